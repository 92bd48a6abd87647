"""The counters that persistent kernels take their work tiles from.

A counter is one integer in the memory of a device, and all of its state is its value: a launch over n work tiles adds
exactly n to it, and is told from which value on to count. So nothing has to be set back, neither by the kernel nor
between launches. Launches that run at the same time must not share one. Those on one stream never do, so there is a
counter for every stream; a launch that a CUDA graph captures gets its own, which every replay sets to 0 first.
"""

from __future__ import annotations

import threading

import torch


class Counter:
    """A counter, and what its value will be when the launches so far are done."""

    __slots__ = ("address", "base", "stream", "value")

    def __init__(self, device: torch.device, stream: int) -> None:
        self.stream = stream  # that its launches are on, a cudaStream_t
        self.value = torch.zeros(1, dtype=torch.int32, device=device)
        self.address = self.value.data_ptr()
        self.base = 0

    def advance(self, work_tiles: int) -> None:
        """A launch over `work_tiles` has reached the stream. Wraps as the kernel's 32-bit integers do."""
        self.base += work_tiles
        if self.base >= 2**31:
            self.base -= 2**32


LAUNCHING = threading.Lock()  # held from `current` to `advance`: counters advance in the order of their stream

_counters: dict[tuple[int, int], Counter] = {}


def current(device: torch.device) -> Counter:
    """The counter for a launch on the current stream of `device`, which is the current device and has an index."""
    index = device.index
    stream = torch._C._cuda_getCurrentRawStream(index)
    # Stream 0, the default one, is never captured. The bare function, as torch.cuda's looks for a driver every time.
    if stream != 0 and torch._C._cuda_isCurrentStreamCapturing():
        return Counter(device, stream)
    counter = _counters.get((index, stream))
    if counter is None:
        counter = _counters[index, stream] = Counter(device, stream)
    return counter
