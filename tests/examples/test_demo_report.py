"""The trainer's events, the report file and the plot."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from examples.demo.__main__ import DemoReport, step_line, write_plot, write_report
from examples.demo.trainer import Event, Proof, Ready, Step, decode_event
from weightsync.report import DeltaReport

READY = Ready(model="tiny", params=10, tensors=2, goal="lower case")
STEP = Step(
    version=1,
    reward=0.25,
    nbytes=1000,
    sync_s=0.5,
    gbps=2e-6,
    stall_s=0.125,
    path="shared_memory",
    verified="held",
    rollout_s=1.0,
    train_s=2.0,
    logprob_gap=1e-6,
)
PROOF = Proof(tensors_checked=2, different=[], server_tokens=[[1, 2]], trainer_tokens=[[1, 2]])


@pytest.mark.parametrize("event", [READY, STEP, PROOF])
def test_an_event_is_one_line_and_comes_back(event: Event) -> None:
    line = msgspec.json.encode(event)
    assert b"\n" not in line
    assert decode_event(line) == event


def test_why_the_model_was_sent_whole_is_said_once() -> None:
    whole = msgspec.structs.replace(
        STEP, delta=DeltaReport(reason="about 95% of the lines changed")
    )
    assert step_line(1, whole, explains=True).endswith(
        "  sent whole: about 95% of the lines changed"
    )
    assert step_line(2, whole, explains=False).endswith(" ms")
    few = DeltaReport(sent=True, share=0.01, saved_nbytes=2_000_000)
    line = step_line(3, msgspec.structs.replace(STEP, delta=few), explains=False)
    assert line.endswith("  1.0% of the lines changed, 2.0 MB saved")


@pytest.mark.parametrize(
    ("change", "holds"),
    [
        ({}, True),
        ({"different": ["a"]}, False),
        ({"server_tokens": [[1, 3]]}, False),
        ({"tensors_checked": 0}, False),
    ],
)
def test_a_proof_needs_every_tensor_and_every_token(change: dict[str, object], holds: bool) -> None:
    assert msgspec.structs.replace(PROOF, **change).holds is holds


def test_the_report_file_holds_what_the_plot_draws(tmp_path: Path) -> None:
    report = DemoReport(
        model="tiny",
        params=10,
        goal="lower case",
        verified=True,
        tensors_checked=2,
        seconds=3.0,
        steps=[STEP, msgspec.structs.replace(STEP, version=2, reward=0.5)],
    )
    write_report(report, tmp_path / "report.json")
    read = msgspec.json.decode((tmp_path / "report.json").read_bytes())
    assert (read["model"], read["params"], read["verified"]) == ("tiny", 10, True)
    wanted = {"version", "reward", "nbytes", "sync_s", "gbps", "stall_s", "path"}
    assert all(wanted <= set(step) for step in read["steps"])
    write_plot(report.steps, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
