"""Triton kernels that quantize weights in GPU memory, with the rounding of `sources.quantized`.

They have run in Triton's interpreter and were compiled for Hopper, and never on a GPU. All rounding
is made of integers and of divisions that round to nearest (`div_rn`): Triton's own division is
approximate, and its float8 needs newer GPUs. NaN is the code 0x7F here; on a host its sign differs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

DTYPES = (torch.bfloat16, torch.float32)
"""Dtypes of the weights that are quantized here."""
_GROUP = tl.constexpr(32)
_GROUPS = 64
"""Groups of mxfp8 that a program quantizes."""
_TILE = 4096
"""Values that a program reads at a time."""


def quantize(
    weight: torch.Tensor, block: tuple[int, int], half: float, *, integers: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes `uint8[rows, columns]` and scales `[down, across]` in the weight's dtype.

    `weight` has elements, is contiguous and in one of DTYPES. `block` has the rows and columns that
    share a scale. Enqueued on the current stream of its device.
    """
    rows, columns = weight.shape
    high, wide = min(block[0], rows), min(block[1], columns)
    down, across = triton.cdiv(rows, high), triton.cdiv(columns, wide)
    made = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(down, across, dtype=weight.dtype, device=weight.device)
    tile_wide = min(triton.next_power_of_2(wide), _TILE)
    tile_high = min(triton.next_power_of_2(high), max(_TILE // tile_wide, 1))
    _quantize_block[(down * across,)](
        _bits_of(weight),
        made,
        _bits_of(scales),
        rows,
        columns,
        high,
        wide,
        across,
        HALF=half,
        EPS=_eps_bits(weight.dtype),
        IS_SHORT=weight.dtype is torch.bfloat16,
        INTEGERS=integers,
        TILE_HIGH=tile_high,
        TILE_WIDE=tile_wide,
        enable_fp_fusion=False,
    )
    return made, scales


def quantize_mx(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes `uint8[rows, columns]` and exponents `uint8[rows, columns / 32]` of mxfp8.

    `weight` as in `quantize`; its rows are a multiple of 32. Enqueued as there.
    """
    rows, columns = weight.shape
    made = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    exponents = torch.empty(rows, columns // 32, dtype=torch.uint8, device=weight.device)
    groups = exponents.numel()
    _quantize_groups[(triton.cdiv(groups, _GROUPS),)](
        _bits_of(weight),
        made,
        exponents,
        groups,
        IS_SHORT=weight.dtype is torch.bfloat16,
        GROUPS=_GROUPS,
        enable_fp_fusion=False,
    )
    return made, exponents


def _bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16 if tensor.dtype is torch.bfloat16 else torch.int32)


def _eps_bits(dtype: torch.dtype) -> int:
    """Return the scale of zeros, the epsilon of a dtype, as the bits of a float32."""
    return int(torch.tensor(torch.finfo(dtype).eps, dtype=torch.float32).view(torch.int32))


@triton.jit
def _as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _load(memory, inside, IS_SHORT: tl.constexpr):  # noqa: N803
    """Return the bits of values as float32; 0 outside."""
    bits = tl.load(memory, mask=inside, other=0).to(tl.int32)
    if IS_SHORT:
        bits = bits << 16
    return bits


@triton.jit
def _divided(bits, scale, IS_SHORT: tl.constexpr):  # noqa: N803
    """Return the bits of values divided by a float32, rounded to bfloat16 where they are that."""
    made = tl.div_rn(_as_float(bits), scale).to(tl.int32, bitcast=True)
    if IS_SHORT:
        is_number = (made & 0x7FFFFFFF) <= 0x7F800000
        odd = (made >> 16) & 1
        made = tl.where(is_number, (made + 0x7FFF + odd) & -0x10000, made)
    return made


@triton.jit
def _float8(bits):
    """Return float8_e4m3fn of float32 bits, at most 448; a zero has no sign."""
    size = bits & 0x7FFFFFFF
    is_nan = size > 0x7F800000
    sign = tl.where(size != 0, (bits >> 24) & 0x80, 0)
    size = tl.minimum(size, 0x43E00000)
    odd = (size >> 20) & 1
    normal = (size + odd - ((120 << 23) - 0x7FFFF)) >> 20
    small = (_as_float(size) + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)
    code = tl.where(size < (121 << 23), small, normal) | sign
    return tl.where(is_nan, 0x7F, code)


@triton.jit
def _int8(bits):
    """Return int8 of float32 bits, ties to even; NaN is 0."""
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    value = _as_float(tl.where(is_nan, 0, bits))
    value = tl.minimum(tl.maximum(value, -128.0), 127.0)
    # 1.5 * 2**23: it leaves the nearest integer at the end.
    return (value + 12582912.0).to(tl.int32, bitcast=True) & 0xFF


@triton.jit
def _quantize_block(  # noqa: PLR0913, PLR0917  # Triton has no structs
    weight,
    out,
    scales,
    rows,
    columns,
    high,
    wide,
    across,
    HALF: tl.constexpr,  # noqa: N803
    EPS: tl.constexpr,  # noqa: N803
    IS_SHORT: tl.constexpr,  # noqa: N803
    INTEGERS: tl.constexpr,  # noqa: N803
    TILE_HIGH: tl.constexpr,  # noqa: N803
    TILE_WIDE: tl.constexpr,  # noqa: N803
):
    """Find the largest magnitude of one block, store its scale, and round its values."""
    block = tl.program_id(0)
    top, left = (block // across) * high, (block % across) * wide
    bottom, right = tl.minimum(top + high, rows), tl.minimum(left + wide, columns)
    down = tl.arange(0, TILE_HIGH)[:, None]
    along = tl.arange(0, TILE_WIDE)[None, :]
    # As integers, NaN and infinity are larger than any number.
    largest = tl.zeros([TILE_HIGH, TILE_WIDE], dtype=tl.int32)
    row = top
    while row < bottom:
        column = left
        while column < right:
            inside = (row + down < bottom) & (column + along < right)
            at = (row + down).to(tl.int64) * columns + column + along
            bits = _load(weight + at, inside, IS_SHORT)
            largest = tl.maximum(largest, bits & 0x7FFFFFFF)
            column += TILE_WIDE
        row += TILE_HIGH
    most = tl.max(tl.max(largest, axis=1), axis=0)
    scale = _divided(most, HALF, IS_SHORT)
    scale = tl.where(scale == 0, EPS, scale)
    if IS_SHORT:
        tl.store(scales + block, (scale >> 16).to(tl.int16))
    else:
        tl.store(scales + block, scale)
    row = top
    while row < bottom:
        column = left
        while column < right:
            inside = (row + down < bottom) & (column + along < right)
            at = (row + down).to(tl.int64) * columns + column + along
            bits = _load(weight + at, inside, IS_SHORT)
            quotient = _divided(bits, _as_float(scale), IS_SHORT)
            code = _int8(quotient) if INTEGERS else _float8(quotient)
            tl.store(out + at, code.to(tl.uint8), mask=inside)
            column += TILE_WIDE
        row += TILE_HIGH


@triton.jit
def _quantize_groups(
    weight,
    out,
    exponents,
    groups,
    IS_SHORT: tl.constexpr,  # noqa: N803
    GROUPS: tl.constexpr,  # noqa: N803
):
    """Quantize groups of 32 values, with the exponents of `_exponents` of `sources.quantized`."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    known = group < groups
    inside = known[:, None]
    bits = _load(weight + at, inside, IS_SHORT)
    most = tl.max(bits & 0x7FFFFFFF, axis=1)
    # From 1.75 on, a significand counts as 2.
    power = (most + (1 << 21)) >> 23
    exponent = tl.where(power == 0, 0, tl.minimum(tl.maximum(power - 8, 0), 254))
    exponent = tl.where(most >= 0x7F800000, 255, exponent)
    # 2**-127 is not normal; 255 is infinity.
    scale = _as_float(tl.where(exponent == 0, 1 << 22, exponent << 23))
    code = _float8(_divided(bits, scale[:, None], IS_SHORT))
    tl.store(out + at, code.to(tl.uint8), mask=inside)
    tl.store(exponents + group, exponent.to(tl.uint8), mask=known)
