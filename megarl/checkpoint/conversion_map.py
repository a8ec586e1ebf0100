"""HF tensors and checkpoint tensors meet in Megatron's parameters, as one rank alone would hold them.

    HF elements --Span--> parameter elements <--Slot-- checkpoint elements
    Group: a range of one parameter, small enough to be held, and the slots that it fills

Nothing here knows which side is the source: conversion reads groups from one side and writes them to the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from torch import Tensor

from megarl.checkpoint.slots import Slot
from megarl.models.shards import ShardSlice
from megarl.weights.checksum import positional_checksum

__all__ = ["ConversionMap", "Group", "Span"]


@dataclass(frozen=True, slots=True)
class Span:
    """`numel` elements of HF tensor `name` from `at`, in order, are `param` viewed with `strides` from `offset`."""

    name: str
    at: int
    param: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_flat(self) -> bool:
        """Contiguous in the parameter too: it can be cut anywhere."""
        return all(
            n == 1 or stride == prod(self.shape[i + 1 :])
            for i, (n, stride) in enumerate(zip(self.shape, self.strides, strict=True))
        )

    @property
    def end(self) -> int:
        """One past its last element of the parameter."""
        return self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + 1

    def clip(self, first: int, last: int) -> Span:
        """What of it lies in elements [first, last) of the parameter."""
        first, last = max(first, self.offset), min(last, self.end)
        if first == self.offset and last == self.end:
            return self
        assert self.is_flat, f"{self.name} lies scattered in {self.param} and is converted whole"
        return Span(self.name, self.at + first - self.offset, self.param, first, (last - first,), (1,))

    def view(self, flat: Tensor, first: int) -> Tensor:
        """Its elements in `flat`, which begins at the parameter's element `first`."""
        return flat.as_strided(self.shape, self.strides, flat.storage_offset() + self.offset - first)


@dataclass(frozen=True, slots=True)
class Group:
    """Elements [at, at + numel) of `param`."""

    param: str
    at: int
    numel: int
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class ConversionMap:
    """One model: every HF tensor, every parameter, every checkpoint tensor."""

    shapes: Mapping[str, tuple[int, ...]]
    slots: Mapping[str, tuple[Slot, ...]]  # by parameter, in order
    spans: Mapping[str, tuple[Span, ...]]  # by parameter, in order
    spans_of_tensor: Mapping[str, tuple[Span, ...]]  # by HF tensor, in order

    @classmethod
    def of(
        cls, shapes: Mapping[str, tuple[int, ...]], boxes: Iterable[ShardSlice], slots: Iterable[Slot]
    ) -> ConversionMap:
        """`boxes` and `slots` of a layout of one rank."""
        by_param: dict[str, list[Span]] = defaultdict(list)
        by_name: dict[str, list[Span]] = defaultdict(list)
        by_slot: dict[str, list[Slot]] = defaultdict(list)
        for slot in slots:
            by_slot[slot.param].append(slot)
        for box in boxes:
            span = _span(box, shapes[box.name])
            by_param[span.param].append(span)
            by_name[span.name].append(span)
        found = cls(
            shapes,
            {param: tuple(sorted(held, key=lambda slot: slot.at)) for param, held in by_slot.items()},
            {param: tuple(sorted(held, key=lambda span: span.offset)) for param, held in by_param.items()},
            {name: tuple(sorted(held, key=lambda span: span.at)) for name, held in by_name.items()},
        )
        found._assert_whole()
        return found

    def _assert_whole(self) -> None:
        assert self.slots.keys() == self.spans.keys(), f"{sorted(self.slots.keys() ^ self.spans.keys())[:4]}"
        for name, shape in self.shapes.items():
            at = 0
            for span in self.spans_of_tensor.get(name, ()):
                assert span.at == at, f"{name}: a gap or an overlap at element {at}"
                at += span.numel
            assert at == prod(shape), f"{name}: {at} of {prod(shape)} elements have a place"
        for param, slots in self.slots.items():
            size = sum(slot.numel for slot in slots)
            held = sum(span.numel for span in self.spans[param])
            assert held == size or (held < size and slots[0].may_be_padded), f"{param}: {held} of {size} elements"

    def groups(self, param: str, *, limit: int, cuts: int = 1) -> Iterator[Group]:
        """The parameter in ranges of at most `limit` elements, where it can be cut, and at 1/`cuts` of every slot."""
        slots = self.slots[param]
        if not all(span.is_flat for span in self.spans[param]):
            yield Group(param, 0, sum(slot.numel for slot in slots), slots)
            return
        for slot in slots:
            rows = slot.shape[slot.stacked] if slot.stacked < len(slot.shape) else 1
            part = -(-rows // cuts)
            step = max(1, min(part, limit // max(1, slot.row)))
            for begin in range(0, rows, part):
                for first in range(begin, min(begin + part, rows), step):
                    piece = slot.rows(first, min(step, begin + part - first, rows - first))
                    yield Group(param, piece.at, piece.numel, (piece,))

    def parts(self, group: Group) -> Iterator[Span]:
        """The HF elements in a group; what no part covers pads the vocabulary."""
        first, last = group.at, group.at + group.numel
        for span in self.spans[group.param]:
            if span.offset < last and span.end > first:
                yield span.clip(first, last)

    def digests(self, group: Group, flat: Tensor) -> Iterator[tuple[str, int]]:
        """A checksum of each HF tensor's elements in `flat`; over all groups they add up (mod 2^64) to the tensor's."""
        for part in self.parts(group):
            yield part.name, self.digest(part.name, part.at, part.view(flat, group.at).reshape(-1))

    def digest(self, name: str, at: int, flat: Tensor) -> int:
        """Of elements [at, at + n) of HF tensor `name`, which are whole rows of it."""
        shape = self.shapes[name]
        if len(shape) < 2:
            return int(positional_checksum(flat, (at,)))
        assert at % shape[-1] == flat.numel() % shape[-1] == 0, f"{name} is cut within a row at {at}"
        return int(positional_checksum(flat.view(-1, shape[-1]), (at // shape[-1], 0)))


def _span(box: ShardSlice, shape: tuple[int, ...]) -> Span:
    """A box of one rank alone: whole in all dims behind the first that it cuts, so its HF elements are in order."""
    whole = shape if len(box.shape) == len(shape) else (*shape[:-1], shape[-1] // 2, 2)
    cut = next((axis for axis, n in enumerate(box.shape) if n != 1), len(box.shape))
    assert box.shape[cut + 1 :] == whole[cut + 1 :], f"{box} is no run of elements of {whole}"
    at = sum(start * prod(whole[axis + 1 :]) for axis, start in enumerate(box.start))
    return Span(box.name, at, box.param, box.offset, box.shape, box.strides)
