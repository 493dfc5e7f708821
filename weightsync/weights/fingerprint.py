"""64-bit fingerprints that depend on every byte and its place.

`xxh3` over host memory that is still in cache; `mix64`, the same value on CPU and CUDA, from
tensor operations: every 8-byte word is keyed with its position and mixed (the finalizer of
splitmix64, Steele, Lea and Flood 2014) *before* the sum. A plain sum would not do: two sign flips
cancel in it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import torch
import xxhash

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK = (1 << 64) - 1
_BLOCK_WORDS = 1 << 20


def xxh3(view: memoryview) -> int:
    """Return the 64-bit xxh3 of host memory."""
    return int(xxhash.xxh3_64_intdigest(view))


def xxh3_parts(parts: Sequence[memoryview | bytes]) -> int:
    """Return the xxh3 of several parts as if they lay one after another."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return int(state.intdigest())


def mix64(flat: torch.Tensor) -> int:
    """Return the portable fingerprint of `uint8[nbytes]` on any device."""
    nbytes = flat.numel()
    whole = nbytes // 8 * 8
    words = _words(flat[:whole])
    total = 0
    for start in range(0, words.numel(), _BLOCK_WORDS):
        total += _mixed_sum(words[start : start + _BLOCK_WORDS], start)
    if whole < nbytes:
        tail = torch.zeros(8, dtype=torch.uint8, device=flat.device)
        tail[: nbytes - whole] = flat[whole:]
        total += _mixed_sum(tail.view(torch.int64), whole // 8)
    return _mix_int((total + nbytes * _GOLDEN) & _MASK)


def to_hex(value: int) -> str:
    """Return a fingerprint as 16 hex digits."""
    return f"{value:016x}"


def table_digest(fingerprints: Sequence[int]) -> str:
    """Return 32 hex digits that name a whole table of fingerprints, in order."""
    return hashlib.blake2b(array("Q", fingerprints).tobytes(), digest_size=16).hexdigest()


def _words(flat: torch.Tensor) -> torch.Tensor:
    if flat.data_ptr() % 8 or flat.storage_offset() % 8:
        flat = flat.clone()
    return flat.view(torch.int64)


def _mixed_sum(words: torch.Tensor, start: int) -> int:
    keys = torch.arange(start + 1, start + 1 + words.numel(), device=words.device)
    mixed = keys.mul_(_signed(_GOLDEN)).add_(words)
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        mixed = (mixed ^ _shifted(mixed, shift)).mul_(_signed(multiplier))
    mixed ^= _shifted(mixed, 31)
    return int(mixed.sum()) & _MASK


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right without the sign: torch's int64 shift keeps it."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _mix_int(value: int) -> int:
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        value = ((value ^ (value >> shift)) * multiplier) & _MASK
    return value ^ (value >> 31)
