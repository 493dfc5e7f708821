"""What `weightsync status` learns of a server, whichever engine stands behind its URL."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import msgspec

from weightsync.cli.answers import FAILED, OK, describe, exit_code
from weightsync.cli.engines import find_engine, read_target
from weightsync.cli.metrics_text import LastUpdates, read_last_updates, read_server_info
from weightsync.errors import ProtocolError, RemoteError, TransportError, WeightSyncError
from weightsync.integrations.sglang.server import SglangControl, SglangFacts
from weightsync.integrations.vllm.server import VllmHttpControl, worker_transports
from weightsync.transports.base import Transport
from weightsync.transports.http import HttpTransport
from weightsync.wire.messages import Status, StatusRequest

MAX_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """What one server answered, or why it did not; and what each of its workers did.

    `facts` are what an SGLang server says of itself, which has no status.
    """

    url: str
    status: Status | None = None
    updates: LastUpdates = field(default_factory=LastUpdates)
    server: dict[str, object] | None = None
    facts: SglangFacts | None = None
    error: WeightSyncError | None = None
    workers: tuple[ServerStatus, ...] = ()

    @property
    def code(self) -> int:
        """The exit code that this server alone would make."""
        if self.error is not None:
            return exit_code(self.error)
        held = self.status
        whole = held is not None and held.may_generate
        return OK if whole or self.facts is not None else FAILED

    def to_dict(self) -> dict[str, object]:
        """Return it as plain data."""
        if self.facts is not None:
            return {"url": self.url, "reachable": True, "server": describe_sglang(self.facts)}
        if self.status is None:
            error = describe(self.error) if self.error else None
            return {
                "url": self.url,
                "reachable": not isinstance(self.error, TransportError),
                "error": error,
            }
        return {
            "url": self.url,
            "reachable": True,
            "path": paths_of(self.status),
            **_whole(self.status),
            "updates": _whole(self.updates),
            "server": self.server,
            "each_worker": [one.to_dict() for one in self.workers],
        }


class StatusTarget:
    """One URL of the command line, to be asked as often as you like.

    Raises ConfigError for what is none. `trusted` is HttpTransport's `verify_tls`.
    """

    def __init__(self, target: str, token: str, trusted: bool | str) -> None:
        self._url, self._engine = read_target(target)
        self._token, self._trusted = token, trusted
        self._http = HttpTransport(self._url, token, verify_tls=trusted)

    def see(self, timeout_s: float) -> list[ServerStatus]:
        """Return what the server answers: several where its workers are receivers on their own."""
        engine = self._engine
        if engine is None:
            seen = _ask(self._http, timeout_s, self._trusted)
            # Another engine's server answers what none of ours would.
            if isinstance(seen.error, ProtocolError | RemoteError):
                engine = find_engine(self._url, self._token, self._trusted, timeout_s)
            if engine is None:
                return [seen]
        try:
            return self._see_vllm(timeout_s) if engine == "vllm" else [self._see_sglang(timeout_s)]
        except WeightSyncError as exc:
            return [ServerStatus(url=self._http.target, error=exc)]

    def _see_vllm(self, timeout_s: float) -> list[ServerStatus]:
        control = VllmHttpControl(self._url, self._token, verify_tls=self._trusted)
        try:
            control.greet(timeout_s=timeout_s)
            workers = worker_transports(control, timeout_s=timeout_s)
            return [_hear(worker, timeout_s, server={"engine": "vllm"}) for worker in workers]
        finally:
            control.close()

    def _see_sglang(self, timeout_s: float) -> ServerStatus:
        control = SglangControl(self._url, self._token, verify_tls=self._trusted)
        try:
            return ServerStatus(url=control.target, facts=control.greet(timeout_s=timeout_s))
        finally:
            control.close()


def look(places: Sequence[StatusTarget], timeout_s: float) -> list[ServerStatus]:
    """Ask all servers at once."""
    with ThreadPoolExecutor(max(1, min(MAX_AT_ONCE, len(places)))) as pool:
        every = pool.map(lambda place: place.see(timeout_s), places)
        return [seen for answered in every for seen in answered]


def paths_of(held: Status) -> str:
    """Return the paths by which the bytes of connected senders come."""
    return ", ".join(sorted(set(held.senders.values()))) or "none"


def describe_sglang(facts: SglangFacts) -> dict[str, object]:
    """Return what an SGLang server says of itself as plain data."""
    return {
        "engine": "sglang",
        "version": ".".join(map(str, facts.version)) or None,
        "model_path": facts.model_path,
        "weight_version": facts.weight_version,
    }


def _whole(answer: msgspec.Struct) -> dict[str, object]:
    """Return a struct as plain data, also the fields that the wire leaves out."""
    return {k: msgspec.to_builtins(v) for k, v in msgspec.structs.asdict(answer).items()}


def _hear(
    transport: Transport, timeout_s: float, server: dict[str, object] | None = None
) -> ServerStatus:
    try:
        reply = transport.call(StatusRequest(), timeout_s=timeout_s)
        if not isinstance(reply, Status):
            raise ProtocolError(f"{transport.target} answered with a {type(reply).__name__}")
    except WeightSyncError as exc:
        return ServerStatus(url=transport.target, error=exc)
    return ServerStatus(url=transport.target, status=reply, server=server)


def _ask(transport: HttpTransport, timeout_s: float, trusted: bool | str) -> ServerStatus:
    seen = _hear(transport, timeout_s)
    if seen.status is None:
        return seen
    return replace(
        seen,
        updates=read_last_updates(transport.target, timeout_s, trusted),
        workers=_ask_workers(transport, seen.status.workers, timeout_s, trusted),
        server=read_server_info(transport.target, timeout_s, trusted),
    )


def _ask_workers(
    transport: HttpTransport, paths: Sequence[str], timeout_s: float, trusted: bool | str
) -> tuple[ServerStatus, ...]:
    if not paths:
        return ()
    transports = transport.expand(paths)
    try:
        with ThreadPoolExecutor(min(MAX_AT_ONCE, len(paths))) as pool:
            return tuple(pool.map(lambda one: _ask(one, timeout_s, trusted), transports))
    finally:
        for one in transports:
            one.close()
