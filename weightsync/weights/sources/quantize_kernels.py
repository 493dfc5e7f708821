"""Compiled loops that quantize bfloat16 weights in host memory, in one pass over each row or block.

Imported where numba is installed (extra `delta`). They round as `quantize` of `sources.quantized`
does with torch, bit for bit: a quotient is rounded to bfloat16, and then to the quantized dtype.
numba computes with small integers in 64 bits unless each step is narrowed, which takes four times
as long (measured).

Where the processor looks 64 bytes up in a table by one instruction (AVX-512 VBMI), float8 needs no
division: a value and a scale have 7 bits of a significand each, and what these two become is one of
128 x 128 codes (`CODES`). The exponents are added to it. Quotients that are subnormal in float8 are
left to the loop that divides. Of mxfp8, whose scales are powers of 2, a code is a value's own bits,
rounded, on every processor.

Rows of a block are a few hundred bytes. Loops that are called for each of them are given addresses:
to pass an array counts its references by an atomic instruction, which takes as long as such a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.np.numpy_support import carray

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
_EPS = U4(0x3C00)
"""The scale of zeros in bfloat16: its epsilon, 2**-7."""
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
_MX_BIAS = U4(7)
"""The exponent's bias of float8."""
_LONG = U8(512)
"""Values from which on a row of a block is a loop of its own."""
_STRIP = U8(1 << 18)
"""Values that are looked at, and then rounded: a second-level cache holds them."""
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


@emitted(types.voidptr, types.uint64)
def _pointer(_: Any, builder: Any, values: Sequence[Any]) -> Any:
    """Return a pointer to an address."""
    return builder.inttoptr(values[0], _I8.as_pointer())


@compiled
def _largest(source: Any, count: Any) -> Any:
    """Return the bits of the largest magnitude; NaN and infinity are larger than any number."""
    values = carray(_pointer(source), (count,), U2)
    largest = U2(0)
    for i in range(count):
        magnitude = U2(values[i] & U2(0x7FFF))
        largest = max(largest, magnitude)
    return U4(largest)


@compiled
def _quotient(bits: Any, scale: Any) -> Any:
    """Return the bits of a bfloat16 divided by `scale`, rounded to bfloat16, as float32."""
    made = _as_bits(_as_float(U4(U4(bits) << U4(16))) / scale)
    odd = U4(U4(made >> U4(16)) & U4(1))
    return U4(U4(U4(made + U4(0x7FFF)) + odd) & U4(0xFFFF0000))


@compiled
def _to_float8(source: Any, target: Any, count: Any, scale: Any) -> None:
    """Divide values by a scale, a float32, and round them."""
    values = carray(_pointer(source), (count,), U2)
    out = carray(_pointer(target), (count,), U1)
    for i in range(count):
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


def _at(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    place = builder.add(address, ir.Constant(address.type, offset))
    return builder.inttoptr(place, kind.as_pointer())


def _read(builder: Any, address: Any, offset: int = 0, kind: Any = _WORDS) -> Any:
    return builder.load(_at(builder, address, offset, kind), align=1)


def _write(builder: Any, vector: Any, address: Any, offset: int = 0) -> None:
    builder.store(vector, _at(builder, address, offset, vector.type), align=1)


def _magnitudes(builder: Any, words: Any) -> Any:
    return builder.and_(words, _words(0x7FFF))


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_unsigned(">", a, b), a, b)


def _coded(builder: Any, words: Any, code: Any) -> Any:
    """Return the bytes of values with these codes, at most that of 448, and the values' signs."""
    largest = _words(_CODE_OF_448)
    code = builder.select(builder.icmp_signed("<", code, largest), code, largest)
    sign = builder.and_(builder.lshr(words, _words(8)), _words(0x80))
    return builder.trunc(builder.or_(code, sign), ir.VectorType(_I8, _LANES))


def _has_table(context: Any) -> bool:
    return "+avx512vbmi" in context.codegen().magic_tuple()[2].split(",")


@emitted(types.boolean)
def _looks_up(context: Any, _: Any, __: Sequence[Any]) -> Any:
    """Return whether the processor has the instruction."""
    return ir.Constant(_I1, int(_has_table(context)))


def _look_up(context: Any, builder: Any, values: Sequence[Any], vectors: int) -> Any:
    """Convert vectors by a table: their address, that of the bytes, of the table, least, bias.

    Returns whether all values are as large as `least`; else the bytes are not to be used. False of
    a processor without the instruction.
    """
    if not _has_table(context):
        return ir.Constant(_I1, 0)
    run, out, table = values[:3]
    least, bias = (_splat(builder, builder.trunc(value, _I16)) for value in values[3:])
    low, high = (_read(builder, table, offset, _BYTES) for offset in (0, 64))
    kind = ir.FunctionType(_BYTES, [_BYTES] * 3)
    name = "llvm.x86.avx512.vpermi2var.qi.512"
    permute = cgutils.get_or_insert_function(builder.module, kind, name)
    whole = None
    for vector in range(vectors):
        words = _read(builder, run, 2 * _LANES * vector)
        size = _magnitudes(builder, words)
        # Only the low byte of each word is used: its lowest 7 bits are the significand.
        found = builder.call(permute, [low, builder.bitcast(words, _BYTES), high])
        code = builder.and_(builder.bitcast(found, _WORDS), _words(0xFF))
        exponent = builder.and_(builder.lshr(size, _words(4)), _words(0x7F8))
        code = builder.sub(builder.add(code, exponent), bias)
        _write(builder, _coded(builder, words, code), out, _LANES * vector)
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


@emitted(types.boolean, types.uint64, types.uint64, types.uint32, types.uint32)
def _round_32(_: Any, builder: Any, values: Sequence[Any]) -> Any:
    """Convert one vector of mxfp8: its address, that of the bytes, least, bias; as `_look_up`."""
    least, bias = (_splat(builder, builder.trunc(value, _I16)) for value in values[2:])
    words = _read(builder, values[0])
    size = _magnitudes(builder, words)
    odd = builder.and_(builder.lshr(size, _words(4)), _words(1))
    code = builder.lshr(builder.add(builder.add(size, _words(7)), odd), _words(4))
    _write(builder, _coded(builder, words, builder.sub(code, bias)), values[1])
    known = builder.bitcast(builder.icmp_unsigned(">=", size, least), _I32)
    return builder.icmp_unsigned("==", known, ir.Constant(_I32, -1))


def _largest_lane(builder: Any, vector: Any) -> Any:
    kind = ir.FunctionType(_I16, [_WORDS])
    name = "llvm.vector.reduce.umax.v32i16"
    reduce = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.zext(builder.call(reduce, [vector]), _I32)


@emitted(types.uint32, types.uint64)
def _largest_32(_: Any, builder: Any, values: Sequence[Any]) -> Any:
    """Return the bits of the largest magnitude of 32 values at an address."""
    return _largest_lane(builder, _magnitudes(builder, _read(builder, values[0])))


@emitted(types.void, types.uint64, types.uint64)
def _merge_128(_: Any, builder: Any, values: Sequence[Any]) -> Any:
    """Merge the magnitudes of 128 values with the 32 largest so far: both addresses."""
    a, b, c, d = (_magnitudes(builder, _read(builder, values[0], 64 * i)) for i in range(4))
    found = _larger(builder, _larger(builder, a, b), _larger(builder, c, d))
    _write(builder, _larger(builder, found, _read(builder, values[1])), values[1])


@emitted(types.void, types.uint64)
def _fetch(_: Any, builder: Any, values: Sequence[Any]) -> Any:
    """Fetch the line at an address, which is read soon."""
    kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    flags = [ir.Constant(_I32, flag) for flag in (0, 3, 1)]
    builder.call(function, [builder.inttoptr(values[0], _I8.as_pointer()), *flags])


@compiled
def _to_float8_by_table(
    source: Any, target: Any, count: Any, scale: Any, codes: Any, ahead: Any
) -> None:
    """Convert as `_to_float8` does; `scale` are the bits of a bfloat16, `codes` an address.

    `ahead` is how far from the values those lie that come soon: they are fetched meanwhile.
    """
    exact = _as_float(U4(scale << U4(16)))
    least = U4(scale - _SUBNORMAL_BELOW)
    bias = U4(U4(U4(scale >> U4(7)) << U4(3)) - _BIAS)
    table = codes + U8(U4(scale & U4(0x7F)) << U4(7))
    i = U8(0)
    while i + _64 <= count:
        if not _look_up_64(source + i + i, target + i, table, least, bias):
            _to_float8(source + i + i, target + i, _64, exact)
        _fetch(source + i + i + ahead)
        _fetch(source + i + i + ahead + _64)
        i += _64
    while i + _32 <= count:
        if not _look_up_32(source + i + i, target + i, table, least, bias):
            _to_float8(source + i + i, target + i, _32, exact)
        i += _32
    if i < count:
        _to_float8(source + i + i, target + i, count - i, exact)


@compiled
def _to_int8(source: Any, target: Any, count: Any, scale: Any) -> None:
    values = carray(_pointer(source), (count,), U2)
    out = carray(_pointer(target), (count,), U1)
    for i in range(count):
        value = _as_float(_quotient(values[i], scale))
        value = min(F4(127.0), value)
        value = max(F4(-128.0), value)
        out[i] = U1(U4(_as_bits(F4(value + _INT8_SHIFT)) & U4(0xFF)))


@compiled
def _scale(largest: Any, half: Any) -> Any:
    """Return the bits of a bfloat16 scale for the bits of the largest magnitude.

    0 for NaN and infinity, and where the scale is not normal; the epsilon for zeros.
    """
    if largest >= _INFINITY:
        return U4(0)
    made = _as_bits(F4(_as_float(U4(largest << U4(16))) / half))
    odd = U4(U4(made >> U4(16)) & U4(1))
    scale = U4(U4(U4(made + U4(0x7FFF)) + odd) >> U4(16))
    if scale >= _SMALLEST_NORMAL:
        return scale
    return U4(0) if largest != U4(0) else _EPS


@compiled
def _find_largest(
    source: Any, columns: Any, rows: Any, wide: Any, most: Any, exact: Any, first: Any, last: Any
) -> None:
    """Write the largest magnitudes of blocks `first` to `last` of some rows to `exact`.

    `most` is memory of 32 values for each block.
    """
    at = U8(most.ctypes.data)
    ahead = U8(2) * columns  # the next row, which is fetched while this one is looked at
    most[first * _32 : last * _32] = 0
    exact[first:last] = 0
    for row in range(rows):  # in the order of memory, which is read ahead
        for j in range(first, last):
            i = j * wide
            end = min(i + wide, columns)
            run = source + U8(2) * (row * columns)
            if wide < _LONG:
                while i + U8(128) <= end:
                    _merge_128(run + i + i, at + U8(64) * j)
                    for line in range(4):
                        _fetch(run + i + i + ahead + _64 * U8(line))
                    i += U8(128)
            if i < end:
                exact[j] = max(exact[j], _largest(run + i + i, end - i))
    for j in range(first, last):
        exact[j] = max(exact[j], _largest(at + U8(64) * j, _32))


@compiled
def quantize(  # noqa: C901, PLR0912  # one loop, compiled once
    values: Any, out: Any, scales: Any, sizes: Any, half: Any, integers: bool, codes: Any
) -> bool:
    """Quantize a part of `values`, uint16[rows * columns], to `out`, uint8[size of the part].

    `sizes` are the columns, the rows and columns of a block, none larger than the weight, and the
    value with which the part begins; uint64, so that no index is negative. The bits of bfloat16
    scales are written to `scales`, uint16[down, across], those of a block by the part that has its
    first value: parts come in order. `half` is the half of the range. `codes` are CODES, or empty:
    then all quotients are divided. Returns False, with nothing of use written, where a block has
    NaN or infinity, or so small a scale that it is not normal.
    """
    columns, high, wide, begin = sizes
    end = begin + U8(out.size)
    area = high * columns
    rows = U8(values.size) // columns
    across = U8(scales.shape[1])
    exact = np.empty(across, U4)
    most = np.empty(across * _32, U2)
    values_at, out_at, codes_at = (
        U8(values.ctypes.data),
        U8(out.ctypes.data),
        U8(codes.ctypes.data),
    )
    by_table = _looks_up() and codes.size > 0 and not integers
    ahead = U8(2) * columns  # the next row, which is fetched while this one is computed
    strip = max(_STRIP // (high * wide), U8(1))
    for block in range(begin // area, (end + area - U8(1)) // area):
        start = block * area
        count = min(high, rows - block * high)
        top = (max(start, begin) - start) // columns
        bottom = (min(start + count * columns, end) - start + columns - U8(1)) // columns
        for first in range(U8(0), across, strip):
            last = min(first + strip, across)
            if start >= begin:
                source = values_at + start + start
                _find_largest(source, columns, count, wide, most, exact, first, last)
            for j in range(first, last):
                if start < begin:  # an earlier part has found it
                    exact[j] = U4(scales[block, j])
                    continue
                scale = _scale(exact[j], half)
                if scale == U4(0):
                    return False
                scales[block, j] = U2(scale)
                exact[j] = scale
            for row in range(top, bottom):
                at = start + row * columns
                is_whole = begin <= at and at + columns <= end
                for j in range(first, last):
                    i = at + j * wide
                    size = min(wide, columns - j * wide)
                    if not is_whole:
                        stop = min(i + size, end)
                        i = max(i, begin)
                        if i >= stop:
                            continue
                        size = stop - i
                    run, to = values_at + i + i, out_at + i - begin
                    scale = exact[j]
                    if by_table and scale >= _LEAST_SCALE:
                        _to_float8_by_table(run, to, size, scale, codes_at, ahead)
                    elif integers:
                        _to_int8(run, to, size, _as_float(U4(scale << U4(16))))
                    else:
                        _to_float8(run, to, size, _as_float(U4(scale << U4(16))))
    return True


@compiled
def quantize_mx(values: Any, out: Any, exponents: Any) -> bool:
    """Quantize `values`, uint16[32 * n], to `out`, uint8[32 * n], and `exponents`, uint8[n].

    Returns False as `quantize` does.
    """
    source, target = U8(values.ctypes.data), U8(out.ctypes.data)
    for group in range(U8(exponents.size)):
        run, to = source + group * U8(64), target + group * _32
        largest = _largest_32(run)
        if largest >= _INFINITY:
            return False
        power = U4(U4(largest + _MX_CARRY) >> U4(7))
        exponent = U4(power - _MX_BELOW) if power > _MX_BELOW else U4(0)
        if power <= _MX_BELOW and largest != U4(0):
            return False
        exponents[group] = U1(exponent)
        scale = U4(exponent << U4(7))
        least = U4(scale - _SUBNORMAL_BELOW)
        bias = U4(U4(exponent - _MX_BIAS) << U4(3))
        if scale < _LEAST_SCALE or not _round_32(run, to, least, bias):
            # 2**-127 of zeros is not normal: 0 divided by any other scale is the same.
            exact = _as_float(U4(max(scale, _SMALLEST_NORMAL) << U4(16)))
            _to_float8(run, to, _32, exact)
    return True
