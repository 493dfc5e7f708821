"""`weightsync demo`: a real model is trained by reinforcement while a server generates with it."""

from __future__ import annotations

import os
import re
import secrets
import tempfile
import time
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from weightsync.cli.answers import FAILED, describe, ending, print_json
from weightsync.cli.child import Child
from weightsync.cli.demo_trainer import (
    DemoReport,
    Proof,
    Ready,
    Step,
    check_plotting,
    decode_event,
    write_plot,
    write_report,
)
from weightsync.errors import ConfigError, RemoteError, WeightSyncError
from weightsync.shm.segment import remove_leftovers

START_TIMEOUT_S = 180.0
EVENT_TIMEOUT_S = 300.0
MAX_THREADS = 8
REPORT_FILE = "demo-report.json"
PLOT_FILE = "demo.png"

_URL = re.compile(rb"https?://[\w.\-]+:\d+")


E = TypeVar("E", Ready, Step, Proof)


class DemoModel(StrEnum):
    """The models that the demo knows a task for."""

    SMOLLM2 = "smollm2"
    TINY = "tiny"


def demo(
    model: Annotated[
        DemoModel, typer.Option(help="smollm2 is a real one, tiny is made on the spot")
    ] = DemoModel.SMOLLM2,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="steps of training")] = 10,
    out: Annotated[Path, typer.Option(help="where the report and the plot are written")] = Path(),
    port: Annotated[int, typer.Option(min=0, max=65535, help="of the server; 0: a free one")] = 0,
    json_: Annotated[
        bool, typer.Option("--json", help="print one JSON object, and the rest on stderr")
    ] = False,
) -> None:
    """Train a model by reinforcement and send its weights to a live server after every step."""
    console = Console(stderr=json_)
    with ending(as_json=json_):
        _check_out(out)
        check_plotting()
        try:
            report = _Demo(console, model.value, steps, port).run()
        except WeightSyncError as exc:
            # Not on one line: it may end with the last lines that a process of it said.
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
    """Raise ConfigError where files cannot be made, before minutes of work are done for them."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"--out {out} cannot be made a directory: {exc.strerror}") from exc
    try:
        tempfile.TemporaryFile(dir=out).close()
    except OSError as exc:
        raise ConfigError(f"--out {out} cannot be written: {exc.strerror}") from exc


class _Demo:
    """One run: a server process, a trainer process, and what the trainer tells."""

    def __init__(self, console: Console, model: str, steps: int, port: int) -> None:
        self._console = console
        self._model, self._num_steps, self._port = model, steps, port
        self._environment = _child_environment(secrets.token_urlsafe(32))

    def run(self) -> DemoReport:
        started = time.monotonic()
        with ExitStack() as stack:
            stack.callback(remove_leftovers)
            server = stack.enter_context(self._server())
            url = server.find(_URL, START_TIMEOUT_S)
            self._console.print(f"server: {self._model} at {url}", markup=False)
            trainer = stack.enter_context(self._trainer(url))
            ready, steps, proof = self._follow(trainer)
        return DemoReport(
            model=ready.model,
            params=ready.params,
            goal=ready.goal,
            verified=proof.holds,
            tensors_checked=proof.tensors_checked,
            seconds=time.monotonic() - started,
            steps=steps,
        )

    def _server(self) -> Child:
        arguments = ("--model", self._model, "--port", str(self._port))
        return Child("server", "weightsync", "serve", *arguments, environment=self._environment)

    def _trainer(self, url: str) -> Child:
        module = "weightsync.cli.demo_trainer"
        arguments = ("--model", self._model, "--server", url, "--steps", str(self._num_steps))
        return Child("trainer", module, *arguments, environment=self._environment)

    def _follow(self, trainer: Child) -> tuple[Ready, list[Step], Proof]:
        ready, steps = self._expect(trainer, Ready), []
        print_line = self._console.print
        print_line(f"trainer: {ready.params / 1e6:.1f} M parameters, {ready.tensors} tensors")
        print_line(f"goal: {ready.goal}", markup=False)
        with _progress(self._console) as progress:
            task = progress.add_task("training", total=self._num_steps)
            for number in range(1, self._num_steps + 1):
                steps.append(step := self._expect(trainer, Step))
                progress.console.print(_describe(number, step), markup=False, highlight=False)
                progress.advance(task)
        print_line(f"path: {steps[-1].path}, every update verified: {steps[-1].verified}")
        proof = self._expect(trainer, Proof)
        print_line(_describe_proof(proof), markup=False, style=None if proof.holds else "red")
        return ready, steps, proof

    def _expect(self, trainer: Child, kind: type[E]) -> E:
        event = decode_event(trainer.receive(EVENT_TIMEOUT_S))
        if not isinstance(event, kind):
            raise RemoteError(f"the trainer said {event} where a {kind.__name__} was due")
        return event


def _child_environment(token: str) -> dict[str, str]:
    # Server and trainer take turns, so each may use every core.
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    return {
        **os.environ,
        "WEIGHTSYNC_TOKEN": token,
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _progress(console: Console) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(TextColumn("{task.description}"), *columns, console=console)


def _describe(number: int, step: Step) -> str:
    return (
        f"step {number:>2}  reward {step.reward:.3f}  version {step.version:>2}  "
        f"{step.nbytes / 1e6:.1f} MB  {step.sync_s * 1e3:.1f} ms  {step.gbps:.2f} GB/s  "
        f"stall {step.stall_s * 1e3:.2f} ms"
    )


def _describe_proof(proof: Proof) -> str:
    if proof.holds:
        return (
            f"verified: {proof.tensors_checked} tensors have the trainer's fingerprints in the "
            f"server, and both generate the same {sum(map(len, proof.server_tokens))} greedy tokens"
        )
    if proof.different:
        return f"NOT verified: these tensors differ in the server: {', '.join(proof.different)}"
    return "NOT verified: server and trainer generate different greedy tokens"
