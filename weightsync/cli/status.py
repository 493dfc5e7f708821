"""`weightsync status`: state and last update of servers, and shared memory of this host."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from weightsync.cli.options import (
    CaFileOption,
    TokenFileOption,
    TokenOption,
    choose_tls,
    choose_token,
    seconds,
)
from weightsync.cli.output import (
    FAILED,
    OK,
    UNREACHABLE,
    describe,
    ending,
    exit_code,
    one_line,
    print_json,
)
from weightsync.cli.terminal import text_console
from weightsync.errors import (
    AuthError,
    ConfigError,
    ProtocolError,
    RemoteError,
    TransportError,
    WeightSyncError,
    shorten,
)
from weightsync.integrations.servers import find_engine, read_target
from weightsync.integrations.sglang.files import list_homes
from weightsync.integrations.sglang.server import SglangControl, SglangFacts
from weightsync.integrations.vllm.server import VllmHttpControl, worker_transports
from weightsync.shm.usage import HostSegment, list_segments
from weightsync.transports.base import Transport
from weightsync.transports.http import HttpTransport
from weightsync.wire.messages import SharedMemoryUsage, Status, StatusRequest

MAX_AT_ONCE = 16
MAX_NBYTES = 4 << 20

COLUMNS = {"segment": 43, "MB": 3, "age": 3, "owner": 5, "open in": 7}
"""Columns with minimum widths: users copy the name of a segment, so it stays on one line."""

_METRIC = re.compile(
    r'weightsync_(?P<name>\w+?)(?:\{\w+="(?P<label>[^"]*)"\})? (?P<value>[-+.0-9eE]+)'
)


def status(  # noqa: PLR0913, PLR0917  # one parameter per option
    urls: Annotated[
        list[str] | None, typer.Argument(help="of the servers", show_default=False)
    ] = None,
    host: Annotated[
        bool, typer.Option("--host", help="also the shared memory of this user on this host")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="repeat until Ctrl-C")] = False,
    interval: Annotated[float, seconds("seconds between two requests")] = 1.0,
    timeout: Annotated[float, seconds("seconds to wait for each server")] = 10.0,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca_file: CaFileOption = None,
    json_: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Show state, version, shared memory and last update of every server."""
    with ending(as_json=json_):
        if watch and json_:
            raise ConfigError(
                "--watch does not end, and --json prints one object; give one of them"
            )
        if not urls and not host:
            raise ConfigError("status needs URLs of servers, or --host")
        # A status needs no token, so none is read from the environment.
        secret = choose_token(token, token_file) or ""
        verify_tls = choose_tls(ca_file, urls or ())
        targets = [StatusTarget(url, secret, verify_tls) for url in urls or ()]
        console = text_console()
        if watch:
            _watch(console, lambda: _show(fetch_all(targets, timeout)), interval)
            return
        found = fetch_all(targets, timeout)
        segments = _host_segments() if host else []
    if json_:
        answer: dict[str, object] = {"servers": [one.to_dict() for one in found]}
        if len(found) > 1:
            answer["in_step"] = are_in_step(found)
        print_json(answer | ({"host": [asdict(one) for one in segments]} if host else {}))
    else:
        console.print(_show(found))
        if host:
            console.print(_show_segments(segments))
    raise typer.Exit(overall([one.code for one in found]))


def overall(codes: Sequence[int]) -> int:
    """Return the one exit code: an unreachable server counts before one that is not ready."""
    return UNREACHABLE if UNREACHABLE in codes else max(codes, default=OK)


def _watch(console: Console, show: Callable[[], RenderableType], interval_s: float) -> None:
    try:
        if not console.is_terminal:
            while True:
                console.print(show())
                time.sleep(interval_s)
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(show(), refresh=True)
                time.sleep(interval_s)
    except KeyboardInterrupt:
        return


# Servers.


class LastUpdates(msgspec.Struct, kw_only=True):
    """How many updates ended how, and the last committed one; empty where unknown.

    `from_ranks` has the bytes from each rank of a trainer that did not gather.
    """

    ended: dict[str, int] = {}
    seconds: dict[str, float] = {}
    nbytes: int | None = None
    stall_s: float | None = None
    from_ranks: dict[int, int] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """The reply of one server and of each of its workers, or the error instead.

    `facts` describe an SGLang server, which has no status.
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
        """The exit code for this server alone."""
        if self.error is not None:
            return exit_code(self.error)
        ready = self.status is not None and self.status.may_generate
        return OK if ready or self.facts is not None else FAILED

    def to_dict(self) -> dict[str, object]:
        """Return it as plain data."""
        if self.facts is not None:
            server = {
                "engine": "sglang",
                "version": ".".join(map(str, self.facts.version)) or None,
                "model_path": self.facts.model_path,
                "weight_version": self.facts.weight_version,
            }
            return {"url": self.url, "reachable": True, "server": server}
        if self.status is None:
            reachable = not isinstance(self.error, TransportError)
            error = describe(self.error) if self.error else None
            return {"url": self.url, "reachable": reachable, "error": error}
        return {
            "url": self.url,
            "reachable": True,
            "path": paths_of(self.status),
            **_all_fields(self.status),
            "updates": _all_fields(self.updates),
            "server": self.server,
            "each_worker": [one.to_dict() for one in self.workers],
        }


def _all_fields(struct: msgspec.Struct) -> dict[str, object]:
    """Return a struct as plain data, with the fields that its encoding omits."""
    return {k: msgspec.to_builtins(v) for k, v in msgspec.structs.asdict(struct).items()}


def paths_of(status: Status) -> str:
    """Return the paths by which bytes of connected senders come."""
    return ", ".join(sorted(set(status.senders.values()))) or "none"


class StatusTarget:
    """One URL of the command line, whose status can be fetched again and again.

    Raises ConfigError for a text that is not a URL. `verify_tls` is that of HttpTransport.
    """

    def __init__(self, target: str, token: str, verify_tls: bool | str) -> None:
        self._url, self._engine = read_target(target)
        self._token, self._verify_tls = token, verify_tls
        self._http = HttpTransport(self._url, token, verify_tls=verify_tls)

    def fetch(self, timeout_s: float) -> list[ServerStatus]:
        """Return the status of the server, or one per worker where each is a receiver."""
        engine = self._engine
        if engine is None:
            found = _fetch(self._http, timeout_s)
            # These errors may mean that the server is of another engine.
            if isinstance(found.error, ProtocolError | RemoteError):
                engine = find_engine(self._url, self._token, self._verify_tls, timeout_s)
            if engine is None:
                return [found]
        try:
            if engine == "vllm":
                return self._fetch_vllm(timeout_s)
            return [self._fetch_sglang(timeout_s)]
        except WeightSyncError as exc:
            return [ServerStatus(url=self._http.target, error=exc)]

    def _fetch_vllm(self, timeout_s: float) -> list[ServerStatus]:
        with closing(
            VllmHttpControl(self._url, self._token, verify_tls=self._verify_tls)
        ) as control:
            control.greet(timeout_s=timeout_s)
            workers = worker_transports(control, timeout_s=timeout_s)
            found = [_call(worker, timeout_s) for worker in workers]
            return [replace(one, server={"engine": "vllm"}) for one in found]

    def _fetch_sglang(self, timeout_s: float) -> ServerStatus:
        with closing(SglangControl(self._url, self._token, verify_tls=self._verify_tls)) as control:
            return ServerStatus(url=control.target, facts=control.greet(timeout_s=timeout_s))


def fetch_all(targets: Sequence[StatusTarget], timeout_s: float) -> list[ServerStatus]:
    """Return the statuses of all targets, fetched at once."""
    with ThreadPoolExecutor(MAX_AT_ONCE) as pool:
        found = pool.map(lambda target: target.fetch(timeout_s), targets)
        return [one for each in found for one in each]


def _call(transport: Transport, timeout_s: float) -> ServerStatus:
    try:
        reply = transport.call(StatusRequest(), timeout_s=timeout_s)
        if not isinstance(reply, Status):
            raise ProtocolError(f"{transport.target} answered with a {type(reply).__name__}")
    except WeightSyncError as exc:
        return ServerStatus(url=transport.target, error=exc)
    return ServerStatus(url=transport.target, status=reply)


def _fetch(transport: HttpTransport, timeout_s: float) -> ServerStatus:
    found = _call(transport, timeout_s)
    if found.status is None:
        return found
    workers = transport.expand(found.status.workers) if found.status.workers else []
    try:
        with ThreadPoolExecutor(MAX_AT_ONCE) as pool:
            each = tuple(pool.map(lambda worker: _fetch(worker, timeout_s), workers))
    finally:
        for worker in workers:
            worker.close()
    return replace(
        found,
        updates=fetch_last_updates(transport, timeout_s),
        workers=each,
        server=_fetch_server_info(transport, timeout_s),
    )


def fetch_last_updates(transport: HttpTransport, timeout_s: float) -> LastUpdates:
    """Return the updates in a server's metrics; empty for a server without metrics."""
    return parse_metrics(_get(transport, "metrics", timeout_s).decode("utf-8", "replace"))


def _fetch_server_info(transport: HttpTransport, timeout_s: float) -> dict[str, object] | None:
    """Return the self-description of `weightsync serve`, None for other servers."""
    try:
        info = _get(transport, "server_info", timeout_s)
        return msgspec.json.decode(info, type=dict[str, object])
    except msgspec.DecodeError:
        return None


def _get(transport: HttpTransport, path: str, timeout_s: float) -> bytes:
    try:
        code, body = transport.get(path, timeout_s=timeout_s, max_nbytes=MAX_NBYTES)
    except WeightSyncError:
        return b""
    return body if code == 200 else b""


def parse_metrics(text: str) -> LastUpdates:
    """Return the updates in Prometheus' text format; lines of other metrics are ignored."""
    updates = LastUpdates()
    for line in text.splitlines():
        if (found := _METRIC.fullmatch(line.strip())) is None:
            continue
        label, value = found["label"] or "", float(found["value"])
        if found["name"] == "updates_total":
            updates.ended[label] = int(value)
        elif found["name"] == "last_update_seconds":
            updates.seconds[label] = value
        elif found["name"] == "last_update_bytes":
            updates.nbytes = int(value)
        elif found["name"] == "last_update_stall_seconds":
            updates.stall_s = value
        elif found["name"] == "last_update_bytes_from_rank" and label.isdecimal():
            updates.from_ranks[int(label)] = int(value)
    return updates


# Text, one block per server.


def _show(found: Sequence[ServerStatus]) -> Group:
    lines = [line for one in found for line in _lines(one)]
    return Group(*lines, *([_compared(found)] if len(found) > 1 else []))


def are_in_step(found: Sequence[ServerStatus]) -> bool | None:
    """Return whether all servers hold the same weights of one sender; None where that is unknown.

    Unknown are those that do not answer, name no weights (other engines, or a server whose workers
    differ), or got none yet.
    """
    statuses = [one.status for one in found if one.status is not None]
    versions = {status.version for status in statuses}
    known = {status.weights_id for status in statuses if status.weights_id is not None}
    if max(len(versions), len(known)) > 1 or not all(s.may_generate for s in statuses):
        return False
    if len(statuses) < len(found) or any(status.weights_id is None for status in statuses):
        return None
    return True


def _compared(found: Sequence[ServerStatus]) -> Text:
    """Return the line that compares servers and workers that have an URL of their own."""
    versions = Counter(f"version {one.status.version}" if one.status else "?" for one in found)
    listed = ", ".join(f"{count} at {held}" for held, count in versions.most_common())
    said, style = {
        True: ("all in step", "bold"),
        False: ("not in step", "bold red"),
        None: ("unknown whether in step", "bold"),
    }[are_in_step(found)]
    return Text(f"{said}: {listed}", style=style)


def _lines(found: ServerStatus) -> Iterator[Text]:
    yield Text(found.url, style="bold")
    held, facts = found.status, found.facts
    if facts is not None:
        release = ".".join(map(str, facts.version)) or "of an unknown version"
        yield Text(f"  engine    SGLang {release}, {facts.model_path}", style="green")
        yield Text(f"  version   {facts.weight_version or 'it keeps none'}")
    elif held is None:
        yield Text(f"  {_failure(found.error)}", style="red")
    else:
        yield Text(f"  state     {held.state}{_remarks(held)}", style=_style(held))
        label = f" ({held.label})" if held.label else ""
        prepared = f", version {held.prepared_version} prepared" if held.prepared_version else ""
        yield Text(f"  version   {held.version}{label}{prepared}")
        yield Text(f"  applies   {held.apply}, verifies up to: {held.verification}")
        yield Text(f"  path      {paths_of(held)}; {', '.join(held.device_keys)}")
        yield from _update_lines(found.updates)
        yield Text(f"  memory    {_memory(held.shared_memory)}")
        for worker in found.workers:
            yield _worker_line(worker, below=found.url)


def _worker_line(found: ServerStatus, *, below: str) -> Text:
    path, held = found.url.removeprefix(f"{below}/"), found.status
    if held is None:
        return Text(f"  {path}  {_failure(found.error)}", style="red")
    committed = found.updates.ended.get("committed", 0)
    return Text(
        f"  {path}  version {held.version}, {held.state}{_remarks(held)}; {committed} updates, "
        f"{', '.join(held.device_keys)}",
        style=_style(held),
    )


def _style(held: Status) -> str:
    return "green" if held.may_generate else "red"


def _failure(error: WeightSyncError | None) -> str:
    """Return an error after its kind: no reply, a refusal, or a reply of another server."""
    if isinstance(error, TransportError):
        kind = "unreachable"
    elif isinstance(error, AuthError):
        kind = "refuses the token"
    elif isinstance(error, ProtocolError):
        kind = "answers, but not as a weightsync server"
    else:
        kind = "answers with an error"
    return f"{kind}: {one_line(error or '')}"


def _remarks(held: Status) -> str:
    remarks = [
        "" if held.may_generate else "may not generate",
        f"update {held.update_id}" if held.update_id else "",
        "busy" if held.busy else "",
        "its sender is dead" if held.orphaned else "",
        "paused" if held.paused else "",
        held.detail,
    ]
    joined = ", ".join(filter(None, remarks))
    return f": {joined}" if joined else ""


def _update_lines(updates: LastUpdates) -> Iterator[Text]:
    if updates.ended:
        ended = ", ".join(f"{count} {result}" for result, count in sorted(updates.ended.items()))
        yield Text(f"  updates   {ended}")
    if updates.nbytes is not None:
        phases = ", ".join(f"{k} {v * 1e3:.1f} ms" for k, v in sorted(updates.seconds.items()))
        stall = f", stall {updates.stall_s * 1e3:.2f} ms" if updates.stall_s is not None else ""
        yield Text(f"  last      {updates.nbytes / 1e6:.1f} MB, {phases}{stall}")
    if updates.from_ranks:
        ranks = [f"rank {r} {n / 1e6:.1f} MB" for r, n in sorted(updates.from_ranks.items())]
        yield Text(f"  from      {shorten(ranks)}")


def _memory(usage: Sequence[SharedMemoryUsage]) -> str:
    if not usage:
        return "empty: no sender is connected"
    nbytes = sum(entry.nbytes for entry in usage)
    kinds = sorted({entry.kind for entry in usage})
    counted = ", ".join(f"{sum(e.kind == kind for e in usage)} {kind}" for kind in kinds)
    oldest = max(entry.age_s for entry in usage)
    late = sorted({name for entry in usage for name in entry.unreleased})
    held = f"; not released by {shorten(late)}" if late else ""
    return f"{counted}; {nbytes / 1e6:.1f} MB, since {oldest:.0f} s{held}"


# This host.


def _host_segments() -> list[HostSegment]:
    """Return the segments of this user, and directories with weights for SGLang servers."""
    homes = [
        HostSegment(
            name=home.path.name,
            nbytes=home.nbytes,
            age_s=home.age_s,
            owner_alive=home.owner_alive,
            mapped_by=(),
        )
        for home in list_homes()
    ]
    return list_segments() + homes


def _show_segments(segments: Sequence[HostSegment]) -> RenderableType:
    """Return `segments` as a table, with the remedy for those of dead owners."""
    title = Text("this host", style="bold")
    if not segments:
        return Group(title, Text("  no segments"))
    table = Table(box=SIMPLE_HEAD)
    for column, width in COLUMNS.items():
        table.add_column(
            column,
            justify="right" if column in {"MB", "age"} else "left",
            overflow="fold",
            min_width=width,
        )
    for segment in segments:
        owner = "alive" if segment.owner_alive else "dead"
        table.add_row(
            segment.name,
            f"{segment.nbytes / 1e6:.1f}" if segment.named else "?",
            f"{segment.age_s:.0f} s" if segment.named else "?",
            Text(
                owner if segment.named else "name removed",
                style="green" if segment.owner_alive else "red",
            ),
            ", ".join(segment.mapped_by) or "no process visible from here",
        )
    dead = any(segment.named and not segment.owner_alive for segment in segments)
    advice = "  weightsync doctor --clean removes what dead owners left; so does the next sender"
    return Group(title, table, Text(advice)) if dead else Group(title, table)
