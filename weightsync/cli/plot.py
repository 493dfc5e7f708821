"""`weightsync plot`: the updates of a run as a picture, from their reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from weightsync.cli.answers import ending, print_json
from weightsync.errors import ConfigError

Report = dict[str, object]
LARGEST = 1e30
"""More than any update takes or is numbered, and little enough for axes to be drawn."""
_SUFFIXES = (".png", ".svg", ".pdf")


def plot(
    reports: Annotated[Path, typer.Argument(help="Reports, one JSON object a line.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The picture: .png, .svg or .pdf.")
    ] = Path("run.png"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Draw seconds per phase, speed and stall of every update of a run.

    A line is what `report.to_json()` returns.
    """
    with ending(as_json=as_json):
        if out.suffix not in _SUFFIXES or out.is_dir() or not out.parent.is_dir():
            raise ConfigError(
                f"--out {out} is no {', '.join(_SUFFIXES)} file in a directory that exists"
            )
        found = read_reports(reports)
        draw(found).savefig(out)
        if as_json:
            print_json({"reports": len(found), "out": str(out)})
        else:
            print(f"{len(found)} updates, versions {_versions(found)}: {out}")


def read_reports(path: Path) -> list[Report]:
    """Return the reports of a file. Raises ConfigError naming the line that is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read {path}: {exc}") from exc
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            found.append(_report(line, f"{path}, line {number}"))
    if not found:
        raise ConfigError(f"{path} has no report; write report.to_json() there after each update")
    return found


def draw(reports: list[Report]) -> Figure:
    """Return a figure of three panels: phases, speed, stall; one point an update."""
    figure = Figure(figsize=(9, 8), layout="constrained")
    phases, speed, stall = figure.subplots(3, 1, sharex=True)
    at = list(range(1, len(reports) + 1))
    _draw_phases(phases, at, [_numbers(report["seconds"]) for report in reports])
    speed.plot(at, [_number(report["gbps"]) for report in reports], marker=".")
    speed.set_ylabel("GB/s")
    stall.plot(at, [_number(report["stall_s"]) * 1e3 for report in reports], marker=".")
    stall.set_ylabel("stall, ms")
    stall.set_xlabel("update")
    figure.suptitle(f"weightsync: {len(reports)} updates, versions {_versions(reports)}")
    return figure


def _draw_phases(axes: Axes, at: list[int], seconds: list[dict[str, float]]) -> None:
    names = sorted({name for one in seconds for name in one}, key=lambda name: name != "total")
    for name in names:
        values = [one.get(name, float("nan")) * 1e3 for one in seconds]
        axes.plot(at, values, marker=".", label=name)
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    axes.legend()


def _report(line: str, where: str) -> Report:
    try:
        report = json.loads(line)
        if not isinstance(report, dict):
            raise TypeError("it is no object")
        _numbers(report["seconds"])
        for name in ("gbps", "stall_s", "version"):
            _number(report[name])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as exc:
        why = str(exc)[:100]
        raise ConfigError(f"{where} is no report ({why}); report.to_json() writes them") from exc
    found: Report = report
    return found


def _numbers(values: object) -> dict[str, float]:
    if not isinstance(values, dict):
        raise TypeError(f"{values!r} is no table of seconds")
    return {str(name): _number(value) for name, value in values.items()}


def _number(value: object) -> float:
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    number = float(value)
    if not abs(number) < LARGEST:  # infinities, and what is none of these
        raise ValueError(f"{number} is not below {LARGEST:g}")
    return number


def _versions(reports: list[Report]) -> str:
    versions = [int(_number(report["version"])) for report in reports]
    return f"{min(versions)} to {max(versions)}"
