"""`weightsync serve`: a model that generates and takes new weights."""

from __future__ import annotations

import os
import signal
import threading
from enum import StrEnum
from typing import Annotated, NoReturn

import typer

from weightsync.errors import BackendUnavailableError, ConfigError

LAST_RESORT_S = 5.0


class Apply(StrEnum):
    """How a receiver puts weights to use."""

    AUTO = "auto"
    STAGED = "staged"
    IN_PLACE = "in_place"


class Dtype(StrEnum):
    """What a model can be loaded in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def serve(
    model: Annotated[str, typer.Option(help="smollm2, tiny, or a Hugging Face directory")],
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one")] = 8000,
    token: Annotated[
        str | None, typer.Option(help="else WEIGHTSYNC_TOKEN, else one is made and printed")
    ] = None,
    no_auth: Annotated[
        bool, typer.Option("--no-auth", help="let every process of this host change weights")
    ] = False,
    apply: Annotated[Apply, typer.Option(help="how weights are put to use")] = Apply.AUTO,
    dtype: Annotated[Dtype, typer.Option(help="of the weights")] = Dtype.FLOAT32,
) -> None:
    """Serve a model over HTTP, while a trainer replaces its weights."""
    signal.signal(signal.SIGTERM, _exit)
    try:
        _serve(model, host, port, token, no_auth, apply, dtype)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _serve(
    model: str, host: str, port: int, token: str | None, no_auth: bool, apply: Apply, dtype: Dtype
) -> None:
    if no_auth and token is not None:
        raise ConfigError("--no-auth and --token exclude each other; give one of them")
    try:
        import torch  # noqa: PLC0415 - this verb's extras must not be needed by the others

        from weightsync.rollout import api_server  # noqa: PLC0415 - same
        from weightsync.rollout.model import load_model  # noqa: PLC0415 - same
        from weightsync.server.auth import Token, resolve_token  # noqa: PLC0415 - same
    except ModuleNotFoundError as exc:
        raise BackendUnavailableError(
            f"serving needs the package {exc.name}; pip install 'weightsync[server,hf]'"
        ) from exc
    guard = Token("") if no_auth else resolve_token(token)
    with api_server.listen(host, port) as listener:
        if no_auth and not api_server.is_loopback(listener):
            raise ConfigError(
                f"--no-auth on {host} would let other hosts change weights; listen on 127.0.0.1, "
                "or leave --no-auth out"
            )
        loaded = load_model(model, dtype=getattr(torch, dtype.value))
        server = api_server.RolloutServer(loaded, token=guard.text or None, apply=apply.value)
        print(f"weightsync serve: listening on {api_server.url_of(listener)}", flush=True)
        if guard.made:
            print(f"weightsync serve: token {guard.text}", flush=True)
        try:
            server.run(listener)
        finally:
            _leave_soon()


def _exit(*_: object) -> NoReturn:
    raise SystemExit(0)


def _leave_soon() -> None:
    """End the process even if a thread is stuck in a user's hook; segments are their senders'."""
    last_resort = threading.Timer(LAST_RESORT_S, os._exit, args=(1,))
    last_resort.daemon = True
    last_resort.start()
