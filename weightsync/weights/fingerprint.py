"""64-bit fingerprints that depend on every byte and its place.

`xxh3` over host memory that is still in cache; `mix64`, the same value on CPU and CUDA, from
tensor operations: every 8-byte word is keyed with its position and mixed (the finalizer of
splitmix64, Steele, Lea and Flood 2014) *before* the sum. A plain sum would not do: two sign flips
cancel in it.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterator, Sequence

import torch
import xxhash

from weightsync.errors import ConfigError
from weightsync.weights.checksums import GOLDEN, MASK, MULTIPLIERS, WORD, settled, to_hex
from weightsync.weights.shards import Block, Slice
from weightsync.wire.messages import TensorPart

__all__ = ["mix64", "mixed_rows", "part_of", "table_digest", "to_hex", "xxh3", "xxh3_parts"]

_BLOCK_WORDS = {"cpu": 1 << 17, "cuda": 1 << 20}
"""Words mixed at a time: on the host what a cache holds, on a GPU enough for a kernel."""
MAX_PIECES = 1 << 16


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
    block = _BLOCK_WORDS[flat.device.type]
    sums = [
        _mixed_sum(words[start : start + block], start) for start in range(0, words.numel(), block)
    ]
    if whole < nbytes:
        tail = torch.zeros(8, dtype=torch.uint8, device=flat.device)
        tail[: nbytes - whole] = flat[whole:]
        sums.append(_mixed_sum(tail.view(torch.int64), whole // 8))
    # A GPU is waited for here, not once a block.
    return settled(sum(map(int, sums)), nbytes)


def mixed_rows(rows: torch.Tensor, first: int, stride: int) -> int:
    """Return what words add to the sum of mix64: `uint8[height, 8 * width]` on any device.

    Row i begins at word `first + i * stride` of the fingerprinted bytes.
    """
    width = rows.shape[1] // WORD
    height = max(_BLOCK_WORDS[rows.device.type] // width, 1)
    total = 0
    for at in range(0, rows.shape[0], height):
        block = rows[at : at + height]
        words = _words(block.reshape(-1))
        starts = torch.arange(block.shape[0], device=words.device).mul_(stride)
        starts += first + at * stride
        places = starts.unsqueeze(1) + torch.arange(width, device=words.device)
        total += int(_mixed(words, places.view(-1).add_(1)))
    return total & MASK


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


def table_digest(fingerprints: Sequence[int]) -> str:
    """Return 32 hex digits that name a whole table of fingerprints, in order."""
    return hashlib.blake2b(array("Q", fingerprints).tobytes(), digest_size=16).hexdigest()


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


def _words(flat: torch.Tensor) -> torch.Tensor:
    if flat.data_ptr() % 8 or flat.storage_offset() % 8:
        flat = flat.clone()
    return flat.view(torch.int64)


def _mixed_sum(words: torch.Tensor, start: int) -> torch.Tensor:
    return _mixed(words, torch.arange(start + 1, start + 1 + words.numel(), device=words.device))


def _mixed(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Mix words with the numbers of their places, from 1 on; `keys` is overwritten."""
    mixed = keys.mul_(_signed(GOLDEN)).add_(words)
    for shift, multiplier in zip((30, 27), MULTIPLIERS, strict=True):
        mixed = (mixed ^ _shifted(mixed, shift)).mul_(_signed(multiplier))
    mixed ^= _shifted(mixed, 31)
    return mixed.sum()


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right without the sign: torch's int64 shift keeps it."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
