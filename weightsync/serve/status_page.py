"""The status page of a server at `/`, its changing sections, and the same facts as JSON."""

from __future__ import annotations

import math
import secrets
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import msgspec
from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse

from weightsync.errors import BackendUnavailableError
from weightsync.serve.engine_client import EngineClient
from weightsync.serve.status_page_data import NO_ANSWER, SHOWN_UPDATES, Snapshot, StatusReader
from weightsync.server.dispatcher import Receiver
from weightsync.update.lifecycle import State

try:
    from jinja2 import Environment, PackageLoader, StrictUndefined
except ModuleNotFoundError as exc:
    raise BackendUnavailableError(
        f"the status page needs the package {exc.name}; pip install 'weightsync[hf]'"
    ) from exc

_HEADERS = {
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_NOTHING = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def status_router(engine: EngineClient, receivers: Sequence[Receiver]) -> APIRouter:
    """Return the routes of the status page. They change nothing and need no token.

    `receivers` are the workers' receivers, ordered by replica and rank. Every route replies even
    when a worker or the engine does not.
    """
    reader = StatusReader(engine, receivers)
    router = APIRouter(tags=["status"])

    @router.get("/", include_in_schema=False, response_class=HTMLResponse)
    async def page() -> HTMLResponse:
        nonce = secrets.token_urlsafe(16)
        allowed = f"style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'"
        policy = f"{_NOTHING}; {allowed}; connect-src 'self'; img-src data:"
        return _html(render_page(await reader.snapshot(), nonce), policy)

    @router.get("/status/fragment", include_in_schema=False, response_class=HTMLResponse)
    async def fragment() -> HTMLResponse:
        return _html(render_fragment(await reader.snapshot()), _NOTHING)

    @router.get("/status.json", response_class=Response, summary="All that the status page shows.")
    async def status_json() -> Response:
        body = msgspec.json.encode(await reader.snapshot())
        return Response(body, headers=_HEADERS, media_type="application/json")

    return router


def _html(text: str, policy: str) -> HTMLResponse:
    return HTMLResponse(text, headers=_HEADERS | {"content-security-policy": policy})


def render_page(snapshot: Snapshot, nonce: str) -> str:
    """Return the whole document; `nonce` is the nonce of its Content-Security-Policy."""
    return _render("status_page.html", snapshot, nonce=nonce)


def render_fragment(snapshot: Snapshot) -> str:
    """Return the sections that change; each has an id, and every section is always there."""
    return _render("status_sections.html", snapshot)


def _render(template: str, snapshot: Snapshot, **more: str) -> str:
    title = f"{snapshot.state} · {versions(snapshot.versions)} · weightsync"
    return _TEMPLATES.get_template(template).render(snapshot=snapshot, title=title, **more)


_UNPRINTABLE = dict.fromkeys(
    [*range(0x20), *range(0x7F, 0xA0), *range(0xD800, 0xE000)],
    "\N{REPLACEMENT CHARACTER}",
) | {ord("\n"): " ", ord("\t"): " "}


def printable(value: object) -> object:
    """Return text on one line, with a replacement character for each control character.

    Called by jinja2 for each value that a template prints. Markup is returned as it is.
    """
    return value.translate(_UNPRINTABLE) if type(value) is str else value


def count(value: int) -> str:
    """Return a whole number with separators of thousands."""
    return f"{value:,}"


def counts(values: Iterable[int]) -> str:
    """Return the different numbers, in order."""
    return ", ".join(map(count, sorted(set(values))))


def versions(values: Sequence[int]) -> str:
    """Return the weight versions that the workers hold, in words."""
    return f"version{'s' if len(values) > 1 else ''} {counts(values) or 'unknown'}"


def number(value: float) -> str:
    """Return three digits, or all digits of a larger whole number."""
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def seconds(value: float) -> str:
    """Return a short duration: in ms below a second."""
    return f"{number(value * 1e3)} ms" if value < 1 else f"{number(value)} s"


def span(value: float) -> str:
    """Return a long duration, in whole seconds."""
    whole = max(0, int(value))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def nbytes(value: float) -> str:
    """Return a number of bytes, with a unit that is a power of ten."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{number(value / size)} {unit}"
    return f"{value:.0f} B"


def rate(bytes_per_s: float) -> str:
    """Return a throughput: in GB/s, or in MB/s below 10 MB/s."""
    if bytes_per_s >= 1e7:
        return f"{number(bytes_per_s / 1e9)} GB/s"
    return f"{number(bytes_per_s / 1e6)} MB/s"


def clock(at: float, now: float) -> str:
    """Return the UTC time of day, with its date if it is a day ago or more."""
    form = "%H:%M:%S UTC" if now - at < 86400 else "%Y-%m-%d %H:%M UTC"
    return time.strftime(form, time.gmtime(at))


def iso(at: float) -> str:
    """Return a Unix time in the form of ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def round_up(value: float) -> float:
    """Return the next of 1, 2, 5, 10 ... that is not below a value; 1 for zero."""
    if value <= 0:
        return 1.0
    size = 10.0 ** math.floor(math.log10(value))
    return next(step * size for step in (1, 2, 5, 10) if step * size >= value * (1 - 1e-9))


def ended(totals: Mapping[str, int]) -> str:
    """Return how many updates ended in each way, committed ones first."""
    order = sorted(totals, key=lambda result: (result != "committed", result))
    return ", ".join(f"{totals[result]:,} {result}" for result in order)


def groups(items: Iterable[Any], attribute: str) -> list[list[Any]]:
    """Return the items grouped by an attribute, in the order of their first appearance."""
    found: dict[object, list[Any]] = defaultdict(list)
    for item in items:
        found[attrgetter(attribute)(item)].append(item)
    return list(found.values())


_TEMPLATES = Environment(
    autoescape=True,
    auto_reload=False,
    finalize=printable,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=["jinja2.ext.do"],
    loader=PackageLoader("weightsync.serve"),
)
_TEMPLATES.globals.update(
    clock=clock,
    count=count,
    counts=counts,
    ended=ended,
    groups=groups,
    iso=iso,
    nbytes=nbytes,
    number=number,
    rate=rate,
    round_up=round_up,
    seconds=seconds,
    shown_updates=SHOWN_UPDATES,
    span=span,
    versions=versions,
    looks={
        State.READY: "ok",
        State.UPDATING: "busy",
        State.PREPARED: "busy",
        State.TORN: "bad",
        NO_ANSWER: "bad",
    },
)
