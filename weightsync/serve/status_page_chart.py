"""Charts as inline SVG: one bar an update, the newest at the right."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from weightsync.serve.status_page_data import SHOWN_UPDATES, UpdateView
from weightsync.serve.status_page_markup import Markup, joined, tag

SLOT = 10
HEIGHT = 100
_WIDTH = SLOT * SHOWN_UPDATES


def bar_chart(
    title: str,
    updates: Sequence[UpdateView],
    value_of: Callable[[UpdateView], float],
    shown: Callable[[float], str],
) -> Markup:
    """Return a figure of one value of each update; `shown` gives the value with its unit."""
    values = [value_of(update) for update in updates]
    top = round_up(max(values, default=0.0))
    latest = shown(values[-1]) if values else "none yet"
    bars = [
        _bar(place, update, value / top, f"version {update.version}: {shown(value)}")
        for place, (update, value) in enumerate(zip(updates, values, strict=True))
    ]
    return tag(
        "figure",
        tag("figcaption", tag("span", title), " ", tag("b", latest)),
        tag("p", shown(top) if values else "", class_="top", aria_hidden="true"),
        tag(
            "svg",
            _line(0),
            _line(HEIGHT / 2),
            joined(bars),
            _line(HEIGHT),
            role="img",
            viewBox=f"0 0 {_WIDTH} {HEIGHT}",
            preserveAspectRatio="none",
            aria_label=_summary(title, values, shown),
        ),
        tag(
            "p",
            tag("span", f"version {updates[0].version}" if len(updates) > 1 else ""),
            tag("span", f"version {updates[-1].version}" if updates else ""),
            class_="ends",
            aria_hidden="true",
        ),
    )


def round_up(value: float) -> float:
    """Return the next of 1, 2, 5, 10 ... that is not below a value; 1 for nothing."""
    if value <= 0:
        return 1.0
    size = 10.0 ** math.floor(math.log10(value))
    return next(step * size for step in (1, 2, 5, 10) if step * size >= value * (1 - 1e-9))


def _bar(place: int, update: UpdateView, share: float, said: str) -> Markup:
    height = max(1.0, share * HEIGHT)
    return tag(
        "rect",
        tag("title", said),
        class_="bar",
        data_version=update.version,
        x=place * SLOT + 1.5,
        y=f"{HEIGHT - height:.2f}",
        width=SLOT - 3,
        height=f"{height:.2f}",
    )


def _line(y: float) -> Markup:
    return tag("line", x1=0, y1=y, x2=_WIDTH, y2=y, vector_effect="non-scaling-stroke")


def _summary(title: str, values: Sequence[float], shown: Callable[[float], str]) -> str:
    if not values:
        return f"{title}: no updates yet"
    said = f"{title} of the last {len(values)} updates: "
    return said + f"{shown(min(values))} to {shown(max(values))}, the latest {shown(values[-1])}"
