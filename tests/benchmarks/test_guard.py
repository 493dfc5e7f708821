"""The guard fails for a loss, and not for noise."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from benchmarks import guard
from benchmarks.guard import Ratios, judge

RIVAL = "weightsync/packed/in_place"
ROWS = [f"toy x2 {RIVAL} {way}" for way in ("not verified", "verified")]
COMMITTED = {"a": 1.0, "b": 2.0}


def tries(*found: Ratios) -> tuple[Callable[[Collection[str] | None], Ratios], list[object]]:
    """Return what measures these one after the other, and what it was asked for."""
    asked: list[object] = []

    def measure(wanted: Collection[str] | None) -> Ratios:
        asked.append(wanted if wanted is None else set(wanted))
        return found[len(asked) - 1]

    return measure, asked


def test_what_holds_is_measured_once() -> None:
    measure, asked = tries({"a": 1.14, "b": 2.2})
    assert judge(COMMITTED, measure) == []
    assert asked == [None]


def test_a_row_that_is_not_committed_is_not_judged() -> None:
    measure, _ = tries({"a": 1.0, "b": 2.0, "new": 99.0, "failed": math.nan})
    assert judge(COMMITTED, measure) == []


def test_a_loss_seen_twice_and_not_again_is_noise() -> None:
    measure, asked = tries({"a": 1.2, "b": 2.0}, {"a": 3.0}, {"a": 1.1})
    assert judge(COMMITTED, measure) == []
    assert asked == [None, {"a"}, {"a"}]


def test_a_loss_seen_in_each_try_is_a_loss() -> None:
    measure, _ = tries({"a": 1.2, "b": 2.5}, {"a": 1.16, "b": 2.0}, {"a": 1.3})
    (loss,) = judge(COMMITTED, measure)
    assert str(loss) == "a: 1.20, 1.16, 1.30 x memcpy, where 1.00 is committed"


def test_a_row_without_a_figure_is_a_loss() -> None:
    measure, _ = tries({"a": 1.0, "b": math.nan}, {"b": math.nan}, {})
    (loss,) = judge(COMMITTED, measure)
    assert str(loss) == "b: no figure x memcpy, where 2.00 is committed"


def test_what_is_committed_is_the_median_of_tries(tmp_path: Path) -> None:
    measure, _ = tries({"a": 1.0, "b": 5.0}, {"a": 3.0, "b": 4.0}, {"a": 1.2, "b": 5.0})
    guard.commit(measure, tmp_path / "file", "check")
    said = guard.read(tmp_path / "file")
    assert said["ratios"] == {"a": 1.2, "b": 5.0}
    assert {"cpu", "cores", "packages"} <= set(said["machine"])


@pytest.mark.parametrize("second", [{"a": 3.0}, {"a": 3.0, "b": math.nan}])
def test_a_row_that_failed_in_any_try_is_not_left_out_in_silence(
    second: Ratios, tmp_path: Path
) -> None:
    measure, _ = tries({"a": 1.0, "b": 5.0}, second, {"a": 1.2, "b": 5.0})
    with pytest.raises(SystemExit, match="1 of 2 rows have no figure in one of 3 tries: b"):
        guard.commit(measure, tmp_path / "file", "check")
    assert not (tmp_path / "file").exists()


def test_another_kind_of_machine_is_not_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "committed.json"
    guard.commit(lambda _: {"a": 1e-6}, file, "toy", 1)
    said = guard.read(file)
    said["machine"]["cores"] += 1
    file.write_text(json.dumps(said), encoding="utf-8")
    assert guard.main(["--file", str(file), "--preset", "toy"]) == 0
    assert capsys.readouterr().out.startswith("not judged: ")


def test_without_anything_committed_it_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="make bench-commit"):
        guard.main(["--file", str(tmp_path / "none")])


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_planted_loss_fails_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "committed.json"
    toy = ["--file", str(file), "--preset", "toy", "--rivals", RIVAL]
    assert guard.main([*toy, "--commit", "--tries", "1"]) == 0
    said = guard.read(file)
    lost, held = ROWS
    assert set(said["ratios"]) == {lost, held}
    # No update becomes a thousand times as fast by chance, or as slow.
    said["ratios"][lost] /= 1_000
    said["ratios"][held] *= 1_000
    file.write_text(json.dumps(said), encoding="utf-8")
    capsys.readouterr()
    assert guard.main([*toy, "--tries", "2"]) == 1
    printed = capsys.readouterr().out
    assert f"slower in each of 2 tries: {lost}: " in printed
    assert held not in printed
    assert "1 of 2 rows held" in printed
