"""What the splits of paged attention leave for each other: memory that outlives a launch.

Counters are 0 between launches: the kernel sets each back. So they are set to 0 once, for every stream, on which
launches follow one another; a launch that a CUDA graph captures gets memory of its own.
"""

from __future__ import annotations

import torch


class Workspace:
    """Room for parts and counters on a device."""

    __slots__ = ("counters", "parts", "stream")

    def __init__(self, device: torch.device, stream: int, counters: int, floats: int) -> None:
        self.stream = stream
        self.counters = torch.zeros(counters, dtype=torch.int32, device=device)
        self.parts = torch.empty(floats, dtype=torch.float32, device=device)

    def holds(self, counters: int, floats: int) -> bool:
        return self.counters.numel() >= counters and self.parts.numel() >= floats


_workspaces: dict[tuple[int, int], Workspace] = {}


def current(device: torch.device, counters: int, floats: int) -> Workspace:
    """The workspace for a launch on the current stream of `device`, which is the current device and has an index."""
    index = device.index
    stream = torch._C._cuda_getCurrentRawStream(index)
    if stream != 0 and torch._C._cuda_isCurrentStreamCapturing():
        return Workspace(device, stream, counters, floats)
    found = _workspaces.get((index, stream))
    if found is None or not found.holds(counters, floats):
        least = (0, 0) if found is None else (found.counters.numel(), found.parts.numel())
        found = Workspace(device, stream, max(counters, least[0]), max(floats, least[1]))
        _workspaces[index, stream] = found
    return found
