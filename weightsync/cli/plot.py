"""`weightsync plot`: draws the updates of a run from their reports."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from weightsync.cli.output import ending, print_json
from weightsync.errors import ConfigError

Number = Annotated[float, msgspec.Meta(gt=-1e30, lt=1e30)]
"""Above any second, speed or version, and small enough for matplotlib to draw axes."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a SyncReport that are drawn."""

    version: Number
    gbps: Number
    stall_s: Number
    seconds: dict[str, Number]


_DECODER = msgspec.json.Decoder(Report)
_SUFFIXES = (".png", ".svg", ".pdf")


def plot(
    reports: Annotated[Path, typer.Argument(help="reports, one JSON object per line")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="the picture: .png, .svg or .pdf")
    ] = Path("run.png"),
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Draw seconds per phase, speed and stall of every update of a run.

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
    """Return a figure of three panels: phases, speed, stall; one point per update."""
    figure = Figure(figsize=(9, 8), layout="constrained")
    phases, speed, stall = figure.subplots(3, 1, sharex=True)
    at = list(range(1, len(reports) + 1))
    _draw_phases(phases, at, [report.seconds for report in reports])
    speed.plot(at, [report.gbps for report in reports], marker=".")
    speed.set_ylabel("GB/s")
    stall.plot(at, [report.stall_s * 1e3 for report in reports], marker=".")
    stall.set_ylabel("stall, ms")
    stall.set_xlabel("update")
    figure.suptitle(f"weightsync: {len(reports)} updates, versions {_versions(reports)}")
    return figure


def _draw_phases(axes: Axes, at: list[int], seconds: list[dict[str, float]]) -> None:
    names = sorted(
        {name for phases in seconds for name in phases}, key=lambda name: name != "total"
    )
    for name in names:
        values = [phases.get(name, float("nan")) * 1e3 for phases in seconds]
        axes.plot(at, values, marker=".", label=name)
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    axes.legend()


def _versions(reports: list[Report]) -> str:
    versions = [int(report.version) for report in reports]
    return f"{min(versions)} to {max(versions)}"
