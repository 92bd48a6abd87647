"""How it is measured: candidates take turns, call by call, with cold caches, on a card that has settled.

A power-limited GPU clocks down under load and up in a pause, so whoever is measured on a cool card looks faster than it
is. Every round calls each candidate once, in an order drawn anew; before the first round all of them run in turn for a
while. Medians and quartiles of such rounds are comparable with each other, not with another day's.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Call = Callable[[], Any]


@dataclass(frozen=True)
class Sample:
    """One call, in seconds."""

    device: float  # from the GPU's start on it to its end
    host: float  # until the call returned


class Timer(Protocol):
    """Times calls without waiting for them."""

    def start(self, call: Call) -> Any:
        """Clears the cache, then makes the call. Returns what `read` wants."""

    def read(self, ticket: Any) -> Sample:
        """Waits until the call has finished."""

    def lead(self, seconds: float) -> None:
        """Makes the GPU idle that long before each call, so that the host is always ahead of it."""

    def now(self) -> float:
        """The wall clock, in seconds."""


class CudaTimer:
    """CUDA events around each call on the current stream."""

    MAX_CLOCK = 2.0e9  # Hz; at a lower clock the pause is longer, which does no harm

    def __init__(self) -> None:
        import torch

        self.cuda = torch.cuda
        l2_bytes = torch.cuda.get_device_properties().L2_cache_size
        self.flushed = torch.ones(2 * l2_bytes // 4, device="cuda")  # read, not written: no dirty lines are left
        self.pause = 0

    def start(self, call: Call) -> Any:
        begin, end = self.cuda.Event(enable_timing=True), self.cuda.Event(enable_timing=True)
        self.flushed.sum()
        if self.pause:
            self.cuda._sleep(self.pause)
        before = time.perf_counter()
        begin.record()
        call()
        end.record()
        return begin, end, time.perf_counter() - before

    def read(self, ticket: Any) -> Sample:
        begin, end, host = ticket
        end.synchronize()
        return Sample(begin.elapsed_time(end) / 1e3, host)

    def lead(self, seconds: float) -> None:
        self.pause = int(seconds * self.MAX_CLOCK)

    def now(self) -> float:
        return time.perf_counter()


def interleave(
    calls: Mapping[str, Call],
    timer: Timer,
    *,
    seconds: float,
    warm_seconds: float = 0.3,
    min_rounds: int = 11,  # for calls of a tenth of a second: the medians of 5 rounds moved by 1.5%
    rounds: int | None = None,
) -> dict[str, list[float]]:
    """Device seconds of every call, by candidate: one per round, at least `min_rounds` and then as many as begin within
    `seconds`; exactly `rounds` if given."""
    timer.lead(0.0)
    settled = _rounds(calls, timer, warm_seconds, min_rounds=3, rounds=None)
    timer.lead(_lead(settled))
    samples = _rounds(calls, timer, seconds, min_rounds, rounds)
    return {name: [sample.device for sample in taken] for name, taken in samples.items()}


def _lead(settled: Mapping[str, list[Sample]]) -> float:
    """Where the GPU is done before the host has made the next call, the host's time would be measured: let it idle.

    The same pause for everyone, because a pause also lets the card cool.
    """
    host = max(statistics.median(sample.host for sample in taken) for taken in settled.values())
    device = min(statistics.median(sample.device for sample in taken) for taken in settled.values())
    return 0.0 if device > 3 * host else 1.5 * host


def _rounds(
    calls: Mapping[str, Call], timer: Timer, seconds: float, min_rounds: int, rounds: int | None
) -> dict[str, list[Sample]]:
    """Rounds follow each other without a gap: one is read only after the next has been queued."""
    samples: dict[str, list[Sample]] = {name: [] for name in calls}
    order = random.Random(0)
    queued: list[tuple[str, Any]] = []
    began = timer.now()
    for number in itertools.count():
        if number >= (min_rounds if rounds is None else rounds):
            if rounds is not None or timer.now() - began >= seconds:
                break
        tickets = [(name, timer.start(calls[name])) for name in order.sample(list(calls), len(calls))]
        for name, ticket in queued:
            samples[name].append(timer.read(ticket))
        queued = tickets
    for name, ticket in queued:
        samples[name].append(timer.read(ticket))
    return samples


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
