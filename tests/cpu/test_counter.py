"""The work counters: where a launch counts from, whatever ran before it, on whichever stream."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

from fmha.jit import counter

DEVICE = torch.device("cuda", 0)


class Driver:
    """Stands in for CUDA: a current device and stream, and launches that count as a kernel does, or fail."""

    def __init__(self) -> None:
        self.device = 0
        self.stream = 1
        self.capturing = False
        self.made = 0
        self.launches: list[tuple[int, int, int]] = []  # the counter, its value and the base it was told

    def zeros(self, *shape, dtype, device):
        assert shape == (1,) and dtype == torch.int32 and device.index == self.device
        self.made += 1
        return torch.tensor([0], dtype=torch.int32)

    @contextlib.contextmanager
    def on(self, device):
        before, self.device = self.device, device.index
        yield
        self.device = before

    def kernel(self, work_tiles, fails=False):
        def function(value, base):
            if fails:
                raise RuntimeError("no launch")
            self.launches.append((id(value), value.item(), base))
            value += torch.tensor([work_tiles], dtype=torch.int64).to(torch.int32)  # wraps as the chip's does

        return function


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(counter, "_counters", {})
    monkeypatch.setattr(counter.torch, "zeros", driver.zeros)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: driver.device)
    monkeypatch.setattr(torch.cuda, "device", driver.on)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: driver.capturing)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: driver.stream, raising=False)
    return driver


def test_every_launch_of_a_stream_counts_on_from_the_one_before(driver):
    for work_tiles in (5, 1, 700):
        counter.launch(driver.kernel(work_tiles), DEVICE, work_tiles)
    assert [(value, base) for _, value, base in driver.launches] == [(0, 0), (5, 5), (6, 6)]
    assert driver.made == 1


def test_streams_and_devices_do_not_share_a_counter(driver):
    for device, stream in ((0, 1), (0, 2), (1, 1), (0, 1)):
        driver.stream = stream
        counter.launch(driver.kernel(9), torch.device("cuda", device), 9)
    owners = [owner for owner, _, _ in driver.launches]
    assert owners[0] == owners[3] and len(set(owners)) == 3
    assert all(value == base for _, value, base in driver.launches)
    assert driver.device == 0


def test_a_launch_that_fails_counts_nothing(driver):
    counter.launch(driver.kernel(5), DEVICE, 5)
    with pytest.raises(RuntimeError, match="no launch"):
        counter.launch(driver.kernel(8, fails=True), DEVICE, 8)
    counter.launch(driver.kernel(1), DEVICE, 1)
    assert [base for _, _, base in driver.launches] == [0, 5]
    assert driver.launches[1][1] == 5


def test_a_captured_launch_has_a_counter_of_its_own(driver):
    counter.launch(driver.kernel(5), DEVICE, 5)
    driver.capturing = True
    for _ in range(2):
        counter.launch(driver.kernel(5), DEVICE, 5)
    driver.capturing = False
    counter.launch(driver.kernel(5), DEVICE, 5)
    assert [(value, base) for _, value, base in driver.launches] == [(0, 0), (0, 0), (0, 0), (5, 5)]
    assert driver.made == 3


def test_counters_wrap_with_the_kernel(driver):
    for _ in range(5):
        counter.launch(driver.kernel(2**30), DEVICE, 2**30)
    assert [base for _, _, base in driver.launches] == [0, 2**30, -(2**31), -(2**30), 0]
    assert all(value == base for _, value, base in driver.launches)


def test_threads_on_one_stream_launch_in_the_order_they_count(driver):
    def worker():
        for _ in range(200):
            counter.launch(driver.kernel(3), DEVICE, 3)

    threads = [threading.Thread(target=worker) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [base for _, _, base in driver.launches] == [3 * i for i in range(800)]
    assert all(value == base for _, value, base in driver.launches)
