"""The counters that persistent kernels take their work tiles from.

A counter is one integer in the memory of a device, and all of its state is its value: a launch over n work tiles adds
exactly n to it, and is told from which value on to count. So nothing has to be set back, neither by the kernel nor
between launches. Launches that run at the same time must not share one. Those on one stream never do, so there is a
counter for every stream; a launch that a CUDA graph captures gets its own, which every replay sets to 0 first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor


class Counter:
    """The counter of one stream."""

    def __init__(self, device: torch.device) -> None:
        self.value = torch.zeros(1, dtype=torch.int32, device=device)
        self.base = 0  # what `value` will be when the launches so far are done


_counters: dict[tuple[int, int], Counter] = {}
_launching = threading.Lock()  # counters are advanced in the order in which their launches reach the stream


def launch(function: Callable[[Tensor, int], None], device: torch.device, work_tiles: int) -> None:
    """Calls `function(counter, base)`, which launches over `work_tiles` on the current stream of `device`."""
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(function, device, work_tiles)
    if torch.cuda.is_current_stream_capturing():
        return function(torch.zeros(1, dtype=torch.int32, device=device), 0)
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    with _launching:
        counter = _counters.get((device.index, stream))
        if counter is None:
            counter = _counters[device.index, stream] = Counter(device)
        function(counter.value, counter.base)
        counter.base = wrapped(counter.base + work_tiles)


def wrapped(count: int) -> int:
    """As the kernel's 32-bit integers wrap."""
    return (count + 2**31) % 2**32 - 2**31
