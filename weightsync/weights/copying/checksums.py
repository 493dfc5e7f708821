"""Checksums of full tensors without torch: the integer arithmetic of mix64, and sums of parts.

A worker that holds a slice of a tensor sends its part (`fingerprint.part_of`); here the parts of
all workers are added up. Imported where no torch is loaded, by `weightsync.server`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

from weightsync.errors import ProtocolError, shorten
from weightsync.wire.messages import CheckReply, TensorPart

GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Constants of splitmix64 (Steele, Lea and Flood 2014)."""
MASK = (1 << 64) - 1
WORD = 8
"""Bytes of a word, the unit that mix64 mixes with its position."""

_MOST_CELLS, _MOST_BOXES, _MOST_STEPS = 1 << 16, 512, 10_000

_Spans = tuple[tuple[tuple[int, int], ...], ...]
"""The spans of a part, for each dimension."""

DISAGREE = "workers disagree"
"""Stands for the fingerprint of a tensor whose copies differ between workers."""


def mixed_word(word: bytes | bytearray, place: int) -> int:
    """Return the summand of mix64 for `word` at position `place` of the fingerprinted bytes."""
    return _mix((int.from_bytes(word, "little") + (place + 1) * GOLDEN) & MASK)


def settled(total: int, nbytes: int) -> int:
    """Return mix64 of `nbytes` bytes whose mixed words sum to `total`."""
    return _mix((total + nbytes * GOLDEN) & MASK)


def to_hex(value: int) -> str:
    """Return a fingerprint as 16 hex digits."""
    return f"{value:016x}"


def _mix(value: int) -> int:
    """Apply the finalizer of splitmix64 to a 64-bit number."""
    for shift, multiplier in zip((30, 27), MULTIPLIERS, strict=True):
        value = ((value ^ (value >> shift)) * multiplier) & MASK
    return value ^ (value >> 31)


def compose(name: str, parts: Sequence[TensorPart]) -> str:
    """Return the mix64 of the full tensor `name`, or DISAGREE where copies of a slice differ.

    Raises ProtocolError where the parts do not cover the tensor exactly once.
    """
    first = parts[0]
    by_spans: dict[str, TensorPart] = {}
    for part in parts:
        known = by_spans.setdefault(repr(part.spans), part)
        if known != part:
            return DISAGREE
    distinct = list(by_spans.values())
    total, words = sum(int(part.total, 16) for part in distinct), sum(p.words for p in distinct)
    cut: dict[int, bytearray] = {}
    covered = words * WORD
    for part in distinct:
        for at, text in part.pieces.items():
            piece = bytes.fromhex(text)
            cut.setdefault(at // WORD, bytearray(WORD))[at % WORD : at % WORD + len(piece)] = piece
            covered += len(piece)
    alike = all((p.shape, p.nbytes) == (first.shape, first.nbytes) for p in distinct)
    if not alike or covered != first.nbytes or words + len(cut) != -(-first.nbytes // WORD):
        raise ProtocolError(
            f"{name}: the workers' slices make {covered} of {first.nbytes} bytes; check that the "
            "replies are of all workers of one replica"
        )
    for place, word in cut.items():
        total += mixed_word(word, place)
    return to_hex(settled(total, first.nbytes))


def join_parts(
    of_processes: Iterable[Mapping[str, Sequence[TensorPart]]],
) -> dict[str, list[TensorPart]]:
    """Return the parts that several processes make of each tensor, together.

    An empty list says that a process made none, and makes the joined one empty.
    """
    found: dict[str, list[TensorPart]] = {}
    missing: set[str] = set()
    for parts in of_processes:
        for name, own in parts.items():
            found.setdefault(name, []).extend(own)
            if not own:
                missing.add(name)
    return {name: [] if name in missing else parts for name, parts in found.items()}


@dataclass(frozen=True)
class SumsCompared:
    """Full tensors, compared with what each of several servers holds of them.

    `wrong` says of each tensor that differs where it does: on which server, and which ranks sent
    it. `compared` are the tensors of which all ranks together have each byte, and each server, too,
    or those together that have only a part. `partial` are the servers that have less than a tensor,
    though all servers are taken together: others that hold the rest were not asked.
    """

    wrong: Mapping[str, str]
    compared: set[str]
    partial: set[str]


def compare_sums(
    sent: Sequence[Mapping[str, Sequence[TensorPart]]],
    held: Mapping[str, Mapping[str, Sequence[TensorPart]]],
) -> SumsCompared:
    """Compare the tensors of which each rank has `sent` parts with those that servers hold.

    `held` has the parts by the server's name.
    """
    wrong: dict[str, str] = {}
    compared: set[str] = set()
    partial: set[str] = set()
    for name, parts in join_parts(sent).items():
        wanted = _composed(name, parts)
        if wanted is None:
            continue
        listed = {server: each.get(name, ()) for server, each in held.items()}
        found = {server: _composed(name, own) for server, own in listed.items()}
        apart = {
            server: own
            for server, own in listed.items()
            if found[server] is None and not (own and not any(map(_nbytes_of, own)))
        }  # a worker with nothing of a tensor that is cut unevenly has nothing to compare
        differing = [server for server, value in found.items() if value not in (None, wanted)]
        told: set[_Spans] = set()
        own_spans = {server: set(map(_spans_of, own)) for server, own in apart.items()}
        # Of workers that were connected as servers of their own: perhaps of several groups of
        # tensor parallelism, each cut in its own way.
        for cover in _covers(frozenset().union(*own_spans.values())):
            makers = [server for server, spans in own_spans.items() if spans & cover]
            joined = _composed(name, [p for m in makers for p in apart[m] if _spans_of(p) in cover])
            if joined is None:
                continue
            told |= cover
            if joined != wanted:
                differing.append(" and ".join(makers))
        apart = {m: own for m, own in apart.items() if not own or not own_spans[m] <= told}
        partial.update(server for server, own in apart.items() if own)
        if not apart:
            compared.add(name)
        if differing:
            owns = [part for server in held for part in listed[server]]
            ranks = _senders(name, sent, owns)
            listed_ranks = f"rank{'s' if len(ranks) > 1 else ''} {shorten(map(str, ranks))}"
            wrong[name] = f"on {shorten(differing)}, sent by {listed_ranks}"
    return SumsCompared(wrong, compared, partial)


@lru_cache(maxsize=1024)  # models repeat their layers
def _covers(boxes: frozenset[_Spans]) -> list[frozenset[_Spans]]:
    """Return sets of these boxes that each make a whole, and together have every box that can.

    A whole is from the first to the last index of any box. None is found of boxes that are none,
    that cut a tensor too often, or that take too many steps to fit together.
    """
    listed = sorted(boxes)
    if len(set(map(len, listed))) != 1 or not all(
        first <= last for box in listed for spans in box for first, last in spans
    ):
        return []
    cells = 1  # between the ends of all spans; each is a bit of one number
    masks = [1] * len(listed)
    for dim in range(len(listed[0])):
        ends = sorted({end for box in listed for span in box[dim] for end in span})
        at = {end: i for i, end in enumerate(ends)}
        width = max(len(ends) - 1, 1)
        cells *= width
        if cells > _MOST_CELLS:
            return []
        for i, box in enumerate(listed):
            inside = sum((1 << at[last]) - (1 << at[first]) for first, last in box[dim])
            masks[i] = sum(inside << bit * width for bit in _bits(masks[i]))
    full = (1 << cells) - 1
    if sum(masks) == full and sum(mask.bit_count() for mask in masks) == cells:
        return [boxes]  # of one group, as usual
    if len(listed) > _MOST_BOXES:
        return []
    found: list[frozenset[_Spans]] = []
    for i, box in enumerate(listed):
        if not any(box in cover for cover in found):
            steps = iter(range(_MOST_STEPS))
            chosen = _exact_cover(masks, full, [i], masks[i], steps)
            if chosen is not None:
                found.append(frozenset(listed[each] for each in chosen))
    return found


def _exact_cover(
    masks: Sequence[int], full: int, chosen: list[int], covered: int, steps: Iterator[int]
) -> list[int] | None:
    """Return `chosen` with masks that cover the rest of `full`, each bit once; None if none do."""
    if covered == full:
        return chosen
    first = ~covered & (covered + 1)
    for i, mask in enumerate(masks):
        if mask & first and not mask & covered and next(steps, None) is not None:
            found = _exact_cover(masks, full, [*chosen, i], covered | mask, steps)
            if found is not None:
                return found
    return None


def _bits(mask: int) -> Iterator[int]:
    """Yield the places of the bits that are set."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _spans_of(part: TensorPart) -> _Spans:
    return tuple(tuple((begin, end) for begin, end in spans) for spans in part.spans)


def _nbytes_of(part: TensorPart) -> int:
    """Return the bytes of a part itself: `nbytes` are those of its tensor."""
    return part.words * WORD + sum(len(text) // 2 for text in part.pieces.values())


def _senders(
    name: str, sent: Sequence[Mapping[str, Sequence[TensorPart]]], held: Sequence[TensorPart]
) -> list[int]:
    """Return the ranks that sent a tensor; where servers hold equal boxes, those that differ."""
    ranks = {rank: each[name] for rank, each in enumerate(sent) if each.get(name)}
    by_spans: dict[str, list[TensorPart]] = {}
    for part in held:
        by_spans.setdefault(repr(part.spans), []).append(part)
    differing = [
        rank
        for rank, parts in ranks.items()
        if any(other != part for part in parts for other in by_spans.get(repr(part.spans), ()))
    ]
    return differing or list(ranks)


def _composed(name: str, parts: Sequence[TensorPart]) -> str | None:
    """Return the mix64 of a full tensor; None where the parts are not all of it."""
    with suppress(ProtocolError):
        return compose(name, parts) if parts else None
    return None


def compose_all(
    replies: Sequence[CheckReply], per_replica: int
) -> tuple[dict[str, str], list[str]]:
    """Return the fingerprints of the workers' full tensors, and the names that differ.

    `replies` are in order of rank; every `per_replica` of them hold one copy of the model. A tensor
    whose fingerprint is not the same in every replica is DISAGREE, and among the names.
    """
    replicas = [
        _compose_replica(replies[at : at + per_replica])
        for at in range(0, len(replies), per_replica)
    ]
    held: dict[str, str] = {}
    for replica in replicas:
        for name, value in replica.items():
            if held.setdefault(name, value) != value or any(name not in r for r in replicas):
                held[name] = DISAGREE
    return held, [name for name, value in held.items() if value == DISAGREE]


def _compose_replica(replies: Sequence[CheckReply]) -> dict[str, str]:
    """Return the fingerprints of the model that these workers hold together."""
    held: dict[str, str] = {}
    names = dict.fromkeys(n for reply in replies for n in (*reply.checksums, *reply.parts))
    for name in names:
        whole = {reply.checksums[name] for reply in replies if name in reply.checksums}
        parts = [reply.parts[name] for reply in replies if name in reply.parts]
        if parts:
            whole.add(compose(name, parts))
        held[name] = whole.pop() if len(whole) == 1 else DISAGREE
    return held
