"""What the demo's trainer tells, line by line, and the report and the plot made of it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import util as import_util
from pathlib import Path

import msgspec

from weightsync.cli.extras import lacking


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """A line of JSON that the trainer process writes."""


class Ready(Event, frozen=True, kw_only=True, tag="ready"):
    """The model is loaded and the server is connected."""

    model: str
    params: int
    tensors: int
    goal: str


class Step(Event, frozen=True, kw_only=True, tag="step"):
    """One RL step: the reward of the server's rollouts, and the update sent after it."""

    version: int
    reward: float
    nbytes: int
    sync_s: float
    gbps: float
    stall_s: float
    path: str
    verified: str
    rollout_s: float
    train_s: float
    logprob_gap: float


class Proof(Event, frozen=True, kw_only=True, tag="proof"):
    """Whether the server holds the trainer's weights at the end."""

    tensors_checked: int
    different: list[str]
    server_tokens: list[list[int]]
    trainer_tokens: list[list[int]]

    @property
    def holds(self) -> bool:
        """Every tensor has the same fingerprint on both sides, and so have the greedy tokens."""
        same_tokens = self.server_tokens == self.trainer_tokens
        return self.tensors_checked > 0 and not self.different and same_tokens


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `demo-report.json` holds."""

    model: str
    params: int
    goal: str
    verified: bool
    tensors_checked: int
    seconds: float
    steps: list[Step]


def encode_event(event: Event) -> bytes:
    """Return an event as one line."""
    return msgspec.json.encode(event) + b"\n"


def decode_event(line: bytes) -> Ready | Step | Proof:
    """Return the event of a line. Raises msgspec.DecodeError when it is none."""
    return msgspec.json.decode(line, type=Ready | Step | Proof)


def write_report(report: DemoReport, file: Path) -> None:
    """Write the report as readable JSON."""
    file.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def check_plotting() -> None:
    """Raise BackendUnavailableError when `write_plot` would not work; called before the work."""
    if import_util.find_spec("matplotlib") is None:
        raise lacking("demo", "matplotlib")


def write_plot(steps: Sequence[Step], file: Path) -> None:
    """Draw reward and sync time by step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - slow to import
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    reward_axis = figure.add_subplot()
    sync_axis = reward_axis.twinx()
    numbers = range(1, len(steps) + 1)
    milliseconds = [step.sync_s * 1e3 for step in steps]
    sync_axis.bar(numbers, milliseconds, color="tab:gray", alpha=0.35, width=0.6)
    sync_axis.set_ylabel("weight sync (ms)")
    sync_axis.set_ylim(bottom=0)
    reward_axis.plot(numbers, [step.reward for step in steps], color="tab:blue", marker="o")
    reward_axis.set_xlabel("step")
    reward_axis.set_xticks(list(numbers))
    reward_axis.set_ylabel("reward", color="tab:blue")
    reward_axis.set_ylim(0, 1.05)
    reward_axis.set_zorder(sync_axis.get_zorder() + 1)
    reward_axis.patch.set_visible(False)
    reward_axis.set_title("Reward, and the time to send the weights after each step")
    figure.savefig(file, dpi=120)
