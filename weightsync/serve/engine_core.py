"""The engine core of one replica: takes jobs, has its workers make steps, hands out tokens."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import msgspec
import zmq

from weightsync.errors import NotReadyError, ProtocolError, WeightSyncError
from weightsync.queues.tensor_codec import TensorDecoder
from weightsync.serve.engine_messages import (
    Answer,
    Ask,
    Cancel,
    EngineStats,
    Event,
    Failed,
    Job,
    Order,
)
from weightsync.serve.pauses import PauseController
from weightsync.serve.scheduling import Owner, Post, Scheduler
from weightsync.serve.standings import ReplicaReadiness
from weightsync.serve.steps import ModelCard
from weightsync.serve.worker_crew import WorkerGroup
from weightsync.serve.worker_messages import (
    ClearCacheCall,
    Done,
    Hello,
    Hold,
    Notice,
    PauseCall,
    PauseState,
    ResumeCall,
    WorkerState,
)
from weightsync.wire.problem import encode_problem, to_problem

if TYPE_CHECKING:
    from weightsync.queues.tensor_queue import TensorIpcReceiver

logger = logging.getLogger(__name__)

IDLE_MS = 50
RATE_WINDOW_S = 5.0


class EngineCore:
    """Runs one replica until `stop`. `orders` is the bound ROUTER that API servers talk to.

    `crew` are the workers, ready to make steps. `tensors` receives what jobs send out of band.
    Every method but `stop` belongs to the thread of `run`.
    """

    def __init__(
        self,
        orders: zmq.Socket[bytes],
        crew: WorkerGroup,
        *,
        tensors: TensorIpcReceiver | None = None,
        scheduler: Scheduler | None = None,
    ) -> None:
        self._orders = orders
        self._crew = crew
        self._tensors = tensors
        self._decoder: TensorDecoder[Order] = TensorDecoder(cast(Any, Order), tensors)
        self._scheduler = scheduler or Scheduler(crew.card)
        self._standings = ReplicaReadiness(crew.size)
        self._pauses = PauseController()
        self._rate = _Rate()
        self._tokens_total = self._steps_total = self._requests_total = 0
        self._stopping = False
        self._deferred: list[Callable[[], None]] | None = None
        self._poller = zmq.Poller()
        self._poller.register(orders, zmq.POLLIN)
        self._poller.register(crew.socket, zmq.POLLIN)
        for rank, version in enumerate(crew.versions):
            self._standings.heard(rank, WorkerState(version=version))

    @property
    def card(self) -> ModelCard:
        """The model that the workers run."""
        return self._crew.card

    def stop(self) -> None:
        """Have `run` return after the step at work. Safe in a signal handler."""
        self._stopping = True

    def run(self) -> None:
        """Serve until `stop`. Raises PeerLostError naming a worker that died."""
        while not self._stopping:
            self._hear(0 if self._has_work() else IDLE_MS)
            self._settle()
            if self._has_work():
                self._make_step()

    def _has_work(self) -> bool:
        ready = self._pauses.may_step and self._standings.may_step
        return ready and self._scheduler.has_work

    def _make_step(self) -> None:
        step = self._scheduler.next_step()
        if step is None:
            return
        self._deferred = []
        try:
            result = self._crew.make(step, self._meanwhile)
        except _Stopped:
            return
        finally:
            deferred, self._deferred = self._deferred, None
        for answer in deferred:
            answer()
        self._steps_total += 1
        self._tokens_total += len(result.chosen)
        self._rate.count(len(result.chosen))
        self._post(self._scheduler.done(result))

    def _meanwhile(self) -> None:
        """A step takes long: serve what does not need it to be over."""
        if self._stopping:
            raise _Stopped
        self._hear(0)

    def _answer(self, worker: int, done: Done) -> None:
        """Answer a worker; once no step is at work, which is what some of them wait for."""
        if self._deferred is None:
            self._crew.answer(worker, done)
        else:
            self._deferred.append(lambda: self._crew.answer(worker, done))

    def _settle(self) -> None:
        """Tell requesters what cannot go on, and pauses what is over."""
        refusal = self._standings.refusal()
        if refusal is not None:
            self._post(self._scheduler.fail_all(refusal))
        for owner, job in self._pauses.look(self._scheduler.requests):
            self._fail(owner, job.request_id, self._pauses.too_long())

    def _hear(self, timeout_ms: int) -> None:
        """Take in what API servers and workers say; waits for something to come."""
        ready = dict(self._poller.poll(timeout_ms))
        if self._crew.socket in ready:
            for worker, notice in self._crew.notices():
                self._noticed(worker, notice)
        if self._orders in ready:
            for owner, frames in _all_messages(self._orders):
                self._ordered(owner, frames)

    def _ordered(self, owner: Owner, frames: list[Any]) -> None:
        request_id = ""
        try:
            request_id = bytes(frames[0].buffer).decode("utf-8", "replace")
            order = self._decoder.decode([frame.buffer for frame in frames[1:]])
        except Exception as exc:  # noqa: BLE001 - one bad message is its sender's alone
            logger.warning("request %s of %r cannot be read: %s", request_id, owner, exc)
            self._fail(owner, request_id, exc)
            return
        if isinstance(order, Job):
            self._requests_total += 1
            self._submit(owner, order)
        elif isinstance(order, Cancel):
            if order.index is None:
                self._pauses.cancel(owner, order.request_id)
                if self._tensors is not None:
                    self._tensors.cleanup_request_tensors(order.request_id)
            self._post(self._scheduler.cancel(owner, order.request_id, order.index))
        elif isinstance(order, Ask):
            self._post([(owner, Answer(call=order.call, stats=self.stats()))])

    def _submit(self, owner: Owner, job: Job) -> None:
        try:
            self._scheduler.check(job, ahead=self._pauses.late)
            if self._pauses.mode is not None:
                self._pauses.postpone(owner, job)
                return
            refusal = self._standings.refusal()
            if refusal is not None:
                raise refusal
            self._scheduler.submit(owner, job)
        except WeightSyncError as exc:
            self._fail(owner, job.request_id, exc)

    def _noticed(self, worker: int, notice: Notice) -> None:
        if isinstance(notice, Hold):
            self._standings.hold(worker)
            self._answer(worker, Done(call=notice.call))
        elif isinstance(notice, WorkerState):
            self._standings.heard(worker, notice)
        elif isinstance(notice, ClearCacheCall):
            self._scheduler.clear_cache()
            self._answer(worker, Done(call=notice.call))
        elif isinstance(notice, PauseCall):
            self._pause(worker, notice)
        elif isinstance(notice, ResumeCall):
            for owner, job in self._pauses.resume():
                self._submit(owner, job)
            self._crew.tell_all(PauseState(paused=False))
            self._answer(worker, Done(call=notice.call))
        elif isinstance(notice, Hello):
            raise ProtocolError(f"worker {worker} says hello again; was it started twice?")

    def _pause(self, worker: int, notice: PauseCall) -> None:
        def answer(error: WeightSyncError | None) -> None:
            problem = encode_problem(to_problem(error)) if error else None
            self._answer(worker, Done(call=notice.call, problem=problem))

        self._pauses.pause(notice.mode, answer)
        self._crew.tell_all(PauseState(paused=True))
        if notice.mode == "abort":
            self._post(self._scheduler.abort_all())

    def _fail(self, owner: Owner, request_id: str, error: Exception) -> None:
        problem = encode_problem(to_problem(error))
        self._post([(owner, Failed(request_id=request_id, problem=problem))])

    def _post(self, posts: Iterable[Post]) -> None:
        """Send every API server its part in one message."""
        parts: dict[Owner, list[Event]] = {}
        for owner, event in posts:
            parts.setdefault(owner, []).append(event)
        for owner, events in parts.items():
            # An API server that died is not there any more; the supervisor ends the rest.
            self._orders.send_multipart([owner, msgspec.msgpack.encode(events)])

    def stats(self) -> EngineStats:
        """How it is going."""
        refusal = self._standings.refusal()
        return EngineStats(
            running=self._scheduler.running,
            waiting=self._scheduler.waiting + self._pauses.late,
            paused=self._pauses.mode,
            tokens_total=self._tokens_total,
            steps_total=self._steps_total,
            requests_total=self._requests_total,
            tokens_per_s=self._rate.per_s(),
            kept_prompts=self._scheduler.kept_prompts,
            versions=self._standings.versions,
            stall_s=self._standings.last_stall_s,
            why_not=str(refusal) if isinstance(refusal, NotReadyError) else "",
        )


class _Stopped(Exception):  # no error: `stop` was called while a step was at work
    pass


class _Rate:
    """Tokens a second over the last few seconds."""

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
    """Yield what has arrived by now."""
    while True:
        try:
            owner, *frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return
        yield bytes(owner.buffer), frames
