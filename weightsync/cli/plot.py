"""`weightsync plot`: draws the updates of a run from their reports."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from matplotlib.figure import Figure

from weightsync.cli.figures import BLUE, ORANGE, counted, draw_line, name, panels, stack
from weightsync.cli.output import ending, print_json
from weightsync.errors import ConfigError

Number = Annotated[float, msgspec.Meta(gt=-1e30, lt=1e30)]
"""Above any second, speed or version, and small enough for matplotlib to draw axes."""


class Delta(msgspec.Struct, frozen=True):
    """The field of a DeltaReport that is shown."""

    sent: bool = False


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a SyncReport that are drawn."""

    version: Number
    gbps: Number
    stall_s: Number
    seconds: dict[str, Number]
    verified: str = ""
    delta: Delta | None = None


_DECODER = msgspec.json.Decoder(Report)
_SUFFIXES = (".png", ".svg", ".pdf")


def plot(
    reports: Annotated[Path, typer.Argument(help="reports, one JSON object per line")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="the picture: .png, .svg or .pdf")
    ] = Path("run.png"),
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Draw time by part, speed and stall of every update of a run.

    Each line of the file is the result of `report.to_json()`.
    """
    with ending(as_json=as_json):
        if out.suffix not in _SUFFIXES or out.is_dir() or not out.parent.is_dir():
            raise ConfigError(
                f"--out {out} is not a {', '.join(_SUFFIXES)} file in a directory that exists"
            )
        found = read_reports(reports)
        draw(found).savefig(out)
        if as_json:
            print_json({"reports": len(found), "out": str(out)})
        else:
            print(f"{len(found)} updates, versions {_versions(found)}: {out}")


def read_reports(path: Path) -> list[Report]:
    """Return the reports of a file. Raises ConfigError that names the first wrong line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read {path}: {exc}") from exc
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(_DECODER.decode(line))
            except (msgspec.DecodeError, RecursionError) as exc:
                raise ConfigError(
                    f"{path}, line {number} is not a report ({exc}); report.to_json() writes "
                    "reports"
                ) from exc
    if not found:
        raise ConfigError(f"{path} has no report; write report.to_json() there after each update")
    return found


def draw(reports: list[Report]) -> Figure:
    """Return a figure of three panels, with a place for each update: parts, speed, stall."""
    verified = counted(report.verified for report in reports if report.verified)
    note = f"{len(reports)} updates, versions {_versions(reports)}"
    note += f"; verified: {verified}" if verified else ""
    deltas = sum(report.delta is not None and report.delta.sent for report in reports)
    note += f" (of {deltas} deltas what changed)" if verified and deltas else ""
    figure, (parts, speed, stall) = panels("Updates of a run", note, 3)
    at = list(range(1, len(reports) + 1))
    stack(parts, at, [report.seconds for report in reports])
    name(parts, "time of an update, ms")
    draw_line(speed, at, [report.gbps for report in reports], BLUE)
    name(speed, "speed, GB/s")
    draw_line(stall, at, [report.stall_s * 1e3 for report in reports], ORANGE)
    name(stall, "generation stood still, ms")
    stall.set_xlabel("update")
    return figure


def _versions(reports: list[Report]) -> str:
    versions = [int(report.version) for report in reports]
    return f"{min(versions)} to {max(versions)}"
