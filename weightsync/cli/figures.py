"""Figures of `plot` and of the demo: panels under each other, in one style."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

BLUE, VIOLET, GREY, ORANGE = "#0969da", "#8250df", "#8c959f", "#bf8700"
_INK, _DIM, _RULE = "#1f2328", "#59636e", "#d0d7de"

PARTS = {"transfer": BLUE, "load": "#54aeff", "finish": VIOLET, "other": GREY}
"""Parts of an update that follow each other, with their colours."""


def panels(title: str, note: str, count: int) -> tuple[Figure, list[Axes]]:
    """Return a figure of `count` panels that share the axis of updates."""
    height = 1.0 + 2.4 * count
    layout = ConstrainedLayoutEngine(rect=(0, 0, 1, 1 - 0.75 / height), hspace=0.06)
    figure = Figure(figsize=(9, height), layout=layout, dpi=120)
    axes: list[Axes] = list(figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0])
    figure.text(0.012, 1 - 0.33 / height, title, color=_INK, fontsize=14, fontweight="bold")
    figure.text(0.012, 1 - 0.6 / height, note, color=_DIM, fontsize=10)
    for axis in axes:
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.spines["bottom"].set_color(_RULE)
        axis.grid(axis="y", color=_RULE, linewidth=0.8)
        axis.set_axisbelow(True)
        axis.tick_params(colors=_DIM, length=0)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def name(axis: Axes, text: str) -> None:
    """Write what a panel shows, and its unit, above it."""
    axis.set_title(text, loc="left", color=_INK, fontsize=11)


def parts_of(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of the parts of an update; they add up to its total.

    `transfer` and `load` of a report both count from the start: bytes are sent, and until the last
    receiver has loaded them.
    """
    total = seconds.get("total", 0.0)
    transfer = min(seconds.get("transfer", 0.0), total)
    load = max(min(seconds.get("load", transfer), total) - transfer, 0.0)
    finish = min(seconds.get("finish", 0.0), total - transfer - load)
    rest = total - transfer - load - finish
    return {"transfer": transfer, "load": load, "finish": finish, "other": max(rest, 0.0)}


def stack(axis: Axes, at: Sequence[int], seconds: Sequence[Mapping[str, float]]) -> None:
    """Draw the parts of each update as stacked bars, in milliseconds."""
    bottom = [0.0] * len(at)
    for part, colour in PARTS.items():
        heights = [parts_of(one)[part] * 1e3 for one in seconds]
        if any(heights):
            axis.bar(at, heights, bottom=bottom, color=colour, width=0.8, label=part)
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    axis.legend(ncols=4, frameon=False, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0)


def draw_line(axis: Axes, at: Sequence[int], values: Sequence[float], colour: str) -> None:
    """Draw a line with a point for each update, from zero."""
    axis.set_xlim(0.4, len(at) + 0.6)
    axis.plot(at, values, color=colour, marker="o", markersize=4, linewidth=1.8)
    axis.set_ylim(0, max([*values, 0.0]) * 1.15 or 1.0)


def counted(words: Iterable[str]) -> str:
    """Return how often each word comes: "held", or "held 9, none 1"."""
    found = Counter(words)
    if len(found) == 1:
        return next(iter(found))
    return ", ".join(f"{word} {count}" for word, count in found.most_common())
