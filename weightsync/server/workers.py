"""Several receivers behind one URL: each has its own routes, and the root acts on all of them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, get_args

from fastapi import APIRouter
from msgspec.structs import replace

from weightsync.errors import ConfigError, ProtocolError, WeightSyncError
from weightsync.report import Verification
from weightsync.server.dispatcher import DEFAULT_MAX_BODY_NBYTES, Receiver
from weightsync.server.metrics import MoreMetrics
from weightsync.server.router import weight_router
from weightsync.transports.calls import CallThreads
from weightsync.update.lifecycle import State, new_update_id
from weightsync.weights.copying.checksums import compose_all, join_parts
from weightsync.wire.messages import (
    AbortRequest,
    CheckReply,
    CheckRequest,
    FetchRequest,
    FinishRequest,
    InitReply,
    InitRequest,
    PrepareRequest,
    RegisteredUpdate,
    Reply,
    Request,
    SleepTag,
    StartRequest,
    StartTerms,
    StateName,
    Status,
    StatusRequest,
    StepReply,
    UpdateRequest,
    WorkerReport,
)
from weightsync.wire.offers import OwnerStatus

T = TypeVar("T")

_LEAST_READY_FIRST = (
    State.TORN,
    State.ABORTING,
    State.CATCHING_UP,
    State.UPDATING,
    State.PREPARED,
    State.READY,
)
_WEAKEST_FIRST = ("none", "arrived", "held")


def _merge_kept(kept: Sequence[Mapping[str, Sequence[str]]]) -> dict[str, list[str]]:
    """Return the names of the tensors that any of the workers keeps, by dtype."""
    dtypes = dict.fromkeys(dtype for each in kept for dtype in each)
    return {d: list(dict.fromkeys(n for each in kept for n in each.get(d, ()))) for d in dtypes}


def merge_statuses(statuses: Mapping[str, Status]) -> Status:
    """Return one status for all workers, given by path: that of the least ready worker.

    `may_generate` is True only where all workers may generate, with the same weights.
    """
    held = list(statuses.values())
    versions = {(status.version, status.weights_id) for status in held}
    instances = " ".join(status.instance for status in held).encode()
    prepared = {status.prepared_version for status in held}
    return Status(
        instance=hashlib.blake2b(instances, digest_size=8).hexdigest(),
        protocol=min(status.protocol for status in held),
        protocol_min=max(status.protocol_min for status in held),
        state=_least_ready(status.state for status in held),
        version=min(status.version for status in held),
        may_generate=len(versions) == 1 and all(status.may_generate for status in held),
        apply="in_place" if any(status.apply == "in_place" for status in held) else "staged",
        verification=_weakest(status.verification for status in held),
        label=_common([status.label for status in held]),
        update_id=next((status.update_id for status in held if status.update_id), None),
        last_finished=_common([status.last_finished for status in held]),
        weights_id=_common([status.weights_id for status in held]),
        prepared_version=prepared.pop() if len(prepared) == 1 else None,
        manifest_digest=_common([status.manifest_digest for status in held]),
        busy=any(status.busy for status in held),
        orphaned=any(status.orphaned for status in held),
        paused=any(status.paused for status in held),
        detail=_reasons(statuses),
        device_keys=list(dict.fromkeys(key for status in held for key in status.device_keys)),
        shared_memory=[
            replace(
                entry,
                name=f"{name}: {entry.name}",
                unreleased=[f"{name}: {late}" for late in entry.unreleased],
            )
            for name, status in statuses.items()
            for entry in status.shared_memory
        ],
        workers=list(statuses),
        senders=_paths(held),
        fetchable=held[0].fetchable,
        lends=held[0].lends,
        asleep=[tag for tag in get_args(SleepTag) if any(tag in s.asleep for s in held)],
        sleep_level=max(status.sleep_level for status in held),
        discarded=any(status.discarded for status in held),
        owner=max((s.owner for s in held if s.owner), key=_standing, default=None),
        backends={
            name: facts
            for name, facts in held[0].backends.items()
            if all(name in status.backends for status in held)
        },
    )


def merge_steps(replies: Sequence[StepReply]) -> StepReply:
    """Return one reply for all workers: the least ready state, and the cost of the slowest."""
    return StepReply(
        state=_least_ready(reply.state for reply in replies),
        version=min(reply.version for reply in replies),
        update_id=next((reply.update_id for reply in replies if reply.update_id), None),
        apply="in_place" if any(reply.apply == "in_place" for reply in replies) else "staged",
        verified=_weakest(reply.verified for reply in replies),
        nbytes=max(reply.nbytes for reply in replies),
        stall_s=max(reply.stall_s for reply in replies),
        peak_extra_nbytes=sum(reply.peak_extra_nbytes for reply in replies),
        seconds=_slowest([reply.seconds for reply in replies]),
        table_digest=_common([reply.table_digest for reply in replies]),
        delta=any(reply.delta for reply in replies),
        names_nothing=any(reply.names_nothing for reply in replies),
        sources=_sum_sources(reply.sources for reply in replies),
        parts=join_parts(reply.parts for reply in replies),
    )


def _sum_sources(each: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """Return the bytes that all workers copied from each rank of the trainer."""
    found: Counter[int] = Counter()
    for sources in each:
        found.update(sources)
    return dict(sorted(found.items()))


def _slowest(seconds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the longest time of each phase; `load` without `wait` is the longest one, too."""
    phases = sorted({phase for each in seconds for phase in each})
    found = {phase: max(each.get(phase, 0.0) for each in seconds) for phase in phases}
    if "wait" in found:
        work = max(each.get("load", 0.0) - each.get("wait", 0.0) for each in seconds)
        found["wait"] = found.get("load", 0.0) - work
    return found


def _least_ready(states: Iterable[StateName]) -> StateName:
    return min(states, key=lambda state: _LEAST_READY_FIRST.index(State(state)))


def _weakest(levels: Iterable[Verification]) -> Verification:
    return min(levels, key=_WEAKEST_FIRST.index)


def _paths(held: Sequence[Status]) -> dict[str, str]:
    """Return the path of every sender by its id, or all of them where workers differ."""
    ids = dict.fromkeys(sender for status in held for sender in status.senders)
    found = {s: {status.senders[s] for status in held if s in status.senders} for s in ids}
    return {sender: ", ".join(sorted(paths)) for sender, paths in found.items()}


def _standing(owner: OwnerStatus) -> tuple[bool, int]:
    return owner.alive, owner.term


def _common(values: Sequence[T | None]) -> T | None:
    """Return the value that all have, or None where they differ."""
    return values[0] if all(value == values[0] for value in values) else None


def _reasons(statuses: Mapping[str, Status]) -> str:
    """Return why workers may not generate, one by one, or that their weights differ."""
    reasons = [
        f"{name}: {status.detail or status.state}"
        for name, status in statuses.items()
        if not status.may_generate
    ]
    if len({(status.version, status.weights_id) for status in statuses.values()}) > 1:
        versions = ", ".join(
            f"{name} {status.version} of update {status.weights_id or 'none'}"
            for name, status in statuses.items()
        )
        reasons.append(
            f"the workers hold different weights ({versions}); a full update heals this: call "
            "send_weights()"
        )
    return "; ".join(reasons)


_GIVES_UP = (StartRequest, UpdateRequest, PrepareRequest)


@dataclass(frozen=True, slots=True)
class _Answer:
    """The outcome of one worker's call: its `reply`, or the `error` that it raised."""

    name: str
    worker: Receiver
    reply: Reply | None = None
    error: Exception | None = None


class Workers(Receiver):
    """The receivers of one server, as one receiver.

    `workers` are by path, in the order of their ranks; each `tensor_parallel` of them hold one
    replica. A step that fails on some workers is aborted on the others. Where a finish fails on
    some only, the server holds two versions, and the error says so. A single worker is called
    directly. Thread-safe. Raises ConfigError where the workers make no whole number of replicas.
    """

    def __init__(self, workers: Mapping[str, Receiver], *, tensor_parallel: int = 1) -> None:
        if not workers or tensor_parallel < 1 or len(workers) % tensor_parallel:
            raise ConfigError(
                f"{len(workers)} workers make no whole replicas of {tensor_parallel} workers each"
            )
        self.workers = dict(workers)
        self._only = next(iter(workers.values())) if len(workers) == 1 else None
        self._tensor_parallel = tensor_parallel
        # Not an executor, for whose threads interpreter exit would wait: a hook may work in them.
        self._threads: CallThreads[Any] = CallThreads()
        self._answers: dict[type, Callable[..., Reply]] = {
            StatusRequest: lambda _: self.status(),
            InitRequest: self._init,
            StartRequest: self._start,
            UpdateRequest: self._update,
            CheckRequest: self._check,
            FetchRequest: self._fetch,
        }

    def report(self) -> WorkerReport:
        """Return one report for all workers; calls each of them once.

        An update that ended alike on all workers counts once. `last_reply` merges those of all
        workers, and is None where one has none.
        """
        reports = self._each(lambda _, worker: worker.report())
        if self._only is not None:
            return next(iter(reports.values()))
        totals = [report.updates_total for report in reports.values()]
        replies = [report.last_reply for report in reports.values()]
        known = [reply for reply in replies if reply is not None]
        return WorkerReport(
            status=merge_statuses({name: r.status for name, r in reports.items()}),
            updates_total={
                kind: max(t.get(kind, 0) for t in totals) for kind in sorted(set().union(*totals))
            },
            last_reply=merge_steps(known) if len(known) == len(replies) else None,
        )

    def status(self) -> Status:
        """Return one status for all workers; does not wait for an update in progress."""
        if self._only is not None:
            return self._only.status()
        return merge_statuses(self._each(lambda _, worker: worker.status()))

    def handle_json(self, call: str, body: bytes) -> bytes:
        """Handle the JSON of a request; see `dispatch`. A single worker is sent it as it is."""
        handle = super().handle_json if self._only is None else self._only.handle_json
        return handle(call, body)

    def dispatch(self, request: Request) -> Reply:
        """Handle a request on all workers. Raises the first error, which names all that failed."""
        if self._only is not None:
            return self._only.dispatch(request)
        answer = self._answers.get(type(request), self._to_all)
        return answer(request)

    def close(self) -> None:
        """End the threads. The workers belong to the caller, and stay open."""
        self._threads.close()

    def _init(self, request: InitRequest) -> InitReply:
        if request.init_info is not None or request.probe is not None:
            raise ProtocolError(
                f"{len(self.workers)} workers stand behind this URL, and each needs memory of its "
                f"own: send init to {', '.join(self.workers)} below it, or connect() to this URL "
                "with weightsync, which does that by itself"
            )
        replies = [answer.reply for answer in self._call_all(request)]
        said = [reply for reply in replies if isinstance(reply, InitReply)]
        kept = [reply.kept for reply in said if reply.kept is not None]
        quantization = [reply.quantization for reply in said]
        are_alike = all(config == quantization[0] for config in quantization)
        return InitReply(
            status=self.status(),
            kept=_merge_kept(kept) if kept else None,
            quantization=quantization[0] if are_alike else None,
        )

    def _fetch(self, request: FetchRequest) -> Reply:
        """One worker sends: where each holds whole tensors, they hold the same."""
        return next(iter(self.workers.values())).dispatch(request)

    def _start(self, request: StartRequest) -> Reply:
        version = self._common_next() if request.version is None else request.version
        update_id = request.update_id or new_update_id()
        anonymous = request.anonymous or request.update_id is None
        return self._to_all(
            replace(request, version=version, update_id=update_id, anonymous=anonymous)
        )

    def _update(self, request: UpdateRequest) -> Reply:
        info = request.update_info
        if isinstance(info, RegisteredUpdate):
            raise ProtocolError(
                f"update_info refers to what init registered, and {len(self.workers)} workers "
                f"stand behind this URL: send it to {', '.join(self.workers)} below it"
            )
        alone = request.update_id is None and request.start is None
        if alone and not any(status.update_id for status in self._each(_status).values()):
            return self._whole(request)
        return self._to_all(request)

    def _whole(self, request: UpdateRequest) -> Reply:
        """A whole update in one message: no worker finishes unless all are prepared."""
        update_id = new_update_id()
        terms = StartTerms(version=self._common_next())
        self._to_all(replace(request, update_id=update_id, start=terms, prepare=True))
        return self._to_all(FinishRequest(update_id=update_id))

    def _common_next(self) -> int | None:
        """The version above those of all workers; None where they agree, and each counts alone."""
        versions = {status.version for status in self._each(_status).values()}
        return max(versions) + 1 if len(versions) > 1 else None

    def _check(self, request: CheckRequest) -> CheckReply:
        if request.partial:
            raise ProtocolError(
                "request the parts from each worker: this URL replies with their sums"
            )
        if request.action == "compare" and not isinstance(request.checksums, dict):
            raise ProtocolError("compare needs checksums: {name: 16 hex digits}")
        given = request.checksums if isinstance(request.checksums, dict) else {}
        names = request.names or (list(given) if request.action == "compare" else None)
        answers = self._call_all(CheckRequest(names=names, partial=True))
        replies = [a.reply for a in answers if isinstance(a.reply, CheckReply)]
        held, apart = compose_all(replies, self._tensor_parallel)
        version = min(reply.version for reply in replies)
        if request.action == "checksum":
            return CheckReply(version=version, checksums=held, different=apart)
        different = [n for n, value in held.items() if n in apart or given.get(n) != value]
        return CheckReply(version=version, different=different, equal=not different)

    def _to_all(self, request: Request) -> Reply:
        replies = [answer.reply for answer in self._call_all(request)]
        steps = [reply for reply in replies if isinstance(reply, StepReply)]
        return merge_steps(steps) if steps else self.status()

    def _call_all(self, request: Request) -> list[_Answer]:
        """Send a request to all workers at once. Raises the first error, once all have answered."""

        def call(name: str, worker: Receiver) -> _Answer:
            try:
                return _Answer(name, worker, worker.dispatch(request))
            except Exception as exc:  # noqa: BLE001  # raised below, once all have answered
                return _Answer(name, worker, error=exc)

        answers = list(self._each(call).values())
        if any(answer.error is not None for answer in answers):
            if isinstance(request, _GIVES_UP):
                self._give_up(answers)
            raise _first_error(answers, finishing=isinstance(request, FinishRequest))
        return answers

    def _give_up(self, answers: Sequence[_Answer]) -> None:
        """Abort, on the other workers, an update that failed on some workers."""
        failed = [answer.name for answer in answers if answer.error is not None]

        def abort(name: str, worker: Receiver) -> None:
            reply = next(answer.reply for answer in answers if answer.name == name)
            if isinstance(reply, StepReply) and reply.update_id:
                reason = f"it failed on {', '.join(failed)}"
                with suppress(WeightSyncError):  # the first failure is the one that is raised
                    worker.dispatch(AbortRequest(update_id=reply.update_id, reason=reason))

        self._each(abort)

    def _each(self, call: Callable[[str, Receiver], T]) -> dict[str, T]:
        """Run `call` for all workers at once; return the results by path. Raises what it raises."""
        calls: dict[str, Future[T]] = {name: Future() for name in self.workers}
        for name, worker in self.workers.items():
            self._threads.submit(partial(call, name, worker), calls[name])
        return {name: future.result() for name, future in calls.items()}


def workers_router(
    workers: Workers,
    *,
    token: str | None,
    max_body_nbytes: int = DEFAULT_MAX_BODY_NBYTES,
    more_metrics: MoreMetrics | None = None,
) -> APIRouter:
    """Return the control routes of all workers at the root, and of each worker below its path.

    See `weight_router`. A single worker has both as well. Only the root's `/metrics` shows
    `more_metrics`.
    """
    router = APIRouter()
    router.include_router(
        weight_router(
            workers, token=token, max_body_nbytes=max_body_nbytes, more_metrics=more_metrics
        )
    )
    for name, worker in workers.workers.items():
        routes = weight_router(worker, token=token, max_body_nbytes=max_body_nbytes)
        router.include_router(routes, prefix=f"/{name}")
    return router


def worker_path(rank: int) -> str:
    """Return the path of a worker's routes below its server's URL."""
    return f"workers/{rank}"


def _status(_: str, worker: Receiver) -> Status:
    return worker.status()


def _first_error(answers: Sequence[_Answer], *, finishing: bool) -> Exception:
    failed = [answer for answer in answers if answer.error is not None]
    done = [answer.name for answer in answers if answer.error is None]
    error = failed[0].error
    assert error is not None  # of those that have one
    others = "".join(f"; {answer.name}: {answer.error}" for answer in failed[1:])
    split = (
        f"; {', '.join(done)} finished it: this server holds two versions until a whole update "
        "is sent"
        if finishing and done
        else ""
    )
    if not isinstance(error, WeightSyncError):
        for answer in failed:
            error.add_note(f"{answer.name}: {type(answer.error).__name__}: {answer.error}")
    else:
        error.args = (f"{failed[0].name}: {error}{others}{split}", *error.args[1:])
    return error
