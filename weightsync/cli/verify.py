"""`weightsync verify`: compares the weights of a server with a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, get_args

import torch
import typer
from rich.console import Console

from weightsync.cli.checkpoint import open_checkpoint
from weightsync.cli.dtypes import Dtype, dtype_option
from weightsync.cli.options import (
    CaFileOption,
    TokenFileOption,
    TokenOption,
    choose_tls,
    choose_token,
    seconds,
)
from weightsync.cli.output import FAILED, OK, ending, print_json
from weightsync.cli.terminal import progress_bar, text_console
from weightsync.errors import ConfigError, ProtocolError, RemoteError
from weightsync.integrations.servers import Engine, find_engine, read_target
from weightsync.tensors import TORCH_DTYPES, as_bytes, dtype_name, sent_dtype
from weightsync.transports.base import Transport
from weightsync.transports.http import HttpTransport
from weightsync.weights.copying.fingerprint import mix64, to_hex
from weightsync.weights.sources.safetensors_source import SafetensorsSource
from weightsync.wire.messages import CheckReply, CheckRequest

SHOWN_NAMES = 20
_PROBE_S = 10.0
_NAMES: dict[Engine, str] = {"vllm": "vLLM", "sglang": "SGLang"}
_HOLDS: dict[Engine, str] = {
    "vllm": "has fused and sharded tensors that no file has, and verifies each push as it arrives",
    "sglang": "does not report fingerprints of its weights",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The result of a comparison. `dtype` is the cast of the files' tensors, None without a cast.

    `missing` tensors are only in the server, `surplus` tensors only in the files.
    """

    url: str
    checkpoint: str
    version: int
    dtype: str | None
    checked: int
    different: list[str]
    missing: list[str]
    surplus: list[str]

    @property
    def equal(self) -> bool:
        """Whether the server holds exactly the tensors of the files."""
        return not (self.different or self.missing or self.surplus)


def verify(
    url: Annotated[str, typer.Argument(help="of the server", show_default=False)],
    checkpoint: Annotated[
        Path, typer.Argument(help="directory or file with safetensors", show_default=False)
    ],
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca_file: CaFileOption = None,
    dtype: Annotated[
        Dtype | None,
        dtype_option("dtype in the server; default: detected"),
    ] = None,
    timeout: Annotated[float, seconds("seconds to wait for the server")] = 300.0,
    json_: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Compare the weights that a server holds with a safetensors checkpoint, tensor by tensor."""
    with ending(as_json=json_):
        if ":/" in str(checkpoint) and "://" not in url:
            raise ConfigError(f"{url} is no URL: verify URL CHECKPOINT, the URL first")
        secret, verify_tls = choose_token(token, token_file), choose_tls(ca_file, [url])
        plain, engine = read_target(url)
        if engine is not None:
            raise _no_fingerprints(plain, engine)
        source = open_checkpoint(checkpoint, None)
        transport = HttpTransport(url, secret, verify_tls=verify_tls)
        try:
            held = _fetch_fingerprints(transport, timeout)
        except (ProtocolError, RemoteError) as exc:
            # The server may be of another engine, which does not know this request.
            engine = find_engine(plain, secret, verify_tls, min(timeout, _PROBE_S))
            if engine is None:
                raise
            raise _no_fingerprints(plain, engine) from exc
        finally:
            transport.close()
        with progress_bar("comparing", len(source.manifest.specs), as_json=json_) as advance:
            found = compare(source, held, url=transport.target, dtype=dtype, advance=advance)
    if json_:
        print_json({"equal": found.equal, **asdict(found)})
    else:
        _print_found(found)
    raise typer.Exit(OK if found.equal else FAILED)


def compare(
    source: SafetensorsSource,
    held: CheckReply,
    *,
    url: str,
    dtype: Dtype | None,
    advance: Callable[[], None] = lambda: None,
) -> Verified:
    """Compare a checkpoint with the fingerprints of a server.

    Without `dtype`, the server may hold a tensor as stored or as a cast; see `Verified.dtype`.
    `advance` is called after each tensor.
    """
    casts = _Casts(TORCH_DTYPES[dtype] if dtype else None)
    places = source.manifest.places()
    different: list[str] = []
    surplus: list[str] = []
    seen: set[str] = set()
    for name, tensor in source.tensors():
        # The server need not have every alias of a tensor.
        known = {place: held.checksums[place] for place in places[name] if place in held.checksums}
        seen |= known.keys()
        if known:
            different += casts.different(tensor, known)
        else:
            surplus.append(name)
        advance()
    return Verified(
        url=url,
        checkpoint=str(source.path),
        version=held.version,
        dtype=casts.used(),
        checked=len(seen),
        different=different,
        missing=sorted(held.checksums.keys() - seen),
        surplus=surplus,
    )


class _Casts:
    """Fingerprints of tensors in each dtype in which a server may hold them, the likely one first.

    `given` is the only dtype if it is not None.
    """

    def __init__(self, given: torch.dtype | None) -> None:
        others = [TORCH_DTYPES[dtype] for dtype in get_args(Dtype)]
        self._tried: list[torch.dtype | None] = [given] if given else [None, *others]
        self._used: set[torch.dtype] = {given} if given else set()

    def different(self, tensor: torch.Tensor, known: Mapping[str, str]) -> list[str]:
        """Return the names in `known` whose fingerprint differs from the one of `tensor`."""
        best = list(known)
        for cast in list(self._tried) if tensor.is_floating_point() else [None]:
            value = _fingerprint(tensor, cast)
            left = [name for name, held in known.items() if held != value]
            if len(left) < len(best):
                best = left
                self._note(cast)
            if not left:
                break
        return best

    def used(self) -> str | None:
        """Return the dtypes to which tensors were cast, None without a cast."""
        return "+".join(sorted(map(dtype_name, self._used))) or None

    def _note(self, cast: torch.dtype | None) -> None:
        if cast in self._tried:
            self._tried.sort(key=lambda tried: tried is not cast)
        if cast is not None:
            self._used.add(cast)


def _print_found(found: Verified) -> None:
    console = text_console()
    cast = f", cast to {found.dtype}" if found.dtype else ""
    if found.equal:
        console.print(
            f"{found.url} holds {found.checkpoint}{cast}: {found.checked} tensors, version "
            f"{found.version}",
            style="green",
        )
        return
    console.print(
        f"{found.url} at version {found.version} does NOT hold {found.checkpoint}{cast}; "
        f"{found.checked} tensors compared",
        style="red",
    )
    for title, names in (
        ("differ", found.different),
        ("are held by the server and not in the files", found.missing),
        ("are in the files and not held by the server", found.surplus),
    ):
        _print_names(console, title, names)


def _print_names(console: Console, title: str, names: Sequence[str]) -> None:
    if not names:
        return
    console.print(f"{len(names)} {title}:")
    for name in names[:SHOWN_NAMES]:
        console.print(f"  {name}")
    if len(names) > SHOWN_NAMES:
        console.print(f"  and {len(names) - SHOWN_NAMES} more (--json lists all)")


def _fetch_fingerprints(transport: Transport, timeout_s: float) -> CheckReply:
    try:
        reply = transport.call(CheckRequest(), timeout_s=timeout_s)
    except ConfigError as exc:  # of the server's configuration, not of this command line
        raise RemoteError(str(exc), remote_type="ConfigError", remote_message=str(exc)) from exc
    if not isinstance(reply, CheckReply):
        raise ProtocolError(f"{transport.target} answered with a {type(reply).__name__}")
    return reply


def _no_fingerprints(url: str, engine: Engine) -> ConfigError:
    return ConfigError(
        f"{url} is a server of {_NAMES[engine]}, which {_HOLDS[engine]}; verify needs a server of "
        "weightsync serve, or one with weightsync's router"
    )


def _fingerprint(tensor: torch.Tensor, cast: torch.dtype | None) -> str:
    return to_hex(mix64(as_bytes(tensor.to(sent_dtype(tensor.dtype, cast)))))
