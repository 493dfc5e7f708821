"""What one rank of a trainer holds of each tensor: boxes, and the tensors in whose memory they are.

A source that says what its ranks hold is sent without a gather: the receivers read each box from a
rank that holds it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from weightsync.errors import ConfigError, ManifestMismatchError, shorten
from weightsync.weights.copying.shards import Slice, Slicer, is_sharded, local_of


class Holdings:
    """The boxes of a source's tensors that this rank holds.

    `boxes[i]` is a box of the tensor `names[i]` of the source's manifest; a tensor may have several
    boxes, or none. `gathered` has the tensors that all ranks have to make together instead, with
    the reason for each.

    Args:
        read: returns the tensors that hold the boxes now, in the same order and not cast. Raises
            ManifestMismatchError where the source has changed.
        buffers: returns tensors that use the memory of these, and follow when it is moved.
    """

    def __init__(
        self,
        names: Sequence[str],
        boxes: Sequence[Slice],
        read: Callable[[], Sequence[torch.Tensor]],
        *,
        gathered: Mapping[str, str] | None = None,
        buffers: Callable[[], Sequence[torch.Tensor]] = tuple,
    ) -> None:
        self.names = names
        self.boxes = boxes
        self.gathered = dict(gathered or {})
        self.buffers = buffers
        self._read = read
        self._shapes = [torch.Size(box.local_shape) for box in boxes]

    def tensors(self) -> Sequence[torch.Tensor]:
        """Return the tensors that hold the boxes now, not cast.

        Raises ManifestMismatchError where one has another shape than its box, or the source has
        changed since `connect`.
        """
        tensors = self._read()
        if [tensor.shape for tensor in tensors] != self._shapes:
            wrong = [
                f"{name}: {list(tensor.shape)}, its box was {list(shape)}"
                for name, tensor, shape in zip(self.names, tensors, self._shapes, strict=True)
                if tensor.shape != shape
            ]
            raise ManifestMismatchError(
                f"{len(wrong)} tensors hold another part than at connect(): {shorten(wrong)}; "
                "bring them back, or connect again",
                mismatched=wrong,
            )
        return tensors


def holdings_of(
    read: Callable[[], tuple[Sequence[str], Sequence[torch.Tensor]]],
    *,
    buffers: Callable[[], Sequence[torch.Tensor]] = tuple,
) -> Holdings:
    """Return the holdings of named tensors and DTensors, which `read` returns as they are now.

    A tensor that is no DTensor is held whole by each rank that has it. One whose placement does not
    say which rows this process holds (partial sums) is to be gathered.
    """
    slicer = Slicer()
    names, tensors = read()
    held: list[int] = []
    boxes: list[Slice] = []
    gathered: dict[str, str] = {}
    for i, (name, tensor) in enumerate(zip(names, tensors, strict=True)):
        try:
            boxes.append(slicer.slice_of(name, tensor))
        except ConfigError as exc:
            gathered[name] = str(exc)
        else:
            held.append(i)
    known = [_placement(tensor) for tensor in tensors]
    described = list(map(_describe, tensors))

    def read_held() -> list[torch.Tensor]:
        nonlocal known
        _, now = read()
        placed = [_placement(tensor) for tensor in now]
        if not all(map(operator.is_, placed, known)):  # the usual case asks no mesh
            described_now = list(map(_describe, now))
            changed = [
                f"{name}: {new}, was {old}"
                for name, old, new in zip(names, described, described_now, strict=True)
                if old != new
            ]
            if changed:
                raise ManifestMismatchError(
                    f"{len(changed)} tensors are placed otherwise than at connect(): "
                    f"{shorten(changed)}; bring them back, or connect again",
                    mismatched=changed,
                )
            known = placed
        return [local_of(now[i]) for i in held]

    return Holdings([names[i] for i in held], boxes, read_held, gathered=gathered, buffers=buffers)


def _placement(tensor: torch.Tensor) -> object:
    """Return the object that says where the shard of a DTensor belongs; None without one."""
    return getattr(tensor, "_spec", None) if is_sharded(tensor) else None


def _describe(tensor: torch.Tensor) -> str:
    """Return the placement of a tensor, for comparison and messages."""
    if not is_sharded(tensor):
        return "no DTensor"
    shard = cast("Any", tensor)
    order = getattr(_placement(tensor), "shard_order", None)
    return f"{shard.placements} of {list(shard.shape)} on {shard.device_mesh}, order {order}"
