"""What `weightsync status --host` shows: the shared memory of this user on this host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from weightsync.integrations.sglang.files import list_homes
from weightsync.shm.census import HostSegment, list_segments

COLUMNS = ("segment", "MB", "age", "owner", "open in")
_WIDTHS = {"segment": 43, "MB": 3, "age": 3, "owner": 5, "open in": 7}
"""A name is copied from here to a shell, so it stands in one piece however narrow the console."""


def census_to_dict() -> list[dict[str, object]]:
    """Return every segment as plain data, for `--json`."""
    return [asdict(segment) for segment in _everything()]


def show_host() -> RenderableType:
    """Return every segment as a table, with what to do about those of dead owners."""
    return show_census(_everything())


def _everything() -> list[HostSegment]:
    """Segments, and the directories in which weights lie for SGLang servers."""
    homes = [
        HostSegment(
            name=home.path.name,
            nbytes=home.nbytes,
            age_s=home.age_s,
            owner_alive=home.owner_alive,
            mapped_by=(),
        )
        for home in list_homes()
    ]
    return list_segments() + homes


def show_census(segments: Sequence[HostSegment]) -> RenderableType:
    """Return `segments` as a table."""
    title = Text("this host", style="bold")
    if not segments:
        return Group(title, Text("  no segments"))
    table = Table(box=SIMPLE_HEAD)
    for column in COLUMNS:
        number = column in ("MB", "age")
        table.add_column(
            column,
            justify="right" if number else "left",
            overflow="fold",
            min_width=_WIDTHS[column],
        )
    for segment in segments:
        table.add_row(
            segment.name,
            f"{segment.nbytes / 1e6:.1f}" if segment.named else "?",
            f"{segment.age_s:.0f} s" if segment.named else "?",
            Text(_owner(segment), style="green" if segment.owner_alive else "red"),
            ", ".join(segment.mapped_by) or "nobody seen from here",
        )
    dead = sum(segment.named and not segment.owner_alive for segment in segments)
    advice = "  weightsync doctor --clean removes what dead owners left; so does the next sender"
    return Group(title, table, Text(advice)) if dead else Group(title, table)


def _owner(segment: HostSegment) -> str:
    if not segment.named:
        return "name removed"
    return "alive" if segment.owner_alive else "dead"
