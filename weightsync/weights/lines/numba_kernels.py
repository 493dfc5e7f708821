"""Compiled loops over lines in host memory. Imported where numba is installed (extra `delta`).

They do what `weights.lines` does with torch, at the speed of memory: eight lines at a time, without
a branch for each. Addresses are host addresses as uint64; the caller keeps the memory alive and
has checked every index. Marks are one bit for each line of the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from weightsync.weights.copying.checksums import GOLDEN, MASK, MULTIPLIERS

U = np.uint64
LINE = U(64)
GROUP = U(8)
_AHEAD = U(64)
_BLOCK = U(2048)
"""Lines that are read back after all of them were written: a cache holds them."""
_AHEAD_NBYTES = U(8192)
"""How far ahead memory is fetched into the cache; without it a scan takes 1.5 times (measured)."""
_LINE_KEY = U(8 * GOLDEN & MASK)
_GROUP_KEY = U(64 * GOLDEN & MASK)
_GOLDEN = U(GOLDEN)

_I1, _I8, _I32, _I64 = (ir.IntType(bits) for bits in (1, 8, 32, 64))
_LANES = ir.VectorType(_I64, 8)


def _vector(values: Sequence[int]) -> ir.Constant:
    return ir.Constant(_LANES, [ir.Constant(_I64, value & MASK) for value in values])


_LANE_KEYS = _vector([lane * GOLDEN for lane in range(8)])
_NONE = ir.Constant(_LANES, ir.Undefined)


def _shuffled(builder: Any, a: Any, b: Any, lanes: Sequence[int]) -> Any:
    mask = ir.Constant(ir.VectorType(_I32, 8), [ir.Constant(_I32, lane) for lane in lanes])
    return builder.shuffle_vector(a, b, mask)


def _splat(builder: Any, value: Any) -> Any:
    first = builder.insert_element(_NONE, value, ir.Constant(_I32, 0))
    return _shuffled(builder, first, _NONE, [0] * 8)


def _load(builder: Any, address: Any) -> Any:
    return builder.load(builder.inttoptr(address, _LANES.as_pointer()), align=1)


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, _LANES.as_pointer()), align=1)


def _mixed(builder: Any, words: Any, key: Any) -> Any:
    """Mix eight words with their positions; `key` is that of the first, (position + 1) * GOLDEN."""
    mixed = builder.add(words, builder.add(_splat(builder, key), _LANE_KEYS))
    for shift, multiplier in zip((30, 27), MULTIPLIERS, strict=True):
        shifted = builder.lshr(mixed, _vector([shift] * 8))
        mixed = builder.mul(builder.xor(mixed, shifted), _vector([multiplier] * 8))
    return builder.xor(mixed, builder.lshr(mixed, _vector([31] * 8)))


def _reduced(builder: Any, lanes: Any) -> Any:
    kind = ir.FunctionType(_I64, [_LANES])
    name = "llvm.vector.reduce.add.v8i64"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [lanes])


def _row_sums(builder: Any, rows: Sequence[Any]) -> Any:
    """Return a vector whose lane i is the sum of the lanes of `rows[i]`."""
    pairs = [
        builder.add(
            _shuffled(builder, rows[i], rows[i + 1], [0, 8, 2, 10, 4, 12, 6, 14]),
            _shuffled(builder, rows[i], rows[i + 1], [1, 9, 3, 11, 5, 13, 7, 15]),
        )
        for i in range(0, 8, 2)
    ]
    fours = [
        builder.add(
            _shuffled(builder, pairs[i], pairs[i + 1], [0, 1, 8, 9, 4, 5, 12, 13]),
            _shuffled(builder, pairs[i], pairs[i + 1], [2, 3, 10, 11, 6, 7, 14, 15]),
        )
        for i in range(0, 4, 2)
    ]
    low = _shuffled(builder, fours[0], fours[1], [0, 1, 2, 3, 8, 9, 10, 11])
    high = _shuffled(builder, fours[0], fours[1], [4, 5, 6, 7, 12, 13, 14, 15])
    return builder.add(low, high)


def _offset(builder: Any, address: Any, nbytes: int) -> Any:
    return builder.add(address, ir.Constant(_I64, nbytes))


Emit = Callable[[Any, Any, Sequence[Any]], Any]


def emitted(result: Any, *arguments: Any) -> Callable[[Emit], Any]:
    """Turn a function that emits LLVM code into one that numba's code calls."""
    signature = result(*arguments)

    def decorate(emit: Emit) -> Any:
        def codegen(context: Any, builder: Any, _: Any, values: Sequence[Any]) -> Any:
            emitted = emit(context, builder, values)
            return context.get_dummy_value() if emitted is None else emitted

        names = [f"a{i}" for i in range(len(arguments))]
        scope: dict[str, Any] = {"signature": signature, "codegen": codegen}
        source = f"def {emit.__name__}(typing, {', '.join(names)}): return signature, codegen"
        exec(source, scope)  # noqa: S102  # numba reads the number of arguments from the code
        return intrinsic(scope[emit.__name__])

    return decorate


_u64 = types.uint64


@emitted(types.UniTuple(_u64, 2), _u64, _u64, _u64, _u64)
def _compare_group(context: Any, builder: Any, values: Sequence[Any]) -> Any:
    """Compare the sums of eight lines with the table, and store them there.

    Arguments: address of the lines, key, address in the table, a bit for each line that counts.
    Returns a bit for each line that differs, and by how much their sum differs.
    """
    address, key, table, counts = values
    rows = []
    for i in range(8):
        words = _load(builder, _offset(builder, address, 64 * i))
        rows.append(_mixed(builder, words, _offset(builder, key, 8 * i * GOLDEN & MASK)))
    before = _load(builder, table)
    valid = builder.bitcast(builder.trunc(counts, _I8), ir.VectorType(_I1, 8))
    now = builder.select(valid, _row_sums(builder, rows), before)
    differs = builder.icmp_unsigned("!=", now, before)
    _store(builder, now, table)
    change = _reduced(builder, builder.sub(now, before))
    mask = builder.zext(builder.bitcast(differs, _I8), _I64)
    return context.make_tuple(builder, types.UniTuple(_u64, 2), (mask, change))


@emitted(types.void, _u64, _u64)
def _copy_line(_: Any, builder: Any, values: Sequence[Any]) -> Any:
    """Copy one line: target, source."""
    _store(builder, _load(builder, values[1]), values[0])


@emitted(_u64, _u64, _u64)
def _line_sum(_: Any, builder: Any, values: Sequence[Any]) -> Any:
    """Return the sum of one line: address, key."""
    return _reduced(builder, _mixed(builder, _load(builder, values[0]), values[1]))


@emitted(types.void, _u64)
def _fetch(_: Any, builder: Any, values: Sequence[Any]) -> Any:
    """Fetch the line at an address into the cache."""
    kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    flags = [ir.Constant(_I32, flag) for flag in (1, 3, 1)]
    builder.call(function, [builder.inttoptr(values[0], _I8.as_pointer()), *flags])


def _places(builder: Any, base: Any, indices: Any) -> list[tuple[Any, Any]]:
    """Return the address and the key of eight lines whose numbers are at `indices`."""
    places = []
    for i in range(8):
        pointer = builder.inttoptr(_offset(builder, indices, 4 * i), _I32.as_pointer())
        line = builder.zext(builder.load(pointer, align=4), _I64)
        address = builder.add(base, builder.shl(line, ir.Constant(_I64, 6)))
        position = builder.add(builder.shl(line, ir.Constant(_I64, 3)), ir.Constant(_I64, 1))
        places.append((address, builder.mul(position, ir.Constant(_I64, GOLDEN))))
    return places


@emitted(_u64, _u64, _u64, _u64)
def _swap_group(_: Any, builder: Any, values: Sequence[Any]) -> Any:
    """Overwrite eight lines: base, indices, new lines. Returns the sum of the overwritten ones."""
    base, indices, lines = values
    total = _vector([0] * 8)
    for i, (address, key) in enumerate(_places(builder, base, indices)):
        total = builder.add(total, _mixed(builder, _load(builder, address), key))
        _store(builder, _load(builder, _offset(builder, lines, 64 * i)), address)
    return _reduced(builder, total)


@emitted(_u64, _u64, _u64)
def _sum_group(_: Any, builder: Any, values: Sequence[Any]) -> Any:
    """Return the sum of eight lines: base, indices."""
    total = _vector([0] * 8)
    for address, key in _places(builder, *values):
        total = builder.add(total, _mixed(builder, _load(builder, address), key))
    return _reduced(builder, total)


def compiled(loop: Callable[..., Any]) -> Any:
    """Compile a loop when it is first called; kept on disk where numba finds a place for it."""
    try:
        return njit(nogil=True, cache=True)(loop)
    except RuntimeError:  # neither the installation nor the user's directory can be written
        return njit(nogil=True)(loop)


@compiled
def _key(line: Any) -> Any:
    return (line * GROUP + U(1)) * _GOLDEN


@compiled
def scan(  # noqa: C901  # one loop, compiled once
    spans: Any,
    state: Any,
    table: Any,
    marks: Any,
    also: Any,
    indices: Any,
    lines: Any,
    scratch: Any,
) -> bool:
    """Compare the lines of `spans` with `table`, and write changed ones to a packet.

    `spans` is uint64[n, 3]: address, number of bytes, first line. `state` is uint64[4]: the span
    and the byte in it that come next, the lines in the packet, the change of the total. Changed
    lines are set in `marks`; those that are set in `also` (uint8[0]: none) are written too.
    `indices` is uint32[capacity], of which no element means that nothing is written; `lines` is
    uint64[capacity * 8]. `scratch` is uint8[512]. Returns whether all spans are done: it ends where
    the packet is full.
    """
    writes, unions = len(indices) > 0, len(also) > 0
    capacity = U(len(indices))
    out = U(lines.ctypes.data)
    sums = U(table.ctypes.data)
    spare = U(scratch.ctypes.data)
    span, at, found, change = state[0], state[1], state[2], state[3]
    while span < U(len(spans)):
        begin, nbytes = spans[span, 0], spans[span, 1]
        line = spans[span, 2] + at // LINE
        key = _key(line)
        while at < nbytes:
            if writes and found + GROUP > capacity:
                state[0], state[1], state[2], state[3] = span, at, found, change
                return False
            address, counts = begin + at, U(255)
            if at + U(512) > nbytes:
                left = nbytes - at
                for i in range(left):
                    scratch[i] = _byte(address + U(i))
                for i in range(left, 512):
                    scratch[i] = 0
                address, counts = spare, (U(1) << ((left + LINE - U(1)) // LINE)) - U(1)
            for i in range(8):
                _fetch(begin + at + _AHEAD_NBYTES + LINE * U(i))
            differs, by = _compare_group(address, key, sums + line * GROUP, counts)
            change += by
            byte, shift = line >> U(3), line & U(7)
            if differs:
                marks[byte] |= np.uint8(differs << shift & U(255))
                if shift:
                    marks[byte + U(1)] |= np.uint8(differs << shift >> U(8))
            if unions:
                both = U(also[byte]) | U(also[byte + U(1)]) << U(8)
                differs |= both >> shift & counts
            if writes and differs:
                for i in range(8):
                    _copy_line(out + LINE * found, address + LINE * U(i))
                    indices[found] = np.uint32(line + U(i))
                    found += differs >> U(i) & U(1)
            at += U(512)
            line += GROUP
            key += _GROUP_KEY
        span += U(1)
        at = U(0)
    state[0], state[1], state[2], state[3] = span, at, found, change
    return True


@emitted(types.uint8, _u64)
def _byte(_: Any, builder: Any, values: Sequence[Any]) -> Any:
    """Return the byte at an address."""
    return builder.load(builder.inttoptr(values[0], _I8.as_pointer()))


@compiled
def sample(spans: Any, step: Any, sums: Any) -> Any:
    """Write the sums of the lines in one of `step` groups of eight; return how many there are.

    `sums` is uint64[n], with room for all of them.
    """
    count = U(0)
    for span in range(len(spans)):
        begin, groups, first = spans[span, 0], spans[span, 1] // U(512), spans[span, 2]
        group = (step - (first // GROUP) % step) % step
        while group < groups:
            for i in range(8):
                place = group * GROUP + U(i)
                sums[count] = _line_sum(begin + place * LINE, _key(first + place))
                count += U(1)
            group += step
    return count


@emitted(types.void, _u64, types.uint8)
def _put(_: Any, builder: Any, values: Sequence[Any]) -> Any:
    """Write a byte to an address."""
    builder.store(values[1], builder.inttoptr(values[0], _I8.as_pointer()))


@compiled
def swap(base: Any, indices: Any, lines: Any) -> Any:
    """Overwrite the lines at `base + 64 * index` by `lines`.

    Returns the sum of the new ones, read back, less that of the old ones. In blocks that stay in
    the cache between the two.
    """
    change = U(0)
    first, new = U(indices.ctypes.data), U(lines.ctypes.data)
    count = U(len(indices))
    begin = U(0)
    while begin < count:
        stop = min(begin + _BLOCK, count)
        whole = begin + (stop - begin) // GROUP * GROUP
        at = begin
        while at < whole:
            for i in range(8):
                ahead = at + U(i) + _AHEAD
                if ahead < count:
                    _fetch(base + LINE * U(indices[ahead]))
            change -= _swap_group(base, first + U(4) * at, new + LINE * at)
            at += GROUP
        while at < stop:
            line = U(indices[at])
            change -= _line_sum(base + LINE * line, _key(line))
            _copy_line(base + LINE * line, new + LINE * at)
            at += U(1)
        at = begin
        while at < whole:
            change += _sum_group(base, first + U(4) * at)
            at += GROUP
        while at < stop:
            line = U(indices[at])
            change += _line_sum(base + LINE * line, _key(line))
            at += U(1)
        begin = stop
    return change


@compiled
def are_growing(indices: Any, limit: Any) -> bool:
    """Return whether each index is larger than the one before, and the last below `limit`."""
    grows = True
    for i in range(1, len(indices)):
        grows &= indices[i] > indices[i - 1]
    return grows and U(indices[len(indices) - 1]) < limit


@compiled
def sum_range(address: Any, line: Any, count: Any) -> Any:
    """Return the sum of `count` lines from `address` on, of which the first is number `line`."""
    total = U(0)
    key = _key(line)
    for i in range(count):
        total += _line_sum(address + LINE * U(i), key)
        key += _LINE_KEY
    return total


@compiled
def mark(marks: Any, indices: Any) -> None:
    """Set the marks of the lines with these numbers."""
    for index in indices:
        marks[index >> np.uint32(3)] |= np.uint8(1) << np.uint8(index & np.uint32(7))


def _differing(builder: Any, lines: Sequence[Any], bits: int) -> Any:
    """Return a bit for each of the numbers of `bits` bits in which two lines differ."""
    lanes = ir.VectorType(ir.IntType(bits), 512 // bits)
    rows = [builder.load(builder.inttoptr(line, lanes.as_pointer()), align=1) for line in lines]
    return builder.bitcast(builder.icmp_unsigned("!=", *rows), ir.IntType(512 // bits))


@emitted(_u64, _u64, _u64)
def _differing_values(_: Any, builder: Any, values: Sequence[Any]) -> Any:
    """Return a bit for each of the 32 values of two bytes in which two lines differ."""
    return builder.zext(_differing(builder, values, 16), _I64)


@emitted(_u64, _u64, _u64)
def _differing_bytes(_: Any, builder: Any, values: Sequence[Any]) -> Any:
    """Return a bit for each of the 64 bytes in which two lines differ."""
    return _differing(builder, values, 8)


@emitted(_u64, _u64)
def _lowest_bit(_: Any, builder: Any, values: Sequence[Any]) -> Any:
    """Return the place of the lowest bit that is set, of a number that is not 0."""
    kind = ir.FunctionType(_I64, [_I64, _I1])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.cttz.i64")
    return builder.call(function, [values[0], ir.Constant(_I1, 1)])


@compiled
def list_changes(indices: Any, old: Any, new: Any, positions: Any, changes: Any) -> Any:
    """Write position and difference of each value of two bytes that differs; return how many.

    `old` and `new` are uint64[8 * n], the lines with these indices. `positions` is uint64[32 * n],
    `changes` uint16[32 * n].
    """
    count = U(0)
    before, now = U(old.ctypes.data), U(new.ctypes.data)
    for i in range(len(indices)):
        differs = _differing_values(before + LINE * U(i), now + LINE * U(i))
        first = U(indices[i]) * U(32)
        while differs:
            lane = _lowest_bit(differs)
            word, shift = U(i) * GROUP + lane // U(4), lane % U(4) * U(16)
            by = (new[word] >> shift) - (old[word] >> shift)
            positions[count] = first + lane
            changes[count] = np.uint16(by & U(0xFFFF))
            count += U(1)
            differs &= differs - U(1)
    return count


@compiled
def list_differing_bytes(old: Any, new: Any, differing: Any) -> None:
    """Write a bit for each byte in which two lines differ.

    `old` and `new` are uint64[8 * n], `differing` is uint64[n].
    """
    before, now = U(old.ctypes.data), U(new.ctypes.data)
    for i in range(len(differing)):
        differing[i] = _differing_bytes(before + LINE * U(i), now + LINE * U(i))


@compiled
def list_elements(lines: Any, bits: Any, width: Any, elements: Any) -> None:
    """Write the position of the element of each bit, in elements of `width` bytes from line 0.

    `bits` is uint64[n]: of the lines with these numbers, at most one bit for each element.
    """
    count = U(0)
    for i in range(len(lines)):
        left = bits[i]
        first = U(lines[i]) * (LINE // width)
        while left:
            elements[count] = np.int64(first + _lowest_bit(left) // width)
            count += U(1)
            left &= left - U(1)


@compiled
def list_lines(positions: Any, indices: Any) -> Any:
    """Write the number of the line of each position, each once; return how many."""
    count, last = 0, U(0xFFFF_FFFF_FFFF_FFFF)
    for i in range(len(positions)):
        line = positions[i] >> U(5)
        if line != last:
            indices[count] = np.uint32(line)
            count += 1
            last = line
    return count


@compiled
def apply_changes(indices: Any, values: Any, positions: Any, changes: Any) -> None:
    """Add the changes to the values (uint16) of the lines with these indices."""
    row = 0
    for i in range(len(positions)):
        line = positions[i] >> U(5)
        while U(indices[row]) != line:
            row += 1
        at = U(row) * U(32) + (positions[i] & U(31))
        values[at] = np.uint16(values[at] + changes[i])


@compiled
def gather(base: Any, indices: Any, lines: Any) -> None:
    """Copy the lines at `base + 64 * index` to `lines`."""
    count = U(len(indices))
    out = U(lines.ctypes.data)
    for at in range(count):
        ahead = U(at) + _AHEAD
        if ahead < count:
            _fetch(base + LINE * U(indices[ahead]))
        _copy_line(out + LINE * U(at), base + LINE * U(indices[at]))


@compiled
def sums_at(addresses: Any, widths: Any, sums: Any) -> None:
    """Write a sum of the `widths[i]` bytes at `addresses[i]`, a line at most, to `sums[i]`."""
    count = U(len(addresses))
    for at in range(count):
        ahead = U(at) + _AHEAD
        if ahead < count:
            _fetch(addresses[ahead])
        if widths[at] == LINE:
            sums[at] = _line_sum(addresses[at], _GOLDEN)
        else:
            total = U(0)
            for i in range(widths[at]):
                total = (total + U(_byte(addresses[at] + U(i))) + U(1)) * _GOLDEN
            sums[at] = total


@compiled
def list_marked(marks: Any, first: Any, stop: Any, indices: Any) -> Any:
    """Write the numbers of the marked lines from `first` to `stop`; return how many there are.

    `first` is a multiple of 8. `indices` is uint32[stop - first + 8].
    """
    count = U(0)
    line = first
    while line < stop:
        bits = U(marks[line >> U(3)])
        if bits:
            for i in range(8):
                indices[count] = np.uint32(line + U(i))
                count += bits >> U(i) & U(1)
        line += GROUP
    return count


@compiled
def copy_lines(target: Any, source: Any, indices: Any) -> None:
    """Copy the lines with these numbers between two flat memories."""
    count = U(len(indices))
    for at in range(count):
        ahead = U(at) + _AHEAD
        if ahead < count:
            place = LINE * U(indices[ahead])
            _fetch(source + place)
            _fetch(target + place)
        place = LINE * U(indices[at])
        _copy_line(target + place, source + place)


@compiled
def sum_of_lines(indices: Any, lines: Any) -> Any:
    """Return the sum of the lines with these numbers, whose contents are `lines`."""
    total = U(0)
    address = U(lines.ctypes.data)
    for i in range(len(indices)):
        total += _line_sum(address + LINE * U(i), _key(U(indices[i])))
    return total


@compiled
def scatter(blocks: Any, indices: Any, lines: Any, writes: bool) -> bool:
    """Write the bytes of lines to the blocks that hold them; or compare, unless it `writes`.

    `blocks` is uint64[n, 6]: the byte of the stream at which a block's first row begins, its
    address, width and height, and the distances between rows in the stream and in memory. Returns
    whether all bytes were equal, True where they were written.
    """
    content = lines.view(np.uint8)
    sent_at = U(lines.ctypes.data)
    differs = np.uint8(0)
    for b in range(len(blocks)):
        source, target, width = blocks[b, 0], blocks[b, 1], blocks[b, 2]
        height, apart, target_apart = blocks[b, 3], blocks[b, 4], blocks[b, 5]
        for i in range(len(indices)):
            begin = U(indices[i]) * LINE
            row = U(0) if begin < source + width else (begin - source - width) // apart + U(1)
            while row < height and source + row * apart < begin + LINE:
                first = source + row * apart
                start, stop = max(first, begin), min(first + width, begin + LINE)
                place = target + row * target_apart + start - first
                row += U(1)
                if stop - start == LINE:
                    line = sent_at + U(i) * LINE
                    if writes:
                        _copy_line(place, line)
                    elif _differing_bytes(place, line):
                        differs = np.uint8(1)
                    continue
                for j in range(stop - start):
                    sent = content[U(i) * LINE + start - begin + U(j)]
                    if writes:
                        _put(place + U(j), sent)
                    else:
                        differs |= sent ^ _byte(place + U(j))
    return bool(differs == 0)


@compiled
def collect(blocks: Any, indices: Any, lines: Any) -> None:
    """Write what the blocks hold of these lines to `lines`, the other way round than `scatter`.

    `blocks` and `lines` as there. Bytes that no block holds stay as they are.
    """
    content = lines.view(np.uint8)
    out = U(lines.ctypes.data)
    for b in range(len(blocks)):
        source, target, width = blocks[b, 0], blocks[b, 1], blocks[b, 2]
        height, apart, target_apart = blocks[b, 3], blocks[b, 4], blocks[b, 5]
        for i in range(len(indices)):
            begin = U(indices[i]) * LINE
            row = U(0) if begin < source + width else (begin - source - width) // apart + U(1)
            while row < height and source + row * apart < begin + LINE:
                first = source + row * apart
                start, stop = max(first, begin), min(first + width, begin + LINE)
                place = target + row * target_apart + start - first
                row += U(1)
                if stop - start == LINE:
                    _copy_line(out + U(i) * LINE, place)
                    continue
                for j in range(stop - start):
                    content[U(i) * LINE + start - begin + U(j)] = _byte(place + U(j))


@compiled
def mark_places(blocks: Any, indices: Any, marks: Any) -> None:
    """Mark the lines of another stream in which the bytes of these lines are.

    `blocks` is that of `scatter`, with bytes of that stream in place of addresses.
    """
    for b in range(len(blocks)):
        source, target, width = blocks[b, 0], blocks[b, 1], blocks[b, 2]
        height, apart, target_apart = blocks[b, 3], blocks[b, 4], blocks[b, 5]
        for i in range(len(indices)):
            begin = U(indices[i]) * LINE
            row = U(0) if begin < source + width else (begin - source - width) // apart + U(1)
            while row < height and source + row * apart < begin + LINE:
                first = source + row * apart
                start, stop = max(first, begin), min(first + width, begin + LINE)
                place = target + row * target_apart + start - first
                line = place // LINE
                while line * LINE < place + stop - start:
                    marks[line >> U(3)] |= np.uint8(1) << np.uint8(line & U(7))
                    line += U(1)
                row += U(1)
