"""The engine core of a replica: schedules requests on its workers, and pauses them."""

from __future__ import annotations

import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import msgspec
import zmq
from msgspec.structs import replace

from weightsync.errors import NotReadyError, TransferTimeout, WeightSyncError
from weightsync.queues.codec import TensorDecoder
from weightsync.serve.adapter_leases import AdapterLeases
from weightsync.serve.messages import (
    Cancel,
    ClientMessage,
    Done,
    EngineRequest,
    EngineStats,
    Event,
    Failed,
    Forget,
    PauseMode,
    PauseState,
    StatsReply,
    StatsRequest,
    WorkerCall,
    WorkerMessage,
    WorkerState,
)
from weightsync.serve.options import Addresses, CoreAddress, Ready, ServeOptions, takes_images
from weightsync.serve.requests import RequestError
from weightsync.serve.scheduling import OwnedEvent, Owner, Scheduler
from weightsync.serve.worker_group import WorkerGroup
from weightsync.wire.problem import encode_error

if TYPE_CHECKING:
    from weightsync.queues.tensor_queue import TensorIpcReceiver


PAUSE_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class _Late:
    owner: Owner
    request: EngineRequest
    since: float


PauseDone = Callable[[WeightSyncError | None], None]


class PauseController:
    """Stops generation between `pause` and `resume`.

    Mode `keep` starts no more steps; requests continue at `resume`. Mode `wait` lets requests in
    flight finish. Mode `abort` ends them with the tokens that they have. Requests that arrive
    during a pause wait in every mode, for at most `timeout_s`.
    """

    def __init__(
        self,
        *,
        timeout_s: float = PAUSE_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.mode: PauseMode | None = None
        self._timeout_s = timeout_s
        self._clock = clock
        self._late: list[_Late] = []
        self._drained: list[tuple[float, PauseDone]] = []

    @property
    def may_step(self) -> bool:
        """Whether requests in flight continue."""
        return self.mode != "keep"

    @property
    def late(self) -> int:
        """The number of requests that arrived during the pause."""
        return len(self._late)

    def pause(self, mode: PauseMode, answer: PauseDone) -> None:
        """Start a pause, or change its mode. `answer` is called when the pause is in effect.

        `keep` is in effect at once, and so are earlier pauses that wait for requests to finish: no
        request finishes any more.
        """
        self.mode = mode
        if mode == "keep":
            self._answer_all()
            answer(None)
        else:
            self._drained.append((self._clock() + self._timeout_s, answer))

    def resume(self, in_flight: int = 1) -> list[tuple[Owner, EngineRequest]]:
        """End the pause, if there is one; return the requests that arrived during it.

        Pauses that still wait for requests to finish get a NotReadyError, unless none is
        `in_flight`: then they have what they wait for.
        """
        self.mode = None
        if not in_flight:
            self._answer_all()
        self._answer_all(
            NotReadyError("generation was resumed before all requests had ended", state="READY")
        )
        late, self._late = self._late, []
        return [(waiting.owner, waiting.request) for waiting in late]

    def postpone(self, owner: Owner, request: EngineRequest) -> None:
        """Keep a request that arrived during a pause."""
        self._late.append(_Late(owner, request, self._clock()))

    def cancel(self, owner: Owner, request_id: str) -> None:
        """Drop a request that waits for the end of the pause."""
        self._late = [
            w for w in self._late if (w.owner, w.request.request_id) != (owner, request_id)
        ]

    def settle(self, in_flight: int) -> list[tuple[Owner, EngineRequest]]:
        """Answer pauses when no request is in flight; return the requests that waited too long."""
        if not in_flight:
            self._answer_all()
        now = self._clock()
        for deadline, answer in self._drained:
            if now > deadline:
                answer(
                    TransferTimeout(
                        f"{in_flight} requests did not end within {self._timeout_s:g} s; "
                        "generation stays paused, pause with mode abort or resume"
                    )
                )
        self._drained = [
            (deadline, answer) for deadline, answer in self._drained if now <= deadline
        ]
        overdue = [w for w in self._late if now - w.since > self._timeout_s]
        self._late = [w for w in self._late if now - w.since <= self._timeout_s]
        return [(waiting.owner, waiting.request) for waiting in overdue]

    def overdue_error(self) -> NotReadyError:
        """Return the error of requests that waited too long."""
        return NotReadyError(
            f"generation has been paused for over {self._timeout_s:g} s; call resume",
            state="PAUSED",
        )

    def _answer_all(self, error: NotReadyError | None = None) -> None:
        drained, self._drained = self._drained, []
        for _, answer in drained:
            answer(error)


SPLIT_S = 10.0
"""How long workers may have different weights before waiting requests fail."""
HELD_S = 900.0
"""How long a worker may hold generation before waiting requests fail; longer than any lease."""


class ReplicaReadiness:
    """Whether a replica may make a step, from the last state of each worker. Pure but for `clock`.

    A worker holds generation before it changes its weights, and releases the hold when the new
    weights are in use. Weights are compared by version and id, because a rewind may bring other
    weights of the same version.
    """

    def __init__(self, size: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._states = dict.fromkeys(range(size), WorkerState(version=0))
        self._holds: dict[int, float] = {}
        self._clock = clock
        self._stopped_at: float | None = None
        self._stopped_with = self._weights
        self._split_at: float | None = None
        self.last_stall_s = 0.0
        """How long the last change of weights stopped generation."""

    @property
    def versions(self) -> list[int]:
        """The weight version of each worker."""
        return [state.version for state in self._states.values()]

    @property
    def draft_versions(self) -> list[int]:
        """The versions of the workers' draft models."""
        found = (state.draft_version for state in self._states.values())
        return [version for version in found if version is not None]

    @property
    def may_step(self) -> bool:
        """Whether a step may begin now."""
        whole = not self._holds and len(self._weights) == 1
        return whole and not any(state.why_not for state in self._states.values())

    @property
    def _weights(self) -> set[tuple[int, str]]:
        return {(state.version, state.weights_id) for state in self._states.values()}

    def hold(self, worker: int) -> None:
        """Note that a worker is about to change its weights."""
        self._holds.setdefault(worker, self._clock())
        self._update_stall()

    def note_state(self, worker: int, state: WorkerState) -> None:
        """Note the state that a worker reports."""
        self._states[worker] = state
        if state.released:
            self._holds.pop(worker, None)
        self._update_stall()

    def refusal(self) -> NotReadyError | None:
        """Return the error of requests that should not wait, because no update is in progress.

        None when a step may begin now or soon.
        """
        if self.may_step:
            return None
        if self._holds:
            return self._held_too_long()
        for worker, state in self._states.items():
            if state.why_not:
                return NotReadyError(f"worker {worker}: {state.why_not}", state=state.state)
        if self._split_at is None or self._clock() - self._split_at < SPLIT_S:
            return None
        held = ", ".join(
            f"worker {w} {s.version} of update {s.weights_id or 'none'}"
            for w, s in self._states.items()
        )
        return NotReadyError(
            f"the workers of this replica hold different weights ({held}): an update ended half "
            "way; a full update heals this: call send_weights() again",
            state="TORN",
        )

    def _held_too_long(self) -> NotReadyError | None:
        worker, since = min(self._holds.items(), key=lambda hold: hold[1])
        held_s = self._clock() - since
        if held_s < HELD_S:
            return None
        return NotReadyError(
            f"worker {worker} has held generation for {held_s:.0f} s; see its weight_info",
            state="UPDATING",
        )

    def _update_stall(self) -> None:
        now = self._clock()
        split = not self._holds and len(self._weights) > 1
        self._split_at = (self._split_at or now) if split else None
        if self.may_step:
            if self._stopped_at is not None and self._weights != self._stopped_with:
                self.last_stall_s = now - self._stopped_at
            self._stopped_at, self._stopped_with = None, self._weights
        elif self._stopped_at is None:
            self._stopped_at = now


logger = logging.getLogger(__name__)

IDLE_MS = 50
RATE_WINDOW_S = 5.0


class EngineCore:
    """Runs one replica until `stop`.

    `clients` is the bound ROUTER socket of the API servers. `tensors` receives the tensors
    that requests send out of band. Only the thread of `run` may call the methods, except `stop`.
    """

    def __init__(
        self,
        clients: zmq.Socket[bytes],
        workers: WorkerGroup,
        *,
        tensors: TensorIpcReceiver | None = None,
        scheduler: Scheduler | None = None,
        adapters: AdapterLeases | None = None,
    ) -> None:
        self._clients = clients
        self._workers = workers
        self._tensors = tensors
        self._decoder: TensorDecoder[ClientMessage] = TensorDecoder(
            cast(Any, ClientMessage), tensors
        )
        self._scheduler = scheduler or Scheduler(workers.card)
        self._readiness = ReplicaReadiness(workers.size)
        self._adapters = adapters or AdapterLeases(workers.size, base=workers.card.name)
        self._pauses = PauseController()
        self._rate = _Rate()
        self._tokens_total = self._steps_total = self._requests_total = 0
        self._proposed_total = self._accepted_total = 0
        self._stopping = False
        self._deferred: list[Callable[[], None]] | None = None
        self._poller = zmq.Poller()
        self._poller.register(clients, zmq.POLLIN)
        self._poller.register(workers.socket, zmq.POLLIN)

    def stop(self) -> None:
        """Make `run` return after the current step. Safe in a signal handler."""
        self._stopping = True

    def run(self) -> None:
        """Serve until `stop`. Raises PeerLostError, which names a worker that died."""
        while not self._stopping:
            self._handle_messages(0 if self._has_work() else IDLE_MS)
            self._settle()
            if self._has_work():
                self._make_step()

    def _has_work(self) -> bool:
        ready = self._pauses.may_step and self._readiness.may_step
        return ready and self._scheduler.has_work

    def _make_step(self) -> None:
        step = self._scheduler.next_step()
        if step is None:
            return
        self._deferred = []
        try:
            result = self._workers.make(step, self._meanwhile)
        except _Stopped:
            return
        finally:
            deferred, self._deferred = self._deferred, None
        for answer in deferred:
            answer()
        self._steps_total += 1
        self._tokens_total += len(result.sampled)
        self._proposed_total += result.proposed
        self._accepted_total += result.accepted
        self._rate.count(len(result.sampled))
        self._post(self._scheduler.done(result))

    def _meanwhile(self) -> None:
        """Serve messages while a step takes long. Called by the worker group."""
        if self._stopping:
            raise _Stopped
        self._handle_messages(0)

    def _answer(self, worker: int, done: Done) -> None:
        """Reply to a worker, after the current step: some calls wait for the end of a step."""
        if self._deferred is None:
            self._workers.send(worker, done)
        else:
            self._deferred.append(lambda: self._workers.send(worker, done))

    def _settle(self) -> None:
        """Fail requests that cannot continue, and answer pauses that are in effect."""
        refusal = self._readiness.refusal()
        if refusal is not None:
            self._post(self._scheduler.fail_all(refusal))
        for owner, request in self._pauses.settle(self._scheduler.num_requests):
            self._fail(owner, request.request_id, self._pauses.overdue_error())
        gone = self._adapters.unneeded(self._scheduler.adapters_in_use)
        if gone:
            self._scheduler.clear_cache(gone)
            self._workers.send_to_all(Forget(keys=gone))

    def _handle_messages(self, timeout_ms: int) -> None:
        """Handle messages of API servers and workers; wait at most `timeout_ms` for the first."""
        ready = dict(self._poller.poll(timeout_ms))
        if self._workers.socket in ready:
            for worker, message in self._workers.messages():
                self._handle_worker(worker, message)
        if self._clients in ready:
            for owner, frames in _all_messages(self._clients):
                self._handle_order(owner, frames)

    def _handle_order(self, owner: Owner, frames: list[Any]) -> None:
        request_id = ""
        try:
            request_id = bytes(frames[0].buffer).decode("utf-8", "replace")
            message = self._decoder.decode([frame.buffer for frame in frames[1:]])
        except Exception as exc:  # noqa: BLE001 - a bad message must not end the core
            logger.warning("request %s of %r cannot be read: %s", request_id, owner, exc)
            self._fail(owner, request_id, exc)
            return
        if isinstance(message, EngineRequest):
            self._requests_total += 1
            self._submit(owner, message)
        elif isinstance(message, Cancel):
            if message.index is None:
                self._pauses.cancel(owner, message.request_id)
                if self._tensors is not None:
                    self._tensors.cleanup_request_tensors(message.request_id)
            self._post(self._scheduler.cancel(owner, message.request_id, message.index))
        elif isinstance(message, StatsRequest):
            self._post([(owner, StatsReply(call=message.call, stats=self.stats()))])

    def _submit(self, owner: Owner, request: EngineRequest) -> None:
        try:
            self._scheduler.check(request, ahead=self._pauses.late)
            if request.adapter is not None:
                found = self._adapters.find(request.adapter, request.adapter_version)
                accepted = replace(request, adapter_version=found.version, adapter_key=found.key)
            else:
                accepted = request
            if self._pauses.mode is not None:
                self._pauses.postpone(owner, request)
                return
            refusal = self._readiness.refusal()
            if refusal is not None:
                raise refusal
            self._scheduler.submit(owner, accepted)
        except WeightSyncError as exc:
            self._fail(owner, request.request_id, exc)

    def _handle_worker(self, worker: int, message: WorkerMessage) -> None:
        if isinstance(message, WorkerState):
            self._readiness.note_state(worker, message)
            self._adapters.note(worker, message.adapters)
            return
        assert isinstance(message, WorkerCall), "a worker registers before the core runs"
        if message.action == "pause":
            self._pause(worker, message)
            return
        if message.action == "hold":
            self._readiness.hold(worker)
        elif message.action == "clear_cache":
            self._scheduler.clear_cache()
        else:
            for owner, request in self._pauses.resume(self._scheduler.num_requests):
                self._submit(owner, request)
            self._workers.send_to_all(PauseState(paused=False))
        self._answer(worker, Done(call=message.call))

    def _pause(self, worker: int, message: WorkerCall) -> None:
        def answer(error: WeightSyncError | None) -> None:
            problem = encode_error(error) if error else None
            self._answer(worker, Done(call=message.call, problem=problem))

        # To this worker alone: each is asked by itself, and one that took the pause of another's
        # sleep for its users' would leave it when it has gone to sleep.
        self._workers.send(worker, PauseState(paused=True))
        self._pauses.pause(message.mode, answer)
        if message.mode == "abort":
            self._post(self._scheduler.abort_all())

    def _fail(self, owner: Owner, request_id: str, error: Exception) -> None:
        failed = Failed(
            request_id=request_id,
            problem=encode_error(error),
            unknown_model=isinstance(error, RequestError),
        )
        self._post([(owner, failed)])

    def _post(self, posts: Iterable[OwnedEvent]) -> None:
        """Send each API server its events in one message."""
        parts: dict[Owner, list[Event]] = {}
        for owner, event in posts:
            parts.setdefault(owner, []).append(event)
        for owner, events in parts.items():
            # ZeroMQ drops messages to an API server that died; the supervisor ends the others.
            self._clients.send_multipart([owner, msgspec.msgpack.encode(events)])

    def stats(self) -> EngineStats:
        """Return the statistics of this replica."""
        refusal = self._readiness.refusal()
        return EngineStats(
            running=self._scheduler.running,
            waiting=self._scheduler.waiting + self._pauses.late,
            paused=self._pauses.mode,
            tokens_total=self._tokens_total,
            steps_total=self._steps_total,
            requests_total=self._requests_total,
            tokens_per_s=self._rate.per_s(),
            kept_prompts=self._scheduler.kept_prompts,
            versions=self._readiness.versions,
            stall_s=self._readiness.last_stall_s,
            why_not=str(refusal) if isinstance(refusal, NotReadyError) else "",
            adapters=self._adapters.served,
            draft_versions=self._readiness.draft_versions,
            proposed_total=self._proposed_total,
            accepted_total=self._accepted_total,
        )


class _Stopped(Exception):
    """`stop` was called during a step."""


class _Rate:
    """Tokens per second over the last RATE_WINDOW_S."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: deque[tuple[float, int]] = deque()

    def count(self, tokens: int) -> None:
        self._counts.append((self._clock(), tokens))
        self._trim()

    def per_s(self) -> float:
        self._trim()
        return sum(tokens for _, tokens in self._counts) / RATE_WINDOW_S

    def _trim(self) -> None:
        oldest = self._clock() - RATE_WINDOW_S
        while self._counts and self._counts[0][0] < oldest:
            self._counts.popleft()


def _all_messages(socket: zmq.Socket[bytes]) -> Iterable[tuple[Owner, list[zmq.Frame]]]:
    """Yield the messages that have arrived."""
    while True:
        try:
            owner, *frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return
        yield bytes(owner.buffer), frames


GATHER_TIMEOUT_S = 600.0


def main(ready: Ready, options: ServeOptions, addresses: Addresses, replica: int) -> None:
    """Run an engine core until SIGTERM. Calls `ready` with the encoded CoreAddress."""
    address = addresses.cores[replica]
    with _sockets(address, addresses.core_workers[replica]) as (clients, own):
        workers = WorkerGroup.gather(own, options.tensor_parallel, timeout_s=GATHER_TIMEOUT_S)
        tensors = _tensor_queue(options) if takes_images(workers.card) else None
        try:
            scheduler = Scheduler(workers.card, max_rows=options.max_rows)
            adapters = AdapterLeases(
                workers.size, kept=options.adapter_versions, base=workers.card.name
            )
            core = EngineCore(
                clients, workers, tensors=tensors, scheduler=scheduler, adapters=adapters
            )

            def on_term(_signal: int, _frame: FrameType | None) -> None:
                core.stop()

            signal.signal(signal.SIGTERM, on_term)
            handle = tensors.handle if tensors else None
            ready(msgspec.msgpack.encode(CoreAddress(socket=address, tensors=handle)))
            core.run()
        finally:
            if tensors is not None:
                tensors.close()
            workers.close()


def _tensor_queue(options: ServeOptions) -> TensorIpcReceiver | None:
    # It loads torch, which the core of a text-only model does not need.
    from weightsync.queues.tensor_queue import TensorIpcReceiver  # noqa: PLC0415 - see above

    return TensorIpcReceiver() if options.tensor_ipc == "torch_shm" else None


@contextmanager
def _sockets(*addresses: str) -> Iterator[list[zmq.Socket[bytes]]]:
    context = zmq.Context()
    try:
        sockets = []
        for address in addresses:
            socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
            socket.setsockopt(zmq.LINGER, 200)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.bind(address)
            sockets.append(socket)
        yield sockets
    finally:
        context.destroy(linger=200)
