"""`weightsync status`: what servers hold, what they have open, and how the last update went."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from weightsync.cli.access import (
    CaFileOption,
    TokenFileOption,
    TokenOption,
    given_token,
    given_trust,
    seconds,
)
from weightsync.cli.answers import (
    OK,
    UNREACHABLE,
    ending,
    one_line,
    print_json,
)
from weightsync.cli.metrics_text import LastUpdates
from weightsync.cli.status_host import census_to_dict, show_host
from weightsync.cli.status_seen import ServerStatus, StatusTarget, look, paths_of
from weightsync.errors import (
    AuthError,
    ConfigError,
    ProtocolError,
    TransportError,
    WeightSyncError,
    shorten,
)
from weightsync.integrations.sglang.server import SglangFacts
from weightsync.wire.messages import LedgerEntry, Status


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
