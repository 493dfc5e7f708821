"""The holdings of all ranks: what they tell each other, and the boxes of each tensor in it.

A rank tells its distinct boxes once, and two numbers for each box of a tensor: kilobytes for a
model of any size, since models repeat their layers. Ranks that list the same tensors in the same
way differ in the distinct boxes alone. Their tensors are sorted once, and not once for each rank.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from weightsync.errors import ConfigError, ManifestMismatchError, ProtocolError, shorten
from weightsync.specs import Manifest
from weightsync.weights.copying.reshard import Boxes, LocalBox, Placed
from weightsync.weights.copying.shards import Slice
from weightsync.weights.sources.holdings import Holdings

_Ints = npt.NDArray[np.int64]
_STORED = np.dtype("<u4")
_LEVEL = 1
"""Of zlib: what repeats becomes 1/100 of its size at any level."""


class RankHoldings(msgspec.Struct, frozen=True, kw_only=True):
    """The holdings of one rank, as it tells them to the others.

    `boxes` are distinct. `table` has two rows of numbers with an entry for each box of a tensor:
    the tensor's position in the manifest, as the difference to the one before, and the index in
    `boxes`. It is compressed. `digest` is that of the manifest, and `gathered` has the positions of
    tensors that all ranks make together, each with the reason.
    """

    digest: str
    boxes: list[Slice]
    table: bytes
    gathered: list[tuple[int, str]]

    def listed(self) -> Iterator[tuple[int, Slice]]:
        """Yield the position of each tensor and the box, in the order of the rank's holdings."""
        steps, which = np.frombuffer(zlib.decompress(self.table), _STORED).reshape(2, -1)
        positions = np.cumsum(steps.astype(np.int32), dtype=np.int64)
        for position, i in zip(positions.tolist(), which.tolist(), strict=True):
            yield position, self.boxes[i]


_decoder = msgspec.msgpack.Decoder(RankHoldings)


def encode_holdings(holdings: Holdings, manifest: Manifest) -> bytes:
    """Return what the other ranks have to know of the holdings of this one.

    `manifest` is that of the source. Raises ConfigError, naming them, for tensors that it lacks.
    """
    index = manifest.index
    unknown = [name for name in (*holdings.names, *holdings.gathered) if name not in index]
    if unknown:
        raise ConfigError(
            f"this rank holds {len(unknown)} tensors that are not among those of its source: "
            f"{shorten(unknown)}; name them as the source does"
        )
    known: dict[Slice, int] = {}
    which = [known.setdefault(box, len(known)) for box in holdings.boxes]
    positions = list(map(index.__getitem__, holdings.names))
    steps = np.diff(np.array(positions, np.int64), prepend=0)
    table = np.concatenate((steps, np.array(which, np.int64))).astype(_STORED)
    told = RankHoldings(
        digest=manifest.digest,
        boxes=list(known),
        table=zlib.compress(table.tobytes(), _LEVEL),
        gathered=[(index[name], why) for name, why in holdings.gathered.items()],
    )
    return msgspec.msgpack.encode(told)


def decode_holdings(data: bytes) -> RankHoldings:
    """Return the holdings of a rank. Raises ProtocolError for other bytes."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ProtocolError(f"a rank tells something else than its holdings: {exc}") from exc


def gathered_from(manifest: Manifest, ranks: Sequence[RankHoldings]) -> dict[str, str]:
    """Return the tensors that a rank cannot tell its part of, each with the reason.

    All ranks make them together. In the manifest's order.
    """
    reasons: dict[int, str] = {}
    for held in ranks:
        for position, why in held.gathered:
            reasons.setdefault(position, why)
    return {manifest.specs[position].name: reasons[position] for position in sorted(reasons)}


def placed_from(manifest: Manifest, ranks: Sequence[RankHoldings]) -> list[Placed]:
    """Return the tensors of `manifest` with the boxes that all ranks hold; rank `i` is `ranks[i]`.

    Without the tensors of `gathered_from`. Tensors that are placed alike share one Boxes object.

    Raises ManifestMismatchError, naming the ranks, where one has another manifest, and ConfigError
    for a box that is none of its tensor.
    """
    others = [str(rank) for rank, held in enumerate(ranks) if held.digest != manifest.digest]
    if others:
        raise ManifestMismatchError(
            f"ranks {shorten(others)} hold tensors of another manifest; give all ranks the same "
            "model, and connect again"
        )
    alike: dict[bytes, list[int]] = defaultdict(list)
    for rank, held in enumerate(ranks):
        alike[held.table].append(rank)
    tables = [
        (members, list(_rounds(table, min(len(ranks[rank].boxes) for rank in members), manifest)))
        for table, members in alike.items()
    ]
    classes, first = _classes(manifest, [rounds for _, rounds in tables])
    held_by: list[list[tuple[int, LocalBox]]] = [[] for _ in first]
    for members, rounds in tables:
        own = {rank: list(map(LocalBox, ranks[rank].boxes)) for rank in members}
        for positions, which in rounds:
            found, at = np.unique(classes[positions], return_index=True)
            for number, i in zip(found.tolist(), which[at].tolist(), strict=True):
                held_by[number] += [(rank, own[rank][i]) for rank in members]
    gathered = gathered_from(manifest, ranks)
    boxes: list[Boxes] = []
    for number, position in enumerate(first.tolist()):
        spec = manifest.specs[position]
        try:
            boxes.append(Boxes(spec.shape, held_by[number]))
        except ConfigError as exc:
            raise ConfigError(f"{spec.name}: {exc}") from exc
    return [
        Placed(spec, boxes[number])
        for spec, number in zip(manifest.specs, classes.tolist(), strict=True)
        if spec.name not in gathered
    ]


def _rounds(table: bytes, boxes: int, manifest: Manifest) -> Iterator[tuple[_Ints, _Ints]]:
    """Yield positions and indices of boxes, a tensor once in each: most tensors have one box.

    Raises ProtocolError for numbers without a tensor or a box.
    """
    try:
        steps, indices = np.frombuffer(zlib.decompress(table), _STORED).reshape(2, -1)
    except (zlib.error, ValueError) as exc:
        raise ProtocolError(f"a rank tells a table of holdings that cannot be read: {exc}") from exc
    positions = np.cumsum(steps.astype(np.int32), dtype=np.int64)
    which: _Ints = indices.astype(np.int64)
    places = len(manifest.specs)
    if len(which) and (positions.min() < 0 or positions.max() >= places or which.max() >= boxes):
        raise ProtocolError("a rank tells holdings of tensors or boxes that it does not list")
    while len(positions):
        _, at = np.unique(positions, return_index=True)
        yield positions[at], which[at]
        left = np.ones(len(positions), np.bool_)
        left[at] = False
        positions, which = positions[left], which[left]


def _classes(
    manifest: Manifest, tables: Sequence[Sequence[tuple[_Ints, _Ints]]]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the class of each tensor, and the first tensor of each class.

    Tensors of a class have the same shape, and the same indices of boxes in each table.
    """
    shapes: dict[tuple[int, ...], int] = {}
    labels = np.array(
        [shapes.setdefault(spec.shape, len(shapes)) for spec in manifest.specs], np.int64
    )
    used = len(shapes)
    for rounds in tables:
        for positions, which in rounds:
            # Only the tensors of the table are looked at: a rank may hold a few of many.
            both = labels[positions] * (which.max() + 1) + which
            found, now = np.unique(both, return_inverse=True)
            labels[positions] = used + now
            used += len(found)
    _, first, classes = np.unique(labels, return_index=True, return_inverse=True)
    return classes, first
