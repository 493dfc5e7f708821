"""The status page of a server at `/`, its changing sections, and the same data as JSON.

The data are read from every worker and replica, at most twice a second.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import anyio
import anyio.to_thread
import msgspec
from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse
from msgspec.structs import asdict

from weightsync.errors import MissingExtraError, install_hint
from weightsync.serve.engine_client import EngineClient
from weightsync.serve.messages import EngineStats
from weightsync.server.dispatcher import Receiver
from weightsync.server.workers import merge_statuses
from weightsync.wire.messages import (
    FleetRecord,
    OpenUpdate,
    SharedMemoryUsage,
    Status,
    UpdateRecord,
    WorkerReport,
)

try:
    from jinja2 import Environment, PackageLoader, StrictUndefined
except ModuleNotFoundError as exc:
    raise MissingExtraError(
        f"the status page needs the package {exc.name}; {install_hint('hf')}"
    ) from exc

FRESH_S = 0.5
"""The least time between two reads of the workers, however many pages are open."""
REPLY_TIMEOUT_S = 2.0
SHOWN_UPDATES = 50
NO_ANSWER = "NO ANSWER"


class Mapped(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a worker has mapped of one sender, or of all control segments (sender "").

    `path` is the path of a connected sender, otherwise "".
    """

    sender: str
    nbytes: int
    path: str = ""


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one worker, or the reason why it is unknown (`error`)."""

    name: str
    state: str = NO_ANSWER
    version: int | None = None
    label: str | None = None
    may_generate: bool = False
    busy: bool = False
    orphaned: bool = False
    paused: bool = False
    apply: str = ""
    detail: str = ""
    updates_total: dict[str, int] = {}  # msgspec copies it
    open_update: OpenUpdate | None = None
    mapped: list[Mapped] = []  # msgspec copies it
    error: str = ""

    @property
    def remark(self) -> str:
        """The reason why the worker does not generate, or "" if there is none."""
        return self.error or self.detail or ("paused" if self.paused else "")

    @property
    def waits_for(self) -> str:
        """The step that an open update is at, or the event that it waits for."""
        if self.state == "ABORTING":
            return "is aborted; waits for the loader to stop"
        if self.orphaned:
            return "its sender is dead; waits for the next sender to end it"
        if self.state == "PREPARED":
            if self.busy:
                return "waits for the end of the current decode step, then swaps"
            return "everything arrived and was checked; waits for its sender to finish it"
        return "loads what its sender shared" if self.busy else "waits for its sender to send more"


class UpdateView(UpdateRecord, frozen=True, kw_only=True):
    """A committed update over its workers: the times of the slowest, the bytes of the largest.

    `sources` are the bytes of all workers together.
    """

    workers: int
    bytes_per_s: float


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All data of the page, and the body of `/status.json`.

    `at` is Unix time in seconds. `versions` are the weight versions of the workers. `updates` are
    ordered by time, the oldest first. `fleet` is None where the last sender did not say.
    """

    at: float
    model: str
    state: str
    versions: list[int]
    label: str | None
    detail: str
    workers: list[WorkerView]
    replicas: list[EngineStats]
    updates: list[UpdateView]
    engine_error: str = ""
    dtype: str = ""
    device: str = ""
    fleet: FleetRecord | None = None

    @property
    def troubles(self) -> list[str]:
        """One line for each problem of a worker, the engine or a replica."""
        return [
            *(f"worker {worker.name}: {worker.error}" for worker in self.workers if worker.error),
            *([f"engine: {self.engine_error}"] if self.engine_error else []),
            *([self.detail] if self.detail else []),
            *(
                f"replica {index} does not generate: {replica.why_not}"
                for index, replica in enumerate(self.replicas)
                if replica.why_not
            ),
        ]


class StatusReader:
    """Reads the state of an engine and its workers, for any number of pages of one event loop.

    A worker that does not reply in time is shown as such, and is not called again before it
    replies.
    """

    def __init__(self, engine: EngineClient, receivers: Sequence[Receiver]) -> None:
        threads = anyio.CapacityLimiter(max(1, len(receivers)))
        in_thread = partial(anyio.to_thread.run_sync, limiter=threads, abandon_on_cancel=True)
        self._engine = engine
        self._calls: list[Callable[[], Coroutine[Any, Any, Any]]] = [
            engine.stats,
            *(partial(in_thread, receiver.report) for receiver in receivers),
        ]
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._since: dict[int, float] = {}
        self._reading: asyncio.Task[Snapshot] | None = None
        self._read_at = float("-inf")
        self._replicas = 1

    async def snapshot(self) -> Snapshot:
        """Return the current data, at most FRESH_S old. Errors of workers become part of it."""
        stale = time.monotonic() - self._read_at > FRESH_S
        if self._reading is None or (self._reading.done() and stale):
            self._reading = asyncio.ensure_future(self._read())
        return await asyncio.shield(self._reading)

    async def _read(self) -> Snapshot:
        for index, call in enumerate(self._calls):
            if index not in self._tasks or self._tasks[index].done():
                self._since[index] = time.monotonic()
                self._tasks[index] = asyncio.ensure_future(call())
        await asyncio.wait(self._tasks.values(), timeout=REPLY_TIMEOUT_S)
        (replicas, engine_error), *reports = map(self._result, range(len(self._calls)))
        self._replicas = len(replicas or ()) or self._replicas
        self._read_at = time.monotonic()
        return take_snapshot(
            self._engine.card.name,
            worker_names(len(reports), self._replicas),
            reports,
            replicas or [],
            engine_error,
            at=time.time(),
            dtype=self._engine.card.dtype,
            device=self._engine.card.device,
        )

    def _result(self, index: int) -> tuple[Any, str]:
        """Return the result of a call, or None and the reason why there is none."""
        task = self._tasks[index]
        if not task.done():
            return None, f"has not answered for {time.monotonic() - self._since[index]:.0f} s"
        if task.cancelled():
            return None, "was not called: the server is shutting down"
        if (failure := task.exception()) is not None:
            return None, str(failure) or type(failure).__name__
        return task.result(), ""


def worker_names(workers: int, replicas: int) -> list[str]:
    """Return the names `replica.rank` of all workers, as in the names of their processes."""
    ranks = workers // replicas if replicas and workers % replicas == 0 else workers
    return [f"{index // ranks}.{index % ranks}" for index in range(workers)]


def take_snapshot(
    model: str,
    names: Sequence[str],
    replies: Sequence[tuple[WorkerReport | None, str]],
    replicas: list[EngineStats],
    engine_error: str = "",
    *,
    at: float,
    dtype: str = "",
    device: str = "",
) -> Snapshot:
    """Combine the replies of the engine and of the workers, which are in the order of `names`."""
    reports = {name: report for name, (report, _) in zip(names, replies, strict=True) if report}
    statuses = {name: report.status for name, report in reports.items()}
    whole = merge_statuses(statuses) if statuses else None
    silent = len(reports) < len(names) or whole is None
    told = [report for report in reports.values() if report.fleet and report.recent]
    latest = max(told, key=lambda report: report.recent[-1].at, default=None)
    return Snapshot(
        at=at,
        model=model,
        state=NO_ANSWER if silent or whole is None else whole.state,
        versions=sorted({status.version for status in statuses.values()}),
        label=whole.label if whole else None,
        detail=whole.detail if whole else "",
        workers=[
            _worker_view(name, report.status, report)
            if report
            else WorkerView(name=name, error=error)
            for name, (report, error) in zip(names, replies, strict=True)
        ],
        replicas=replicas,
        updates=merge_updates(record for report in reports.values() for record in report.recent),
        engine_error=engine_error,
        dtype=dtype,
        device=device,
        fleet=latest.fleet if latest else None,
    )


def _worker_view(name: str, status: Status, report: WorkerReport) -> WorkerView:
    return WorkerView(
        name=name,
        state=status.state,
        version=status.version,
        label=status.label,
        may_generate=status.may_generate,
        busy=status.busy,
        orphaned=status.orphaned,
        paused=status.paused,
        apply=status.apply,
        detail=status.detail,
        updates_total=report.updates_total,
        open_update=report.open_update,
        mapped=mapped_by_sender(status.shared_memory, status.senders),
    )


def mapped_by_sender(usage: Iterable[SharedMemoryUsage], paths: Mapping[str, str]) -> list[Mapped]:
    """Return the mapped bytes of each sender. Control segments have no sender's name."""
    sums: dict[str, int] = defaultdict(int)
    for entry in usage:
        sums["" if entry.kind == "control" else entry.name] += entry.nbytes
    return [
        Mapped(sender=sender, nbytes=nbytes, path=paths.get(sender, ""))
        for sender, nbytes in sorted(sums.items())
    ]


def merge_updates(records: Iterable[UpdateRecord]) -> list[UpdateView]:
    """Return the last updates, the oldest first, each combined from the records of its workers."""
    groups: dict[tuple[str, int], list[UpdateRecord]] = defaultdict(list)
    for record in records:
        groups[record.update_id, record.version].append(record)
    views = sorted(map(_update_view, groups.values()), key=lambda view: view.at)
    return views[-SHOWN_UPDATES:]


def _update_view(group: list[UpdateRecord]) -> UpdateView:
    slowest = max(group, key=lambda record: record.duration_s)
    nbytes = max(record.nbytes for record in group)
    sources: Counter[int] = Counter()
    for record in group:
        sources.update(record.sources)
    fields = asdict(slowest) | {
        "at": max(record.at for record in group),
        "nbytes": nbytes,
        "stall_s": max(record.stall_s for record in group),
        "sources": dict(sources),
    }
    return UpdateView(
        **fields, workers=len(group), bytes_per_s=nbytes / max(slowest.duration_s, 1e-9)
    )


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


def share(part: int, whole: int) -> str:
    """Return a part of a whole in percent, "" of nothing."""
    return f"{100 * part / whole:.0f} %" if whole else ""


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
    share=share,
    shown_updates=SHOWN_UPDATES,
    span=span,
    versions=versions,
    looks={
        "READY": "ok",
        "UPDATING": "busy",
        "PREPARED": "busy",
        "TORN": "bad",
        NO_ANSWER: "bad",
    },
)
