"""The state of one receiver, behind one lock, and the steps of an update."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from weightsync.backends.base import LoadContext, Received
from weightsync.backends.ipc.handles import receive_handles
from weightsync.cuda.events import wait_for
from weightsync.errors import ProtocolError, TransferError, UpdateConflictError
from weightsync.specs import Manifest
from weightsync.update.gate import OnHold, OnRelease, ReadWriteGate
from weightsync.update.history import UpdateTable
from weightsync.update.incoming import IncomingUpdate, LoadTargets
from weightsync.update.lifecycle import ApplyChoice, State, Terms, UpdateLifecycle
from weightsync.update.senders import FleetClaims, Senders
from weightsync.weights.layout import StreamLayout
from weightsync.weights.sink import LoadTarget, WeightSink, check_manifest
from weightsync.wire.messages import (
    EmptyUpdate,
    OpenUpdate,
    RegisteredUpdate,
    StartTerms,
    StepReply,
    UpdateInfo,
)
from weightsync.wire.offers import InitInfo, describe

logger = logging.getLogger(__name__)

_CHECKS_PER_LEASE = 10
"""How often in the time of a lease the sender is checked for signs of life."""
_MAX_LEASES = 5
"""Leases without a message from a live sender, whose caller may compute between two messages."""
_WATCH_S = 1.0
"""Seconds between two checks of a sender whose update blocks readers between its messages."""


class ReceiverSession:
    """Owns the state of one receiver. Thread-safe.

    `lock` guards the lifecycle, the running step, the gate, the table of updates, the claims of
    senders and the lease. It is held for moments only. A *step* works without it: it loads or
    commits weights, opens or closes engines, calls hooks, waits for GPUs. One step runs at a time;
    the next one waits for at most `lease_s` seconds.

    An update without progress for `lease_s` seconds is aborted. Between two messages of a sender
    that gives signs of life, the limit is _MAX_LEASES times as long.
    """

    def __init__(
        self,
        sink: WeightSink,
        senders: Senders,
        *,
        apply: ApplyChoice,
        lease_s: float,
        version: int = 0,
        clear_cache: Callable[[], None] | None = None,
        on_hold: OnHold | None = None,
        on_release: OnRelease | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self.sink = sink
        self.senders = senders
        self.lifecycle = UpdateLifecycle(version)
        self.load_targets = LoadTargets(sink, apply)
        self.table = UpdateTable(lease_s, self.lock)
        self.gate = ReadWriteGate(
            self.lifecycle.check_readable,
            lock=self.lock,
            on_hold=on_hold,
            on_release=on_release,
            gpus=lambda: sink.gpus,
        )
        self._claims = FleetClaims(self.lifecycle, senders, lease_s)
        self._clear_cache = clear_cache
        self._lease_s = lease_s
        self._incoming: IncomingUpdate | None = None
        self._abort_reason = ""
        self._step_ended = threading.Condition(self.lock)
        self._busy = False
        self._busy_with = ""
        self._timer = ProgressTimer(self._check_progress, self.lock)
        self._beat: int | None = None
        self._last_message_at = self._last_sign_at = 0.0
        _sessions.add(self)

    @property
    def busy(self) -> bool:
        """Whether a step is running."""
        return self._busy

    @property
    def is_open(self) -> bool:
        """Whether an update is open."""
        return self._incoming is not None

    @property
    def open_update(self) -> OpenUpdate | None:
        """The open update; None between updates."""
        with self.lock:
            incoming, terms = self._incoming, self.lifecycle.terms
            if incoming is None or terms is None:
                return None
            return OpenUpdate(
                update_id=incoming.update_id,
                version=self.lifecycle.next_version,
                since=incoming.since,
                label=terms.label,
                partial=terms.partial,
            )

    @property
    def orphaned(self) -> bool:
        """Whether the sender of the open update is dead, or was refused when it reconnected."""
        incoming = self._incoming
        sender = incoming.sender if incoming else None
        return sender is not None and not self.senders.alive(sender)

    # Senders

    def init(self, info: InitInfo) -> None:
        """Open a sender's engine, check its manifest, and open the load target of a whole model.

        Raises SenderConflictError where the receiver belongs to another living sender, and the
        errors of the engine, the manifest check and the load target.
        """
        replaced = self.senders.replaces(info)
        if replaced is not None and self.lifecycle.state is State.UPDATING:
            # Its loader may wait for a sender that is stopped. The new owner recovers a PREPARED
            # update: other receivers may have committed it.
            self.abort(None, f"{describe(replaced)} was replaced as the owner of this receiver")
        with self._step("init"):
            self._close_dead_senders()
            manifest = self.senders.open(info)
            try:
                difference = self.sink.difference(manifest)
                if difference.unexpected or difference.mismatched or difference.cut:
                    difference.check(partial=False)
                if not difference.missing and self._incoming is None:
                    # The load targets of an open update must not move.
                    self._load_target(StreamLayout(manifest), whole=True)
            except BaseException:
                self.senders.close(info.sender)
                raise
            if info.fleet_version is not None:
                with self.lock:
                    self._claims.joined(info.sender, info.fleet_version)

    def shutdown(self, sender: str | None, *, leaves: bool = True) -> None:
        """Close the engine of a sender (None: of every sender).

        With `leaves` False the sender will init again, and its claim of a fleet version stays.
        Raises UpdateConflictError while an update of that sender is open.
        """
        with self._step("shutdown"):
            holder = self._incoming
            if holder is not None and sender in (None, holder.sender):
                raise UpdateConflictError(
                    f"update {holder.update_id} is open; finish or abort it first",
                    state=self.lifecycle.state.value,
                    update_id=holder.update_id,
                )
            if sender is None:
                self.senders.close_all()
            else:
                self.senders.close(sender)
            with self.lock:
                self._claims.left(sender, for_good=leaves)

    def close_dead_senders(self) -> None:
        """Close the engines of dead senders, unless a step is running. Never waits."""
        if self.lifecycle.state is State.ABORTING:
            return  # the call that ends the update waits for its turn
        if not (self.lifecycle.required_version or self.senders.dead(keep=self._sender)):
            return
        if self._begin_step(wait_s=0):
            try:
                self._close_dead_senders()
            finally:
                self._end_step()

    def _close_dead_senders(self) -> None:
        dead = self.senders.close_dead(keep=self._sender)
        with self.lock:
            self._claims.remove_dead(dead)

    @property
    def _sender(self) -> str | None:
        """The sender of the open update."""
        incoming = self._incoming
        return incoming.sender if incoming is not None else None

    # The steps of an update

    def open_id(self, update_id: str | None, step: str) -> str:
        """Return the update of a message: the one that it names, or the anonymous session.

        Raises UpdateConflictError where it names none and no anonymous session is open.
        """
        incoming = self._incoming
        if update_id is not None:
            return update_id
        if incoming is None or not incoming.anonymous:
            holder = f"update {incoming.update_id} is" if incoming else "no update is"
            raise UpdateConflictError(
                f"{step} without update_id: {holder} open, and no anonymous session; name the "
                "update, or start a session with start_weight_update",
                state=self.lifecycle.state.value,
                update_id=incoming.update_id if incoming else "",
            )
        return incoming.update_id

    def check_start(self, sender: str, terms: StartTerms | None) -> None:
        """Check that the sender is connected, and sends the model that it announced at init.

        Raises UnknownSenderError or ProtocolError.
        """
        self.senders.get(sender)
        manifest = self.senders.manifest(sender)
        digest = manifest.digest if manifest is not None else None
        if terms is not None and terms.manifest_digest not in (None, digest):
            raise ProtocolError(
                f"the update has manifest {terms.manifest_digest}, init announced {digest}; "
                "init again with the new manifest"
            )

    def start(
        self, update_id: str, terms: StartTerms, *, sender: str | None, anonymous: bool = False
    ) -> StepReply:
        """READY becomes UPDATING. Only an `anonymous` update takes messages without an id."""
        with self.lock:
            self.table.check_not_aborted(update_id)
            self.lifecycle.start(
                Terms(
                    update_id=update_id,
                    version=terms.version,
                    label=terms.label,
                    base_version=terms.base_version,
                    partial=terms.partial,
                    rewind=terms.rewind,
                    weights_id=terms.weights_id or "",
                )
            )
            if self._incoming is None:
                self._abort_reason = ""
                self._claims.started()
                self._incoming = IncomingUpdate(
                    update_id,
                    sender,
                    terms.partial,
                    anonymous=anonymous,
                    manifest_digest=terms.manifest_digest,
                )
        self._renew_lease()
        return self.reply()

    def load(self, update_id: str, info: UpdateInfo) -> StepReply:
        """Load the tensors of one message. An error aborts the whole update."""
        with self._step("load", update_id), self._expected(update_id, State.UPDATING) as incoming:
            started = time.perf_counter()
            incoming.note(self._receive(incoming, info))
            incoming.timed("load", started)
            self._check_not_aborted(incoming)
        return self.reply()

    def prepare(self, update_id: str) -> StepReply:
        """UPDATING becomes PREPARED, if the update is complete. Idempotent."""
        with self.lock:
            prepared = (State.PREPARED, update_id)
            repeated = (self.lifecycle.state, self.lifecycle.update_id) == prepared
        if repeated:
            self._renew_lease()
            return self.reply()
        with (
            self._step("prepare", update_id),
            self._expected(update_id, State.UPDATING) as incoming,
        ):
            started = time.perf_counter()
            incoming.validate(self.sink, self.senders.manifest(incoming.sender))
            incoming.timed("settle", started)
            with self.lock:
                self.lifecycle.prepared(update_id)
        return self.reply()

    def finish(
        self, update_id: str, *, digest: str | None, label: str | None, clear_cache: bool
    ) -> StepReply:
        """PREPARED becomes READY: the new weights are in use when this returns. Idempotent."""
        with self._step("finish", update_id):
            last = self.table.last_reply
            if update_id == self.lifecycle.last_finished and last is not None:
                return last
            with self._expected(update_id, State.PREPARED) as incoming:
                incoming.check_digest(digest)
                state = self._commit(incoming, label, clear_cache=clear_cache)
            try:
                reply = incoming.reply(
                    state, self.lifecycle.version, self.load_targets.apply, self.gate.held_s
                )
                duration_s = time.perf_counter() - incoming.started
                self.table.committed(reply, self.lifecycle.label, duration_s)
                return reply
            finally:
                self.gate.release()
                self.senders.finish_update()

    def _commit(self, incoming: IncomingUpdate, label: str | None, *, clear_cache: bool) -> State:
        """Swap in the new weights while no reader is active, and return the state afterwards.

        The gate is still held when this returns.
        """
        started = time.perf_counter()
        with self.lock:
            self._check_not_aborted(incoming)
            incoming.committing = True
        if not self.gate.held:
            self.gate.hold(self._lease_s)
        if incoming.load_targets:
            with self.lock:
                # From here on a failure leaves the sink between two versions.
                self.lifecycle.dirty = True
            self.sink.commit_all(incoming.load_targets)
        # The streams of generation do not wait for this thread's; they continue when the gate is
        # released.
        wait_for(self.sink.gpus)
        # Before the commit: new weights with a stale cache are not one complete version.
        if clear_cache and self._clear_cache is not None:
            self._clear_cache()
        incoming.timed("swap", started)
        with self.lock:
            self.lifecycle.finish(incoming.update_id)
            self._claims.committed(incoming.sender, partial=incoming.partial)
            if label is not None:
                self.lifecycle.label = label
            self._incoming = None  # at once: the next start may come before this step ends
            return self.lifecycle.state

    def abort(self, update_id: str | None, reason: str) -> StepReply:
        """Abort the update. Returns when the loader has stopped, or with ABORTING after `lease_s`.

        An update that is being committed is not aborted: the reply has its result.
        """
        with self.lock:
            incoming = self._incoming
            holder = incoming.update_id if incoming else ""
            if update_id is not None and update_id not in (holder, self.lifecycle.last_finished):
                self.table.aborted(update_id)
                self.table.forget(update_id)
            if incoming is not None and not (incoming.committing and update_id in (None, holder)):
                self.lifecycle.begin_abort(update_id or holder)
                self._abort_reason = reason or "its sender aborted it"
        if incoming is None:
            return self.reply()
        if self._begin_step():
            try:
                if self.lifecycle.state is State.ABORTING:
                    self._give_up(incoming)
            finally:
                self._end_step()
        else:
            self._renew_lease()  # the abort is tried again when the lease expires
        if holder != self.lifecycle.last_finished:
            self.table.forget(holder)
        return self.reply()

    def reply(self) -> StepReply:
        """Return a reply with the receiver's state, and the received part of the open update."""
        with self.lock:
            incoming, torn_by = self._incoming, self.lifecycle.torn_by
            state, version = self.lifecycle.state, self.lifecycle.version
        apply = self.load_targets.apply
        if incoming is not None:
            return incoming.reply(state, version, apply)
        return StepReply(state=state.value, version=version, update_id=torn_by or None, apply=apply)

    def close(self) -> None:
        """Abort the open update, wait for its loader, and close every engine.

        If the loader does not stop in time, the memory that it reads stays mapped: to unmap it
        would crash the process.
        """
        self.abort(None, "the receiver is closed")
        if self._begin_step():
            try:
                self.senders.close_all()
            finally:
                self._end_step()
        else:
            logger.warning("a loader is still running; the memory that it reads stays mapped")
        self._timer.close()

    # Loading; all of this is called in a step

    def _receive(self, incoming: IncomingUpdate, info: UpdateInfo) -> Received:
        """Load the tensors of one message into their load target. Raises the engine's errors."""
        context = self._load_context(incoming)
        if isinstance(info, EmptyUpdate):
            return Received(Manifest(()))
        if not isinstance(info, RegisteredUpdate):
            return receive_handles(info, self.senders.keys, context)
        self.senders.get(info.sender)
        incoming.sender = info.sender
        offered = self.senders.manifest(info.sender)
        if info.manifest is None and offered is not None:
            check_manifest(self.sink, offered, partial=incoming.partial)
        engine = self.senders.start_update(info.sender)
        received: object = engine.receive_weights(info, context)
        method = f"{type(engine).__name__}.receive_weights()"
        if not isinstance(received, Received):
            raise ProtocolError(f"{method} returned a {type(received).__name__}, not a Received")
        if received.manifest.specs and received.manifest.digest not in incoming.opened:
            raise ProtocolError(
                f"{method} reports {received.manifest.nbytes} bytes for which it opened no load "
                "target"
            )
        return received

    def _load_context(self, incoming: IncomingUpdate) -> LoadContext:
        def open_target(layout: StreamLayout) -> LoadTarget:
            # A session of messages without ids may split tied tensors: `validate` checks them all.
            more_follows = incoming.anonymous and not incoming.partial
            check_manifest(self.sink, layout.manifest, partial=True, more_follows=more_follows)
            whole = not incoming.partial and not self.sink.difference(layout.manifest).missing
            return incoming.use(self._load_target(layout, whole=whole), layout)

        def mark_dirty() -> None:
            if incoming.load_targets[-1].in_place and not self.lifecycle.dirty:
                self.gate.hold(self._lease_s)
                with self.lock:
                    self.lifecycle.mark_dirty(incoming.update_id)

        return LoadContext(
            open_target=open_target,
            mark_dirty=mark_dirty,
            check=lambda: self._check_not_aborted(incoming),
            verification=self.sink.verification,
            lends_views=not getattr(self.sink, "keeps_views", False),
            ties=self.sink.ties,
        )

    def _check_not_aborted(self, incoming: IncomingUpdate) -> None:
        """Raise TransferError when the update is being aborted."""
        if self.lifecycle.state is State.ABORTING:
            raise TransferError(f"update {incoming.update_id} ends: {self._abort_reason}")

    def _load_target(self, layout: StreamLayout, *, whole: bool) -> LoadTarget:
        """Return the load target of a layout. Opens it with readers blocked: the model may move."""
        known = self.load_targets.find(layout)
        if known is not None or self.gate.held:  # held by an update in place, which releases it
            return known or self.load_targets.get(layout, whole=whole)
        self.gate.hold(self._lease_s)
        try:
            return self.load_targets.get(layout, whole=whole)
        finally:
            self.gate.release()

    # One step at a time

    @contextmanager
    def _step(self, step: str, update_id: str = "") -> Iterator[None]:
        """Run one step, of an update if it is given one; its lease does not run meanwhile.

        Raises UpdateConflictError where another step does not end within `lease_s`.
        """
        if update_id:
            self._timer.renew(None)
        try:
            if not self._begin_step(update_id):
                raise UpdateConflictError(
                    f"{step}: the receiver has been busy for {self._lease_s:g} s with update "
                    f"{self.lifecycle.update_id}",
                    state=self.lifecycle.state.value,
                    update_id=self.lifecycle.update_id,
                )
            try:
                yield
            finally:
                self._end_step()
        finally:
            if update_id:
                self._renew_lease()

    def _begin_step(self, update_id: str = "", *, wait_s: float | None = None) -> bool:
        """Begin a step when no other one runs; return False where that takes longer than a lease.

        `wait_s` is another limit.
        """
        with self._step_ended:
            wait_s = self._lease_s if wait_s is None else wait_s
            if not self._step_ended.wait_for(lambda: not self._busy, wait_s):
                return False
            self._busy = self.senders.at_work = True
            self._busy_with = update_id
            return True

    def _end_step(self) -> None:
        with self._step_ended:
            self._busy = self.senders.at_work = False
            self._busy_with = ""
            self._step_ended.notify_all()

    @contextmanager
    def _expected(self, update_id: str, state: State) -> Iterator[IncomingUpdate]:
        """Yield the open update, and abort it when the block fails. Called in a step.

        Raises UpdateConflictError, and changes nothing, where another update or state is found.
        """
        with self.lock:
            incoming, now = self._incoming, self.lifecycle.state
            if incoming is None or incoming.update_id != update_id or now is not state:
                open_id = incoming.update_id if incoming else ""
                raise UpdateConflictError(
                    f"update {update_id} is not {state.value} here: the receiver is {now.value} "
                    f"at version {self.lifecycle.version}, with "
                    f"{f'update {open_id} open' if open_id else 'no update open'}",
                    state=now.value,
                    update_id=open_id,
                )
        try:
            yield incoming
        except BaseException as exc:
            logger.warning("update %s failed and is aborted: %s", update_id, exc)
            self._give_up(incoming)
            raise

    def _give_up(self, incoming: IncomingUpdate) -> None:
        """Return to READY(v), or enter TORN. Called in a step; ignores an update that has ended."""
        with self.lock:
            if self._incoming is not incoming:
                return
            self.table.aborted(incoming.update_id)  # repeated messages must not start it again
            self.lifecycle.begin_abort(incoming.update_id)
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

    # The lease

    def _renew_lease(self) -> None:
        """Record a message of the open update, and start its lease again."""
        beat = self.senders.beat(self._sender)
        with self.lock:
            self._beat = beat
            self._last_message_at = self._last_sign_at = time.monotonic()
            self._start_timer()

    def _start_timer(self) -> None:
        """Start the timer for the next check of the open update. Called with the lock."""
        incoming = self._incoming
        if incoming is None:
            self._timer.renew(None)
            return
        waits = [self._lease_s / _CHECKS_PER_LEASE] if self._may_expire(incoming) else []
        waits += [_WATCH_S] if self.gate.held else []
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
            if incoming is None or self._busy_with == incoming.update_id:
                return  # the end of the step starts the timer again
        try:
            if self.gate.held and self.orphaned and self._end_orphaned(incoming):
                return
            if self._may_expire(incoming) and not self._is_active(incoming):
                reason = f"its sender gave no sign of life for {self._lease_s:g} s"
                logger.warning("update %s is aborted: %s", incoming.update_id, reason)
                with suppress(UpdateConflictError):  # it has ended, and another one is open
                    self.abort(incoming.update_id, reason)
        finally:
            with self.lock:
                self._start_timer()

    def _end_orphaned(self, incoming: IncomingUpdate) -> bool:
        """Release the gate that a dead sender's update holds; return False if a step is running.

        A PREPARED update stays PREPARED, for recovery by the next sender. Readers are refused if
        the weights are dirty.
        """
        if not self._begin_step(wait_s=0):
            return False
        try:
            if self._incoming is not incoming or self.lifecycle.state is not State.PREPARED:
                self._give_up(incoming)
            elif self.gate.held:
                update_id = incoming.update_id
                logger.warning("the sender of update %s died before it was finished", update_id)
                self.gate.release()
            return True
        finally:
            self._end_step()


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

    def _left_s(self) -> float | None:
        """Return the seconds to wait: 0 after the deadline, None to sleep until notified."""
        self._wakes_at = self._deadline
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def _call(self) -> None:
        try:
            self._expire()
        except Exception:  # the next update needs this thread
            logger.exception("an update that makes no progress could not be ended")


def _run_timer(ref: Callable[[], ProgressTimer | None], changed: threading.Condition) -> None:
    this = threading.current_thread()
    while True:
        with changed:
            timer = ref()
            if timer is None or timer._thread is not this:
                return
            wait_s = timer._left_s()
            if wait_s != 0.0:
                del timer
                changed.wait(wait_s)
                continue
            timer._deadline = None
        timer._call()
        del timer


_sessions: weakref.WeakSet[ReceiverSession] = weakref.WeakSet()
_fork = threading.Lock()
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
