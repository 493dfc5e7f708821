"""`weightsync push`: load a checkpoint into servers that are running."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weightsync.cli.checkpoint import explain, open_checkpoint
from weightsync.cli.dtypes import Dtype, dtype_option
from weightsync.cli.options import (
    CaFileOption,
    TokenFileOption,
    TokenOption,
    choose_tls,
    choose_token,
    seconds,
)
from weightsync.cli.output import ending, print_json
from weightsync.cli.terminal import text_console
from weightsync.errors import ConfigError, ManifestMismatchError
from weightsync.report import SyncReport
from weightsync.sender import connect


def push(  # noqa: PLR0913, PLR0917  # one parameter per option
    checkpoint: Annotated[
        Path, typer.Argument(help="directory or file with safetensors", show_default=False)
    ],
    urls: Annotated[
        list[str] | None, typer.Argument(help="of the servers", show_default=False)
    ] = None,
    to: Annotated[
        list[str] | None,
        typer.Option(help="URL of a further server; may be given several times"),
    ] = None,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca_file: CaFileOption = None,
    dtype: Annotated[
        Dtype | None,
        dtype_option("cast floating-point tensors to it"),
    ] = None,
    version: Annotated[
        int | None,
        typer.Option(min=1, help="default: one more than the servers hold", show_default=False),
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="a name for these weights", show_default=False)
    ] = None,
    rewind: Annotated[
        bool, typer.Option("--rewind", help="allow a version lower than the servers hold")
    ] = False,
    backend: Annotated[
        str, typer.Option(help="backend: auto, ipc, tcp or one of your own")
    ] = "auto",
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="compare fingerprints after the transfer")
    ] = True,
    timeout: Annotated[float, seconds("seconds without progress")] = 60.0,
    json_: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Load a safetensors checkpoint into servers that are running."""
    with ending(as_json=json_):
        targets = [*(urls or ()), *(to or ())]
        if ":/" in str(checkpoint):
            given = str(checkpoint).replace(":/", "://", 1)  # Path makes one slash of two
            raise ConfigError(f"{given} is a URL: push CHECKPOINT URL, the checkpoint first")
        if not targets:
            raise ConfigError("push needs URLs of servers: push CHECKPOINT URL...")
        secret, verify_tls = choose_token(token, token_file), choose_tls(ca_file, targets)
        source = open_checkpoint(checkpoint, dtype)
        try:
            with connect(
                source,
                targets,
                token=secret,
                verify_tls=verify_tls,
                backend=backend,
                verify=verify,
                timeout_s=timeout,
                progress=not json_,
            ) as sender:
                report = sender.send_weights(version, label=label, rewind=rewind)
        except ManifestMismatchError as exc:
            raise ManifestMismatchError(
                explain(exc, checkpoint, targets),
                missing=exc.missing,
                unexpected=exc.unexpected,
                mismatched=exc.mismatched,
            ) from exc
        if json_:
            print_json(report.to_dict())
        else:
            _print_report(report)


def _print_report(report: SyncReport) -> None:
    console = text_console()
    labelled = f" ({report.label})" if report.label else ""
    console.print(
        f"pushed version {report.version}{labelled}: {report.nbytes / 1e6:.1f} MB in "
        f"{report.tensors} tensors, {report.gbps:.2f} GB/s",
        style="bold",
    )
    for receiver in report.receivers:
        console.print(
            f"  {receiver.target}: {receiver.path}, {receiver.apply}, verified: "
            f"{receiver.verified}, stall {receiver.stall_s * 1e3:.2f} ms"
        )
        for path, why in receiver.skipped_paths.items():
            console.print(f"    not by {path}: {why}", style="yellow")
    phases = ", ".join(f"{name} {value * 1e3:.1f} ms" for name, value in report.seconds.items())
    console.print(f"  {phases}")
