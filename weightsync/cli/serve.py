"""`weightsync serve`: serves a model over HTTP, while a trainer replaces its weights."""

from __future__ import annotations

import json
import os
import signal
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from weightsync.cli.app import missing_package, require
from weightsync.cli.dtypes import Dtype, dtype_option
from weightsync.errors import ConfigError

if TYPE_CHECKING:
    from weightsync.serve.options import ServeOptions

_PACKAGES = (
    "fastapi",
    "uvicorn",
    "zmq",
    "prometheus_client",
    "transformers",
    "safetensors",
    "jinja2",
    "psutil",
)
"""Packages that this process, or a process that it starts, imports."""


Apply = Literal["auto", "staged", "in_place"]


def serve(  # noqa: PLR0913, PLR0917 # each is an option of the command line
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="smollm2, tiny, or a Hugging Face directory",
            show_default=False,
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="the same, as an option")] = None,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one")] = 8000,
    token: Annotated[
        str | None, typer.Option(help="else WEIGHTSYNC_TOKEN, else a new one, printed")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="holds the token, mode 0600; else WEIGHTSYNC_TOKEN_FILE")
    ] = None,
    no_auth: Annotated[
        bool, typer.Option("--no-auth", help="let every process of this host change weights")
    ] = False,
    tls_cert: Annotated[
        Path | None, typer.Option(help="certificate and its chain, PEM: serve HTTPS")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="its key, PEM; default: in the certificate's file")
    ] = None,
    apply: Annotated[Apply, typer.Option(help="how weights are applied")] = "auto",
    dtype: Annotated[Dtype, dtype_option("of the weights; default: float32")] = "float32",
    device: Annotated[
        Literal["auto", "cuda", "cpu"],
        typer.Option(help="cuda: a GPU for each worker, never tried; auto: if there is one"),
    ] = "auto",
    api_servers: Annotated[int, typer.Option(min=1, help="API processes on one socket")] = 1,
    data_parallel: Annotated[int, typer.Option(min=1, help="replicas of the model")] = 1,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="workers that share a replica")] = 1,
    weights_from: Annotated[
        list[str] | None,
        typer.Option(
            help="URL of a server with the same token, whose weights are taken at the start; of "
            "several, the first that can",
            show_default=False,
        ),
    ] = None,
    tensor_ipc: Annotated[
        Literal["direct_rpc", "torch_shm"] | None,
        typer.Option(help="images in messages or shared memory; else WEIGHTSYNC_TENSOR_IPC"),
    ] = None,
    max_rows: Annotated[int, typer.Option(min=1, help="completions generated at once")] = 256,
    adapter_versions: Annotated[
        int, typer.Option(min=1, help="newest versions of each adapter that stay")
    ] = 2,
    draft_model: Annotated[
        str | None,
        typer.Option(
            help="a smaller model of the same vocabulary: speculative decoding", show_default=False
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        int, typer.Option(min=1, help="tokens that the draft model proposes in each step")
    ] = 3,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="of each worker; else OMP_NUM_THREADS, else a share of cores"),
    ] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option(help="info: a line for the start and for each update, on stderr"),
    ] = "info",
    access_log: Annotated[
        bool, typer.Option("--access-log", help="a line for each request, on stdout")
    ] = False,
    json_: Annotated[
        bool, typer.Option("--json", help="one JSON line when ready: url, token, pid, model")
    ] = False,
) -> None:
    """Serve a model over HTTP, while a trainer replaces its weights."""
    signal.signal(signal.SIGTERM, _exit)
    if no_auth and (token is not None or token_file is not None):
        raise ConfigError("--no-auth excludes --token and --token-file; give one of them")
    if (name is None) == (model is None):
        raise ConfigError("serve needs one model: smollm2, tiny, or a Hugging Face directory")
    chosen = name or model or ""
    require("serve", *_PACKAGES)
    try:
        from weightsync.queues.codec import chosen_tensor_ipc  # noqa: PLC0415 - an extra
        from weightsync.serve.options import ServeOptions  # noqa: PLC0415 - same
        from weightsync.server.auth import Token, resolve_token  # noqa: PLC0415 - same
    except ModuleNotFoundError as exc:
        raise missing_package("serve", exc.name) from exc
    guard = Token("") if no_auth else resolve_token(token, token_file=token_file)
    options = ServeOptions(
        model=chosen,
        dtype=dtype,
        device=device,
        apply=apply,
        api_servers=api_servers,
        data_parallel=data_parallel,
        tensor_parallel=tensor_parallel,
        token=guard.text or None,
        tensor_ipc=chosen_tensor_ipc(tensor_ipc),
        max_rows=max_rows,
        adapter_versions=adapter_versions,
        draft_model=draft_model,
        num_speculative_tokens=num_speculative_tokens,
        threads=threads,
        log_level=log_level,
        access_log=access_log,
        ssl_certfile=str(tls_cert) if tls_cert else None,
        ssl_keyfile=str(tls_key) if tls_key else None,
        weights_from=tuple(weights_from or ()),
    )
    try:
        _serve(options, host, port, guard.text if guard.made else "", as_json=json_)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    finally:
        _end_tracker()


def _serve(options: ServeOptions, host: str, port: int, made_token: str, *, as_json: bool) -> None:
    from weightsync.serve.serving import serving  # noqa: PLC0415 - an extra
    from weightsync.server.listening import (  # noqa: PLC0415 - same
        check_tls_files,
        is_loopback,
        listen,
        url_of,
    )

    check_tls_files(options.ssl_certfile, options.ssl_keyfile)
    with listen(host, port) as listener:
        if options.token is None and not is_loopback(listener):
            raise ConfigError(
                f"--no-auth on {host} would let other hosts change weights; listen on 127.0.0.1, "
                "or leave --no-auth out"
            )
        with serving(options, listener) as tree:
            url = url_of(listener, tls=options.ssl_certfile is not None)
            _print_ready(url, made_token, options.model, as_json=as_json)
            tree.wait()


def _print_ready(url: str, made_token: str, model: str, *, as_json: bool) -> None:
    if as_json:
        # Only a new token is printed: a given one may be a secret of the environment.
        ready = {"url": url, "token": made_token or None, "pid": os.getpid(), "model": model}
        print(json.dumps(ready), flush=True)
        return
    print(f"weightsync serve: listening on {url}", flush=True)
    if made_token:
        print(f"weightsync serve: token {made_token}", flush=True)


def _end_tracker() -> None:
    """End multiprocessing's resource tracker, a process that would outlive this one."""
    stop = getattr(resource_tracker._resource_tracker, "_stop", None)
    if stop is not None:
        stop()


def _exit(*_: object) -> NoReturn:
    raise SystemExit(0)
