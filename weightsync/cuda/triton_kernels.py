"""Triton kernels that copy bytes and fingerprint them as `mix64` does, in one pass.

Imported only where CUDA memory is copied or fingerprinted. `launch` works on a table of tiles
(`tiles.Tiles`), so that one launch covers thousands of tensors; `line_sums` has the sums of lines,
by which deltas are found.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weightsync.cuda.tiles import FIELDS, TILE_WORDS, Tiles

BLOCK_WORDS = 2048
"""Words that one program reads at a time: 16 KiB."""
NUM_WARPS = 8
BLOCK_LINES = 256
_FIELDS = tl.constexpr(FIELDS)
_TILE = tl.constexpr(TILE_WORDS)
_BLOCK = tl.constexpr(BLOCK_WORDS)
_WORDS = {
    16: tl.constexpr(tl.int64),
    8: tl.constexpr(tl.int64),
    4: tl.constexpr(tl.int32),
    2: tl.constexpr(tl.int16),
    1: tl.constexpr(tl.int8),
}


def launch(
    tiles: Tiles, sums: torch.Tensor | None, *, copies: bool, reads_back: bool = True
) -> None:
    """Enqueue the work of all tiles on the current stream of their device; does not wait.

    Each tile adds its mixed words to its element of `sums` (`int64`, zeros before the launch);
    with None the kernel copies only. With `copies` it copies, reads the destination back and
    fingerprints that, or, if it does not read back, the words that it stores; without `copies` it
    fingerprints the sources.
    """
    for alignment, table in tiles.items():
        count = table.shape[0]
        _mix_tiles[(count,)](
            table,
            sums if sums is not None else table,
            ALIGNMENT=alignment,
            ELEMENT=_WORDS[alignment],
            COPIES=copies,
            MIXES=sums is not None,
            READS_BACK=reads_back and copies,
            num_warps=NUM_WARPS,
        )


def line_sums(words: torch.Tensor, first: int) -> torch.Tensor:
    """Return the sums (`int64[n]`) of lines of eight words (`int64[8 * n]`), from line `first` on.

    Enqueued on the current stream of their device.
    """
    lines = words.numel() // 8
    sums = torch.empty(lines, dtype=torch.int64, device=words.device)
    if lines:
        _sum_lines[(triton.cdiv(lines, BLOCK_LINES),)](
            words, sums, lines, first, BLOCK=BLOCK_LINES, num_warps=NUM_WARPS
        )
    return sums


@triton.jit
def _sum_lines(words, sums, lines, first, BLOCK: tl.constexpr):  # noqa: N803
    """Store the sums of the lines of one block."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    places = row[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = row < lines
    word = tl.load(words + places, mask=inside[:, None], other=0).to(tl.uint64)
    keyed = (first * 8 + 1 + places).to(tl.uint64) * 0x9E3779B97F4A7C15
    total = tl.sum(_mix(word, keyed), axis=1)
    tl.store(sums + row, total.to(tl.int64, bitcast=True), mask=inside)


@triton.jit
def _mix(words, keyed):
    """Apply the finalizer of splitmix64, as `fingerprint._mixed` does; all operands are uint64."""
    mixed = words + keyed
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    return mixed ^ (mixed >> 31)


@triton.jit
def _joined(parts, WIDTH: tl.constexpr):  # noqa: N803
    """Return `uint64[words]` made of `[words, 8 / WIDTH]` little-endian parts."""
    bits = parts.to(tl.uint64) & ((1 << (8 * WIDTH)) - 1)
    shifts = tl.arange(0, 8 // WIDTH).to(tl.uint64) * (8 * WIDTH)
    return tl.sum(bits << shifts[None, :], axis=1)


@triton.jit
def _copy_tile(
    source,
    target,
    offsets,
    held,
    stored,
    WHOLE: tl.constexpr,  # noqa: N803
    ALIGNMENT: tl.constexpr,  # noqa: N803
):
    """Copy `held` elements and write zeros behind them, up to `stored` elements."""
    step: tl.constexpr = offsets.numel
    done = 0
    if held == WHOLE:
        # Without masks the compiler can move 16 bytes at a time.
        for i in tl.static_range(WHOLE // step):
            sources, targets = source + i * step + offsets, target + i * step + offsets
            if ALIGNMENT == 16:
                sources, targets = tl.multiple_of(sources, 16), tl.multiple_of(targets, 16)
            tl.store(targets, tl.load(sources))
        done = WHOLE
    while done < stored:
        at = done + offsets
        parts = tl.load(source + at, mask=at < held, other=0)
        tl.store(target + at, parts, mask=at < stored)
        done += step


@triton.jit
def _mix_tiles(  # noqa: C901, PLR0915  # one kernel: its branches are decided when it is compiled
    table,
    sums,
    ALIGNMENT: tl.constexpr,  # noqa: N803
    ELEMENT: tl.constexpr,  # noqa: N803
    COPIES: tl.constexpr,  # noqa: N803
    MIXES: tl.constexpr,  # noqa: N803
    READS_BACK: tl.constexpr,  # noqa: N803
):
    """Copy and fingerprint one tile: this program's row of `table` (`int64[tiles, FIELDS]`).

    To read the destination back costs half as much memory traffic again as the copy.
    """
    row = table + tl.program_id(0).to(tl.int64) * _FIELDS
    memory = tl.load(row).to(tl.pointer_type(ELEMENT))
    width: tl.constexpr = 8 if ALIGNMENT == 16 else ALIGNMENT
    per_word: tl.constexpr = 8 // width
    held = tl.load(row + 2) // width
    if per_word == 1:
        offsets = tl.arange(0, _BLOCK)
    else:
        offsets = tl.reshape(tl.arange(0, _BLOCK * per_word), [_BLOCK, per_word])
    stores: tl.constexpr = COPIES and MIXES and not READS_BACK
    target = memory
    stored = held
    if COPIES:
        target = tl.load(row + 1).to(tl.pointer_type(ELEMENT))
        stored = tl.load(row + 3) // width
    if COPIES and not stores:
        _copy_tile(memory, target, offsets, held, stored, _TILE * per_word, ALIGNMENT)
        memory, held = target, stored
        # A thread may read back what another thread stored.
        tl.debug_barrier()
    if MIXES:
        words = tl.load(row + 4)
        places = tl.arange(0, _BLOCK)
        keyed = (tl.load(row + 5) + 1 + places).to(tl.uint64) * 0x9E3779B97F4A7C15
        total = tl.zeros([_BLOCK], dtype=tl.uint64)
        done = 0
        if held == _TILE * per_word:
            for i in tl.static_range(_TILE // _BLOCK):
                sources = memory + i * (_BLOCK * per_word) + offsets
                if ALIGNMENT == 16:
                    sources = tl.multiple_of(sources, 16)
                parts = tl.load(sources, volatile=READS_BACK)
                if stores:
                    targets = target + i * (_BLOCK * per_word) + offsets
                    if ALIGNMENT == 16:
                        targets = tl.multiple_of(targets, 16)
                    tl.store(targets, parts)
                word = parts.to(tl.uint64) if per_word == 1 else _joined(parts, width)
                total += _mix(word, keyed)
                keyed += (_BLOCK * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
            done = _TILE
        while done < words:
            at = done * per_word + offsets
            parts = tl.load(memory + at, mask=at < held, other=0, volatile=READS_BACK)
            if stores:
                tl.store(target + at, parts, mask=at < stored)
            word = parts.to(tl.uint64) if per_word == 1 else _joined(parts, width)
            mixed = _mix(word, keyed)
            total += tl.where(places + done < words, mixed, tl.zeros_like(mixed))
            keyed += (_BLOCK * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
            done += _BLOCK
        tl.atomic_add(sums + tl.load(row + 6), tl.sum(total).to(tl.int64, bitcast=True))
