"""One update as its sender lives it: bytes on one side, messages on the other, all or nothing."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from concurrent.futures import Future, wait

from weightsync.backends.ipc_sender import IpcOptions, IpcTrainerEngine
from weightsync.errors import (
    TransferError,
    TransportError,
    VerificationError,
    WeightSyncError,
)
from weightsync.report import ReceiverReport, SyncReport
from weightsync.samehost.heartbeat import beating
from weightsync.samehost.ring import PATIENCE
from weightsync.sending.fleet import Answer, Fleet, Member, failures, raise_first
from weightsync.weights.source import NamedTensors
from weightsync.wire.messages import (
    AbortRequest,
    FinishRequest,
    PrepareRequest,
    StartRequest,
    StartTerms,
    StepReply,
    UpdateRequest,
)

logger = logging.getLogger(__name__)

_FINISH_TRIES = 3
_LOOK_S = 0.5
_ABORT_TIMEOUT_S = 30.0
_STRENGTH = ("none", "arrived", "held")


class Update:
    """A transaction over the fleet. Made by the sender; `send` adds tensors to it.

    Only when every staged receiver is PREPARED does any finish. Receivers that load in place have
    no version to return to: once one of them is PREPARED, all that are PREPARED finish, and the
    error names those that are not.
    """

    def __init__(
        self,
        fleet: Fleet,
        engine: IpcTrainerEngine,
        options: IpcOptions,
        *,
        verify: bool,
        stop: threading.Event | None = None,
    ) -> None:
        self.update_id = secrets.token_hex(8)
        self.rule = "two-phase"
        self.last_report: SyncReport | None = None
        self._fleet = fleet
        self._engine = engine
        self._timeout_s = options.timeout_s
        self._verify = verify
        self._stop_asked = stop or threading.Event()
        self._finishing = False
        self._started = time.perf_counter()
        self._before = (fleet.sent_nbytes, fleet.sent_messages)
        self._seconds: dict[str, float] = {}
        self._replies: dict[str, StepReply] = {}
        self._digest: str | None = None
        self._packed = False
        self._largest = 0

    def send_whole(self, terms: StartTerms) -> None:
        """The steady update, two messages a receiver: start, load, prepare in one, then finish."""
        try:
            self._transfer(terms=terms, prepare=True)
            self._digest = self._engine.table_digest
            self.finish()
        except BaseException as exc:
            self.abort(f"the sender gave up: {type(exc).__name__}")
            raise

    def start(self, terms: StartTerms) -> None:
        """Open the update on every receiver."""
        request = StartRequest(
            update_id=self.update_id,
            version=terms.version,
            label=terms.label,
            base_version=terms.base_version,
            partial=terms.partial,
            rewind=terms.rewind,
            manifest_digest=terms.manifest_digest,
        )
        answers = self._fleet.ask(request, timeout_s=self._timeout_s)
        if failures(answers):
            self.abort("a receiver refused to start")
        raise_first(answers, "start")

    def send(self, named_tensors: NamedTensors) -> None:
        """Send these tensors to every receiver; returns when all have taken them."""
        self._transfer(pairs=named_tensors)

    def prepare(self) -> None:
        """Have every receiver check that it has everything."""
        answers = self._fleet.ask(
            PrepareRequest(update_id=self.update_id), timeout_s=self._timeout_s
        )
        self._note(answers)
        self._raise_unless_all(answers, "prepare")

    def finish(self) -> None:
        """Put the weights to use everywhere. A receiver out of reach is asked again next time."""
        started = time.perf_counter()
        self._check_verified()
        self._finishing = True
        for member in self._fleet.members:
            member.unfinished = self.update_id
        request = FinishRequest(update_id=self.update_id, table_digest=self._digest)
        answers = self._fleet.ask(request, timeout_s=self._timeout_s)
        for _ in range(_FINISH_TRIES - 1):
            again = [a.member for a in answers if isinstance(a.error, TransportError)]
            if not again:
                break
            answers = [a for a in answers if a.member not in again]
            answers += self._fleet.ask(request, timeout_s=self._timeout_s, members=again)
        for answer in answers:
            if not isinstance(answer.error, TransportError):
                answer.member.unfinished = None
        self._note(answers)
        self._seconds["finish"] = time.perf_counter() - started
        raise_first(answers, "finish")

    def abort(self, reason: str) -> None:
        """Have every receiver forget the update; not once any was told to finish it."""
        if self._finishing:
            return
        request = AbortRequest(update_id=self.update_id, reason=reason)
        answers = self._fleet.ask(request, timeout_s=min(_ABORT_TIMEOUT_S, self._timeout_s))
        for answer in failures(answers):
            logger.warning("abort at %s: %s", answer.member.target, answer.error)
            if isinstance(answer.error, TransportError):
                answer.member.unaborted = self.update_id

    def report(self, version: int, label: str | None, skipped_roads: dict[str, str]) -> SyncReport:
        """Say what this update did."""
        seconds = {**self._seconds, "total": time.perf_counter() - self._started}
        receivers = tuple(self._receiver(target, r) for target, r in self._replies.items())
        nbytes, messages = self._before
        weakest = min((r.verified for r in receivers), key=_STRENGTH.index, default="none")
        return SyncReport(
            version=version,
            label=label,
            update_id=self.update_id,
            tensors=len(self._engine.manifest.specs),
            nbytes=max((r.nbytes for r in self._replies.values()), default=0),
            packed=self._packed,
            road=self._engine.road,
            apply="in_place" if any(r.apply == "in_place" for r in receivers) else "staged",
            verified=weakest,
            stall_s=max((r.stall_s for r in receivers), default=0.0),
            seconds=seconds,
            control_nbytes=self._fleet.sent_nbytes - nbytes,
            control_messages=self._fleet.sent_messages - messages,
            peak_extra_nbytes=self._engine.extra_nbytes,
            receivers=receivers,
            skipped_roads=skipped_roads,
            rule=self.rule,
        )

    def _transfer(
        self,
        *,
        terms: StartTerms | None = None,
        prepare: bool = False,
        pairs: NamedTensors | None = None,
    ) -> None:
        """Send one message to all, and the bytes that belong to it while they read."""
        started = time.perf_counter()
        engine = self._engine
        readers = [member.reader for member in self._fleet.members]
        info = engine.begin(readers, verify=self._verify, pairs=pairs)
        self._packed = info.packed
        request = UpdateRequest(
            update_id=self.update_id, start=terms, update_info=info, prepare=prepare
        )
        begun = self._fleet.begin(request, timeout_s=self._patience)
        try:
            with beating(engine.beat):
                engine.transfer(lambda: self._raise_early(begun))
                self._seconds["transfer"] = time.perf_counter() - started
                while wait(begun, timeout=_LOOK_S).not_done:
                    self._raise_if_cancelled()
        except BaseException:
            self._stop(begun)
            raise
        finally:
            engine.end()
        answers = [future.result() for future in begun]
        self._note(answers)
        self._seconds["load"] = time.perf_counter() - started
        self._raise_unless_all(answers, "update_weights")

    @property
    def _patience(self) -> float:
        """A call outlasts the receiver's own limits, so that its reason is what is seen."""
        return self._timeout_s * (PATIENCE + 1) + 10

    def _stop(self, begun: list[Future[Answer]]) -> None:
        """The bytes stopped: tell the readers, and wait until none of them reads any more."""
        self.abort("the sender stopped in the middle")
        for future in begun:
            error = future.result().error
            if error is not None:
                logger.debug("after the stop: %s", error)

    def _raise_unless_all(self, answers: list[Answer], doing: str) -> None:
        """One refusal aborts all, unless a receiver in place has nothing to return to."""
        failed = failures(answers)
        if not failed:
            return
        forward = [a.member for a in answers if a.error is None and a.step.apply == "in_place"]
        if forward:
            self._roll_forward([a.member for a in answers if a.error is None])
        raise_first(answers, doing)

    def _roll_forward(self, members: list[Member]) -> None:
        self.rule = "roll-forward"
        request = FinishRequest(update_id=self.update_id, table_digest=self._engine.table_digest)
        answers = self._fleet.ask(request, timeout_s=self._timeout_s, members=members)
        names = ", ".join(member.target for member in members)
        logger.warning("update %s: rolled forward on %s", self.update_id, names)
        raise_first(answers, "roll forward")

    def _check_verified(self) -> None:
        """What was to be verified has been, by everyone."""
        if not self._verify:
            return
        unverified = [t for t, reply in self._replies.items() if reply.verified == "none"]
        if unverified and self._engine.manifest.nbytes:
            raise VerificationError(
                f"not verified by {', '.join(unverified)}: other tensors came into the update"
            )

    def _raise_if_cancelled(self) -> None:
        if self._stop_asked.is_set():
            raise TransferError("the update was cancelled by its caller")

    def _raise_early(self, begun: list[Future[Answer]]) -> None:
        """Stop when asked to; a receiver that has answered with an error ends the transfer too."""
        self._raise_if_cancelled()
        for future in begun:
            if future.done():
                error: WeightSyncError | None = future.result().error
                if error is not None:
                    raise error

    def _note(self, answers: list[Answer]) -> None:
        for answer in answers:
            if answer.error is None:
                self._replies[answer.member.target] = answer.step

    def _receiver(self, target: str, reply: StepReply) -> ReceiverReport:
        return ReceiverReport(
            target=target,
            road=self._engine.road,
            apply=reply.apply,
            verified=reply.verified,
            stall_s=reply.stall_s,
            seconds=reply.seconds,
            peak_extra_nbytes=reply.peak_extra_nbytes,
        )
