"""The diagrams of the documentation, light and dark: `python docs/diagrams.py` writes them.

Each is a drawing of boxes and arrows in one list; the two files differ in colours alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

IMAGES = Path(__file__).with_name("images")

COLOURS: Mapping[str, Mapping[str, str]] = {
    "light": {
        "card": "#ffffff", "rule": "#d0d7de", "text": "#1f2328", "dim": "#59636e",
        "plain": "#f6f8fa", "edge": "#8c959f", "data": "#0969da", "data fill": "#ddf4ff",
        "control": "#8250df", "control fill": "#fbefff",
    },
    "dark": {
        "card": "#0d1117", "rule": "#3d444d", "text": "#f0f6fc", "dim": "#9198a1",
        "plain": "#151b23", "edge": "#656c76", "data": "#4493f8", "data fill": "#0c2d6b",
        "control": "#ab7df8", "control fill": "#271052",
    },
}  # fmt: skip
"""Data is blue and control is violet, in every diagram."""

_STYLE = """
    .card {{ fill: {card}; stroke: {rule} }}
    .frame {{ fill: none; stroke: {rule}; stroke-dasharray: 6 4 }}
    .plain {{ fill: {plain}; stroke: {edge} }}
    .data {{ fill: {data fill}; stroke: {data} }}
    .control {{ fill: {control fill}; stroke: {control} }}
    .dataline {{ fill: none; stroke: {data}; stroke-width: 3 }}
    .controlline {{ fill: none; stroke: {control}; stroke-width: 1.5 }}
    .datahead {{ fill: {data} }}
    .controlhead {{ fill: {control} }}
    .text {{ fill: {text} }}
    .dim {{ fill: {dim}; font-size: 12px }}
    .title {{ fill: {text}; font-size: 15px; font-weight: 600 }}
    .mid {{ text-anchor: middle }}
"""


def box(kind: str, x: int, y: int, width: int, height: int, *lines: str) -> str:
    """Return a rounded box with lines of text in its middle; further lines are smaller."""
    drawn = f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'
    first = y + height / 2 + 4 - 8 * (len(lines) - 1)
    for number, line in enumerate(lines):
        drawn += label(
            x + width / 2, first + 17 * number, line, "dim mid" if number else "text mid"
        )
    return drawn


def frame(x: int, y: int, width: int, height: int, title: str) -> str:
    """Return a dashed frame with a title at its upper left."""
    rect = f'<rect class="frame" x="{x}" y="{y}" width="{width}" height="{height}" rx="8"/>'
    return rect + label(x + 12, y + 20, title, "dim")


def label(x: float, y: float, text: str, kind: str = "dim") -> str:
    """Return a line of text, from x or around it."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>'


def arrow(kind: str, *points: int, both: bool = False) -> str:
    """Return an arrow of data or control along points x, y, x, y, …, of level or upright lines."""
    path = list(zip(points[::2], points[1::2], strict=True))
    ends = [(path[-1], path[-2])] + ([(path[0], path[1])] if both else [])
    heads = ""
    for (x, y), (from_x, from_y) in ends:
        u, v = (x > from_x) - (x < from_x), (y > from_y) - (y < from_y)
        heads += (
            f'<path class="{kind}head" d="M{x} {y}l{-10 * u - 5 * v} {-10 * v - 5 * u}'
            f'l{10 * v} {10 * u}z"/>'
        )
        path[path.index((x, y))] = (x - 8 * u, y - 8 * v)
    line = "L".join(f"{x} {y}" for x, y in path)
    return f'<path class="{kind}line" d="M{line}"/>{heads}'


PLANES = (
    box("plain", 20, 60, 190, 200, "trainer", "source: module, shards,", "state dict, callable"),
    box("plain", 570, 60, 190, 200, "server", "WeightReceiver", "module or load_weights"),
    label(390, 84, "control plane: two small messages an update", "dim mid"),
    arrow("control", 214, 100, 566, 100, both=True),
    label(390, 122, "HTTP, a Ray actor's method, your own callable", "dim mid"),
    box("data", 250, 160, 280, 66, "registered parameters, or a ring", "allocated once, reused"),
    arrow("data", 214, 193, 246, 193),
    arrow("data", 534, 193, 566, 193),
    label(390, 250, "data plane: ipc, tcp, or a backend of your own", "dim mid"),
    label(20, 36, "Two planes", "title"),
)  # fmt: skip

PATHS = (
    label(20, 34, "Paths", "title"),
    frame(20, 50, 470, 290, "host A"),
    box("plain", 44, 150, 130, 70, "trainer", "rank 0"),
    box("data", 216, 92, 110, 56, "GPU memory", "cuda_ipc"),
    box("data", 216, 164, 110, 56, "/dev/shm", "shared_memory"),
    box("plain", 366, 92, 104, 56, "server", "the same GPU"),
    box("plain", 366, 164, 104, 56, "server"),
    arrow("data", 326, 120, 362, 120),
    arrow("data", 326, 192, 362, 192),
    arrow("data", 174, 172, 194, 172, 194, 120, 212, 120),
    arrow("data", 174, 192, 212, 192),
    arrow("data", 174, 208, 194, 208, 194, 282, 550, 282),
    label(318, 272, "tcp: once per host", "dim mid"),
    frame(520, 50, 240, 290, "host B"),
    box("data", 554, 254, 96, 56, "/dev/shm", "its ring"),
    box("plain", 554, 92, 84, 56, "worker"),
    box("plain", 654, 92, 84, 56, "worker"),
    arrow("data", 596, 254, 596, 152),
    arrow("data", 602, 254, 602, 202, 696, 202, 696, 152),
    label(44, 326, "Each receiver gets the fastest path that passes its probe."),
)  # fmt: skip

SERVE = (
    label(20, 34, "weightsync serve", "title"),
    box("plain", 20, 56, 150, 46, "clients", "OpenAI, /generate"),
    box("control", 240, 56, 150, 46, "API servers", "--api-servers"),
    box("control", 240, 150, 150, 46, "engine cores", "--data-parallel"),
    box("data", 240, 250, 150, 56, "workers", "--tensor-parallel each"),
    box("plain", 560, 250, 180, 56, "trainer", "ws.connect(model, to=url)"),
    arrow("control", 174, 79, 236, 79, both=True),
    arrow("control", 315, 106, 315, 146, both=True),
    label(326, 130, "ZeroMQ"),
    arrow("control", 315, 200, 315, 246, both=True),
    label(326, 227, "message queue in shared memory"),
    arrow("control", 650, 250, 650, 79, 394, 79),
    label(520, 70, "two messages an update", "dim mid"),
    arrow("data", 556, 278, 394, 278),
    label(475, 298, "bytes, to every worker", "dim mid"),
    label(20, 334, "A supervisor starts all of them, and ends the server when one of them dies."),
)  # fmt: skip

SHARDS = (
    label(20, 34, "Ranks that send what they hold", "title"),
    frame(20, 50, 740, 240, "one host"),
    box("plain", 44, 88, 150, 60, "rank 0", "rows 0 to 511"),
    box("plain", 44, 200, 150, 60, "rank 1", "rows 512 to 1023"),
    box("data", 256, 88, 190, 60, "stream of rank 0", "its shards, or its ring"),
    box("data", 256, 200, 190, 60, "stream of rank 1", "its shards, or its ring"),
    arrow("data", 198, 118, 252, 118),
    arrow("data", 198, 230, 252, 230),
    box("plain", 560, 72, 180, 56, "server", "the whole module, or a hook"),
    box("plain", 560, 146, 180, 56, "worker 0", "columns 0 to 511"),
    box("plain", 560, 220, 180, 56, "worker 1", "columns 512 to 1023"),
    arrow("data", 446, 118, 484, 118, 484, 92, 556, 92),
    arrow("data", 446, 118, 484, 118, 484, 166, 556, 166),
    arrow("data", 446, 118, 484, 118, 484, 240, 556, 240),
    arrow("data", 446, 230, 520, 230, 520, 108, 556, 108),
    arrow("data", 446, 230, 520, 230, 520, 182, 556, 182),
    arrow("data", 446, 230, 520, 230, 520, 256, 556, 256),
    label(20, 314, "Rank 0 offers the memory of all ranks in one message; each receiver opens it."),
    label(20, 334, "A worker reads its columns of each rank's rows. No rank has a whole tensor."),
)  # fmt: skip

DIAGRAMS: Mapping[str, tuple[str, int, Sequence[str]]] = {
    "planes": ("The control plane and the data plane between a trainer and a server", 280, PLANES),
    "paths": ("The paths of bytes on one host, and to another host", 360, PATHS),
    "shards": ("Two ranks whose shards a server and two workers read", 350, SHARDS),
    "serve": ("The processes of weightsync serve", 350, SERVE),
}


def drawing(name: str, scheme: str) -> str:
    """Return the SVG of a diagram in a scheme, light or dark."""
    title, height, parts = DIAGRAMS[name]
    style = _STYLE.format(**COLOURS[scheme])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 780 {height}" width="780" '
        f'height="{height}" role="img"\n     font-family="system-ui, -apple-system, '
        "'Segoe UI', 'DejaVu Sans', sans-serif\" font-size=\"13\">\n"
        f"  <title>{escape(title)}</title>\n  <style>{style}  </style>\n"
        f'  <rect class="card" x="0.5" y="0.5" width="779" height="{height - 1}" rx="8"/>\n  '
        + "\n  ".join(parts)
        + "\n</svg>\n"
    )


def main() -> None:
    """Write all of them."""
    for name in DIAGRAMS:
        for scheme in COLOURS:
            path = IMAGES / f"{name}-{scheme}.svg"
            path.write_text(drawing(name, scheme), encoding="utf-8")


if __name__ == "__main__":
    main()
