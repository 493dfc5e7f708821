"""`weightsync bench`: how fast weights move between two processes of this machine."""

from __future__ import annotations

import json
import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import torch
import typer
from rich.console import Console
from rich.table import Table

from weightsync.arguments import SIZE_HELP, as_share, parse_size
from weightsync.backends.registry import backend_names
from weightsync.cli.app import require
from weightsync.cli.bench_broadcast import raw_broadcast
from weightsync.cli.bench_receiver import (
    ApplyName,
    BenchSetup,
    ShapesName,
    SinkName,
    TransportName,
    decode_reply,
    make_model,
    shapes_of,
    total_nbytes,
)
from weightsync.cli.child import Child
from weightsync.cli.output import ending, print_json
from weightsync.cli.terminal import progress_bar
from weightsync.errors import ConfigError, RemoteError, TransportError
from weightsync.report import DeltaReport, SyncReport
from weightsync.sender import WeightSender, connect
from weightsync.specs import DTYPE_ALIASES, DTYPE_NBYTES
from weightsync.tensors import TORCH_DTYPES, as_bytes
from weightsync.transports.tokens import TOKEN_VARIABLE

START_TIMEOUT_S = 120.0
CALL_TIMEOUT_S = 1800.0
_CATCH_UP_S = 0.2
"""Seconds that receivers have after a delta, as in a training step, before the next copies."""
WARMUP_ROUNDS = 2
"""Rounds that are not counted, because the first updates touch memory for the first time."""


def bench(  # noqa: PLR0913, PLR0917  # one parameter per option
    nbytes: Annotated[str, typer.Option(help=f"size of the model: {SIZE_HELP}")] = "512MiB",
    tensors: Annotated[int, typer.Option(min=1, help="number of tensors")] = 300,
    dtype: Annotated[str, typer.Option(help="dtype of the tensors, as bfloat16")] = "bfloat16",
    shapes: Annotated[
        ShapesName | None, typer.Option(help="shapes of a real model instead")
    ] = None,
    packed: Annotated[
        bool, typer.Option("--packed/--unpacked", help="through buckets, or read in place")
    ] = False,
    backend: Annotated[str, typer.Option(help="auto, ipc, tcp (as if to another host)")] = "auto",
    transport: Annotated[TransportName, typer.Option(help="for control messages")] = "http",
    readers: Annotated[int, typer.Option(min=1, max=16, help="receiving processes")] = 1,
    sink: Annotated[SinkName, typer.Option(help="what receivers load into")] = "module",
    apply: Annotated[ApplyName, typer.Option(help="how receivers apply weights")] = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="rounds that are counted")] = 7,
    delta: Annotated[
        float | None,
        typer.Option(help="send deltas: the share of the values that change in each round"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="file to which the figures are also written, as JSON"),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Measure how fast weights move between two processes, beside a plain copy in one."""
    with ending(as_json=json_):
        setup = BenchSetup(
            nbytes=parse_size(nbytes),
            tensors=tensors,
            dtype=_one_of("--dtype", DTYPE_ALIASES.get(dtype, dtype), tuple(DTYPE_NBYTES)),
            shapes=shapes,
            packed=packed,
            backend=_one_of("--backend", backend, ("auto", *backend_names())),
            transport=transport,
            readers=readers,
            sink=sink,
            apply=apply,
            rounds=rounds,
            delta=None if delta is None else as_share("--delta", delta),
        )
        if out is not None and (out.is_dir() or not out.parent.is_dir()):
            raise ConfigError(f"--out {out} is not a file in a directory that exists")
        if transport == "http":
            require("bench", "fastapi", "uvicorn")
        try:
            with progress_bar("measuring", WARMUP_ROUNDS + rounds, as_json=json_) as advance:
                measured = measure(setup, advance)
        except TransportError as exc:  # not a server of the user, but a process of this verb
            raise RemoteError(f"a receiving process failed: {exc}") from exc
        figures = measured.to_dict()
        if out is not None:
            out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        if json_:
            print_json(figures)
        else:
            Console().print(make_table(measured))


def _one_of(option: str, value: str, known: tuple[str, ...]) -> str:
    """Return `value`. Raises ConfigError for an unknown one."""
    if value not in known:
        raise ConfigError(f"{option} is one of {', '.join(known)}, not {value!r}")
    return value


@dataclass(slots=True)
class Series:
    """Seconds of one kind of work, round by round, the sender's share of a CPU, and reports."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    reports: list[SyncReport] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median of the seconds."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: copies inside one process, updates without and with verification, broadcasts."""

    setup: BenchSetup
    nbytes: int
    tensors: int
    connect_seconds: Mapping[str, float]
    memcpy: Series = field(default_factory=Series)
    plain: Series = field(default_factory=Series)
    verified: Series = field(default_factory=Series)
    broadcast: Series = field(default_factory=Series)

    def ratio(self, series: Series) -> float:
        """Return a series as a multiple of the copies."""
        return series.median / self.memcpy.median

    def to_dict(self) -> dict[str, object]:
        """Return the figures as plain data, for `--json` and `--out`."""
        report = self.plain.reports[-1]
        seconds = {
            phase: statistics.median(r.seconds[phase] for r in self.plain.reports)
            for phase in report.seconds
            if phase != "total"
        }
        broadcast: dict[str, object] = {}
        if self.broadcast.seconds:
            broadcast = {
                "ratio_to_broadcast": self.plain.median / self.broadcast.median,
                "seconds_broadcast": self.broadcast.median,
                "rounds_broadcast": self.broadcast.seconds,
            }
        return {
            "ratio_to_memcpy": self.ratio(self.plain),
            "ratio_verified": self.ratio(self.verified),
            "seconds": {**seconds, "total": self.plain.median, "memcpy": self.memcpy.median},
            "seconds_verified": self.verified.median,
            "connect_seconds": dict(self.connect_seconds),
            "trainer_cpu_s": statistics.median(self.plain.cpu_seconds),
            "written_nbytes": report.written_nbytes,
            **broadcast,
            **_delta_figures(self.verified.reports[-1].delta),
            "gbps": self.nbytes / self.plain.median / 1e9,
            "control_nbytes": report.control_nbytes,
            "control_messages": report.control_messages,
            "peak_extra_nbytes": report.peak_extra_nbytes,
            "stall_s": statistics.median(r.stall_s for r in self.plain.reports),
            "path": report.path,
            "apply": report.apply,
            "verified": self.verified.reports[-1].verified,
            "nbytes": self.nbytes,
            "tensors": self.tensors,
            "dtype": self.setup.dtype,
            "packed": report.packed,
            "backend": self.setup.backend,
            "transport": self.setup.transport,
            "readers": self.setup.readers,
            "sink": self.setup.sink,
            "rounds": {
                "memcpy": self.memcpy.seconds,
                "plain": self.plain.seconds,
                "verified": self.verified.seconds,
            },
        }


def _delta_figures(delta: DeltaReport | None) -> dict[str, object]:
    if delta is None:
        return {}
    return {
        "delta": delta.sent,
        "delta_nbytes": delta.nbytes,
        "delta_share": delta.share,
        "delta_reason": delta.reason,
    }


def make_table(measured: Measured) -> Table:
    """Return the figures of one run as a table."""
    setup = measured.setup
    last = measured.plain.reports[-1]
    mode = "packed" if last.packed else "unpacked"
    title = (
        f"{measured.nbytes / 1e6:.0f} MB in {measured.tensors} {setup.dtype} tensors, {mode}, "
        f"{setup.transport}, {setup.readers} reader(s), {setup.sink} sink, {last.apply}, "
        f"{last.path}"
    )
    caption = (
        f"medians of {setup.rounds} rounds; an update sends {last.control_messages} messages, "
        f"{last.control_nbytes} bytes; the sender holds {last.peak_extra_nbytes / 1e6:.1f} MB "
        f"beside the model; stall {last.stall_s * 1e3:.2f} ms; it connected once, in "
        f"{sum(measured.connect_seconds.values()) * 1e3:.0f} ms"
    )
    table = Table(title=title, caption=caption)
    for heading in ("", "ms", "min", "max", "GB/s", "x memcpy"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, series in (
        ("memcpy in one process", measured.memcpy),
        ("update, not verified", measured.plain),
        (f"update, verified ({measured.verified.reports[-1].verified})", measured.verified),
        ("one raw Gloo broadcast", measured.broadcast),
    ):
        if series.seconds:
            table.add_row(
                name,
                f"{series.median * 1e3:.1f}",
                f"{min(series.seconds) * 1e3:.1f}",
                f"{max(series.seconds) * 1e3:.1f}",
                f"{measured.nbytes / series.median / 1e9:.2f}",
                f"{measured.ratio(series):.2f}",
            )
    return table


def measure(setup: BenchSetup, advance: Callable[[], None]) -> Measured:
    """Run the bench: in every round one copy, one update without and one with verification.

    With the backend "tcp" also one raw broadcast. `advance` is called after every round.
    """
    shapes, dtype = shapes_of(setup), TORCH_DTYPES[setup.dtype]
    nbytes = total_nbytes(shapes, dtype)
    token = secrets.token_urlsafe(16)
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        targets = [stack.enter_context(_receiver(setup, token)) for _ in range(setup.readers)]
        model = make_model(shapes, dtype, value=1)
        copied = [torch.ones_like(parameter) for parameter in model.parameters()]
        raw = stack.enter_context(raw_broadcast(nbytes)) if setup.backend == "tcp" else None
        sender = stack.enter_context(
            connect(
                model,
                to=targets,
                token=token,
                backend=setup.backend,
                # The backend "tcp" always packs, and refuses packed=False.
                packed=setup.packed or None if raw else setup.packed,
                delta="off" if setup.delta is None else "auto",
            )
        )
        for number in range(WARMUP_ROUNDS + setup.rounds):
            if number in (0, WARMUP_ROUNDS):
                measured = Measured(setup, nbytes, len(shapes), sender.connect_seconds)
            _round(sender, model, copied, measured, torch.Generator().manual_seed(number))
            if raw is not None:
                measured.broadcast.seconds.append(raw())
            advance()
        return measured


def _round(
    sender: WeightSender,
    model: torch.nn.Module,
    copied: list[torch.Tensor],
    measured: Measured,
    random: torch.Generator,
) -> None:
    parameters, share = list(model.parameters()), measured.setup.delta
    if share is not None:
        time.sleep(_CATCH_UP_S)
    started = time.perf_counter()
    for target, source in zip(copied, parameters, strict=True):
        target.copy_(source)
    measured.memcpy.seconds.append(time.perf_counter() - started)
    for series in (measured.plain, measured.verified):
        if share is None:
            for parameter in parameters[:: max(1, len(parameters) // 16)]:
                as_bytes(parameter)[0] ^= 1
        else:
            for parameter in parameters:
                _change(parameter, share, random)
        sender.verify = series is measured.verified
        cpu, started = time.process_time(), time.perf_counter()
        report = sender.send_weights()
        series.cpu_seconds.append(time.process_time() - cpu)
        series.seconds.append(time.perf_counter() - started)
        series.reports.append(report)


def _change(parameter: torch.Tensor, share: float, random: torch.Generator) -> None:
    """Flip the lowest bit of a share of the values, at random places."""
    values = as_bytes(parameter).view(parameter.numel(), -1)
    values[torch.randint(len(values), (round(share * len(values)),), generator=random), 0] ^= 1


@contextmanager
def _receiver(setup: BenchSetup, token: str) -> Iterator[str | Callable[[object], object]]:
    """Run a receiving process; yield what `connect(to=…)` takes."""
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {TOKEN_VARIABLE: token}
    encoded = msgspec.json.encode(setup).decode()
    with Child(
        "receiving process",
        "weightsync.cli.bench_receiver",
        encoded,
        environment=environment,
        quoted_lines=1,
    ) as child:
        try:
            line = child.receive(START_TIMEOUT_S)
        except RemoteError as exc:
            raise RemoteError(f"{exc}; is there enough memory for --nbytes?") from exc
        url = decode_reply(line, peer="the receiving process failed").decode()

        def call(message: object) -> object:
            child.send(msgspec.json.encode(message))
            return msgspec.json.decode(decode_reply(child.receive(CALL_TIMEOUT_S)))

        yield url or call
