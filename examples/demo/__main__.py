"""A real model is trained by reinforcement while a server generates with it.

    python -m examples.demo --help

Run in the root of a clone, as `make demo` does.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.demo.trainer import Proof, Ready, Step, decode_event
from weightsync.cli.child import Child
from weightsync.cli.figures import BLUE, VIOLET, counted, draw_line, name, panels
from weightsync.cli.output import FAILED, describe, ending, print_json
from weightsync.errors import ConfigError, RemoteError, WeightSyncError
from weightsync.report import DeltaReport
from weightsync.shm.segment import remove_leftovers
from weightsync.transports.tokens import TOKEN_VARIABLE

START_TIMEOUT_S = 180.0
EVENT_TIMEOUT_S = 300.0
MAX_THREADS = 8
REPORT_FILE = "demo-report.json"
PLOT_FILE = "demo.png"

_URL = re.compile(rb"https?://[\w.\-]+:\d+")

E = TypeVar("E", Ready, Step, Proof)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `demo-report.json`."""

    model: str
    params: int
    goal: str
    verified: bool
    tensors_checked: int
    seconds: float
    steps: list[Step]


@app.command()
def demo(
    model: Annotated[
        Literal["smollm2", "tiny"],
        typer.Option(help="smollm2 is a real one, tiny is made on the spot"),
    ] = "smollm2",
    steps: Annotated[int, typer.Option(min=1, max=1000, help="steps of training")] = 10,
    out: Annotated[Path, typer.Option(help="where the report and the plot are written")] = Path(),
    port: Annotated[int, typer.Option(min=0, max=65535, help="of the server; 0: a free one")] = 0,
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option(help="of both; cuda: the same GPU, if there is one")
    ] = "cpu",
    json_: Annotated[
        bool, typer.Option("--json", help="print one JSON object, and the rest on stderr")
    ] = False,
) -> None:
    """Train a model by reinforcement and send its weights to a live server after every step."""
    console = Console(stderr=json_)
    with ending(as_json=json_):
        _check_out(out)
        try:
            report = run_demo(console, model, steps, port, device)
        except WeightSyncError as exc:
            # On several lines: the message may end with the last lines of a child's log.
            console.print(f"the demo failed: {exc}", style="red", markup=False, soft_wrap=True)
            if json_:
                print_json({"error": describe(exc), "exit_code": FAILED})
            raise typer.Exit(FAILED) from exc
        write_report(report, out / REPORT_FILE)
        write_plot(report.steps, out / PLOT_FILE)
    if json_:
        files = {"report": str(out / REPORT_FILE), "plot": str(out / PLOT_FILE)}
        print_json(msgspec.to_builtins(report) | {"files": files})
    first, last = report.steps[0].reward, report.steps[-1].reward
    console.print(f"reward {first:.2f} -> {last:.2f} in {report.seconds:.0f} s", markup=False)
    console.print(f"report: {out / REPORT_FILE}, plot: {out / PLOT_FILE}", markup=False)
    if not report.verified:
        raise typer.Exit(FAILED)


def _check_out(out: Path) -> None:
    """Raise ConfigError where no file can be written, before the demo runs for minutes."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"--out {out} cannot be made a directory: {exc.strerror}") from exc
    try:
        tempfile.TemporaryFile(dir=out).close()
    except OSError as exc:
        raise ConfigError(f"--out {out} cannot be written: {exc.strerror}") from exc


def run_demo(console: Console, model: str, steps: int, port: int, device: str) -> DemoReport:
    """Run a server process and a trainer process, and print the events of the trainer."""
    started = time.monotonic()
    # Server and trainer work in turns, so each may use every core.
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    environment = {
        **os.environ,
        TOKEN_VARIABLE: secrets.token_urlsafe(32),
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    with ExitStack() as stack:
        stack.callback(remove_leftovers)
        line = ("serve", "--model", model, "--port", str(port), "--device", device)
        server = Child("server", "weightsync", *line, environment=environment)
        url = stack.enter_context(server).find(_URL, START_TIMEOUT_S)
        console.print(f"server: {model} at {url}", markup=False)
        options = (model, url, str(steps), device)
        trainer = Child("trainer", "examples.demo.trainer", *options, environment=environment)
        ready, made, proof = _follow(console, stack.enter_context(trainer), steps)
    return DemoReport(
        model=ready.model,
        params=ready.params,
        goal=ready.goal,
        verified=proof.holds,
        tensors_checked=proof.tensors_checked,
        seconds=time.monotonic() - started,
        steps=made,
    )


def _follow(console: Console, trainer: Child, num_steps: int) -> tuple[Ready, list[Step], Proof]:
    ready, steps = _receive(trainer, Ready), list[Step]()
    is_whole = False
    console.print(f"trainer: {ready.params / 1e6:.1f} M parameters, {ready.tensors} tensors")
    console.print(f"goal: {ready.goal}", markup=False)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=console) as progress:
        task = progress.add_task("training", total=num_steps)
        for number in range(1, num_steps + 1):
            steps.append(step := _receive(trainer, Step))
            text = step_line(number, step, explains=not is_whole)
            is_whole = not step.delta.sent
            progress.console.print(text, markup=False, highlight=False)
            progress.advance(task)
    levels = ", ".join(sorted({step.verified for step in steps}))
    console.print(f"path: {steps[-1].path}, updates verified: {levels}")
    proof = _receive(trainer, Proof)
    console.print(_describe_proof(proof), markup=False, style=None if proof.holds else "red")
    return ready, steps, proof


def _receive(trainer: Child, kind: type[E]) -> E:
    event = decode_event(trainer.receive(EVENT_TIMEOUT_S))
    if not isinstance(event, kind):
        raise RemoteError(f"the trainer sent {event}, and a {kind.__name__} was expected")
    return event


def step_line(number: int, step: Step, *, explains: bool) -> str:
    """Return the line of a step; `explains` why the model was sent whole: once for several."""
    return (
        f"step {number:>2}  reward {step.reward:.3f}  version {step.version:>2}  "
        f"{step.nbytes / 1e6:.1f} MB  {step.sync_s * 1e3:.1f} ms  {step.gbps:.2f} GB/s  "
        f"stall {step.stall_s * 1e3:.2f} ms  {_describe_delta(step.delta, explains=explains)}"
    ).rstrip()


def _describe_delta(delta: DeltaReport, *, explains: bool) -> str:
    if not delta.sent:
        return f"sent whole: {delta.reason}" if explains and delta.reason else ""
    return f"{delta.share:.1%} of the lines changed, {delta.saved_nbytes / 1e6:.1f} MB saved"


def _describe_proof(proof: Proof) -> str:
    if proof.holds:
        return (
            f"verified: {proof.tensors_checked} tensors have the trainer's fingerprints in the "
            f"server, and both generate the same {sum(map(len, proof.server_tokens))} greedy tokens"
        )
    if proof.different:
        return f"NOT verified: these tensors differ in the server: {', '.join(proof.different)}"
    return "NOT verified: server and trainer generate different greedy tokens"


def write_report(report: DemoReport, file: Path) -> None:
    """Write the report as indented JSON."""
    file.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def write_plot(steps: Sequence[Step], file: Path) -> None:
    """Draw rewards, and the update after each step."""
    gbps = sum(step.nbytes for step in steps) / max(sum(step.sync_s for step in steps), 1e-9) / 1e9
    note = (
        f"{len(steps)} steps; {steps[-1].nbytes / 1e6:.1f} MB by {steps[-1].path} after each, "
        f"{gbps:.2f} GB/s; verified: {counted(step.verified for step in steps)}"
    )
    figure, (rewards, updates) = panels("Training by rewards, with a live server", note, 2)
    at = list(range(1, len(steps) + 1))
    draw_line(rewards, at, [step.reward for step in steps], VIOLET)
    rewards.set_ylim(0, 1.05)
    name(rewards, "reward of what the server generated")
    updates.bar(at, [step.sync_s * 1e3 for step in steps], color=BLUE, width=0.6)
    name(updates, "time to send the weights, ms")
    updates.set_xlabel("step")
    figure.savefig(file)


if __name__ == "__main__":
    logging.basicConfig()
    app()
