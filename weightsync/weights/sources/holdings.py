"""Holdings of one rank of a trainer: boxes of each tensor, and the tensors whose memory has them.

A source that says what its ranks hold is sent without a gather: the receivers read each box from a
rank that holds it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from weightsync.errors import ConfigError, ManifestMismatchError, shorten
from weightsync.weights.copying.reshard import show_box
from weightsync.weights.copying.shards import Slice, Slicer, is_member, is_sharded

_shape_of = operator.attrgetter("shape")
_spec_of = operator.attrgetter("_spec")
_local_of = operator.attrgetter("_local_tensor")


class Holdings:
    """The boxes of a source's tensors that this rank holds.

    `boxes[i]` is a box of the tensor `names[i]` of the source's manifest; a tensor may have several
    boxes, or none. `gathered` has the tensors that all ranks have to make together instead, with
    the reason for each. `stays` is True where the same tensors hold the boxes in every update: call
    `tensors`, whose memory can be registered. Else the source makes them for each update, and may
    use memory again: call `pairs`, and copy each before the next one. `may_wait` is True where it
    makes full tensors then, and may wait for other ranks, in a collective of its own.

    Args:
        read: returns the tensors that hold the boxes now, in the same order and not cast: a
            sequence where they stay. Raises ManifestMismatchError where the source has changed.
        buffers: returns tensors that use the memory of these, and follow when it is moved.
        bases: returns for each box the tensor of which it is a view; None where the boxes are no
            views. On the CPU these are moved into shared memory, and the boxes are read there.
    """

    def __init__(
        self,
        names: Sequence[str],
        boxes: Sequence[Slice],
        read: Callable[[], Iterable[torch.Tensor]],
        *,
        gathered: Mapping[str, str] | None = None,
        buffers: Callable[[], Sequence[torch.Tensor]] = tuple,
        bases: Callable[[], Sequence[torch.Tensor]] | None = None,
        stays: bool = True,
        may_wait: bool = False,
    ) -> None:
        self.names = names
        self.boxes = boxes
        self.gathered = dict(gathered or {})
        self.buffers = buffers
        self.bases = bases
        self.stays = stays
        self.may_wait = may_wait
        self._read = read
        self._shapes = [torch.Size(box.local_shape) for box in boxes]

    def tensors(self) -> Sequence[torch.Tensor]:
        """Return the tensors that hold the boxes now, not cast. Only where they stay.

        Called once in each update, by each rank for itself: it is no collective. Raises
        ManifestMismatchError where one has another shape than its box, or the source has changed
        since `connect`.
        """
        assert self.stays, "tensors that are made for each update are read by pairs()"
        tensors = list(self._read())
        if list(map(_shape_of, tensors)) != self._shapes:
            raise _other_boxes(
                f"{name}: {list(tensor.shape)}, its box was {list(shape)}"
                for name, tensor, shape in zip(self.names, tensors, self._shapes, strict=True)
                if tensor.shape != shape
            )
        return tensors

    def pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names, and the tensors that hold the boxes now, not cast.

        Called once in each update, by each rank for itself, and run to its end: a source notes
        there which tensors changed meanwhile. The memory of a tensor is valid until the next one is
        requested. Raises as `tensors` does, at the tensor that differs.
        """
        if self.stays:
            yield from zip(self.names, self.tensors(), strict=True)
            return
        for name, shape, tensor in zip(self.names, self._shapes, self._read(), strict=True):
            if tensor.shape != shape:
                raise _other_boxes([f"{name}: {list(tensor.shape)}, its box was {list(shape)}"])
            yield name, tensor

    def renamed(self, rename: Callable[[str], str]) -> Holdings:
        """Return the same boxes, of tensors with other names."""
        return Holdings(
            list(map(rename, self.names)),
            self.boxes,
            self._read,
            gathered={rename(name): why for name, why in self.gathered.items()},
            buffers=self.buffers,
            bases=self.bases,
            stays=self.stays,
            may_wait=self.may_wait,
        )

    def cut(self, cutter: Callable[[str, Slice], Cut]) -> Holdings:
        """Return boxes of other tensors, in views of these."""
        assert not self.gathered, "what is gathered has no box to cut"
        cuts = [cutter(name, box) for name, box in zip(self.names, self.boxes, strict=True)]
        listed = [part for cut in cuts for part in cut.parts]

        def read() -> Iterator[torch.Tensor]:
            for (_, tensor), cut in zip(self.pairs(), cuts, strict=True):
                yield from cut.views(tensor)

        def bases() -> list[torch.Tensor]:
            held = self.tensors() if self.bases is None else self.bases()
            return [base for base, cut in zip(held, cuts, strict=True) for _ in cut.parts]

        return Holdings(
            [name for name, _ in listed],
            [box for _, box in listed],
            read,
            buffers=self.buffers,
            bases=bases,
            stays=self.stays,
            may_wait=self.may_wait,
        )


class Cut(NamedTuple):
    """The parts that one box becomes: names and boxes, and a function that returns their views."""

    parts: Sequence[tuple[str, Slice]]
    views: Callable[[torch.Tensor], Sequence[torch.Tensor]]


class Places:
    """The boxes of tensors that this rank holds, as they were when each was noted.

    `sharded`: some of them are DTensors.
    """

    def __init__(self) -> None:
        self.sharded = False
        self.names: list[str] = []
        self.boxes: list[Slice] = []
        self.gathered: dict[str, str] = {}
        self._slicer = Slicer()

    def note(self, name: str, tensor: torch.Tensor) -> bool:
        """Note the box of a tensor; return whether this rank holds one.

        A tensor that is no DTensor is held whole. One whose placement does not say which rows this
        process holds (partial sums) is to be gathered, and one of a mesh without this process is
        held by others.
        """
        self.sharded = self.sharded or is_sharded(tensor)
        if not is_member(tensor):
            return False
        try:
            self.boxes.append(self._slicer.slice_of(name, tensor))
        except ConfigError as exc:
            self.gathered[name] = str(exc)
            return False
        self.names.append(name)
        return True

    def change(self, i: int, tensor: torch.Tensor) -> str | None:
        """Return how the box of the `i`-th held tensor has changed; None where it has not."""
        name, box = self.names[i], self.boxes[i]
        try:
            now = self._slicer.slice_of(name, tensor)
        except ConfigError as exc:
            return str(exc)
        was = show_box(box.spans)
        return None if now == box else f"{name}: {show_box(now.spans)} here, {was} at connect()"

    def check(self, tensors: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Raise ManifestMismatchError for tensors of which this rank now holds another box."""
        changed = [why for i, tensor in tensors if (why := self.change(i, tensor)) is not None]
        if changed:
            raise _other_boxes(changed)


def holdings_of(
    read: Callable[[], tuple[Sequence[str], Sequence[torch.Tensor]]],
    *,
    buffers: Callable[[], Sequence[torch.Tensor]] = tuple,
) -> Holdings:
    """Return the holdings of named tensors and DTensors, which `read` returns as they are now.

    `read` returns the same names in the same order each time. See `Places.note`.
    """
    names, tensors = read()
    places = Places()
    held = [i for i, pair in enumerate(zip(names, tensors, strict=True)) if places.note(*pair)]
    seen = _Seen([tensors[i] for i in held])

    def read_held() -> list[torch.Tensor]:
        nonlocal seen
        _, everything = read()
        now = [everything[i] for i in held]
        # Between updates tensors rarely get another placement: the usual case asks no mesh.
        if not seen.fits(now):
            places.check(enumerate(now))
            seen = _Seen(now)
        return seen.locals_of(now)

    return Holdings(
        places.names, places.boxes, read_held, gathered=places.gathered, buffers=buffers
    )


class _Seen:
    """Where each of some tensors belongs, to be compared without a loop in Python."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._sharded = [i for i, tensor in enumerate(tensors) if is_sharded(tensor)]
        self._types = list(map(type, tensors))
        self._specs = self._specs_of(tensors)

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether each tensor is of the same type, and a DTensor placed by the same object."""
        return list(map(type, tensors)) == self._types and all(
            map(operator.is_, self._specs_of(tensors), self._specs)
        )

    def locals_of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors, the local ones of DTensors."""
        local = list(tensors)
        for i, shard in zip(self._sharded, map(_local_of, self._shards(tensors)), strict=True):
            local[i] = shard
        return local

    def _shards(self, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        return map(tensors.__getitem__, self._sharded)

    def _specs_of(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        return list(map(_spec_of, self._shards(tensors)))


def _other_boxes(changed: Iterable[str]) -> ManifestMismatchError:
    listed = list(changed)
    return ManifestMismatchError(
        f"{len(listed)} tensors are placed otherwise than at connect(): {shorten(listed)}; bring "
        "them back, or connect again",
        mismatched=listed,
    )
