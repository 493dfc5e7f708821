"""Compiled loops that quantize bfloat16 weights in host memory, in one pass over each row or block.

Imported where numba is installed (extra `delta`). They round as `quantize` of `sources.quantized`
does with torch, bit for bit: a quotient is rounded to bfloat16, and then to the quantized dtype.
numba computes with small integers in 64 bits unless each step is narrowed, which takes four times
as long (measured).

Where the processor looks 64 bytes up in a table by one instruction (AVX-512 VBMI), float8 needs no
division: a value and a scale have 7 bits of a significand each, and what these two become is one of
128 x 128 codes (`CODES`). The exponents are added to it. Quotients that are subnormal in float8 are
left to the loop that divides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from weightsync.weights.lines.numba_kernels import compiled, emitted

U1, U2, U4, U8 = np.uint8, np.uint16, np.uint32, np.uint64
F4 = np.float32
_INFINITY = U4(0x7F80)
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

_LANES = 32
_32, _64 = np.uint64(32), np.uint64(64)
_SUBNORMAL_BELOW = U4(6 << 7)
"""A quotient of 2**-6 or more is normal in float8: such a value is this far below the scale."""
_LEAST_SCALE = U4(8 << 7)
"""From this scale on, such a value is normal in bfloat16, too."""
_BIAS = U4(48)
"""The exponent's bias of float8, 7 << 3, without the 8 that each code of the table has more."""
_CODE_OF_448 = 0x7E
_MX_CARRY = U4(32)
"""From 1.75 on, a significand counts as 2."""
_MX_BELOW = U4(8)
"""The exponent of float8's largest number."""
_I1, _I8, _I16, _I32 = (ir.IntType(bits) for bits in (1, 8, 16, 32))
_BYTES = ir.VectorType(_I8, 64)
_WORDS = ir.VectorType(_I16, _LANES)


def _codes() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the codes by the significands of scale and value: 8 * exponent + 8, and 3 bits.

    The quotient of two significands is in (0.5, 2), so that its exponent is -1 or 0.
    """
    significands = np.arange(128, 256, dtype=np.float32)
    bits = (significands[None, :] / significands[:, None]).view(np.uint32)
    quotient = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = (quotient + 7 + ((quotient >> 4) & 1)) >> 4
    return (rounded - (126 << 3)).astype(np.uint8)


CODES = _codes()


@emitted(types.float32, types.uint32)
def _as_float(_: Any, builder: Any, values: Sequence[Any]) -> Any:
    """Return the float32 of these bits: bits."""
    return builder.bitcast(values[0], ir.FloatType())


@emitted(types.uint32, types.float32)
def _as_bits(_: Any, builder: Any, values: Sequence[Any]) -> Any:
    """Return the bits of a float32: value."""
    return builder.bitcast(values[0], ir.IntType(32))


@compiled
def _largest(values: Any, begin: Any, end: Any) -> Any:
    """Return the bits of the largest magnitude; NaN and infinity are larger than any number."""
    largest = U2(0)
    for i in range(begin, end):
        magnitude = U2(values[i] & U2(0x7FFF))
        largest = max(largest, magnitude)
    return largest


@compiled
def _quotient(bits: Any, scale: Any) -> Any:
    """Return the bits of a bfloat16 divided by `scale`, rounded to bfloat16, as float32."""
    made = _as_bits(_as_float(U4(U4(bits) << U4(16))) / scale)
    odd = U4(U4(made >> U4(16)) & U4(1))
    return U4(U4(U4(made + U4(0x7FFF)) + odd) & U4(0xFFFF0000))


@compiled
def _to_float8(values: Any, out: Any, begin: Any, end: Any, scale: Any) -> None:
    for i in range(begin, end):
        value = _quotient(values[i], scale)
        size = U4(value & _MAGNITUDE)
        size = min(_448, size)
        sign = U4(U4(value >> U4(24)) & U4(0x80))
        sign = sign if size != U4(0) else U4(0)
        odd = U4(U4(size >> U4(20)) & U4(1))
        normal = U4(U4(U4(size + odd) - _FP8_REBIAS) >> U4(20))
        small = U4(_as_bits(_as_float(size) + _2_14) - _FP8_SUBNORMAL)
        rounded = small if size < _FP8_NORMAL else normal
        out[i] = U1(U4(rounded | sign))


def _splat(builder: Any, value: Any) -> Any:
    none = ir.Constant(_WORDS, ir.Undefined)
    first = builder.insert_element(none, value, ir.Constant(_I32, 0))
    lanes = ir.Constant(ir.VectorType(_I32, _LANES), [0] * _LANES)
    return builder.shuffle_vector(first, none, lanes)


def _words(value: int) -> ir.Constant:
    return ir.Constant(_WORDS, [value] * _LANES)


def _look_up(context: Any, builder: Any, values: Sequence[Any], vectors: int) -> Any:
    """Convert vectors by a table: their address, that of the bytes, of the table, least, bias.

    Returns whether all values are as large as `least`; else the bytes are not to be used. False of
    a processor without the instruction.
    """
    if "+avx512vbmi" not in context.codegen().magic_tuple()[2].split(","):
        return ir.Constant(_I1, 0)
    run, out, table = values[:3]
    least, bias = (_splat(builder, builder.trunc(value, _I16)) for value in values[3:])

    def at(address: Any, offset: int, kind: Any) -> Any:
        place = builder.add(address, ir.Constant(address.type, offset))
        return builder.inttoptr(place, kind.as_pointer())

    low, high = (builder.load(at(table, offset, _BYTES), align=1) for offset in (0, 64))
    kind = ir.FunctionType(_BYTES, [_BYTES] * 3)
    name = "llvm.x86.avx512.vpermi2var.qi.512"
    permute = cgutils.get_or_insert_function(builder.module, kind, name)
    whole = None
    for vector in range(vectors):
        words = builder.load(at(run, 2 * _LANES * vector, _WORDS), align=1)
        size = builder.and_(words, _words(0x7FFF))
        # Only the low byte of each word is used: its lowest 7 bits are the significand.
        found = builder.call(permute, [low, builder.bitcast(words, _BYTES), high])
        code = builder.and_(builder.bitcast(found, _WORDS), _words(0xFF))
        exponent = builder.and_(builder.lshr(size, _words(4)), _words(0x7F8))
        code = builder.sub(builder.add(code, exponent), bias)
        largest = _words(_CODE_OF_448)
        code = builder.select(builder.icmp_signed("<", code, largest), code, largest)
        sign = builder.and_(builder.lshr(words, _words(8)), _words(0x80))
        byte = builder.trunc(builder.or_(code, sign), ir.VectorType(_I8, _LANES))
        builder.store(byte, at(out, _LANES * vector, byte.type), align=1)
        known = builder.bitcast(builder.icmp_unsigned(">=", size, least), _I32)
        whole = known if whole is None else builder.and_(whole, known)
    return builder.icmp_unsigned("==", whole, ir.Constant(_I32, -1))


_ARGUMENTS = (types.uint64, types.uint64, types.uint64, types.uint32, types.uint32)


@emitted(types.boolean, *_ARGUMENTS)
def _look_up_64(context: Any, builder: Any, values: Sequence[Any]) -> Any:
    """Convert two vectors, for which the table is loaded once."""
    return _look_up(context, builder, values, 2)


@emitted(types.boolean, *_ARGUMENTS)
def _look_up_32(context: Any, builder: Any, values: Sequence[Any]) -> Any:
    """Convert one vector."""
    return _look_up(context, builder, values, 1)


@compiled
def _to_float8_by_table(
    values: Any, out: Any, begin: Any, end: Any, scale: Any, codes: Any
) -> None:
    """Convert as `_to_float8` does; `scale` are the bits of a bfloat16."""
    exact = _as_float(U4(scale << U4(16)))
    least = U4(scale - _SUBNORMAL_BELOW)
    bias = U4(U4(U4(scale >> U4(7)) << U4(3)) - _BIAS)
    table = U8(codes.ctypes.data) + U8(U4(scale & U4(0x7F)) << U4(7))
    source, target = U8(values.ctypes.data), U8(out.ctypes.data)
    i = begin
    while i + _64 <= end:
        if not _look_up_64(source + i + i, target + i, table, least, bias):
            _to_float8(values, out, i, i + _64, exact)
        i += _64
    while i + _32 <= end:
        if not _look_up_32(source + i + i, target + i, table, least, bias):
            _to_float8(values, out, i, i + _32, exact)
        i += _32
    if i < end:
        _to_float8(values, out, i, end, exact)


@compiled
def _to_int8(values: Any, out: Any, begin: Any, end: Any, scale: Any) -> None:
    for i in range(begin, end):
        value = _as_float(_quotient(values[i], scale))
        value = min(F4(127.0), value)
        value = max(F4(-128.0), value)
        out[i] = U1(U4(_as_bits(F4(value + _INT8_SHIFT)) & U4(0xFF)))


@compiled
def _scale(largest: Any, half: Any, eps: Any) -> Any:
    """Return the bits of a bfloat16 scale for the bits of the largest magnitude.

    0 for NaN and infinity, and where the scale is not normal; `eps` for zeros. Of mxfp8, whose
    `half` is 0, a power of 2.
    """
    if largest >= _INFINITY:
        return U4(0)
    if half == F4(0):
        power = U4(U4(largest + _MX_CARRY) >> U4(7))
        if power > _MX_BELOW:
            return U4(U4(power - _MX_BELOW) << U4(7))
        return U4(0) if largest != U4(0) else U4(eps)
    made = _as_bits(F4(_as_float(U4(largest << U4(16))) / half))
    odd = U4(U4(made >> U4(16)) & U4(1))
    scale = U4(U4(U4(made + U4(0x7FFF)) + odd) >> U4(16))
    if scale >= _SMALLEST_NORMAL:
        return scale
    return U4(0) if largest != U4(0) else U4(eps)


@compiled
def quantize(
    values: Any,
    out: Any,
    scales: Any,
    sizes: Any,
    half: Any,
    eps: Any,
    integers: bool,
    codes: Any,
) -> bool:
    """Quantize `values`, uint16[rows * columns], to `out`, uint8[rows * columns].

    `sizes` are the columns, and the rows and columns of a block; uint64, so that no index is
    negative. The bits of bfloat16 scales are written to `scales`, uint16[down, across]. `half` is
    the half of the range, 0 for mxfp8, `eps` the bits of the scale of zeros. `codes` are CODES, or
    empty: then all quotients are divided. Returns False, with nothing of use written, where a block
    has NaN or infinity, or so small a scale that it is not normal.
    """
    columns, high, wide = sizes
    rows = U8(values.size) // columns
    down, across = scales.shape
    exact = np.empty(across, U4)
    for block in range(U8(down)):
        first = block * high
        last = min(first + high, rows)
        exact[:] = 0
        for row in range(first, last):  # in the order of memory, which is read ahead
            for j in range(U8(across)):
                begin = row * columns + j * wide
                end = row * columns + min((j + U8(1)) * wide, columns)
                exact[j] = max(exact[j], U4(_largest(values, begin, end)))
        for j in range(U8(across)):
            scale = _scale(exact[j], half, eps)
            if scale == U4(0):
                return False
            scales[block, j] = U2(scale)
            exact[j] = scale
        for row in range(first, last):
            for j in range(U8(across)):
                begin = row * columns + j * wide
                end = row * columns + min((j + U8(1)) * wide, columns)
                scale = exact[j]
                if integers:
                    _to_int8(values, out, begin, end, _as_float(U4(scale << U4(16))))
                elif codes.size and scale >= _LEAST_SCALE:
                    _to_float8_by_table(values, out, begin, end, scale, codes)
                else:
                    _to_float8(values, out, begin, end, _as_float(U4(scale << U4(16))))
    return True
