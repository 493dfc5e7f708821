"""The tables of the GPU benchmark, and the targets of its figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gpu import Result, Row

MB = 1e6


@dataclass(frozen=True)
class Bar:
    """One target: a figure and its limit."""

    name: str
    found: str
    wanted: str
    met: bool

    def __str__(self) -> str:
        verdict = "met" if self.met else "NOT MET"
        return f"{self.name:<58} {self.found:>10}  {self.wanted:<16} {verdict}"


def bars_of(result: Result, *, ring_nbytes: int) -> list[Bar]:
    """Return every target with the measured figure."""
    proved, bare = _row(result, "unpacked", proved=True), _row(result, "unpacked", proved=False)
    packed = _row(result, "packed", proved=True)
    plain = _row(result, "packed", proved=False)
    copied = result.kernels["one launch, copy"]
    fused = result.kernels["one launch, copy and fingerprint"] / copied - 1
    read = result.kernels["one launch, fingerprint only"] / result.copy_s
    ahead = result.rival_s / packed.total_s
    allowed = ring_nbytes + result.largest_group
    extra = max(row.trainer_extra for row in (proved, bare, packed, plain))
    written = [row for row in result.rows if row.way == "unpacked, written"]
    return [
        _at_least("unpacked: data phase, of the copy rate", bare.of_copy_rate, 0.85),
        _at_least("unpacked, verified: data phase, of the copy rate", proved.of_copy_rate, 0.85),
        *(
            _at_least("unpacked, written, verified: the same", row.of_copy_rate, 0.85)
            for row in written
        ),
        _at_least("packed: data phase, of the copy rate", plain.of_copy_rate, 0.35),
        _at_least("packed, verified: data phase, of the copy rate", packed.of_copy_rate, 0.35),
        Bar("unpacked: control plane", _ms(bare.control_s), "<= 10 ms", bare.control_s <= 0.010),
        Bar("packed: control plane", _ms(plain.control_s), "<= 10 ms", plain.control_s <= 0.010),
        _at_most("fingerprints fused with the copy, more than the copy", fused, 0.10),
        _at_most("the sender's own pass, of a copy", read, 0.60),
        Bar(
            "packed, verified: ahead of the re-enacted protocol",
            f"{ahead:.2f} x",
            ">= 3 x",
            ahead >= 3,
        ),
        Bar(
            "the trainer's extra memory: ring + one group",
            f"{extra / MB:.0f} MB",
            f"<= {allowed / MB:.0f} MB",
            extra <= allowed,
        ),
    ]


def table(result: Result, *, ring_nbytes: int) -> str:
    """Return a result as text."""
    return "\n".join(_lines(result, ring_nbytes))


def _lines(result: Result, ring_nbytes: int) -> Iterator[str]:
    gbps = result.nbytes / result.copy_s / 1e9
    yield f"{result.title}: {result.nbytes / 1e9:.3f} GB in {result.tensors} tensors"
    yield f"one copy on the device: {_ms(result.copy_s)}, {gbps:.1f} GB/s"
    kernel = "the fused kernel" if result.fused else "torch, not the fused kernel"
    yield f"passes over all tensors, alone on the device, by {kernel}:"
    for name, seconds in result.kernels.items():
        yield f"  {name:<34} {_ms(seconds):>12} {seconds / result.copy_s:6.2f} x the copy"
    yield (
        f"handles sent: {result.handles}, {result.event_handles} of them with an interprocess "
        "event that their reader waits for when it opens them"
    )
    yield ""
    yield (
        f"{'way':<17} {'path':<14} {'verified':<9} {'data ms':>9} {'of copy':>8} "
        f"{'clock':<6} {'swap ms':>7} {'total ms':>9} {'control ms':>10} {'own pass':>8} "
        f"{'slots':>5} {'extra MB':>9} {'there':>7}"
    )
    for row in result.rows:
        yield _line(row, result.copy_s)
    yield f"{'re-enacted':<17} {'':<50} {'':<7} {result.rival_s * 1e3:9.2f}"
    yield ""
    yield from map(str, bars_of(result, ring_nbytes=ring_nbytes))


def _line(row: Row, copy_s: float) -> str:
    return (
        f"{row.way:<17} {row.path:<14} {row.verified:<9} {row.data_s * 1e3:9.2f} "
        f"{row.of_copy_rate:8.1%} {row.clock:<6} {row.swap_s * 1e3:7.2f} {row.total_s * 1e3:9.2f} "
        f"{row.control_s * 1e3:10.2f} {row.sender_pass_s / copy_s:8.2f} {row.slots:5d} "
        f"{row.trainer_extra / MB:9.1f} {row.receiver_extra / MB:7.1f}"
    )


def _row(result: Result, way: str, *, proved: bool) -> Row:
    return next(row for row in result.rows if row.way == way and (row.verified != "none") == proved)


def _at_least(name: str, found: float, wanted: float) -> Bar:
    return Bar(name, f"{found:.1%}", f">= {wanted:.0%}", found >= wanted)


def _at_most(name: str, found: float, wanted: float) -> Bar:
    return Bar(name, f"{found:.1%}", f"<= {wanted:.0%}", found <= wanted)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
