"""`weightsync certify`: push a checkpoint; compare with a server that loaded it itself."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from weightsync.cli.checkpoint import explain, open_checkpoint
from weightsync.cli.dtypes import Dtype, dtype_option
from weightsync.cli.options import TokenFileOption, TokenOption, choose_token, seconds
from weightsync.cli.output import FAILED, OK, ending, print_json
from weightsync.cli.terminal import text_console
from weightsync.errors import (
    AuthError,
    ConfigError,
    ManifestMismatchError,
    ProtocolError,
    RemoteError,
)
from weightsync.integrations.certificate import (
    Server,
    Step,
    cold_server,
    fresh,
    vllm_command,
)
from weightsync.integrations.certificate import (
    certify as certify_updates,
)
from weightsync.integrations.servers import find_engine, read_target

_PROBE_S = 10.0
SHOWN = 10


def certify(  # noqa: PLR0913, PLR0917  # one parameter per option
    url: Annotated[str, typer.Argument(help="of a server without updates", show_default=False)],
    to: Annotated[Path, typer.Option(help="another checkpoint of the model", show_default=False)],
    from_: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="the checkpoint it was started with; else it is asked",
            show_default=False,
        ),
    ] = None,
    cold: Annotated[
        str | None,
        typer.Option(
            help="command of a server on {checkpoint} and {port}; else a vLLM like the one at URL",
            show_default=False,
        ),
    ] = None,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    dtype: Annotated[
        Dtype | None,
        dtype_option("cast floating-point tensors to it"),
    ] = None,
    timeout: Annotated[float, seconds("seconds without progress")] = 60.0,
    json_: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Push a checkpoint, and compare the server with one that loaded it itself."""
    with ending(as_json=json_):
        server = Server(url, choose_token(token, token_file))
        second = open_checkpoint(to, dtype)
        plain, named = read_target(url)
        engine = named or find_engine(plain, server.token, True, _PROBE_S)
        if cold is None and engine != "vllm":
            with suppress(AuthError, ProtocolError, RemoteError):
                server.model()  # raises ConnectError where there is no server at all
            raise ConfigError(
                f"{url} is no vLLM: give --cold, a command that starts such a server on "
                "{checkpoint} and {port}"
            )
        root = "" if from_ else server.model()[1]
        if not (from_ or root):
            raise ConfigError(f"{url} does not say with what it was started; give --from")
        first = from_ or Path(root)
        if not first.exists():
            raise ConfigError(
                f"{url} was started with {str(first)!r}, which is no path here; give --from"
            )
        source = open_checkpoint(first, dtype)
        command = vllm_command(server) if cold is None else cold
        began = fresh(server)
        try:
            server.check(second, timeout_s=timeout)
        except ManifestMismatchError as exc:
            raise ConfigError(explain(exc, to, [url])) from exc
        with cold_server(command, str(to), server.token) as other:
            wanted = other.look()
        steps = certify_updates(
            server, began, wanted, first=source, second=second, timeout_s=timeout
        )
        _print(url, to, steps, as_json=json_)
        raise typer.Exit(FAILED if any(step.differences for step in steps) else OK)


def _print(url: str, to: Path, steps: list[Step], *, as_json: bool) -> None:
    equal = not any(step.differences for step in steps)
    if as_json:
        print_json(
            {
                "url": url,
                "to": str(to),
                "equal": equal,
                "steps": [asdict(step) for step in steps],
            }
        )
        return
    table = Table("update", "checkpoint", "version", "seconds", "tensors", "result")
    for step in steps:
        first = step.differences[0] if step.differences else "equal to a cold server"
        table.add_row(
            str(step.update),
            step.checkpoint,
            str(step.version),
            f"{step.seconds:.3f}",
            str(step.checked),
            first,
        )
    console = text_console()
    console.print(table)
    for step in steps:
        for line in step.differences[:SHOWN]:
            console.print(f"update {step.update}: {line}")
    console.print("certified" if equal else "NOT certified")
