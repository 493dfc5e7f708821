"""The plots of docs/performance.md and README.md: SVG files, the same for the same results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks.plan import CHANGING, WORKLOADS
from benchmarks.results import Results, Row
from benchmarks.rivals.registry import RIVALS

OURS, THEIRS = "#1f77b4", "#9a9a9a"
STYLE: Any = {  # matplotlib's type of it lists every setting
    "svg.fonttype": "none",
    "svg.hashsalt": "weights",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
AXIS = "times as long as one plain copy (log scale)"
LONGEST = 4.0
"""Where the axis of the README's chart ends, in multiples of its shortest bar."""
MAIN_RIVAL = "weightsync/unpacked/staged"
SCHEMES: dict[str, dict[str, str]] = {
    "light": {"card": "#ffffff", "text": "#1f2328", "ours": "#0969da", "theirs": "#8c959f"},
    "dark": {"card": "#0d1117", "text": "#e6edf3", "ours": "#58a6ff", "theirs": "#6e7681"},
}
"""Colours of the README's chart, for pages on a light and on a dark ground."""


def draw(results: Results, directory: Path, main: str) -> list[tuple[str, str]]:
    """Write the plots of the rows in the results; return their file names and titles."""
    directory.mkdir(parents=True, exist_ok=True)
    drawn = []
    plots: list[tuple[str, str, Callable[[Results, str], Figure | None]]] = [
        ("bench-ways.svg", "Every way, one reader", ways),
        ("bench-readers.svg", "One, two and four readers", readers),
        ("bench-workloads.svg", "Sizes, tensor counts and real models", workloads),
    ]
    with mpl.rc_context(STYLE):
        for name, title, plot in plots:
            if (figure := plot(results, main)) is not None:
                figure.savefig(directory / name, metadata={"Date": None}, bbox_inches="tight")
                drawn.append((name, title))
        for scheme, colours in SCHEMES.items():
            if (figure := overview(results, main, colours)) is not None:
                file = directory / f"bench-overview-{scheme}.svg"
                figure.savefig(file, metadata={"Date": None}, bbox_inches="tight")
    return drawn


def overview(results: Results, main: str, colours: Mapping[str, str]) -> Figure | None:
    """Draw the README's chart: weightsync with default settings, and the best of each rival.

    Bars that are longer than the axis are cut, so that the others can be told apart.
    """
    measured = _measured(results, main, 1)
    best: dict[str, Row] = {}
    for row in sorted(measured, key=lambda row: row.ratio.median):
        entry = RIVALS[row.rival]
        if not entry.ours:
            best.setdefault(entry.module, row)
    ours = [row for row in measured if row.rival == MAIN_RIVAL]
    if not best or not ours:
        return None
    rows = sorted([*ours, *best.values()], key=lambda row: -row.ratio.median)
    figure, axes = _figure(6, 0.6 + 0.26 * len(rows))
    figure.set_facecolor(colours["card"])
    axes.set_facecolor(colours["card"])
    end = LONGEST * min(row.ratio.median for row in rows)
    for place, row in enumerate(rows):
        colour = colours["ours" if RIVALS[row.rival].ours else "theirs"]
        length = min(row.ratio.median, end)
        axes.barh(place, length, color=colour, height=0.7)
        if row.ratio.median > end:
            for gap in (0.94, 0.96):
                ends = (gap * end - 0.02 * end, gap * end + 0.02 * end)
                axes.plot(ends, (place - 0.5, place + 0.5), color=colours["card"], linewidth=2.5)
        axes.annotate(
            f"{row.ratio.median:.2f}",
            (length, place),
            textcoords="offset points",
            xytext=(4, 0),
            va="center",
            color=colours["text"],
        )
    names = [f"weightsync, {r.way}" if RIVALS[r.rival].ours else _label(r) for r in rows]
    axes.set_yticks(range(len(rows)), [name.partition(" (")[0] for name in names])
    axes.set_xlim(0, end)
    axes.set_xticks(range(int(end) + 1))
    axes.axvline(1, color=colours["text"], linewidth=0.8, linestyle=":")
    for side in ("left", "bottom"):
        axes.spines[side].set_color(colours["theirs"])
    axes.tick_params(axis="y", length=0, labelcolor=colours["text"])
    axes.tick_params(axis="x", color=colours["theirs"], labelcolor=colours["text"])
    title = f"{WORKLOADS[main]().title}: times as long as one plain copy (less is better)"
    figure.suptitle(title, color=colours["text"], fontsize=10)
    return figure


def ways(results: Results, main: str) -> Figure | None:
    """Draw a bar per way, from its least to its greatest ratio, the median marked."""
    rows = sorted(_measured(results, main, 1), key=lambda row: -row.ratio.median)
    if not rows:
        return None
    figure, axes = _figure(8, 0.8 + 0.24 * len(rows))
    for place, row in enumerate(rows):
        ratio, colour = row.ratio, _colour(row)
        axes.barh(place, ratio.median, color=colour, height=0.7)
        axes.plot([ratio.least, ratio.most], [place, place], color="black", linewidth=0.8)
        axes.text(ratio.most * 1.06, place, f"{ratio.median:.2f}", va="center")
    axes.set_yticks(range(len(rows)), [_label(row) for row in rows])
    _log(axes.xaxis, axes.set_xscale)
    axes.set_xlabel(AXIS)
    axes.set_title(f"{WORKLOADS[main]().title}, one reader")
    return figure


def readers(results: Results, main: str) -> Figure | None:
    """Draw a line per way over the number of readers."""
    counts = sorted({row.readers for row in results.rows if row.workload == main})
    if len(counts) < 2:
        return None
    figure, axes = _figure(8, 4.5)
    for rival, way in dict.fromkeys((row.rival, row.way) for row in results.rows):
        rows = [results.find(main, count, rival, way) for count in counts]
        found = [row for row in rows if row is not None and not row.failed]
        if len(found) > 1:
            axes.plot(
                [row.readers for row in found],
                [row.ratio.median for row in found],
                marker="o",
                color=_colour(found[0]),
                linewidth=1.2,
            )
            axes.annotate(
                _label(found[-1]),
                (found[-1].readers, found[-1].ratio.median),
                textcoords="offset points",
                xytext=(6, -3),
                fontsize=7,
            )
    axes.set_xticks(counts)
    _log(axes.yaxis, axes.set_yscale)
    axes.set_xlabel("readers")
    axes.set_ylabel(AXIS)
    axes.set_title(WORKLOADS[main]().title)
    return figure


def workloads(results: Results, _: str) -> Figure | None:
    """Draw a dot per way in a line per workload."""
    found = dict.fromkeys(row.workload for row in results.rows if row.readers == 1)
    names = [name for name in found if name not in CHANGING]
    if len(names) < 2:
        return None
    figure, axes = _figure(8, 1 + 0.32 * len(names))
    for place, name in enumerate(reversed(names)):
        rows = _measured(results, name, 1)
        axes.scatter(
            [row.ratio.median for row in rows],
            [place] * len(rows),
            c=[_colour(row) for row in rows],
            s=18,
        )
    axes.set_yticks(range(len(names)), [WORKLOADS[name]().title for name in reversed(names)])
    axes.grid(axis="y", linewidth=0.3)
    _log(axes.xaxis, axes.set_xscale)
    axes.set_xlabel(f"{AXIS}; blue: weightsync, grey: the others")
    return figure


def _figure(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height))
    return figure, figure.subplots()


def _log(axis: Any, scale: Callable[[str], object]) -> None:
    scale("log")
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _measured(results: Results, workload: str, count: int) -> Sequence[Row]:
    return [
        row
        for row in results.rows
        if (row.workload, row.readers) == (workload, count) and not row.failed
    ]


def _label(row: Row) -> str:
    entry = RIVALS[row.rival]
    return f"{entry.title}, {row.way}" if len(entry.ways) > 1 else entry.title


def _colour(row: Row) -> str:
    return OURS if RIVALS[row.rival].ours else THEIRS
