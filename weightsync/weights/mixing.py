"""The integer arithmetic of mix64: what its words add up to, without a tensor."""

from __future__ import annotations

GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MASK = (1 << 64) - 1
WORD = 8


def mixed_word(word: bytes | bytearray, place: int) -> int:
    """Return what word `place` of the fingerprinted bytes adds to the sum of mix64."""
    return _mix((int.from_bytes(word, "little") + (place + 1) * GOLDEN) & MASK)


def settled(total: int, nbytes: int) -> int:
    """Return mix64 of `nbytes` bytes whose mixed words sum to `total`."""
    return _mix((total + nbytes * GOLDEN) & MASK)


def to_hex(value: int) -> str:
    """Return a fingerprint as 16 hex digits."""
    return f"{value:016x}"


def _mix(value: int) -> int:
    for shift, multiplier in zip((30, 27), MULTIPLIERS, strict=True):
        value = ((value ^ (value >> shift)) * multiplier) & MASK
    return value ^ (value >> 31)
