"""Single numbers in global memory."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64


def at(address: Int64, index: Int32) -> cute.Pointer:
    return cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4) + index


def read(address: Int64, index: Int32) -> Int32:
    return cute.make_tensor(at(address, index), cute.make_layout(1))[0]


def write(address: Int64, index: Int32, value: Int32) -> None:
    cute.make_tensor(at(address, index), cute.make_layout(1))[0] = value
