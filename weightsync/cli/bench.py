"""`weightsync bench`: how fast weights move between two processes of this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from weightsync.cli.access import SIZE_HELP, parse_size
from weightsync.cli.answers import ending, print_json, require
from weightsync.cli.bench_measure import BenchSetup, Measured, Series, measure
from weightsync.errors import ConfigError, RemoteError, TransportError
from weightsync.specs import DTYPE_NBYTES


def bench(  # noqa: PLR0913, PLR0917  # one parameter per option
    nbytes: Annotated[str, typer.Option(help=f"Size of the model: {SIZE_HELP}.")] = "512MiB",
    tensors: Annotated[int, typer.Option(min=1, help="Into how many tensors.")] = 300,
    dtype: Annotated[str, typer.Option(help="Their dtype, without torch.")] = "bfloat16",
    shapes: Annotated[str | None, typer.Option(help="Real shapes instead: smollm2.")] = None,
    packed: Annotated[
        bool, typer.Option("--packed/--unpacked", help="Through buckets, or read in place.")
    ] = False,
    backend: Annotated[
        str, typer.Option(help="Path: auto, ipc, distributed (as if to another host).")
    ] = "auto",
    transport: Annotated[str, typer.Option(help="Control messages by: http, callback.")] = "http",
    readers: Annotated[int, typer.Option(min=1, max=16, help="Receiving processes.")] = 1,
    sink: Annotated[str, typer.Option(help="Load into a: module, hook.")] = "module",
    apply: Annotated[str, typer.Option(help="auto, staged, in_place.")] = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 7,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the figures there as JSON as well.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure how fast weights move between two processes, beside a plain copy in one."""
    with ending(as_json=json_):
        _check(backend, ("auto", "ipc", "distributed"), "--backend")
        _check(transport, ("http", "callback"), "--transport")
        _check(sink, ("module", "hook"), "--sink")
        _check(apply, ("auto", "staged", "in_place"), "--apply")
        _check(dtype, tuple(DTYPE_NBYTES), "--dtype")
        if out is not None and (out.is_dir() or not out.parent.is_dir()):
            raise ConfigError(f"--out {out} is not a file in a directory that exists")
        setup = BenchSetup(
            nbytes=parse_size(nbytes),
            tensors=tensors,
            dtype=dtype,
            shapes=shapes,
            packed=packed,
            backend=backend,  # type: ignore[arg-type]  # checked above
            transport=transport,  # type: ignore[arg-type]  # checked above
            readers=readers,
            sink=sink,  # type: ignore[arg-type]
            apply=apply,  # type: ignore[arg-type]
            rounds=rounds,
        )
        if transport == "http":
            require("bench", "fastapi", "uvicorn")
        measured = _measure(setup, shown=not json_)
        figures = measured.to_dict()
        if out is not None:
            out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        if json_:
            print_json(figures)
        else:
            Console().print(make_table(measured))


def _measure(setup: BenchSetup, *, shown: bool) -> Measured:
    console = Console(stderr=True)
    hidden = not (shown and console.is_terminal)
    with Progress(console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("measuring", total=None)
        try:
            return measure(setup, lambda done, total: bar.update(task, completed=done, total=total))
        except TransportError as exc:  # nobody's server, but a process of ours
            raise RemoteError(f"a receiving process failed: {exc}") from exc


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
    for title in ("", "ms", "min", "max", "GB/s", "x memcpy"):
        table.add_column(title, justify="left" if not title else "right")
    broadcast = (("one raw Gloo broadcast", measured.broadcast),)
    rows: tuple[tuple[str, Series], ...] = (
        ("memcpy in one process", measured.memcpy),
        ("update, not verified", measured.plain),
        (f"update, verified ({measured.verified.reports[-1].verified})", measured.verified),
        *(broadcast if measured.broadcast.seconds else ()),
    )
    for name, series in rows:
        table.add_row(
            name,
            f"{series.median * 1e3:.1f}",
            f"{min(series.seconds) * 1e3:.1f}",
            f"{max(series.seconds) * 1e3:.1f}",
            f"{measured.nbytes / series.median / 1e9:.2f}",
            f"{measured.ratio(series):.2f}",
        )
    return table


def _check(value: str, known: tuple[str, ...], option: str) -> None:
    if value not in known:
        raise ConfigError(f"{option} is one of {', '.join(known)}, not {value!r}")
