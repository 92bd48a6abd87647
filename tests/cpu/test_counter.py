"""The work counters: where a launch counts from, whatever ran before it, on whichever stream."""

from __future__ import annotations

import threading

import pytest
import torch

from fmha.jit import counter


class Driver:
    """Stands in for CUDA: a current stream, and launches that count as a kernel does, or fail."""

    def __init__(self) -> None:
        self.stream = 1
        self.capturing = False
        self.kept: list[torch.Tensor] = []
        self.launches: list[tuple[int, int, int]] = []  # the counter, its value and the base it was told

    def launch(self, work_tiles, device=0, fails=False):
        """As a plan does it."""
        with counter.LAUNCHING:
            count = counter.current(torch.device("cuda", device))
            if fails:
                raise RuntimeError("no launch")
            self.launches.append((count.address, count.value.item(), count.base))
            assert (count.address, count.stream) == (count.value.data_ptr(), self.stream)
            self.kept.append(count.value)  # so that no two have the same address
            count.value += torch.tensor([work_tiles]).to(torch.int32)  # wraps as the chip's does
            count.advance(work_tiles)


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    zeros = torch.zeros
    monkeypatch.setattr(counter, "_counters", {})
    monkeypatch.setattr(torch, "zeros", lambda *shape, dtype, device: zeros(*shape, dtype=dtype))
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: driver.capturing, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: driver.stream, raising=False)
    return driver


def test_every_launch_of_a_stream_counts_on_from_the_one_before(driver):
    for work_tiles in (5, 1, 700):
        driver.launch(work_tiles)
    assert [(value, base) for _, value, base in driver.launches] == [(0, 0), (5, 5), (6, 6)]
    assert len({owner for owner, _, _ in driver.launches}) == 1


def test_streams_and_devices_do_not_share_a_counter(driver):
    for device, stream in ((0, 1), (0, 2), (1, 1), (0, 1)):
        driver.stream = stream
        driver.launch(9, device)
    owners = [owner for owner, _, _ in driver.launches]
    assert owners[0] == owners[3] and len(set(owners)) == 3
    assert all(value == base for _, value, base in driver.launches)


def test_a_launch_that_fails_counts_nothing(driver):
    driver.launch(5)
    with pytest.raises(RuntimeError, match="no launch"):
        driver.launch(8, fails=True)
    driver.launch(1)
    assert [(value, base) for _, value, base in driver.launches] == [(0, 0), (5, 5)]


def test_a_captured_launch_has_a_counter_of_its_own(driver):
    driver.launch(5)
    driver.capturing = True
    driver.launch(5)
    driver.launch(5)
    driver.capturing = False
    driver.launch(5)
    assert [(value, base) for _, value, base in driver.launches] == [(0, 0), (0, 0), (0, 0), (5, 5)]


def test_the_default_stream_is_never_captured_and_not_asked(driver, monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: pytest.fail("asked"))
    driver.stream = 0
    driver.launch(5)
    driver.launch(5)
    assert [(value, base) for _, value, base in driver.launches] == [(0, 0), (5, 5)]


def test_counters_wrap_with_the_kernel(driver):
    for _ in range(5):
        driver.launch(2**30)
    assert [base for _, _, base in driver.launches] == [0, 2**30, -(2**31), -(2**30), 0]
    assert all(value == base for _, value, base in driver.launches)


def test_threads_on_one_stream_launch_in_the_order_they_count(driver):
    def worker():
        for _ in range(200):
            driver.launch(3)

    threads = [threading.Thread(target=worker) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [base for _, _, base in driver.launches] == [3 * i for i in range(800)]
    assert all(value == base for _, value, base in driver.launches)
