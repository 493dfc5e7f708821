"""Compiled loops that quantize bfloat16 weights in host memory, in one pass over each row or block.

Imported where numba is installed (extra `delta`). They round as `quantize` of `sources.quantized`
does with torch, bit for bit: a quotient is rounded to bfloat16, and then to the quantized dtype.
numba computes with small integers in 64 bits unless each step is narrowed, which takes four times
as long (measured).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from weightsync.weights.lines.numba_kernels import compiled, emitted

U1, U2, U4 = np.uint8, np.uint16, np.uint32
F4 = np.float32
_INFINITY = U2(0x7F80)
_SMALLEST_NORMAL = U4(0x80)
_MAGNITUDE = U4(0x7FFFFFFF)
_448 = U4(0x43E00000)
_FP8_NORMAL = U4(121 << 23)
"""The smallest normal number of float8_e4m3fn, 2**-6, as float32."""
_FP8_REBIAS = U4((120 << 23) - 0x7FFFF)
_FP8_SUBNORMAL = U4(141 << 23)
"""2**14 as float32: added to a small number, it leaves the bits of a subnormal at the end."""
_2_14 = F4(16384.0)
_INT8_SHIFT = F4(12582912.0)
"""1.5 * 2**23: added to a number, it leaves the nearest integer, ties to even, at the end."""


@emitted(types.float32, types.uint32)
def _as_float(_: Any, builder: Any, values: Sequence[Any]) -> Any:
    """Return the float32 of these bits: bits."""
    return builder.bitcast(values[0], ir.FloatType())


@emitted(types.uint32, types.float32)
def _as_bits(_: Any, builder: Any, values: Sequence[Any]) -> Any:
    """Return the bits of a float32: value."""
    return builder.bitcast(values[0], ir.IntType(32))


@compiled
def _largest(run: Any) -> Any:
    """Return the bits of the largest magnitude; NaN and infinity are larger than any number."""
    largest = U2(0)
    for i in range(run.size):
        magnitude = U2(run[i] & U2(0x7FFF))
        largest = max(largest, magnitude)
    return largest


@compiled
def _quotient(bits: Any, scale: Any) -> Any:
    """Return the bits of a bfloat16 divided by `scale`, rounded to bfloat16, as float32."""
    made = _as_bits(_as_float(U4(U4(bits) << U4(16))) / scale)
    odd = U4(U4(made >> U4(16)) & U4(1))
    return U4(U4(U4(made + U4(0x7FFF)) + odd) & U4(0xFFFF0000))


@compiled
def _to_float8(run: Any, out: Any, scale: Any) -> None:
    for i in range(run.size):
        value = _quotient(run[i], scale)
        size = U4(value & _MAGNITUDE)
        size = min(_448, size)
        sign = U4(U4(value >> U4(24)) & U4(0x80))
        sign = sign if size != U4(0) else U4(0)
        odd = U4(U4(size >> U4(20)) & U4(1))
        normal = U4(U4(U4(size + odd) - _FP8_REBIAS) >> U4(20))
        small = U4(_as_bits(_as_float(size) + _2_14) - _FP8_SUBNORMAL)
        rounded = small if size < _FP8_NORMAL else normal
        out[i] = U1(U4(rounded | sign))


@compiled
def _to_int8(run: Any, out: Any, scale: Any) -> None:
    for i in range(run.size):
        value = _as_float(_quotient(run[i], scale))
        value = min(F4(127.0), value)
        value = max(F4(-128.0), value)
        out[i] = U1(U4(_as_bits(F4(value + _INT8_SHIFT)) & U4(0xFF)))


@compiled
def quantize(
    weight: Any, out: Any, scales: Any, high: int, wide: int, half: Any, eps: Any, integers: bool
) -> bool:
    """Quantize `weight`, uint16[rows, columns], by blocks of `high` rows and `wide` columns.

    Writes uint8[rows, columns] to `out`, and the bits of bfloat16 scales to `scales`. `half` is the
    half of the range, `eps` the bits of the scale of zeros. Returns False, with nothing of use
    written, where a block has NaN or infinity, or so small a scale that it is not normal.
    """
    rows, columns = weight.shape
    across = scales.shape[1]
    exact = np.empty(across, F4)
    for first in range(0, rows, high):
        last = min(first + high, rows)
        for j in range(across):
            begin, end = j * wide, min((j + 1) * wide, columns)
            largest = U2(0)
            for row in range(first, last):
                found = _largest(weight[row, begin:end])
                largest = max(largest, found)
            if largest >= _INFINITY:
                return False
            made = _as_bits(F4(_as_float(U4(U4(largest) << U4(16))) / half))
            odd = U4(U4(made >> U4(16)) & U4(1))
            scale = U4(U4(U4(made + U4(0x7FFF)) + odd) >> U4(16))
            if scale < _SMALLEST_NORMAL:
                if largest != U2(0):
                    return False
                scale = U4(eps)
            scales[first // high, j] = U2(scale)
            exact[j] = _as_float(U4(scale << U4(16)))
        for row in range(first, last):
            for j in range(across):
                begin, end = j * wide, min((j + 1) * wide, columns)
                if integers:
                    _to_int8(weight[row, begin:end], out[row, begin:end], exact[j])
                else:
                    _to_float8(weight[row, begin:end], out[row, begin:end], exact[j])
    return True
