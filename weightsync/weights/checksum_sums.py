"""The mix64 of whole tensors, from the parts that the workers made of their slices."""

from __future__ import annotations

from collections.abc import Sequence

from weightsync.errors import ProtocolError
from weightsync.weights.mixing import WORD, mixed_word, settled, to_hex
from weightsync.wire.messages import CheckReply, TensorPart

DISAGREE = "workers disagree"
"""In place of a fingerprint: copies of one tensor differ between workers."""


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
        total += mixed_word(word, place)
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
