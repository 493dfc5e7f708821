"""`weightsync plot`: pictures of a run's reports, and what it says of files that have none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.cli.running import answer_of, weightsync
from tests.test_report import report
from weightsync.cli.figures import counted, parts_of
from weightsync.cli.output import USAGE
from weightsync.cli.plot import Delta, draw, read_reports


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three updates, the first one slow."""
    file = tmp_path / "run.jsonl"
    made = [replace(report(seconds={"load": 0.3 / v, "total": 0.5 / v}), version=v) for v in (1, 2)]
    file.write_text("".join(f"{one.to_json()}\n" for one in [*made, replace(made[1], version=7)]))
    return file


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_picture_is_written(run: Path, tmp_path: Path, suffix: str, magic: bytes) -> None:
    out = tmp_path / f"run.{suffix}"
    result = weightsync("plot", run, "-o", out)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("3 updates, versions 1 to 7: ")
    assert out.read_bytes().startswith(magic)


def test_it_answers_in_json(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.png"
    result = weightsync("plot", run, "-o", out, "--json")
    assert answer_of(result) == {"reports": 3, "out": str(out)}


def test_what_is_drawn_is_what_the_reports_say(run: Path) -> None:
    figure = draw(read_reports(run))
    axes: list[Any] = figure.axes
    phases, speed, stall = axes
    drawn = {bars.get_label(): [bar.get_height() for bar in bars] for bars in phases.containers}
    assert drawn == {"load": [300, 150, 150], "other": [200, 100, 100]}
    assert [bar.get_y() for bar in phases.containers[1]] == [300, 150, 150]
    assert list(speed.get_lines()[0].get_ydata()) == pytest.approx([4, 8, 8])
    assert list(stall.get_lines()[0].get_ydata()) == pytest.approx([2, 2, 2])
    assert "3 updates, versions 1 to 7; verified: held" in {t.get_text() for t in figure.texts}


def test_deltas_are_told_from_whole_models(run: Path) -> None:
    reports = read_reports(run)
    deltas = [structs.replace(one, delta=Delta(sent=i > 0)) for i, one in enumerate(reports)]
    (note,) = {t.get_text() for t in draw(deltas).texts if "verified" in t.get_text()}
    assert note.endswith("verified: held (of 2 deltas what changed)")


@pytest.mark.parametrize(
    "seconds",
    [
        {"transfer": 0.2, "load": 0.3, "finish": 0.1, "total": 0.7},
        {"transfer": 0.5, "load": 0.4, "finish": 0.3, "total": 0.6},
        {"total": 0.1},
        {},
    ],
)
def test_the_parts_of_an_update_add_up_to_its_total(seconds: dict[str, float]) -> None:
    parts = parts_of(seconds)
    assert sum(parts.values()) == pytest.approx(seconds.get("total", 0.0))
    assert all(value >= 0 for value in parts.values())


def test_levels_that_differ_are_counted() -> None:
    assert counted(["held", "held"]) == "held"
    assert counted(["held", "none", "held"]) == "held 2, none 1"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no report"),
        ("{}\n", "line 1 is not a report"),
        ("[1]\n", "line 1 is not a report"),
        (f"{report().to_json()}\nnonsense\n", "line 2 is not a report"),
    ],
)
def test_a_file_without_reports_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "run.jsonl"
    file.write_text(text)
    result = weightsync("plot", file, "-o", tmp_path / "run.png")
    assert result.exit_code == USAGE
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "run.png").exists()


def test_paths_that_cannot_be(run: Path, tmp_path: Path) -> None:
    for reports, out in (
        (tmp_path / "absent", tmp_path / "run.png"),
        (run, tmp_path / "absent" / "run.png"),
        (run, tmp_path / "run.txt"),
    ):
        assert weightsync("plot", reports, "-o", out).exit_code == USAGE
