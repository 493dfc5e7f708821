"""Comparison of tensors that several ranks hold: a receiver gets the copy of one rank only."""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec
import torch

from weightsync.errors import shorten
from weightsync.ranks.comm import RankComm, name_ranks
from weightsync.tensors import contiguous_bytes, tensor_data
from weightsync.weights.copying.checksums import settled
from weightsync.weights.copying.fingerprint import mixed_total, xxh3
from weightsync.weights.copying.shards import Slice, local_of, slice_key

logger = logging.getLogger(__name__)

CheckReplicas = Literal["first", "always", "off"]
"""When replicas are compared: a tensor the first time it is sent, at every update, or never."""

_ROUND = 2048
"""Tensors of which the ranks exchange fingerprints at a time, where some differ."""
_DECODER = msgspec.json.Decoder(dict[str, str])


class ReplicaCheck:
    """Compares the tensors that several ranks hold, by fingerprints of each rank's own bytes.

    Replicas are plain tensors that more than one rank has, copies of one shard in several DTensors
    of a mesh dimension that replicates, and names that several ranks hold of a source that is split
    among them. `note` takes the fingerprint of a tensor as this rank has it, before it is gathered.
    All ranks call `begin` and `compare` together.
    """

    def __init__(self, ranks: RankComm, when: CheckReplicas) -> None:
        self._ranks = ranks
        self._when = when
        self._known: set[str] = set()
        self._compared: Sequence[str] = ()
        self._differing: dict[str, None] = {}
        self._noted: dict[str, dict[int, int]] = {}
        self._on_device: list[tuple[str, int, torch.Tensor, int]] = []
        self._count = 0

    def wants(self, names: Sequence[str]) -> bool:
        """Whether tensors of these names are to be compared when they are sent next."""
        if self._when == "off" or self._ranks.size == 1:
            return False
        if self._when == "always":
            return True
        # The same list comes at every update of a model: not one look-up for each tensor.
        return names is not self._compared and not self._known.issuperset(names)

    def begin(self) -> None:
        """Forget what was noted."""
        self._noted.clear()
        self._on_device.clear()
        self._count = 0

    def note_all(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note tensors, in the order of the names that `compare` gets."""
        for tensor in tensors:
            self._note(tensor)

    def note_boxes(self, boxes: Iterable[tuple[int, Slice, torch.Tensor]]) -> None:
        """Note the boxes that this rank holds of tensors, by the positions of their names."""
        for place, box, tensor in boxes:
            self._note_as(f"{box.spans}", place, tensor)

    def noting(
        self, pairs: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the pairs of one pass, and note their tensors unless an earlier pass did."""
        for place, pair in enumerate(pairs):
            if place == self._count:
                self._note(pair[1])
            yield pair

    def compare(self, names: Sequence[str]) -> None:
        """Compare what the ranks have noted, and log what differs on rank 0. Collective."""
        self._settle()
        digests = {key: _digest(words) for key, words in self._noted.items()}
        tables = [_DECODER.decode(b) for b in self._ranks.exchange(msgspec.json.encode(digests))]
        found: dict[str, list[str]] = {}
        for key in sorted({key for table in tables for key in table}):
            if len({table[key] for table in tables if key in table}) > 1:
                for name, ranks in self._differences(key, names):
                    found.setdefault(name, []).append(ranks)
        self.begin()
        self._known.update(names)
        self._compared = names
        self._differing.update(dict.fromkeys(found))
        if found and self._ranks.rank == 0:
            kind = (
                "1 tensor that several ranks hold differs"
                if len(found) == 1
                else (f"{len(found)} tensors that several ranks hold differ")
            )
            listed = (f"{name} ({', '.join(ranks)})" for name, ranks in found.items())
            logger.warning(
                "%s between them: %s; a receiver gets the copy of the rank that sends to it. "
                'Broadcast them before the update, or connect with check_replicas="off" where the '
                "ranks are meant to differ",
                kind,
                shorten(listed),
            )

    def take_differing(self) -> tuple[str, ...]:
        """Return the names that differed since the last call of this method."""
        names = tuple(self._differing)
        self._differing.clear()
        return names

    def _note(self, tensor: torch.Tensor) -> None:
        place, self._count = self._count, self._count + 1
        if tensor.is_meta:  # this rank does not hold it
            return
        key = slice_key(tensor, self._ranks.size)
        if key is None:
            return
        self._note_as(key, place, local_of(tensor))

    def _note_as(self, key: str, place: int, local: torch.Tensor) -> None:
        """Note what this rank has of a tensor; ranks with the same key have the same part of it."""
        key += local.device.type  # the fingerprints of host memory are others
        if local.device.type == "cpu":
            self._noted.setdefault(key, {})[place] = xxh3(tensor_data(local))
        else:  # without a wait for each tensor
            flat = contiguous_bytes(local)
            self._on_device.append((key, place, mixed_total(flat), flat.numel()))

    def _settle(self) -> None:
        """Wait for the fingerprints that devices compute."""
        by_device: dict[torch.device, list[tuple[str, int, torch.Tensor, int]]] = {}
        for entry in self._on_device:
            by_device.setdefault(entry[2].device, []).append(entry)
        for entries in by_device.values():
            totals = torch.stack([total for _, _, total, _ in entries]).tolist()
            for (key, place, _, nbytes), total in zip(entries, totals, strict=True):
                self._noted.setdefault(key, {})[place] = settled(int(total), nbytes)
        self._on_device.clear()

    def _differences(self, key: str, names: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yield names, and the ranks whose bytes of the slice `key` are not those of the first."""
        own = self._noted.get(key, {})
        for start in range(0, len(names), _ROUND):
            places = [p for p in range(start, min(start + _ROUND, len(names))) if p in own]
            flat = array("Q", [number for place in places for number in (place, own[place])])
            held: dict[int, dict[int, list[int]]] = {}
            for rank, body in enumerate(self._ranks.exchange(flat.tobytes())):
                theirs = array("Q", body)
                for place, word in zip(theirs[::2], theirs[1::2], strict=True):
                    held.setdefault(place, {}).setdefault(word, []).append(self._ranks.names[rank])
            for place in sorted(held):
                first, *others = held[place].values()
                if others:
                    unlike = [rank for ranks in others for rank in ranks]
                    yield names[place], f"{name_ranks(unlike)} unlike {name_ranks(first[:1])}"


def _digest(words: dict[int, int]) -> str:
    places = hashlib.blake2b(array("Q", words.keys()).tobytes(), digest_size=16)
    places.update(array("Q", words.values()).tobytes())
    return places.hexdigest()
