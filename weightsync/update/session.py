"""The state of one receiver, behind one lock, and the steps of an update."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial

from msgspec import structs

from weightsync.backends.base import LoadContext, Received
from weightsync.cuda.wait import wait_for
from weightsync.errors import (
    ConfigError,
    DeltaError,
    ProtocolError,
    TransferError,
    UpdateConflictError,
    VerificationError,
    text_of,
)
from weightsync.profiling import scope
from weightsync.runtime.interpreter_exit import TorchCalls
from weightsync.specs import Manifest
from weightsync.update.gate import OnCommit, OnHold, OnRelease, ReadWriteGate
from weightsync.update.history import UpdateTable
from weightsync.update.incoming import Base, IncomingUpdate, LoadTargets
from weightsync.update.lifecycle import (
    ApplyChoice,
    State,
    Terms,
    UpdateLifecycle,
    new_update_id,
)
from weightsync.update.senders import FleetClaims, Senders
from weightsync.update.sets import SetCommits, parts_of
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.copying.rank_streams import describe_wants
from weightsync.weights.lines.memory import warm_up
from weightsync.weights.sinks.base import LoadTarget, WeightSink, check_manifest, users_code
from weightsync.wire.codec import castable
from weightsync.wire.messages import (
    AbortRequest,
    DeltaTerms,
    EmptyUpdate,
    FinishRequest,
    FleetRecord,
    ForeignUpdate,
    OpenUpdate,
    PrepareRequest,
    RegisteredUpdate,
    StartRequest,
    StartTerms,
    StepReply,
    UpdateInfo,
    UpdateRequest,
)
from weightsync.wire.offers import InitInfo, WantsInfo, describe

logger = logging.getLogger(__name__)

Undo = Callable[[], None] | None
"""Puts the former weights of a load target back after its commit; None: they are not kept."""

_CHECKS_PER_LEASE = 10
"""How often in the time of a lease the sender is checked for signs of life."""
_MAX_LEASES = 5
"""Leases without a message from a live sender, whose caller may compute between two messages."""
_REPLY_S = 0.005
"""Seconds in which the reply to `finish` leaves this process, before memory is prepared."""
_WATCH_S = 1.0
"""Seconds between two checks of a sender whose update blocks readers between its messages."""
_CLOSE_S = 10.0
"""The longest time that `close` waits for a running step, whose end closes the engines then."""


class ReceiverSession:
    """Owns the state of one receiver, and executes the messages of updates. Thread-safe.

    `lock` guards the lifecycle, the running step, the gate, the table of updates, the claims of
    senders and the lease. It is held for moments only. A *step* works without it: it loads or
    commits weights, opens or closes engines, calls hooks, waits for GPUs. One step runs at a time;
    the next one waits for at most `lease_s` seconds.

    An update without progress for `lease_s` seconds is aborted. Between two messages of a sender
    that gives signs of life, the limit is _MAX_LEASES times as long.
    """

    def __init__(  # noqa: PLR0913  # the hooks of WeightReceiver, each with a default
        self,
        sink: WeightSink,
        senders: Senders,
        *,
        apply: ApplyChoice,
        lease_s: float,
        version: int = 0,
        clear_cache: Callable[[], None] | None = None,
        on_commit: OnCommit | None = None,
        on_hold: OnHold | None = None,
        on_release: OnRelease | None = None,
        beside: ReceiverSession | None = None,
    ) -> None:
        self.lock: threading.RLock = threading.RLock() if beside is None else beside.lock
        self.sink = sink
        self.senders = senders
        self.lifecycle = UpdateLifecycle(version)
        self.load_targets = LoadTargets(sink, apply)
        self.table = UpdateTable(lease_s, self.lock)
        self.gate: ReadWriteGate = ReadWriteGate(
            self.lifecycle.check_readable,
            lock=self.lock,
            on_hold=on_hold,
            on_release=on_release,
            gpus=lambda: sink.gpus,
            beside=beside.gate if beside is not None and sink.swaps else None,
        )
        self._set: _ReceiverSet = _ReceiverSet() if beside is None else beside._set
        with self.lock:
            self._set.add(self)
        self._closed = False
        self._claims = FleetClaims(self.lifecycle, senders, lease_s)
        self._clear_cache = clear_cache
        self._on_commit = on_commit
        self._lease_s = lease_s
        self._incoming: IncomingUpdate | None = None
        self.starts = 0
        self._abort_reason = ""
        self._step_ended = threading.Condition(self.lock)
        self._step: str | None = None
        self._step_thread = 0
        self._closes_late = False
        self._calls = TorchCalls()
        self._timer = ProgressTimer(self._check_progress, self.lock)
        self._beat: int | None = None
        self._last_message_at = self._last_sign_at = 0.0
        with _fork:
            _sessions.add(self)

    @property
    def set_id(self) -> str:
        """The same for all receivers of a set; see Status."""
        return self._set.id

    @property
    def busy(self) -> bool:
        """Whether a step is running."""
        return self._step is not None

    @property
    def orphaned(self) -> bool:
        """Whether the sender of the open update is dead, or was refused when it reconnected."""
        sender = self._sender
        return sender is not None and not self.senders.alive(sender)

    @property
    def open_update(self) -> OpenUpdate | None:
        """The open update; None between updates."""
        with self.lock:
            incoming, terms = self._incoming, self.lifecycle.terms
            if incoming is None or terms is None:
                return None
            update = OpenUpdate(
                update_id=incoming.update_id,
                version=self.lifecycle.next_version,
                since=incoming.since,
                label=terms.label,
                partial=terms.partial,
            )
        return update  # noqa: RET504  # an interrupt at a `return` inside would leave the lock taken

    @property
    def _inside_step(self) -> bool:
        """Whether this thread runs the step: a hook calls its own receiver, which cannot wait."""
        return self._step is not None and self._step_thread == threading.get_ident()

    @property
    def _sender(self) -> str | None:
        """The sender of the open update."""
        incoming = self._incoming
        return incoming.sender if incoming is not None else None

    def _conflict(self, why: str) -> UpdateConflictError:
        return UpdateConflictError(
            why, state=self.lifecycle.state.value, update_id=self.lifecycle.update_id
        )

    # The weights in use

    @contextmanager
    def reading(self, timeout_s: float) -> Iterator[int]:
        """See WeightReceiver.reading."""
        if self.lifecycle.required_version:
            self.close_dead_senders()  # a receiver does not catch up with a dead sender's fleet
        with self.gate.reading(0.0 if self.gate.held and self._inside_step else timeout_s):
            yield self.lifecycle.version

    def discarded(self) -> None:
        """See WeightReceiver.discarded."""
        self.check_open()
        self._abort(None, "the weights in use were discarded")
        with self._in_step("discarded"), self.lock:
            self.lifecycle.discarded()
            self.load_targets.discarded()

    def fall_asleep(self, level: int, free: Callable[[], None]) -> None:
        """See WeightReceiver.sleep. `free` gives the memory back; readers are refused by then.

        An open update is aborted. Where `free` raises, weights of level 1 stay awake: it has given
        nothing back. Those of level 2 are discarded in any case. Raises UpdateConflictError where a
        step does not end, or another update came meanwhile, and TransferError where readers do not
        end; nothing has changed then.
        """
        self.check_open()
        self._abort(None, f"the receiver goes to sleep (level {level})")
        with self._in_step("sleep"):
            self.gate.hold(self._lease_s)
            try:
                with self.lock:
                    self.lifecycle.fell_asleep(level)  # before the memory is gone
                    if level > 1:
                        self.load_targets.discarded()
            finally:
                self.gate.release()
            try:
                free()
                self.load_targets.fall_asleep(level)
            except BaseException:
                if level == 1:
                    with self.lock:
                        self.lifecycle.woke_up(self.lifecycle.asleep)
                raise

    def wake_up(
        self, tags: Collection[str] | None, take: Callable[[Collection[str]], None]
    ) -> None:
        """See WeightReceiver.wake_up. `take` takes the memory for the tags that still sleep."""
        self.check_open()
        with self._in_step("wake_up"):
            asleep = self.lifecycle.asleep
            woken = [tag for tag in asleep if tags is None or tag in tags]
            if "weights" in asleep and woken and "weights" not in woken:
                self.lifecycle.check_awake(
                    f"to wake {', '.join(woken)} before the weights",
                    "wake the weights first, or both together",
                )
            if woken:
                take(woken)
                with self.lock:
                    self.lifecycle.woke_up(woken)

    def woke_up(self, tags: Collection[str] | None) -> None:
        """See WeightReceiver.show_awake."""
        with self._in_step("wake_up"), self.lock:
            self.lifecycle.woke_up(self.lifecycle.asleep if tags is None else tags)

    # Senders

    def init(self, info: InitInfo) -> None:
        """Open a sender's engine, check its manifest, and open the load target of a whole model.

        Raises SenderConflictError where the receiver belongs to another living sender, and the
        errors of the engine, the manifest check and the load target.
        """
        self.check_open()
        self._set.check_awake("a connection", "wake it, then connect: POST /wake_up?tags=weights")
        replaced = self.senders.replaces(info)
        if replaced is not None:
            # Its loader may wait for a sender that is stopped. The new owner recovers a PREPARED
            # update: other receivers may have committed it.
            why = f"{describe(replaced)} was replaced as the owner of this receiver"
            self._abort(None, why, only=State.UPDATING)
        with self._in_step("init"):
            self.check_open()  # it may have been closed meanwhile
            self._close_dead_senders()
            manifest = self.senders.open(info)
            self.sink.let_cast(castable(info.manifest))
            try:
                difference = self.sink.difference(manifest)
                if difference.unexpected or difference.mismatched or difference.cut:
                    difference.check(partial=False)
                if not difference.missing and self._incoming is None:
                    # The load targets of an open update must not move.
                    self._load_target(StreamLayout(manifest), info.sender, whole=True)
            except BaseException:
                self.senders.close(info.sender)
                raise
            if info.fleet_version is not None:
                with self.lock:
                    self._claims.joined(info.sender, info.fleet_version, generation=info.generation)

    def widened(self, sender: str) -> list[str] | None:
        """Return the names of a sender's tensors that are kept here in more digits, as a sink does.

        None where that is not known.
        """
        manifest = self.senders.manifest(sender)
        return self.sink.widened(manifest) if manifest is not None else None

    def casts(self, sender: str) -> dict[str, int]:
        """Return how many tensors of a sender are cast here; see WeightSink.counted_casts."""
        manifest = self.senders.manifest(sender)
        return {} if manifest is None else self.sink.counted_casts(manifest)

    def wants(self, sender: str) -> WantsInfo | None:
        """Return the boxes that are loaded of a sender's tensors; None for whole tensors."""
        manifest = self.senders.manifest(sender)
        boxes = self.sink.boxes(manifest) if manifest is not None else None
        return None if boxes is None else describe_wants(boxes)

    def whole(self, sender: str) -> dict[str, str]:
        """Return the tensors of a sender that are loaded whole and why, as a sink does."""
        manifest = self.senders.manifest(sender)
        return {} if manifest is None else dict(self.sink.whole(manifest))

    def shutdown(self, sender: str | None, *, leaves: bool = True) -> None:
        """Close the engine of a sender (None: of every sender).

        With `leaves` False the sender will init again, and its claim of a fleet version stays.
        Raises UpdateConflictError while an update of that sender is open.
        """
        with self._in_step("shutdown"):
            holder = self._incoming
            if holder is not None and sender in (None, holder.sender):
                raise self._conflict(f"update {holder.update_id} is open; finish or abort it first")
            self.senders.close(sender)
            with self.lock:
                self._claims.left(sender, for_good=leaves)

    def close_dead_senders(self) -> None:
        """Close the engines of dead senders, unless a step is running. Never waits."""
        if self.lifecycle.state is State.ABORTING:
            return  # the call that ends the update waits for its turn
        if self.lifecycle.required_version or self.senders.dead(keep=self._sender):
            with self._turn(0) as ours:
                if ours:
                    self._close_dead_senders()

    def _close_dead_senders(self) -> None:
        dead = self.senders.close_dead(keep=self._sender)
        with self.lock:
            self._claims.remove_dead(dead)

    # Messages of an update

    def start(self, request: StartRequest) -> StepReply:
        """READY becomes UPDATING."""
        self.check_open()
        update_id = request.update_id or new_update_id()
        anonymous = request.anonymous or request.update_id is None

        def start() -> StepReply:
            self._start(update_id, request, request.sender, anonymous=anonymous)
            return self._reply()

        return self._once(request.update_id, "start", start)

    def update(self, request: UpdateRequest) -> StepReply:
        """Load the tensors of one message. An error aborts the whole update."""
        info = request.update_info
        if isinstance(info, RegisteredUpdate):
            step = ("update", info.sender, info.epoch)
            return self._once(request.update_id, step, lambda: self._update(request, info.sender))
        return self._update(request, None)  # without an epoch a retry is executed again

    def _update(self, request: UpdateRequest, sender: str | None) -> StepReply:
        terms, update_id = request.start, request.update_id
        whole = update_id is None and terms is None and self._incoming is None
        if whole or terms is not None:
            update_id = update_id or new_update_id()
            anonymous = request.update_id is None
            self._start(update_id, terms or StartTerms(), sender, anonymous=anonymous)
        else:
            update_id = self._id_of(update_id, "update_weights")
        self._load(update_id, request.update_info)
        if whole or request.prepare:
            self._prepare(update_id)
        return self._finish(update_id, FinishRequest()) if whole else self._reply()

    def prepare(self, request: PrepareRequest) -> StepReply:
        """UPDATING becomes PREPARED, if the update is complete. Idempotent."""
        update_id = self._id_of(request.update_id, "prepare_weight_update")
        return self._once(request.update_id, "prepare", lambda: self._prepare(update_id))

    def finish(self, request: FinishRequest) -> StepReply:
        """PREPARED becomes READY: the new weights are in use when this returns. Idempotent."""
        update_id = self._id_of(request.update_id, "finish_weight_update")

        def finish() -> StepReply:
            if request.update_id is None:
                self._prepare(update_id)
            return self._finish(update_id, request)

        return self._once(request.update_id, "finish", finish)

    def announce_finish(self, request: FinishRequest) -> None:
        """Note the finish of a part of a set that this thread handles after that of another part.

        The other one, which would wait for it, commits both. Does nothing where the update is not
        open: it is committed already, or was given up.
        """
        with self.lock:
            incoming = self._incoming
            if incoming is not None and incoming.update_id == request.update_id:
                incoming.finish = request

    def abort(self, request: AbortRequest) -> StepReply:
        """Abort the update. Returns when the loader has stopped, or with ABORTING after `lease_s`.

        An update that is being committed is not aborted: the reply has its result.
        """
        update_id = request.update_id
        with self.lock:
            if update_id is None and self._incoming is not None:
                update_id = self._id_of(None, "abort_weight_update")
        return self._reply() if update_id is None else self._abort(update_id, request.reason)

    def _abort(
        self,
        update_id: str | None,
        reason: str,
        *,
        only: State | None = None,
        wait_s: float | None = None,
    ) -> StepReply:
        """Abort an update, None: the open one, whichever it is; with `only`, in that state only.

        Waits for its loader for `wait_s`, None: `lease_s`.
        """
        with self.lock:
            if only is not None and self.lifecycle.state is not only:
                return self._reply()
            incoming = self._incoming
            holder = incoming.update_id if incoming else ""
            if update_id is not None and update_id not in (holder, self.lifecycle.last_finished):
                self.table.aborted(update_id)
                self.table.forget(update_id)
            if incoming is None:
                return self._reply()
            if not (incoming.committing and update_id in (None, holder)):
                self._begin_abort(update_id or holder, reason or "its sender aborted it")
        return self._end_abort(incoming, self._lease_s if wait_s is None else wait_s)

    def _begin_abort(self, update_id: str, reason: str) -> None:
        self.lifecycle.begin_abort(update_id)
        self._abort_reason = reason

    def _end_abort(self, incoming: IncomingUpdate, wait_s: float) -> StepReply:
        """Wait for the loader of an update, and end its abort if that began."""
        with self._turn(wait_s) as ours:
            if ours and self.lifecycle.state is State.ABORTING:
                self._give_up(incoming)
        if not ours:
            self._renew_lease(incoming.update_id)  # the abort is tried again when it expires
        if incoming.update_id != self.lifecycle.last_finished:
            self.table.forget(incoming.update_id)
        return self._reply()

    def close(self, *, for_good: bool) -> None:
        """Abort the open update, wait for its loader, and close every engine.

        Waits for at most `lease_s`, and no longer than _CLOSE_S; inside a hook not at all. Where
        the loader still runs then, its end closes the engines: to unmap the memory that it reads
        would crash the process. `for_good`: no sender may connect, and no update start, again.
        """
        self._closed |= for_good
        deadline = time.monotonic() + min(self._lease_s, _CLOSE_S)
        self._abort(None, "the receiver is closed", wait_s=min(self._lease_s, _CLOSE_S))
        while True:
            with self._turn(max(0.0, deadline - time.monotonic())) as ours:
                if ours:
                    self._close_all()
            with self.lock:
                self._closes_late = not ours and self._step is not None
            if ours or self._closes_late:
                break
        if not ours:
            logger.warning("a loader is still running; its end closes the memory that it reads")
        self._timer.close()

    def _close_all(self) -> None:
        """End the abort of `close`, and close every engine. Called in a step, or at its end."""
        incoming = self._incoming
        if incoming is not None and self.lifecycle.state is State.ABORTING:
            self._give_up(incoming)
        self.senders.close(None)

    def check_open(self) -> None:
        """Raise ProtocolError after `close` for good."""
        if self._closed:
            raise ProtocolError("this receiver is closed and takes no more weights; make another")

    def _once(
        self, update_id: str | None, step: Hashable, call: Callable[[], StepReply]
    ) -> StepReply:
        """Return the first reply for a retry; anonymous steps have no key and run again."""
        if update_id is None:
            return call()
        return self.table.once(update_id, step, call, timeout_s=self._lease_s)

    def _id_of(self, update_id: str | None, call: str) -> str:
        """Return the update of a message: the one that it names, or the anonymous session.

        Raises UpdateConflictError where it names none and no anonymous session is open.
        """
        if update_id is not None:
            return update_id
        incoming = self._incoming
        if incoming is None or not incoming.anonymous:
            holder = f"update {incoming.update_id} is" if incoming else "no update is"
            raise UpdateConflictError(
                f"{call} without update_id: {holder} open, and no anonymous session; name the "
                "update, or start a session with start_weight_update",
                state=self.lifecycle.state.value,
                update_id=incoming.update_id if incoming else "",
            )
        return incoming.update_id

    def _reply(self) -> StepReply:
        """Return a reply with the receiver's state, and the received part of the open update."""
        with self.lock:
            incoming, torn_by = self._incoming, self.lifecycle.torn_by
            state, version = self.lifecycle.state, self.lifecycle.version
        apply = self.load_targets.apply
        if incoming is not None:
            return incoming.reply(state, version, apply)
        return StepReply(state=state.value, version=version, update_id=torn_by or None, apply=apply)

    # The steps of an update

    def _start(
        self, update_id: str, terms: StartTerms, sender: str | None, *, anonymous: bool
    ) -> None:
        """Open an update. Only an `anonymous` one takes messages without an id.

        Raises UnknownSenderError for a sender that is not connected, ProtocolError for another
        model than it announced at init, UpdateConflictError and StaleVersionError.
        """
        if sender is not None:
            self.senders.get(sender)
            manifest = self.senders.manifest(sender)
            digest = manifest.digest if manifest is not None else None
            if terms.manifest_digest not in (None, digest):
                raise ProtocolError(
                    f"the update has manifest {terms.manifest_digest}, init announced {digest}; "
                    "init again with the new manifest"
                )
        if terms.partial and not self.sink.takes_parts:
            raise ConfigError(
                f"update {update_id} is partial, and each update of this receiver makes new "
                "weights: the others would be missing; send all tensors, without partial=True"
            )
        with self.lock:
            self.check_open()
            self._set.check_awake(f"update {update_id}")
            self.table.check_not_aborted(update_id)
            fields = {name: getattr(terms, name) for name in StartTerms.__struct_fields__}
            opens = self._incoming is None
            incoming = IncomingUpdate(
                update_id,
                sender,
                terms.partial,
                anonymous=anonymous,
                manifest_digest=terms.manifest_digest,
            )
            try:
                self.lifecycle.start(Terms(update_id=update_id, **fields))
                if opens:
                    self.starts += 1
                    self._claims.started()
                    self._incoming = incoming
            except BaseException:
                if opens and self.lifecycle.begin_abort(update_id):  # interrupted after the start
                    self.lifecycle.end_abort()
                    self._incoming = None
                raise
        self._renew_lease(update_id)

    def _load(self, update_id: str, info: UpdateInfo) -> None:
        with self._update_step("load", update_id), self._expected("load", update_id) as incoming:
            started = time.perf_counter()
            incoming.note(self._receive(incoming, info))
            incoming.timed("load", started)
            self._check_not_aborted()

    def _prepare(self, update_id: str) -> StepReply:
        lifecycle = self.lifecycle
        with self.lock:
            again = lifecycle.state is State.PREPARED and lifecycle.update_id == update_id
        if again:
            self._renew_lease(update_id)
            return self._reply()
        with (
            self._update_step("prepare", update_id),
            self._expected("prepare", update_id) as incoming,
        ):
            started = time.perf_counter()
            incoming.validate(self.sink, self.senders.manifest(incoming.sender))
            incoming.timed("settle", started)
            with self.lock:
                lifecycle.prepared(update_id)
        return self._reply()

    def _finish(self, update_id: str, request: FinishRequest) -> StepReply:
        """Commit the update; that of a set with the other receivers that have a part of it."""
        parts = parts_of(update_id)
        if parts > 1 and self._is_open(update_id):
            try:
                self._set.finish(self, parts, update_id, request, self._patience_s(self._sender))
            except Exception:
                if update_id != self.lifecycle.last_finished:
                    raise
                logger.exception("update %s failed after its commit", update_id)
        with self._update_step("finish", update_id):
            last = self.table.last_reply
            if update_id == self.lifecycle.last_finished:
                committed = last is not None and last.update_id == update_id
                return last if last is not None and committed else self._reply()
            if parts > 1:  # never alone
                raise self._conflict(
                    f"{update_id}: this part of a set is not open, so it was given up or has not "
                    "started; send the set again, under another update_id"
                )
            with ExitStack() as ends:
                incoming = self._begin_finish(update_id, request, ends)
                self._begin_commit([(self, incoming)])
                self._swap(incoming, request)
                # Not returned here: an interrupt after the call would come outside of the block.
                reply = self._settle(incoming, request)
            return reply  # noqa: RET504  # see above

    def _begin_finish(
        self, update_id: str, request: FinishRequest, ends: ExitStack
    ) -> IncomingUpdate:
        """Check that an update can be committed; return it. `ends` ends what this begins.

        Called in a step. An error that `ends` sees aborts the update, unless it is committed.
        """
        with self.lock:
            self.lifecycle.expect(update_id, State.PREPARED, step="finish")
        sender = self._sender

        def end() -> None:
            if self.gate.held:
                self.gate.release()
            self.senders.finish_update()
            if request.delta_follows and self.load_targets.delta_forms:
                self._catch_up_soon(sender)

        ends.callback(end)
        incoming = ends.enter_context(self._expected("finish", update_id, State.PREPARED))
        incoming.check_digest(request.table_digest)
        self.load_targets.check_follows(incoming.load_targets)
        return incoming

    def _catch_up_soon(self, sender: str | None) -> None:
        """Prepare memory for the next delta in a thread, as a step, when this one has ended."""

        def catch_up() -> None:
            try:
                time.sleep(_REPLY_S)
                warm_up()
                with self._calls.inside(), self._turn(self._lease_s) as ours:
                    if ours and self._incoming is None and self.lifecycle.may_generate:
                        known = sender is not None and self.senders.knows(sender)
                        engine = self.senders.get(sender) if sender and known else None
                        self.load_targets.catch_up(engine)
            except Exception:  # the next delta tries it again, or is refused
                logger.debug("the memory for a delta could not be prepared", exc_info=True)

        threading.Thread(target=catch_up, name="weightsync-catch-up", daemon=True).start()

    def _fleet_record(self, request: FinishRequest) -> FleetRecord | None:
        sender, version = self.senders.owner_name, self.lifecycle.version
        if request.fleet is None or sender is None:
            return None
        return FleetRecord(sender=sender, version=version, servers=request.fleet)

    def _begin_commit(self, parts: Sequence[tuple[ReceiverSession, IncomingUpdate]]) -> None:
        """Let no abort come between the commits of these receivers, which have one lock."""
        with self.lock:
            for session, _ in parts:
                session._check_not_aborted()
            for _, incoming in parts:
                incoming.committing = True

    def _swap(
        self, incoming: IncomingUpdate, request: FinishRequest, *, in_set: bool = False
    ) -> Sequence[Undo]:
        """Swap in the new weights while no reader is active; return what takes them back.

        That is for `_undo`; None of a load target that keeps nothing. The gate is still held when
        this returns, and `_settle` has to follow. With `in_set` it is kept also without a user's
        code that may fail.
        """
        started = time.perf_counter()
        if not self.gate.held and self.sink.swaps:
            self.gate.hold(self._patience_s(incoming.sender))
        before = self.lifecycle.dirty
        may_undo = (self._on_commit or in_set) and not before
        undos = [t.undo() for t in incoming.load_targets] if may_undo else []
        if incoming.load_targets:
            with self.lock:
                # From here on a failure leaves the sink between two versions.
                self.lifecycle.dirty = True
            with users_code("the commit of the sink"):
                self.sink.commit_all(incoming.load_targets)
        # The streams of generation do not wait for this thread's; they continue when the gate is
        # released.
        wait_for(self.sink.gpus)
        if self._on_commit is not None:
            try:
                self._call_on_commit(self.lifecycle.next_version)
            except BaseException:
                self._undo(undos, incoming)
                raise
        # Before the commit: new weights with a stale cache are not one complete version.
        if request.clear_cache and self._clear_cache is not None:
            with users_code("on_clear_cache"):
                self._clear_cache()
        incoming.timed("swap", started)
        return undos

    def _settle(self, incoming: IncomingUpdate, request: FinishRequest) -> StepReply:
        """Make the weights that were swapped in the receiver's version; return the reply."""
        with self.lock:
            self.lifecycle.finish(incoming.update_id)
            self.load_targets.committed(incoming.load_targets, self.lifecycle.weights_id, incoming)
            self._claims.committed(incoming.sender, partial=incoming.partial)
            if request.weight_version is not None:
                self.lifecycle.label = request.weight_version
            self._incoming = None  # at once: the next start may come before this step ends
            state, version = self.lifecycle.state, self.lifecycle.version
        reply = incoming.reply(state, version, self.load_targets.apply, self.gate.held_s)
        if self.load_targets.takes_next_delta:
            reply = structs.replace(reply, delta_base=self.lifecycle.weights_id)
        duration_s = time.perf_counter() - incoming.started
        fleet = self._fleet_record(request)
        self.table.committed(reply, self.lifecycle.label, duration_s, fleet)
        return reply

    def _call_on_commit(self, version: int) -> None:
        """Have the user's code derive from the weights what depends on them."""
        if self._on_commit is not None:
            with users_code("on_commit"):
                self._on_commit(version)
            wait_for(self.sink.gpus)

    def _undo(self, undos: Sequence[Undo], incoming: IncomingUpdate) -> None:
        """Put the former weights back, after `on_commit` failed; the receiver is not dirty then.

        It stays dirty where they were not kept, or where `on_commit` fails with them as well:
        what it derives may be of the new weights.
        """
        if len(undos) != len(incoming.load_targets) or None in undos:
            return
        try:
            for undo in reversed(undos):
                if undo is not None:
                    undo()
            wait_for(self.sink.gpus)
            if not self.lifecycle.torn_by:
                self._call_on_commit(self.lifecycle.version)
        except Exception:
            logger.exception("on_commit failed, and so did the return to the former weights")
            return
        with self.lock:
            self.lifecycle.dirty = False

    def _give_up(self, incoming: IncomingUpdate) -> None:
        """Return to READY(v), or enter TORN. Called in a step; ignores an update that has ended."""
        with self.lock:
            if self._incoming is not incoming:
                return
            if not self.lifecycle.begin_abort(incoming.update_id):
                self._incoming = None  # committed: the interrupt came after that
                return
            self.table.aborted(incoming.update_id)  # repeated messages must not start it again
        try:
            for load_target in incoming.load_targets:
                load_target.discard()
        finally:
            with self.lock:
                self.lifecycle.end_abort()
                self._incoming = None
                self.table.given_up(torn=self.lifecycle.state is State.TORN)
            if self.gate.held:
                self.gate.release()
            self.senders.finish_update()

    def _receive(self, incoming: IncomingUpdate, info: UpdateInfo) -> Received:
        """Load the tensors of one message into their load target. Raises the engine's errors."""
        context = self._load_context(incoming)
        if isinstance(info, EmptyUpdate):
            return Received(Manifest(()))
        if isinstance(info, ForeignUpdate):
            loaded: Received = info.receive(self.senders.keys, context)
            return loaded
        self.senders.get(info.sender)
        incoming.sender = info.sender
        offered = self.senders.manifest(info.sender)
        if info.delta is not None:
            return self._receive_delta(incoming, info, info.delta)
        if info.manifest is None and offered is not None:
            check_manifest(self.sink, offered, partial=incoming.partial)
        engine = self.senders.start_update(info.sender)
        received = engine.receive_weights(info, context)
        incoming.check_received(received, f"{type(engine).__name__}.receive_weights()", info.verify)
        return received

    def _receive_delta(
        self, incoming: IncomingUpdate, info: RegisteredUpdate, terms: DeltaTerms
    ) -> Received:
        """Apply a delta to the weights in use, or to the memory that is used next.

        Raises DeltaError where these are not the weights that it builds on: others by their id, or
        by their fingerprint, since the id is the sender's word alone.
        """
        context = self._load_context(incoming)
        try:
            base = self._base_of(incoming, info.sender, terms)
        except Exception as exc:
            self._refuse(info, context, exc)
            raise
        delta = base.delta()
        context = replace(context, open_target=lambda _: incoming.use(delta, base.layout))
        engine = self.senders.start_update(info.sender)
        try:
            received = engine.receive_weights(info, context)
            results = received.fingerprints if base.streams else [delta.result()]
        except VerificationError:  # it may be the base that differs, which nobody may fetch then
            self.load_targets.discarded()
            raise
        streams = engine.streams_in(base.memory.memory) if base.streams else None
        return Received(
            base.layout.manifest,
            list(results),
            self.sink.verification,
            stream_totals=None if streams is None else (streams.digest, results),
            waited_s=received.waited_s,
            sources=received.sources,
        )

    def _refuse(self, info: RegisteredUpdate, context: LoadContext, why: Exception) -> None:
        """Have the engine give up an update: other receivers may wait for bytes that it passes on.

        They may hear of the failure only when they have answered, too.
        """

        def refuse(_: StreamLayout) -> LoadTarget:
            raise why

        with suppress(Exception):  # `why`, and the caller raises it
            engine = self.senders.start_update(info.sender)
            engine.receive_weights(info, replace(context, open_target=refuse))

    def _base_of(self, incoming: IncomingUpdate, sender: str, terms: DeltaTerms) -> Base:
        """Return the weights in use, if the delta builds on them. Raises DeltaError."""
        offered, lifecycle = self.senders.manifest(sender), self.lifecycle
        announced = None if lifecycle.torn_by else terms.bases.get(lifecycle.weights_id)
        if offered is None or announced is None or incoming.manifests:
            held = lifecycle.weights_id or "none of a sender"
            raise DeltaError(
                f"this receiver holds the weights {held}{' (TORN)' if lifecycle.torn_by else ''}, "
                f"and the delta builds on {', '.join(terms.bases) or 'none'}; send the whole model"
            )
        base = self.load_targets.of_delta(offered.digest, self.senders.get(sender))
        if base.fingerprint != announced:
            self.load_targets.discarded()
            own = base.fingerprint or "an unknown fingerprint"
            raise DeltaError(
                f"the weights {lifecycle.weights_id} have {own} here, and {announced} for the "
                "sender: they are not the same; send the whole model"
            )
        return base

    def _load_context(self, incoming: IncomingUpdate) -> LoadContext:
        def open_target(layout: StreamLayout) -> LoadTarget:
            # A session of messages without ids may split tied tensors: `validate` checks them all.
            more_follows = incoming.anonymous and not incoming.partial
            check_manifest(self.sink, layout.manifest, partial=True, more_follows=more_follows)
            whole = not incoming.partial and not self.sink.difference(layout.manifest).missing
            target = self._load_target(layout, incoming.sender, whole=whole)
            return incoming.use(target, layout)

        def mark_dirty() -> None:
            if incoming.load_targets[-1].in_place and not self.lifecycle.dirty:
                self.gate.hold(self._patience_s(incoming.sender))
                with self.lock:
                    self.lifecycle.mark_dirty(incoming.update_id)

        return LoadContext(
            open_target=open_target,
            mark_dirty=mark_dirty,
            check=self._check_not_aborted,
            verification=self.sink.verification,
            lends_views=not self.sink.keeps_views,
            ties=self.sink.ties,
        )

    def _check_not_aborted(self) -> None:
        """Raise TransferError when the open update is being aborted, or the interpreter exits."""
        self._calls.check()
        if self.lifecycle.state is State.ABORTING:
            raise TransferError(f"update {self.lifecycle.update_id} ends: {self._abort_reason}")

    def _load_target(self, layout: StreamLayout, sender: str | None, *, whole: bool) -> LoadTarget:
        """Return the load target of a layout. Opens it with readers blocked: the model may move."""
        known, held = self.load_targets.find(layout), self.gate.held
        if known is not None or held:  # held by an update in place, which releases it
            return known or self.load_targets.get(layout, whole=whole)
        try:
            self.gate.hold(self._patience_s(sender))
            opened = self.load_targets.get(layout, whole=whole)
        finally:
            if self.gate.held:
                self.gate.release()
        return opened

    def _patience_s(self, sender: str | None) -> float:
        """Return how long an update waits for decode steps: as long as its sender waits for it."""
        return min(self._lease_s, self.senders.lease_s(sender))

    # One step at a time

    @contextmanager
    def _turn(self, wait_s: float, update_id: str = "") -> Iterator[bool]:
        """Run the block as a step, of an update if one is named; yield whether it is one.

        It is none where another step does not end within `wait_s` seconds.
        """
        ours = False
        try:
            with self.lock:
                wait_s = 0.0 if self._inside_step else wait_s
                if self._step_ended.wait_for(lambda: self._step is None, wait_s):
                    ours, self._step, self.senders.at_work = True, update_id, True
                    self._step_thread = threading.get_ident()
            yield ours
        finally:
            if ours:
                self._end_turn()

    def _end_turn(self) -> None:
        """Let the next step begin; close the engines first, where `close` did not wait for it."""
        late = True
        try:
            while late:
                with self.lock:
                    late, self._closes_late = self._closes_late, False
                    if not late:
                        self._free_turn()
                if late:
                    self._close_all()
        except BaseException:
            self._free_turn()
            raise

    def _free_turn(self) -> None:
        with self.lock:
            self._step, self.senders.at_work = None, False
            self._step_ended.notify_all()

    @contextmanager
    def _in_step(self, step: str, update_id: str = "") -> Iterator[None]:
        """Run the block as a step. Raises UpdateConflictError where another one does not end."""
        with (
            self._calls.inside(),
            self._turn(self._lease_s, update_id) as ours,
            scope(f"weightsync {step}"),
        ):
            if not ours:
                if self._inside_step:
                    raise self._conflict(
                        f"{step}: called by a hook that a step of this receiver runs"
                    )
                raise self._conflict(
                    f"{step}: the receiver has been busy for {self._lease_s:g} s with update "
                    f"{self.lifecycle.update_id}"
                )
            yield

    @contextmanager
    def _update_step(self, step: str, update_id: str) -> Iterator[None]:
        """Run a step of an update; its lease does not run meanwhile."""
        with self.lock:
            if self._is_open(update_id):
                self._timer.renew(None)
        try:
            with self._in_step(step, update_id):
                yield
        finally:
            self._renew_lease(update_id)

    @contextmanager
    def _expected(
        self, step: str, update_id: str, state: State = State.UPDATING
    ) -> Iterator[IncomingUpdate]:
        """Yield the open update, and abort it when the block fails. Called in a step.

        Raises UpdateConflictError, and changes nothing, where another update or state is found.
        """
        with self.lock:
            self.lifecycle.expect(update_id, state, step=step)
            incoming = self._incoming
        assert incoming is not None
        try:
            yield incoming
        except BaseException as exc:
            logger.warning("update %s failed and is aborted: %s", update_id, text_of(exc))
            self._give_up(incoming)
            raise

    # The lease

    def _announced(self, update_id: str) -> FinishRequest | None:
        incoming = self._incoming
        return incoming.finish if incoming is not None and self._is_open(update_id) else None

    def _is_open(self, update_id: str) -> bool:
        incoming = self._incoming
        return incoming is not None and incoming.update_id == update_id

    def _renew_lease(self, update_id: str) -> None:
        """Record a message of an update, and start its lease again, if it is the open one."""
        beat = self.senders.beat(self._sender)
        with self.lock:
            if not self._is_open(update_id):
                return
            self._beat = beat
            self._last_message_at = self._last_sign_at = time.monotonic()
            self._start_timer()

    def _start_timer(self) -> None:
        """Start the timer for the next check of the open update. Called with the lock."""
        incoming, waits = self._incoming, []
        if incoming is not None and self._may_expire(incoming):
            waits.append(self._lease_s / _CHECKS_PER_LEASE)
        if incoming is not None and self.gate.held:
            waits.append(_WATCH_S)
        self._timer.renew(min(waits, default=None))

    def _may_expire(self, incoming: IncomingUpdate) -> bool:
        """Whether the lease applies. A PREPARED update with a sender id waits for recovery."""
        return self.lifecycle.state is not State.PREPARED or incoming.sender is None

    def _is_active(self, incoming: IncomingUpdate) -> bool:
        """Whether the sender's last message or heartbeat is recent enough to keep the lease."""
        beat, sender = self.senders.beat(incoming.sender), incoming.sender
        # Senders on other hosts have no heartbeat here; for them the connection counts.
        connected = beat is None and sender is not None and self.senders.alive(sender)
        now = time.monotonic()
        with self.lock:
            if beat != self._beat or connected:
                self._beat, self._last_sign_at = beat, now
            silent_s, quiet_s = now - self._last_sign_at, now - self._last_message_at
        return silent_s < self._lease_s and quiet_s < _MAX_LEASES * self._lease_s

    def _check_progress(self) -> None:
        """End an update whose lease has run out, or whose dead sender blocks readers."""
        with self.lock:
            incoming = self._incoming
            if incoming is None or self._step == incoming.update_id:
                return  # the end of the step starts the timer again
        why = ""
        if self.lifecycle.state is State.ABORTING:
            why = self._abort_reason  # the call that aborted it did not get its turn
        elif self._may_expire(incoming) and not self._is_active(incoming):
            why = f"its sender gave no sign of life for {self._lease_s:g} s"
        elif self.gate.held and self.orphaned:
            why = "its sender died"
        try:
            if why:
                logger.warning("update %s makes no progress: %s", incoming.update_id, why)
                self._end_silent(incoming, why)
        finally:
            with self.lock:
                self._start_timer()

    def _end_silent(self, incoming: IncomingUpdate, why: str) -> None:
        """Abort an update; or release the gate where it is PREPARED, for its recovery.

        Readers are then refused if the weights are dirty.
        """
        with self.lock:
            if self._incoming is not incoming or self._step == incoming.update_id:
                return  # a message came meanwhile
            aborts = self._may_expire(incoming)
            if aborts:
                self._begin_abort(incoming.update_id, why)
        if aborts:
            self._end_abort(incoming, self._lease_s)
            return
        with self._turn(0) as ours:
            if ours and self._incoming is incoming and self.gate.held:
                self.gate.release()


_Finish = tuple[ReceiverSession, FinishRequest]


class _ReceiverSet:
    """The receivers of one server whose updates of the same id are committed together."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(8)
        self._sessions: list[weakref.ref[ReceiverSession]] = []
        self._commits: SetCommits[_Finish] = SetCommits()

    def add(self, session: ReceiverSession) -> None:
        """Add a receiver. They are committed in the order in which they were added."""
        self._sessions = [ref for ref in self._sessions if ref() is not None]
        self._sessions.append(weakref.ref(session))

    def _all(self) -> list[ReceiverSession]:
        return [session for ref in self._sessions if (session := ref()) is not None]

    def check_awake(self, step: str, *advice: str) -> None:
        """Raise UpdateConflictError while the weights of one of them sleep."""
        for session in self._all():
            session.lifecycle.check_awake(step, *advice)

    def _with(self, update_id: str) -> list[ReceiverSession]:
        """Return the receivers in which an update of this id is open."""
        return [session for session in self._all() if session._is_open(update_id)]

    def finish(
        self,
        own: ReceiverSession,
        parts: int,
        update_id: str,
        request: FinishRequest,
        timeout_s: float,
    ) -> None:
        """Commit an update of this number of parts in all of its receivers, or in none.

        When each has its finish. Not waited for is one whose sender is dead: a finish means that
        all parts were PREPARED, with the fingerprints that were sent, and that the sender, or the
        one after it, has decided. Raises
        UpdateConflictError where a finish does not come, and nothing has changed then. So it does
        where fewer receivers have the update: these give it up, as the others did.
        """

        def missing(finishes: Sequence[_Finish]) -> bool:
            told, sessions = {id(session) for session, _ in finishes}, self._with(update_id)
            return len(sessions) == parts and any(
                id(session) not in told
                and session._announced(update_id) is None
                and not session.orphaned
                for session in sessions
            )

        def commit(finishes: Sequence[_Finish]) -> None:
            told = {id(session): each for session, each in finishes}

            def request_of(session: ReceiverSession) -> FinishRequest:
                announced = told.get(id(session)) or session._announced(update_id)
                return announced or FinishRequest(update_id=update_id)

            self._commit(parts, update_id, request_of)

        if not self._commits.finish(update_id, (own, request), missing, commit, timeout_s):
            # Of this kind no error is kept for a retry, which may find the others there.
            raise UpdateConflictError(
                f"{update_id}: not all of the {parts} parts of this set got their finish within "
                f"{timeout_s:g} s; nothing is committed",
                state=State.PREPARED.value,
                update_id=update_id,
            )

    def _commit(
        self, parts: int, update_id: str, request_of: Callable[[ReceiverSession], FinishRequest]
    ) -> None:
        """Commit an update in all receivers that have it, or in none of them.

        Nothing is left to do where another thread has committed them, or they have given it up.
        """
        sessions = self._with(update_id)
        with ExitStack() as ends:
            for session in sessions:
                ends.enter_context(session._update_step("finish", update_id))
            open_parts = [
                (session, session._begin_finish(update_id, request_of(session), ends))
                for session in sessions
            ]
            if len(open_parts) not in (0, parts):
                raise UpdateConflictError(
                    f"{update_id}: {len(open_parts)} of the {parts} parts of this set are left, as "
                    "another receiver was closed or has given its part up; nothing is committed",
                    state=State.ABORTING.value,
                    update_id=update_id,
                )
            for session, _ in open_parts[:1]:
                session._begin_commit(open_parts)
            swapped: list[tuple[ReceiverSession, IncomingUpdate, Sequence[Undo]]] = []
            try:
                for session, incoming in open_parts:
                    undos = session._swap(incoming, request_of(session), in_set=True)
                    swapped.append((session, incoming, undos))
            except BaseException:
                for session, incoming, undos in reversed(swapped):
                    session._undo(undos, incoming)
                raise
            self._settle(open_parts, request_of)

    def _settle(
        self,
        parts: Sequence[tuple[ReceiverSession, IncomingUpdate]],
        request_of: Callable[[ReceiverSession], FinishRequest],
    ) -> None:
        """Settle all parts, which are swapped in, before an error or an interrupt is raised."""
        try:
            for session, incoming in parts:
                session._settle(incoming, request_of(session))
        finally:
            with ExitStack() as rest:
                for session, incoming in parts:
                    if session.lifecycle.state is State.PREPARED:
                        rest.callback(session._settle, incoming, request_of(session))


class ProgressTimer:
    """Calls `expire()` once the time of the last `renew` has passed. Thread-safe.

    One thread serves all updates. It starts with the first, and ends with `close` or when nothing
    refers to this timer. `lock` guards the timer, and is not held while `expire` runs.
    """

    def __init__(self, expire: Callable[[], None], lock: threading.RLock | None = None) -> None:
        self._expire = expire
        self._changed = threading.Condition(lock)
        self._deadline: float | None = None
        self._wakes_at: float | None = None
        self._thread: threading.Thread | None = None

    @property
    def runs(self) -> bool:
        """Whether `expire` will be called."""
        return self._deadline is not None

    def renew(self, seconds: float | None) -> None:
        """Call `expire` in `seconds`, instead of an earlier time; None: do not call it."""
        with self._changed:
            if seconds is None:
                self._deadline = None
                return
            self._deadline = time.monotonic() + seconds
            if self._thread is None or not self._thread.is_alive():  # as in a forked child
                self._start()
            elif self._wakes_at is None or self._deadline < self._wakes_at:
                self._changed.notify()  # else the thread wakes earlier, and waits again

    def close(self) -> None:
        """End the thread. Idempotent."""
        with self._changed:
            self._deadline = self._thread = None
            self._changed.notify()

    def _start(self) -> None:
        changed = self._changed

        def wake(_: object) -> None:
            with changed:
                changed.notify()

        # The thread holds no reference to this timer while it waits.
        run = partial(_run_timer, weakref.ref(self, wake), changed)
        self._thread = threading.Thread(target=run, name="weightsync-progress", daemon=True)
        self._thread.start()


def _run_timer(ref: Callable[[], ProgressTimer | None], changed: threading.Condition) -> None:
    this = threading.current_thread()
    while True:
        with changed:
            timer = ref()
            if timer is None or timer._thread is not this:
                return
            deadline = timer._wakes_at = timer._deadline
            wait_s = None if deadline is None else deadline - time.monotonic()
            if wait_s is None or wait_s > 0:
                del timer
                changed.wait(wait_s)
                continue
            timer._deadline = None
        try:
            timer._expire()
        except Exception:  # the next update needs this thread
            logger.exception("an update that makes no progress could not be ended")
        del timer


_sessions: weakref.WeakSet[ReceiverSession] = weakref.WeakSet()
_fork = threading.RLock()
"""Taken by a fork, and to add a session: a fork looks at all of them."""
_locks: list[threading.RLock] = []


def _before_fork() -> None:
    """Take the locks of all sessions: a child could never take one that another thread holds."""
    _fork.acquire()
    for session in list(_sessions):
        session.lock.acquire()
        _locks.append(session.lock)


def _after_fork() -> None:
    while _locks:
        _locks.pop().release()
    _fork.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
