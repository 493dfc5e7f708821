"""The comparison with what people use instead: it runs, is right, and finds what is wrong."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import weightsync as ws
from benchmarks import compare, deltas, tables
from benchmarks.plan import CHANGING, DELTAS, OUR_DELTAS, PRESETS, WORKLOADS, Preset, Trial
from benchmarks.results import Results, Row, machine
from benchmarks.rivals import ours, trial
from benchmarks.rivals.contract import Job, Rival, RivalError
from benchmarks.rivals.parameters import (
    Parameters,
    digests,
    fill,
    load,
    make_module,
    parameters_of,
)
from benchmarks.rivals.registry import RIVALS, Entry

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 280.0
TOY = PRESETS["toy"]
FEW = ("weightsync/packed/staged", "delta/weightsync/always", "delta/http_body")

pytestmark = pytest.mark.timeout(300)


def run_toy(out: Path, *options: str) -> Results:
    """Have the command make the toy preset's results."""
    command = [sys.executable, "-m", "benchmarks.compare", "--preset", "toy", "--out", str(out)]
    done = subprocess.run(
        [*command, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return Results.read(out)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of a few rivals, as if they were all."""
    out = tmp_path_factory.mktemp("compared") / "results.json"
    results = run_toy(out, "--rivals", *FEW)
    results.finished = True
    results.save(out)
    return out


def rows_of(rivals: Iterable[str]) -> set[str]:
    return {
        f"{part.workload} x{part.readers} {name} {way}"
        for part in TOY.trials
        for name in part.rivals
        for way in RIVALS[name].ways
        if name.startswith(tuple(rivals))
    }


def test_rivals_move_everything(compared: Path) -> None:
    check_all_moved(Results.read(compared), rows_of(FEW))


@pytest.mark.soak
def test_everyone_moves_everything(tmp_path: Path) -> None:
    results = run_toy(tmp_path / "results.json")
    assert results.finished
    assert {row.rival for row in results.rows} == set(RIVALS)
    check_all_moved(results, rows_of([""]))


def check_all_moved(results: Results, keys: set[str]) -> None:
    assert not [f"{row.key}: {row.failed}" for row in results.rows if row.failed]
    assert {row.key for row in results.rows} == keys
    for row in results.rows:
        assert len(row.update) == len(row.memcpy) == TOY.rounds
        assert 0 < row.ratio.least <= row.ratio.median <= row.ratio.most
        if row.workload in CHANGING:
            assert 0.009 < row.changed_values / (row.nbytes / 2) <= 0.01
            assert row.changed_values <= row.sent_nbytes <= row.nbytes


def test_pages_get_tables_plots_and_links_to_rows(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/performance.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    rows = [
        replace(row_of(part.workload, way), readers=part.readers, rival=name)
        for part in TOY.trials
        for name in part.rivals
        for way in RIVALS[name].ways
    ]
    for number, row in enumerate(rows):
        if row.workload in CHANGING:
            rows[number] = replace(row, changed_values=100, changed_lines=90, sent_nbytes=625)
    results = Results("toy", machine(), rows, finished=True)
    # The README shows models that the toy preset does not move.
    toy = [row for row in results.rows if (row.workload, row.readers) == ("toy", 2)]
    results.rows += [replace(row, workload="smollm2", readers=1) for row in toy]
    results.rows += [replace(row, readers=1) for row in toy]
    tables.write(results, tmp_path)
    page = (tmp_path / "docs/performance.md").read_text(encoding="utf-8")
    assert "## A GPU" in page  # what is outside the markers stays
    others, _, changing = page.partition("### Few values change")
    few = {row.key for row in results.rows if row.workload in CHANGING}
    assert changing.count("(6.25) |") == len(few) > 0
    anchors = re.findall(r'<a id="([^"]+)">', page)
    # One for each workload that we moved to one reader, one for each row of the main workload.
    moved = {row.workload for row in results.rows if row.rival.startswith("weightsync")}
    main = {row.key for row in results.rows if row.workload == "toy" and row.readers == 1}
    assert len(anchors) == len(set(anchors)) == len(moved) + len(main)
    for row in results.rows:
        text = changing if row.workload in CHANGING else others
        assert f"{tables.title(row)} |" in text, row.key
    first_page = (tmp_path / "README.md").read_text(encoding="utf-8")
    # Its first sentence links to a row too, which tests/docs/test_readme.py compares.
    table = first_page.partition("<!-- numbers: begin")[2]
    linked = re.findall(r"docs/performance\.md#([\w-]+)", table)
    assert linked
    assert set(linked) <= set(anchors)
    drawn = re.findall(r"\]\((images/[\w.-]+)\)", page)
    assert len(drawn) == 3
    drawn += re.findall(r"images/bench-[\w-]+\.svg", first_page)
    assert len(drawn) == 5
    for name in drawn:
        assert 1_000 < (tmp_path / "docs" / name).stat().st_size < 200_000


def test_an_unfinished_run_is_gone_on_with_and_a_finished_one_is_not(compared: Path) -> None:
    results = Results.read(compared)
    assert compare.resume(compared, "toy").rows == []
    results.finished = False
    results.save(compared)
    try:
        assert len(compare.resume(compared, "toy").rows) == len(results.rows)
        assert compare.resume(compared, "standard").rows == []
    finally:
        results.finished = True
        results.save(compared)


def test_what_is_stopped_leaves_pages_and_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the second trial: the first is kept, and the next run begins with the second."""
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/performance.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    trials = tuple(Trial(f"4K-{n}", 1, ("gloo",)) for n in (2000, 10000))
    monkeypatch.setitem(PRESETS, "toy", replace(TOY, trials=trials))
    out = tmp_path / "results.json"
    command = ["--preset", "toy", "--out", str(out), "--pages", str(tmp_path)]
    asked = []

    def measure(preset: Preset, part: Trial) -> list[Row]:
        asked.append(part.workload)
        if len(asked) == 2:
            compare.stop()
        return [row_of(part.workload, way) for way in RIVALS["gloo"].ways]

    monkeypatch.setattr(compare, "measure", measure)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert compare.main([*command, "--minutes", "0"]) == 130
        assert asked == []
        assert compare.main(command) == 130
        page = (tmp_path / "docs/performance.md").read_text(encoding="utf-8")
        assert "Unfinished: 1 of 2 trials" in " ".join(page.split())
        assert compare.main(command) == 0
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert asked == ["4K-2000", "4K-10000", "4K-10000"]
    page = (tmp_path / "docs/performance.md").read_text(encoding="utf-8")
    written = page.partition("<!-- bench: begin -->")[2].partition("<!-- bench: end -->")[0]
    measured = [line for line in written.splitlines() if "| 2.50 |" in line]
    assert [line.count("4k-2000") for line in measured] == [1, 1, 0, 0]
    assert "Unfinished" not in page


def row_of(workload: str, way: str) -> Row:
    """Return a row with two rounds."""
    return Row(
        workload=workload,
        readers=1,
        rival="gloo",
        way=way,
        nbytes=1,
        tensors=1,
        dtype="bfloat16",
        memcpy=[1.0, 2.0],
        update=[3.0, 4.0],
    )


class Inside(Rival):
    """Moves weights within this process, as `move` says."""

    def __init__(self, move: Callable[[Parameters, Parameters], object]) -> None:
        super().__init__("")
        self._move = move

    def setup(self, job: Job, module: nn.Module) -> None:
        self._ours = parameters_of(module)
        self._theirs = parameters_of(make_module(job.tensors))

    def update(self, way: str) -> None:
        self._move(self._theirs, self._ours)

    def held(self) -> list[Mapping[str, str]]:
        return [digests(self._theirs)]

    def close(self) -> None:
        pass


class InsideEntry(Entry):
    """An entry whose rival is not imported."""

    move: Callable[[Parameters, Parameters], object]

    def make(self) -> Callable[[], Rival]:
        return lambda: Inside(type(self).move)


def order_of(workload: str, rival: str) -> trial.Order:
    """Return an order of three rounds after one that does not count, for one rival and reader."""
    return trial.Order(
        workload=workload, readers=1, rivals=[rival], rounds=3, warm_ups=1, budget_s=1.0, aim_s=60.0
    )


def _everything(theirs: Parameters, ours: Parameters) -> object:
    return load(theirs, ours.items())


def _nothing(theirs: Parameters, ours: Parameters) -> object:
    return None


def _all_but_one(theirs: Parameters, ours: Parameters) -> object:
    return load(theirs, list(ours.items())[1:])


@pytest.mark.parametrize(
    ("move", "wanted"),
    [
        (_everything, ""),
        (_nothing, "30 of 30 tensors of reader 0 are not what was sent"),
        (_all_but_one, "1 of 30 tensors of reader 0 are not what was sent, weights.0 among them"),
    ],
)
def test_who_moves_less_gets_no_figure(
    move: Callable[[Parameters, Parameters], object],
    wanted: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = type("Planted", (InsideEntry,), {"move": staticmethod(move)})
    planted = entry(module="ours", title="inside", ways=("one",))
    monkeypatch.setitem(RIVALS, "inside", planted)
    trial.run(order_of("toy-mixed", "inside"), tmp_path / "results")
    (line,) = (tmp_path / "results").read_text(encoding="utf-8").splitlines()
    said = json.loads(line)
    assert wanted in said.get("failed", "")
    assert ("update" in said) == (not wanted)


class Halting(Inside):
    """Moves everything, and fails at one way's third update."""

    updates = 0

    def update(self, way: str) -> None:
        super().update(way)
        self.updates += way == "halts"
        if way == "halts" and self.updates == 3:
            raise RivalError("halted")


def test_a_way_that_fails_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = type("Planted", (Entry,), {"make": lambda _: lambda: Halting(_everything)})
    monkeypatch.setitem(RIVALS, "inside", entry(module="ours", title="in", ways=("halts", "goes")))
    trial.run(order_of("toy-mixed", "inside"), tmp_path / "results")
    lines = (tmp_path / "results").read_text(encoding="utf-8").splitlines()
    halts, goes = map(json.loads, lines)
    assert halts == {"rival": "inside", "way": "halts", "failed": "RivalError: halted"}
    assert len(goes["update"]) == len(goes["memcpy"]) == 3


@pytest.mark.parametrize(
    ("aim_s", "rounds", "reason"),
    [(100, 3, ""), (60, 2, ""), (30, 0, "an update takes 10.0 s: too long for 21 s of rounds")],
)
def test_slow_ways_have_fewer_rounds(
    aim_s: float, rounds: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(trial, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def takes_ten_seconds(taken: trial.Taken) -> None:
        now[0] += 10
        taken.update.append(10.0)

    taken = trial.Taken()
    course = trial.Course(replace(order_of("toy", "none"), aim_s=aim_s), 1, taken)
    while course.wants_more():
        course.run(takes_ten_seconds)
    assert len(taken.update) == rounds
    assert taken.failed.removeprefix("RivalError: ") == reason


def aliases(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return second users of the parameters' memory: nobody may move it then."""
    return {name: parameter.data for name, parameter in module.named_parameters()}


def test_a_trainer_whose_parameters_are_not_adopted_gets_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shm_clean: None
) -> None:
    monkeypatch.setattr(trial, "parameters_of", aliases)
    trial.run(order_of("toy", "weightsync/unpacked/in_place"), tmp_path / "results")
    lines = (tmp_path / "results").read_text(encoding="utf-8").splitlines()
    reason = "RivalError: 12 of 12 parameters were not adopted into shared memory"
    assert [json.loads(line).get("failed") for line in lines] == [reason] * 2


@pytest.mark.parametrize("kept", [False, True])
def test_a_reader_whose_parameters_are_not_swapped_gets_no_figure(
    kept: bool, shm_clean: None
) -> None:
    module, sent = (make_module(WORKLOADS["toy"]().tensors) for _ in range(2))
    fill(parameters_of(sent), 1)
    seen = aliases(module) if kept else {}
    reader = ours.Receiver(module, ("module", "staged", "a-token"))
    try:
        with ws.connect(sent, to=reader.hello(), token="a-token", packed=True) as sender:
            sender.send_weights()
            if seen:
                with pytest.raises(RivalError, match="12 of 12 parameters were copied over"):
                    reader.held()
            else:
                assert reader.held() == digests(parameters_of(sent))
    finally:
        reader.close()


def test_who_takes_too_long_is_a_row_with_the_reason(shm_clean: None) -> None:
    rows = compare.measure(replace(TOY, limit_s=0.5), Trial("toy", 1, ("gloo",)))
    assert [row.failed for row in rows] == ["took longer than its limit of 0.5 s"] * 2


def test_who_does_not_fit_is_a_row_with_the_reason() -> None:
    (row,) = compare.measure(TOY, Trial("4G-300", 64, ("tmpfs",)))
    assert re.fullmatch(r"needs about \d+ GiB of memory, \d+ GiB are free", row.failed)
    assert "no figure: needs about" in tables.full(row)[1]


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_name_what_exists_and_nothing_twice(preset: str) -> None:
    trials = PRESETS[preset].trials
    asked = [(t.workload, t.readers, name) for t in trials for name in t.rivals]
    assert len(asked) == len(set(asked))
    assert {workload for workload, _, _ in asked} <= set(WORKLOADS)
    assert {name for _, _, name in asked} <= set(RIVALS)
    assert all((workload in CHANGING) == (name in DELTAS) for workload, _, name in asked)


def test_a_trainer_that_sends_whole_models_as_deltas_gets_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shm_clean: None
) -> None:
    always = RIVALS["delta/weightsync/always"]
    refuses = replace(always, option="packed,hook,in_place,always")
    monkeypatch.setitem(RIVALS, "delta/weightsync/always", refuses)
    trial.run(order_of("toy-1-percent", "delta/weightsync/always"), tmp_path / "results")
    said = json.loads((tmp_path / "results").read_text(encoding="utf-8"))
    assert said["failed"].startswith("RivalError: the whole model was sent: ")
    assert said["failed"].endswith(" takes no deltas")


def test_the_table_of_deltas_has_a_line_for_each_change_and_number_of_readers() -> None:
    one, many = WORKLOADS["512M-300-1-percent"](), WORKLOADS["smollm2-1e-06"]()
    rows = [
        replace(
            row_of(workload.name, "verified"),
            readers=readers,
            rival=name,
            nbytes=6400,
            changed_values=10,
            changed_lines=8,
            sent_nbytes=500_000,
            stall_s=0.002,
            update=[factor, 2 * factor],
        )
        for workload, readers in ((one, 1), (one, 4), (many, 1))
        for name, factor in zip(OUR_DELTAS, (4.0, 3.0, 2.0), strict=True)
    ]
    rows[-1] = replace(rows[-1], failed="halted")
    lines = deltas.table_of(Results("deltas", machine(), rows)).splitlines()[2:]
    figures = "1500.0 | 4.00 | 2.00 | 0.50 | 3.00 | 8.0% | 0.5 | 2.00 |"
    assert lines == [
        f"| {one.title} | 1 | {figures}",
        f"| {one.title} | 4 | {figures}",
        f"| {many.title} | 1 | 1500.0 | 4.00 | - |  | 3.00 |  |  |  |",
    ]


def test_a_row_comes_back_from_the_file_as_it_was(tmp_path: Path) -> None:
    row = row_of("toy", "per tensor")
    Results("toy", {"cpu": "one"}, [row]).save(tmp_path / "file")
    assert Results.read(tmp_path / "file").rows == [row]
