"""Numbers with their units, three digits of each."""

from __future__ import annotations

import time

_DAY_S = 86400


def number(value: float) -> str:
    """Three digits, or more of a large whole number."""
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def seconds(value: float) -> str:
    """How long something took: ms below a second."""
    return f"{number(value * 1e3)} ms" if value < 1 else f"{number(value)} s"


def span(value: float) -> str:
    """How long something has lasted, in whole seconds."""
    whole = max(0, int(value))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def nbytes(value: float) -> str:
    """Bytes, in powers of ten."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{number(value / size)} {unit}"
    return f"{value:.0f} B"


def rate(bytes_per_s: float) -> str:
    """Throughput: GB/s, or MB/s where that would be next to nothing."""
    if bytes_per_s >= 1e7:
        return f"{number(bytes_per_s / 1e9)} GB/s"
    return f"{number(bytes_per_s / 1e6)} MB/s"


def clock(at: float, now: float) -> str:
    """The UTC time of day, with its date if it is not of the last day."""
    form = "%H:%M:%S UTC" if now - at < _DAY_S else "%Y-%m-%d %H:%M UTC"
    return time.strftime(form, time.gmtime(at))


def iso(at: float) -> str:
    """A time as machines read it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
