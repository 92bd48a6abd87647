"""What the splits of paged attention leave for each other: memory that outlives a launch.

Counters are 0 between launches: the kernel sets each back. So they are set to 0 once, for every stream, on which
launches follow one another. Launches that a CUDA graph captures, which may be replayed on any stream, get counters of
their own out of a reserve that is 0 already, or else, which costs every replay some microseconds, zeros that the graph
makes.
"""

from __future__ import annotations

import torch

RESERVE = 1 << 20  # counters for captured launches, that a device has at a time


class Workspace:
    """Room for parts and counters on a device."""

    __slots__ = ("counters", "counters_at", "parts", "parts_at", "stream")

    def __init__(self, stream: int, counters: torch.Tensor, parts: torch.Tensor) -> None:
        self.stream = stream
        self.counters = counters
        self.parts = parts
        self.counters_at, self.parts_at = counters.data_ptr(), parts.data_ptr()

    def holds(self, counters: int, floats: int) -> bool:
        return self.counters.numel() >= counters and self.parts.numel() >= floats


_workspaces: dict[tuple[int, int], Workspace] = {}
_reserves: dict[int, torch.Tensor] = {}  # what is left of each device's
_given: list[torch.Tensor] = []  # kept for the graphs that use them


def current(device: torch.device, counters: int, floats: int) -> Workspace:
    """The workspace for a launch on the current stream of `device`, which is the current device and has an index."""
    index = device.index
    stream = torch._C._cuda_getCurrentRawStream(index)
    if stream != 0 and torch._C._cuda_isCurrentStreamCapturing():
        return Workspace(stream, _reserved(device, counters), _floats(device, floats))
    found = _workspaces.get((index, stream))
    if found is None or not found.holds(counters, floats):
        if found is not None:
            counters, floats = max(counters, found.counters.numel()), max(floats, found.parts.numel())
        found = Workspace(stream, _zeros(device, counters), _floats(device, floats))
        _workspaces[index, stream] = found
    return found


def reserve(device: torch.device) -> None:
    """Sees to it that there is a reserve, outside of a capture. Its zeros are there when anything can be captured."""
    left = _reserves.get(device.index)
    if left is None or left.numel() < RESERVE // 8:
        _reserves[device.index] = _zeros(device, RESERVE)
        _given.append(_reserves[device.index])
        torch.cuda.current_stream(device).synchronize()


def _reserved(device: torch.device, counters: int) -> torch.Tensor:
    left = _reserves.get(device.index)
    if left is None or left.numel() < counters:
        return _zeros(device, counters)
    _reserves[device.index] = left[counters:]
    return left[:counters]


def _zeros(device: torch.device, count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


def _floats(device: torch.device, count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.float32, device=device)
