"""HF <-> Megatron as data. A `Box` says where a rectangle of one HF tensor lives in a rank's memory.

Import, export, conversion and sync all read the same boxes: whoever holds [start, start + shape) of
an HF tensor on both sides can copy it, whatever the two layouts are. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Box"]


@dataclass(frozen=True, slots=True)
class Box:
    """[start, start + shape) of HF tensor `name` is `param` viewed with `strides` from `offset` (elements).

    `offset` counts from the parameter's first element, and the parameter is contiguous.
    """

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    param: str
    offset: int
    strides: tuple[int, ...]
