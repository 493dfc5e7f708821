"""64-bit fingerprints that depend on every byte and its position.

`xxh3` is for host memory that is still in cache. `mix64` is made of tensor operations and has the
same value on CPU and CUDA. It mixes every 8-byte word with its position (the finalizer of
splitmix64, Steele, Lea and Flood 2014) *before* it adds the words up: in a plain sum two sign flips
cancel. So the words of a slice, at their positions in the full tensor, make a part of the full sum,
and no process needs the full tensor (`part_of`; `checksums.compose` adds the parts up).
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
import xxhash

from weightsync.errors import ConfigError
from weightsync.weights.copying.checksums import GOLDEN, MASK, MULTIPLIERS, WORD, settled, to_hex
from weightsync.weights.copying.shards import Block, Slice
from weightsync.wire.messages import TensorPart

__all__ = [
    "as_words",
    "mix64",
    "mixed_rows",
    "mixed_total",
    "mixed_words",
    "part_of",
    "parts_of",
    "table_digest",
    "to_hex",
    "xxh3",
    "xxh3_parts",
]

_SHIFTS, _LAST_SHIFT = (30, 27), 31
_BLOCK_WORDS = {"cpu": 1 << 17, "cuda": 1 << 20}
"""Words mixed at a time: on the host as many as a cache holds, on a GPU enough for a kernel."""
MAX_PIECES = 1 << 16
"""Most words of one tensor that slices may cut: each is sent as bytes."""
MAX_ALL_PIECES = 1 << 20
"""Most such pieces of all tensors of one process: about 30 MB of a message."""


def xxh3(view: memoryview) -> int:
    """Return the 64-bit xxh3 of host memory."""
    return int(xxhash.xxh3_64_intdigest(view))


def xxh3_parts(parts: Sequence[memoryview | bytes]) -> int:
    """Return the xxh3 of several parts, as of one memory that holds them in this order."""
    if len(parts) == 1:
        return int(xxhash.xxh3_64_intdigest(parts[0]))
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return int(state.intdigest())


def mix64(flat: torch.Tensor) -> int:
    """Return the portable fingerprint of `uint8[nbytes]` on any device; waits for a GPU."""
    return settled(int(mixed_total(flat)), flat.numel())


def mixed_total(flat: torch.Tensor) -> torch.Tensor:
    """Return the sum of mixed words of which `settled` makes mix64; does not wait for a GPU."""
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
    if not sums:
        return torch.zeros((), dtype=torch.int64, device=flat.device)
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()  # modulo 2 ** 64, as settled


def mixed_rows(rows: torch.Tensor, first: int, stride: int) -> int:
    """Return the summand of mix64 for `uint8[height, 8 * width]` on any device.

    Row i begins at word `first + i * stride` of the fingerprinted bytes. Waits for a GPU.
    """
    width, block_words = rows.shape[1] // WORD, _BLOCK_WORDS[rows.device.type]
    if width > block_words:  # a whole tensor, for instance, has one row
        columns = range(0, width, block_words)
        parts = (rows[:, WORD * at : WORD * (at + block_words)] for at in columns)
        sums = (
            mixed_rows(part, first + at, stride) for at, part in zip(columns, parts, strict=True)
        )
        return sum(sums) & MASK
    height = block_words // width
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
    """Return the part of a full tensor's mix64 that the slice `held` of it makes.

    `flat` is the slice's contiguous bytes (`uint8[nbytes]`). Words that the slice cuts are part of
    the reply as bytes, and are mixed where the parts are added up. Raises ConfigError, naming the
    tensor, for more than `MAX_PIECES` of them.
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


def parts_of(
    tensors: Iterable[tuple[str, torch.Tensor, Slice, int]],
) -> dict[str, list[TensorPart]]:
    """Return the parts of full tensors' mix64 that boxes make: (name, bytes, box, itemsize) each.

    A tensor whose boxes cut too many words has an empty list, and so has one that comes when
    `MAX_ALL_PIECES` are reached: no message may be of any length.
    """
    found: dict[str, list[TensorPart]] = {}
    refused: set[str] = set()
    left = MAX_ALL_PIECES
    for name, flat, box, itemsize in tensors:
        parts, cuts = found.setdefault(name, []), _count_pieces(box, itemsize)
        if cuts > min(left, MAX_PIECES):
            refused.add(name)
            continue
        left -= cuts
        parts.append(part_of(name, flat, box, itemsize))
    return {name: [] if name in refused else parts for name, parts in found.items()}


def table_digest(fingerprints: Sequence[int]) -> str:
    """Return 32 hex digits that identify a table of fingerprints, order included (blake2b)."""
    return hashlib.blake2b(array("Q", fingerprints).tobytes(), digest_size=16).hexdigest()


def joined_totals(totals: Sequence[int]) -> str:
    """Return 16 hex digits that identify the fingerprints of several streams, order included."""
    return table_digest(totals)[:16]


def as_words(digest: str) -> list[int]:
    """Return the digest of a table as two fingerprints: those of the streams make another table."""
    return [int(digest[:16], 16), int(digest[16:], 16)]


def _phases(block: Block) -> Iterator[Block]:
    """Split a block into blocks whose rows all begin at the same byte of a word."""
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


def _count_pieces(held: Slice, itemsize: int) -> int:
    """Return how many pieces of words that a slice cuts `part_of` makes."""
    count = 0
    for block in held.blocks(itemsize):
        for run in _phases(block):
            lead = min(-run.source % WORD, run.width)
            count += run.height * (bool(lead) + bool((run.width - lead) % WORD))
    return count


def _add_pieces(pieces: dict[int, str], rows: torch.Tensor, run: Block, offset: int) -> None:
    """Add each row of `uint8[height, width]` as hex, by its byte offset in the full tensor."""
    height, width = rows.shape
    if not width or len(pieces) > MAX_PIECES:
        return
    data = bytes(rows.contiguous().cpu().numpy().tobytes())
    for row in range(height):
        at = run.source + offset + row * run.source_stride
        pieces[at] = data[row * width : (row + 1) * width].hex()


def _words(flat: torch.Tensor) -> torch.Tensor:
    """View `uint8[8 * n]` as `int64[n]`; copies where the memory is not aligned."""
    if flat.data_ptr() % 8 or flat.storage_offset() % 8:
        flat = flat.clone()
    return flat.view(torch.int64)


def _mixed_sum(words: torch.Tensor, start: int) -> torch.Tensor:
    return _mixed(words, torch.arange(start + 1, start + 1 + words.numel(), device=words.device))


def _mixed(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the sum of `mixed_words`."""
    return mixed_words(words, keys).sum()


def mixed_words(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return `words`, each mixed with its position in `keys` (from 1, overwritten)."""
    if keys.device.type == "cpu":
        return _mixed_on_cpu(words, keys)
    mixed = keys.mul_(_signed(GOLDEN)).add_(words)
    for shift, multiplier in zip(_SHIFTS, MULTIPLIERS, strict=True):
        mixed = (mixed ^ _shifted(mixed, shift)).mul_(_signed(multiplier))
    mixed ^= _shifted(mixed, _LAST_SHIFT)
    return mixed


def _mixed_on_cpu(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the same in the memory of `keys`.

    NumPy has unsigned numbers, and writes to memory that is in the cache already: with one thread
    it takes a quarter to a third of the time of torch.
    """
    mixed = keys.mul_(_signed(GOLDEN)).add_(words).numpy().view(np.uint64)
    # NumPy has no view of `words`: torch resizes no storage of which it had one, for good.
    shifted = np.empty_like(mixed)
    for shift, multiplier in zip(_SHIFTS, MULTIPLIERS, strict=True):
        np.right_shift(mixed, np.uint64(shift), out=shifted)
        mixed ^= shifted
        mixed *= np.uint64(multiplier)
    np.right_shift(mixed, np.uint64(_LAST_SHIFT), out=shifted)
    mixed ^= shifted
    return keys


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right and fill with zeros: torch's int64 shift fills with the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit number."""
    return value - (1 << 64) if value >> 63 else value
