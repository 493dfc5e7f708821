"""mix64 of a tensor that several processes hold slices of, without one of them seeing all of it.

mix64 sums words that are mixed with their place, so the sum of a slice at its place in the full
tensor is a part of the whole sum. Words that a slice cuts are handed over as bytes, and mixed by
who adds the parts up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from weightsync.errors import ConfigError, ProtocolError
from weightsync.weights.fingerprint import MASK, WORD, mixed_rows, settled, to_hex
from weightsync.weights.shards import Block, Slice
from weightsync.wire.messages import CheckReply, TensorPart

MAX_PIECES = 1 << 16
DISAGREE = "workers disagree"
"""In place of a fingerprint: copies of one tensor differ between workers."""


def part_of(name: str, flat: torch.Tensor, held: Slice, itemsize: int) -> TensorPart:
    """Return the part of a full tensor's mix64 that its slice `flat` (uint8[nbytes]) makes.

    Raises ConfigError naming a tensor whose slices cut too many words.
    """
    nbytes = math.prod(held.shape) * itemsize
    pieces: dict[int, str] = {}
    total = words = 0
    for block in held.blocks(itemsize):
        for run in _phases(block):
            lead = min(-run.source % WORD, run.width)
            whole = (run.width - lead) // WORD
            begin = flat.storage_offset() + run.target
            rows = flat.as_strided((run.height, run.width), (run.target_stride, 1), begin)
            if whole:
                middle = rows[:, lead : lead + whole * WORD]
                total += mixed_rows(middle, (run.source + lead) // WORD, run.source_stride // WORD)
                words += whole * run.height
            _add_pieces(pieces, rows[:, :lead], run, 0)
            _add_pieces(pieces, rows[:, lead + whole * WORD :], run, lead + whole * WORD)
            if len(pieces) > MAX_PIECES:
                raise ConfigError(
                    f"{name}: its slices cut more than {MAX_PIECES} words of {WORD} bytes; name "
                    "other tensors, or compare with a model loaded from a checkpoint"
                )
    return TensorPart(
        shape=list(held.shape),
        spans=[list(spans) for spans in held.spans],
        nbytes=nbytes,
        total=to_hex(total & MASK),
        words=words,
        pieces=pieces,
    )


def compose(name: str, parts: Sequence[TensorPart]) -> str:
    """Return the mix64 of the full tensor, or DISAGREE where copies of a slice differ.

    Raises ProtocolError where the parts do not make one whole tensor.
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
            f"{name}: the workers' slices make {covered} of {first.nbytes} bytes; were all workers "
            "of one replica asked?"
        )
    for place, word in cut.items():
        total += mixed_rows(torch.frombuffer(word, dtype=torch.uint8).view(1, WORD), place, 0)
    return to_hex(settled(total, first.nbytes))


def compose_all(
    replies: Sequence[CheckReply], per_replica: int
) -> tuple[dict[str, str], list[str]]:
    """Return the fingerprints of what all workers hold together, and the names that differ.

    `replies` are in order of rank, `per_replica` of them hold one model together; those who hold
    the same have to answer the same.
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
    held: dict[str, str] = {}
    names = dict.fromkeys(n for reply in replies for n in (*reply.checksums, *reply.parts))
    for name in names:
        whole = {reply.checksums[name] for reply in replies if name in reply.checksums}
        parts = [reply.parts[name] for reply in replies if name in reply.parts]
        if parts:
            whole.add(compose(name, parts))
        held[name] = whole.pop() if len(whole) == 1 else DISAGREE
    return held


def _phases(block: Block) -> Iterator[Block]:
    """Cut a block into rows that lie alike within words: every so many bytes the same place."""
    period = min(WORD // math.gcd(block.source_stride, WORD), block.height)
    for first in range(period):
        yield Block(
            block.source + first * block.source_stride,
            block.target + first * block.target_stride,
            block.width,
            len(range(first, block.height, period)),
            block.source_stride * period,
            block.target_stride * period,
        )


def _add_pieces(pieces: dict[int, str], rows: torch.Tensor, run: Block, offset: int) -> None:
    height, width = rows.shape
    if not width or len(pieces) > MAX_PIECES:
        return
    data = bytes(rows.contiguous().cpu().numpy().tobytes())
    for row in range(height):
        at = run.source + offset + row * run.source_stride
        pieces[at] = data[row * width : (row + 1) * width].hex()
