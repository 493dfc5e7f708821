"""`weightsync status`: what servers hold, what this host shares, and how the last update went."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from weightsync.cli.access import (
    CaFileOption,
    TokenFileOption,
    TokenOption,
    find_engine,
    given_token,
    given_trust,
    read_target,
    seconds,
)
from weightsync.cli.answers import (
    FAILED,
    OK,
    UNREACHABLE,
    describe,
    ending,
    exit_code,
    one_line,
    print_json,
)
from weightsync.errors import (
    AuthError,
    ConfigError,
    ProtocolError,
    RemoteError,
    TransportError,
    WeightSyncError,
    shorten,
)
from weightsync.integrations.sglang.files import list_homes
from weightsync.integrations.sglang.server import SglangControl, SglangFacts
from weightsync.integrations.vllm.server import VllmHttpControl, worker_transports
from weightsync.shm.census import HostSegment, list_segments
from weightsync.transports.base import Transport
from weightsync.transports.http import HttpTransport
from weightsync.wire.messages import LedgerEntry, Status, StatusRequest

COLUMNS = ("segment", "MB", "age", "owner", "open in")
_WIDTHS = {"segment": 43, "MB": 3, "age": 3, "owner": 5, "open in": 7}
"""A name is copied from here to a shell, so it stands in one piece however narrow the console."""


def census_to_dict() -> list[dict[str, object]]:
    """Return every segment as plain data, for `--json`."""
    return [asdict(segment) for segment in _everything()]


def show_host() -> RenderableType:
    """Return every segment as a table, with what to do about those of dead owners."""
    return show_census(_everything())


def _everything() -> list[HostSegment]:
    """Segments, and the directories in which weights lie for SGLang servers."""
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


def show_census(segments: Sequence[HostSegment]) -> RenderableType:
    """Return `segments` as a table."""
    title = Text("this host", style="bold")
    if not segments:
        return Group(title, Text("  no segments"))
    table = Table(box=SIMPLE_HEAD)
    for column in COLUMNS:
        number = column in ("MB", "age")
        table.add_column(
            column,
            justify="right" if number else "left",
            overflow="fold",
            min_width=_WIDTHS[column],
        )
    for segment in segments:
        table.add_row(
            segment.name,
            f"{segment.nbytes / 1e6:.1f}" if segment.named else "?",
            f"{segment.age_s:.0f} s" if segment.named else "?",
            Text(_owner(segment), style="green" if segment.owner_alive else "red"),
            ", ".join(segment.mapped_by) or "nobody seen from here",
        )
    dead = sum(segment.named and not segment.owner_alive for segment in segments)
    advice = "  weightsync doctor --clean removes what dead owners left; so does the next sender"
    return Group(title, table, Text(advice)) if dead else Group(title, table)


def _owner(segment: HostSegment) -> str:
    if not segment.named:
        return "name removed"
    return "alive" if segment.owner_alive else "dead"


MAX_NBYTES = 4 << 20

_LINE = re.compile(
    r'weightsync_(?P<name>\w+?)(?:\{\w+="(?P<label>[^"]*)"\})? (?P<value>[-+.0-9eE]+)'
)


class LastUpdates(msgspec.Struct, kw_only=True):
    """How many updates ended how, and the last one that was committed; empty where unknown."""

    ended: dict[str, int] = {}
    seconds: dict[str, float] = {}
    nbytes: int | None = None
    stall_s: float | None = None


def read_last_updates(url: str, timeout_s: float, trusted: bool | str = True) -> LastUpdates:
    """Ask the server at `url`; one that serves no metrics has none, and that is no error."""
    return parse(_get(url, "metrics", timeout_s, trusted).decode("utf-8", "replace"))


def read_server_info(
    url: str, timeout_s: float, trusted: bool | str = True
) -> dict[str, object] | None:
    """Return what `weightsync serve` says of itself; None for servers that do not."""
    try:
        answer = _get(url, "server_info", timeout_s, trusted)
        return msgspec.json.decode(answer, type=dict[str, object])
    except msgspec.DecodeError:
        return None


def _get(url: str, path: str, timeout_s: float, trusted: bool | str) -> bytes:
    try:
        transport = HttpTransport(url, "", verify_tls=trusted)
        try:
            status, answer = transport.get(path, timeout_s=timeout_s, max_nbytes=MAX_NBYTES)
        finally:
            transport.close()
    except WeightSyncError:
        return b""
    return answer if status == 200 else b""


def parse(text: str) -> LastUpdates:
    """Read the lines of Prometheus' text format that are of weightsync's updates."""
    updates = LastUpdates()
    for line in text.splitlines():
        if (found := _LINE.fullmatch(line.strip())) is None:
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
    return updates


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


def status(  # noqa: PLR0913, PLR0917  # one parameter per option
    urls: Annotated[
        list[str] | None, typer.Argument(help="of the servers", show_default=False)
    ] = None,
    host: Annotated[
        bool, typer.Option("--host", help="also the shared memory of this user on this host")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="ask again until Ctrl-C")] = False,
    interval: Annotated[float, seconds("seconds between looks")] = 1.0,
    timeout: Annotated[float, seconds("seconds to wait for each server")] = 10.0,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca_file: CaFileOption = None,
    json_: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Show state, version, ledger and last update of every server."""
    with ending(as_json=json_):
        if watch and json_:
            raise ConfigError("--watch goes on, and --json prints one object; give one of them")
        if not urls and not host:
            raise ConfigError("status of what? give URLs of servers, or --host")
        secret = given_token(token, token_file) or ""  # reading needs none, so none is looked for
        trusted = given_trust(ca_file, urls or ())
        places = [StatusTarget(url, secret, trusted) for url in urls or ()]
        if watch:
            _watch(places, interval, timeout)
            return
        seen = look(places, timeout)
        segments = census_to_dict() if json_ and host else None
    if json_:
        servers = [one.to_dict() for one in seen]
        print_json({"servers": servers} | ({"host": segments} if host else {}))
    else:
        _console().print(_show(seen))
        if host:
            _console().print(show_host())
    raise typer.Exit(overall([one.code for one in seen]))


def overall(codes: Sequence[int]) -> int:
    """Return the one exit code: a server that cannot be reached counts before one not ready."""
    return UNREACHABLE if UNREACHABLE in codes else max(codes, default=OK)


def _watch(places: Sequence[StatusTarget], interval_s: float, timeout_s: float) -> None:
    console = _console()

    def looked() -> list[ServerStatus]:
        return look(places, timeout_s)

    try:
        if not console.is_terminal:
            _repeat(looked, interval_s, lambda seen: console.print(_show(seen)))
        with Live(console=console, auto_refresh=False) as live:
            _repeat(looked, interval_s, lambda seen: live.update(_show(seen), refresh=True))
    except KeyboardInterrupt:
        return


def _repeat(
    looked: Callable[[], list[ServerStatus]],
    interval_s: float,
    show: Callable[[list[ServerStatus]], None],
) -> None:
    while True:
        show(looked())
        time.sleep(interval_s)


def _console() -> Console:
    return Console(soft_wrap=True, highlight=False, markup=False)


def _show(seen: Sequence[ServerStatus]) -> Group:
    return Group(*(line for one in seen for line in _lines(one)))


def _lines(seen: ServerStatus) -> Iterator[Text]:
    yield Text(seen.url, style="bold")
    if seen.facts is not None:
        yield from _sglang_lines(seen.facts)
        return
    held = seen.status
    if held is None:
        yield Text(f"  {_trouble(seen.error)}", style="red")
        return
    style = "green" if held.may_generate else "red"
    yield Text(f"  state     {held.state}{_remarks(held)}", style=style)
    label = f" ({held.label})" if held.label else ""
    coming = f", version {held.prepared_version} prepared" if held.prepared_version else ""
    yield Text(f"  version   {held.version}{label}{coming}")
    yield Text(f"  applies   {held.apply}, verifies {held.verification}")
    yield Text(f"  path      {paths_of(held)}; {', '.join(held.device_keys)}")
    for line in _update_lines(seen.updates):
        yield Text(f"  updates   {line}")
    yield Text(f"  ledger    {_ledger(held.ledger)}")
    for one in seen.workers:
        yield _worker_line(one, below=seen.url)


def _sglang_lines(facts: SglangFacts) -> Iterator[Text]:
    number = ".".join(map(str, facts.version)) or "of an unknown version"
    yield Text(f"  engine    SGLang {number}, {facts.model_path}", style="green")
    yield Text(f"  version   {facts.weight_version or 'it keeps none'}")


def _trouble(error: WeightSyncError | None) -> str:
    """Say whether nobody answers, or somebody does who is not what was asked for."""
    if isinstance(error, TransportError):
        kind = "unreachable"
    elif isinstance(error, AuthError):
        kind = "refuses the token"
    elif isinstance(error, ProtocolError):
        kind = "answers, but not as a weightsync server"
    else:
        kind = "answers with an error"
    return f"{kind}: {one_line(error or '')}"


def _worker_line(seen: ServerStatus, *, below: str) -> Text:
    path, held = seen.url.removeprefix(f"{below}/"), seen.status
    if held is None:
        return Text(f"  {path}  {_trouble(seen.error)}", style="red")
    committed = seen.updates.ended.get("committed", 0)
    return Text(
        f"  {path}  version {held.version}, {held.state}{_remarks(held)}; {committed} updates, "
        f"{', '.join(held.device_keys)}",
        style="green" if held.may_generate else "red",
    )


def _remarks(held: Status) -> str:
    remarks = [
        "" if held.may_generate else "may not generate",
        f"update {held.update_id}" if held.update_id else "",
        "busy" if held.busy else "",
        "its sender is dead" if held.orphaned else "",
        "paused" if held.paused else "",
        held.detail,
    ]
    said = ", ".join(filter(None, remarks))
    return f": {said}" if said else ""


def _update_lines(updates: LastUpdates) -> Iterator[str]:
    if updates.ended:
        yield ", ".join(f"{count} {result}" for result, count in sorted(updates.ended.items()))
    if updates.nbytes is not None:
        phases = ", ".join(f"{k} {v * 1e3:.1f} ms" for k, v in sorted(updates.seconds.items()))
        stall = f", stall {updates.stall_s * 1e3:.2f} ms" if updates.stall_s is not None else ""
        yield f"last: {updates.nbytes / 1e6:.1f} MB, {phases}{stall}"


def _ledger(ledger: Sequence[LedgerEntry]) -> str:
    if not ledger:
        return "empty: no sender is connected"
    nbytes = sum(entry.nbytes for entry in ledger)
    kinds = sorted({entry.kind for entry in ledger})
    counted = ", ".join(f"{sum(e.kind == kind for e in ledger)} {kind}" for kind in kinds)
    oldest = max(entry.age_s for entry in ledger)
    late = sorted({name for entry in ledger for name in entry.unreleased})
    held = f"; not released by {shorten(late)}" if late else ""
    return f"{counted}; {nbytes / 1e6:.1f} MB, since {oldest:.0f} s{held}"
