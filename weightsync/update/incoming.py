"""One update on a receiver: its steps, its load targets, the received tensors, and its end."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from weightsync.backends.base import LoadContext, Received, WeightTransferEngine
from weightsync.backends.ipc.handles import receive_handles
from weightsync.cuda.events import wait_for
from weightsync.errors import (
    ConfigError,
    ManifestMismatchError,
    ProtocolError,
    StaleVersionError,
    TransferError,
    UpdateConflictError,
    VerificationError,
)
from weightsync.specs import Manifest, union
from weightsync.update.gate import OnHold, OnRelease, ReadWriteGate
from weightsync.update.history import AbortedUpdates, History
from weightsync.update.lifecycle import ApplyChoice, State, Terms, UpdateLifecycle
from weightsync.update.senders import Readiness, Senders
from weightsync.weights import arena
from weightsync.weights.fingerprint import table_digest
from weightsync.weights.layout import StreamLayout
from weightsync.weights.sink import Apply, LoadTarget, Verification, WeightSink, check_manifest
from weightsync.wire.messages import (
    EmptyUpdate,
    RegisteredUpdate,
    StartTerms,
    StepReply,
    UpdateInfo,
)
from weightsync.wire.offers import InitInfo, describe

logger = logging.getLogger(__name__)

_STRENGTH: tuple[Verification, ...] = ("none", "arrived", "held")


@dataclass(slots=True)
class IncomingUpdate:
    """The received part of one update."""

    update_id: str
    sender: str | None
    partial: bool
    anonymous: bool = False
    manifest_digest: str | None = None
    committing: bool = False
    load_targets: list[LoadTarget] = field(default_factory=list)
    fingerprints: list[int] = field(default_factory=list)
    manifests: list[Manifest] = field(default_factory=list)
    levels: set[Verification] = field(default_factory=set)
    tied: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    engine: WeightTransferEngine | None = None
    opened: set[str] = field(default_factory=set)

    def use(self, load_target: LoadTarget, layout: StreamLayout) -> LoadTarget:
        """Add a load target to this update and return it; begin it the first time."""
        self.opened.add(layout.manifest.digest)
        if load_target in self.load_targets:
            self.load_targets.remove(load_target)  # the last one used is committed last
        else:
            load_target.begin()
        self.load_targets.append(load_target)
        return load_target

    def begin(self, engine: WeightTransferEngine) -> None:
        """Set the engine that moves weights for this update; start its update the first time."""
        if engine is not self.engine:
            self.end()
            self.engine = engine
            engine.start_weight_update()

    def end(self) -> None:
        """Finish the engine's update, after a commit or an abort."""
        engine, self.engine = self.engine, None
        try:
            if engine is not None:
                engine.finish_weight_update()
        except Exception:  # the update is over: what it brought is in use, or discarded
            logger.exception("%s.finish_weight_update() failed", type(engine).__name__)

    def note(self, received: Received) -> None:
        """Add the result of one message."""
        self.manifests.append(received.manifest)
        self.fingerprints += received.fingerprints
        self.levels.add(received.verified)
        self.tied.update(received.tied)

    @property
    def nbytes(self) -> int:
        """Bytes of weights that arrived."""
        return sum(manifest.nbytes for manifest in self.manifests)

    @property
    def verified(self) -> Verification:
        """The weakest verification level of any part."""
        return min(self.levels, key=_STRENGTH.index, default="none")

    @property
    def table_digest(self) -> str | None:
        """The digest of all received fingerprints, in order; None without any."""
        return table_digest(self.fingerprints) if self.fingerprints else None

    @property
    def apply(self) -> Apply:
        """How the weights are applied: in place if any load target is."""
        return (
            "in_place"
            if any(load_target.in_place for load_target in self.load_targets)
            else "staged"
        )

    @property
    def extra_nbytes(self) -> int:
        """Bytes that the load targets hold in addition to the model, at their peak."""
        return sum(load_target.peak_extra_nbytes for load_target in self.load_targets)

    def validate(self, sink: WeightSink, offered: Manifest | None) -> None:
        """Check that the update is complete. Called when all messages were received.

        Raises ManifestMismatchError for tensors that are missing, and ProtocolError where the
        manifest is not the announced one or no tensors were received.
        """
        for load_target in self.load_targets:
            load_target.validate()
        self._check_ties(sink)
        announced = self.manifest_digest
        if announced is not None and len(self.manifests) == 1 and not self.partial:
            digest = self.manifests[0].digest
            if digest != announced:
                raise ProtocolError(
                    f"update {self.update_id} was announced with manifest {announced}, but has "
                    f"manifest {digest}; send what was announced"
                )
        wanted = sink.manifest or offered
        if self.partial:
            return
        if wanted is None:
            if not any(manifest.specs for manifest in self.manifests):
                raise ProtocolError(
                    f"update {self.update_id} has no tensors; send them with update_weights "
                    "before it is finished"
                )
            sink.difference(union(self.manifests, sink.ties)).check(partial=False)
            return
        if any(not sink.difference(m).missing for m in self._whole_manifests(sink)):
            return
        arrived = {name for manifest in self.manifests for name in manifest.index}
        missing = [name for name, names in wanted.places().items() if arrived.isdisjoint(names)]
        if missing:
            raise ManifestMismatchError(missing=missing)

    def _check_ties(self, sink: WeightSink) -> None:
        """Raise ManifestMismatchError where tied tensors of several messages differ."""
        wrong = [
            f"{name}: offered as {name} and {alias} with other bytes, wanted as one tied tensor"
            for alias, name in sink.ties.items()
            if alias in self.tied and self.tied.get(name, self.tied[alias]) != self.tied[alias]
        ]
        if wrong:
            raise ManifestMismatchError(mismatched=wrong)

    def _whole_manifests(self, sink: WeightSink) -> list[Manifest]:
        """Return the manifests that may be whole: none where the sink declares no manifest."""
        return self.manifests if sink.manifest is not None else []

    def check_digest(self, expected: str | None) -> None:
        """Raise VerificationError unless the sender's table of fingerprints is the received one."""
        if expected is not None and self.table_digest not in (None, expected):
            raise VerificationError(
                f"the sender's table of fingerprints has digest {expected}, the received table "
                f"{self.table_digest}: the table was changed in transit; send the update again"
            )

    def reply(self, lifecycle: UpdateLifecycle, stall_s: float) -> StepReply:
        """Return a reply with the received part of the update and the receiver's state."""
        return StepReply(
            state=lifecycle.state.value,
            version=lifecycle.version,
            update_id=self.update_id,
            apply=self.apply,
            verified=self.verified,
            nbytes=self.nbytes,
            stall_s=stall_s,
            peak_extra_nbytes=self.extra_nbytes,
            seconds=dict(self.seconds),
            table_digest=self.table_digest,
        )

    def timed(self, phase: str, started: float) -> None:
        """Add the seconds since `started` to a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started


_KEPT_SUBSETS = 2


class LoadTargets:
    """The load targets of one sink, by manifest: of the last whole model, and of a few subsets."""

    def __init__(self, sink: WeightSink, choice: ApplyChoice) -> None:
        if choice not in ("auto", "staged", "in_place"):
            raise ConfigError(f"apply must be auto, staged or in_place, not {choice!r}")
        self._sink = sink
        self._choice = choice
        self._whole: tuple[str, LoadTarget] | None = None
        self._subsets: OrderedDict[str, LoadTarget] = OrderedDict()
        self._generation = 0
        self.apply: Apply = "in_place" if choice == "in_place" else "staged"

    def find(self, layout: StreamLayout) -> LoadTarget | None:
        """Return the load target of a layout, None where there is none that still fits the sink."""
        generation = self._sink.refresh()
        if generation != self._generation:
            self._generation, self._whole = generation, None
            self._subsets.clear()
        digest = layout.manifest.digest
        if self._whole and self._whole[0] == digest:
            return self._whole[1]
        if digest in self._subsets:
            self._subsets.move_to_end(digest)
        return self._subsets.get(digest)

    def get(self, layout: StreamLayout, *, whole: bool) -> LoadTarget:
        """Return the load target of a layout; open it where there is none."""
        known = self.find(layout)
        if known is not None:
            return known
        digest = layout.manifest.digest
        if whole:
            self.apply = self._choose(layout)
        load_target = self._open_target(layout)
        if whole:
            self._whole = (digest, load_target)
        else:
            self._subsets[digest] = load_target
            while len(self._subsets) > _KEPT_SUBSETS:
                self._subsets.popitem(last=False)
        return load_target

    def _open_target(self, layout: StreamLayout) -> LoadTarget:
        """Open a load target; in place where "auto" finds no memory for a staged one."""
        try:
            return self._sink.open_target(layout, self.apply)
        except TransferError:
            if self._choice != "auto" or self.apply == "in_place":
                raise
            self._warn(layout)
            self.apply = "in_place"
            return self._sink.open_target(layout, self.apply)

    def _choose(self, layout: StreamLayout) -> Apply:
        if self._choice != "auto":
            return self._choice
        if arena.fits(self._sink.staged_nbytes(layout), self._sink.device):
            return "staged"
        self._warn(layout)
        return "in_place"

    def _warn(self, layout: StreamLayout) -> None:
        device = self._sink.device
        logger.warning(
            "no room on %s to stage %d bytes (%d are free): weights in use are written in place, "
            "and an update that fails half way leaves the receiver TORN",
            device,
            self._sink.staged_nbytes(layout),
            arena.available(device),
        )


class ProgressTimer:
    """Calls `expire(update_id)` unless it is renewed or stopped within `seconds`. Thread-safe.

    One thread serves all updates. It starts with the first, and ends with `close` or when nothing
    refers to this timer.
    """

    def __init__(self, seconds: float, expire: Callable[[str], None]) -> None:
        self.seconds = seconds
        self._expire = expire
        self._deadline: float | None = None
        self._update_id = ""
        self._changed = threading.Condition()
        self._sleeps = False
        self._thread: threading.Thread | None = None

    @property
    def update_id(self) -> str | None:
        """The update whose timer runs, None where it does not run."""
        with self._changed:
            return None if self._deadline is None else self._update_id

    def renew(self, update_id: str) -> None:
        """Start the timer again, for `update_id`."""
        with self._changed:
            self._deadline, self._update_id = time.monotonic() + self.seconds, update_id
            if self._thread is None or not self._thread.is_alive():  # as in a forked child
                self._start()
            elif self._sleeps:  # else it wakes at an earlier deadline, and checks again
                self._changed.notify()

    def stop(self) -> None:
        """Stop the timer; its thread stays."""
        with self._changed:
            self._deadline = None

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
        self._sleeps = False
        self._thread = threading.Thread(target=run, name="weightsync-progress", daemon=True)
        self._thread.start()

    def _look(self) -> float | None:
        """Return the seconds to wait: 0 after the deadline, None to sleep until notified."""
        if self._deadline is None:
            self._sleeps = True
            return None
        self._sleeps = False
        return max(self._deadline - time.monotonic(), 0.0)

    def _take(self) -> str:
        self._deadline = None
        return self._update_id


def _run_timer(ref: Callable[[], ProgressTimer | None], changed: threading.Condition) -> None:
    this = threading.current_thread()
    while True:
        with changed:
            timer = ref()
            if timer is None or timer._thread is not this:
                return
            wait_s = timer._look()
            if wait_s != 0.0:
                del timer
                changed.wait(wait_s)
                continue
            update_id = timer._take()
        timer._expire(update_id)
        del timer


class Loader:
    """Loads weights for one receiver. Called with its step lock; `state` guards `lifecycle`."""

    def __init__(
        self,
        sink: WeightSink,
        senders: Senders,
        load_targets: LoadTargets,
        gate: ReadWriteGate,
        lifecycle: UpdateLifecycle,
        state: threading.RLock,
        lease_s: float,
    ) -> None:
        self._sink = sink
        self._senders = senders
        self._load_targets = load_targets
        self._gate = gate
        self._lifecycle = lifecycle
        self._state = state
        self._lease_s = lease_s
        self.abort_reason = ""

    def receive(self, incoming: IncomingUpdate, info: UpdateInfo) -> Received:
        """Load the tensors of one message into their load target. Raises the engine's errors."""
        context = self._load_context(incoming)
        if isinstance(info, EmptyUpdate):
            return Received(Manifest(()))
        if not isinstance(info, RegisteredUpdate):
            return receive_handles(info, self._senders.keys, context)
        engine = self._senders.get(info.sender)
        incoming.sender = info.sender
        offered = self._senders.manifest(info.sender)
        if info.manifest is None and offered is not None:
            check_manifest(self._sink, offered, partial=incoming.partial)
        incoming.begin(engine)
        return _checked(engine, engine.receive_weights(info, context), incoming)

    def _load_context(self, incoming: IncomingUpdate) -> LoadContext:
        def open_target(layout: StreamLayout) -> LoadTarget:
            # A session of messages without ids may split tied tensors: `validate` checks them all.
            more_follows = incoming.anonymous and not incoming.partial
            check_manifest(self._sink, layout.manifest, partial=True, more_follows=more_follows)
            whole = not incoming.partial and not self._sink.difference(layout.manifest).missing
            return incoming.use(self.load_target(layout, whole=whole), layout)

        def mark_dirty() -> None:
            if incoming.load_targets[-1].in_place and not self._lifecycle.dirty:
                self._gate.hold(self._lease_s)
                with self._state:
                    self._lifecycle.mark_dirty(incoming.update_id)

        return LoadContext(
            open_target=open_target,
            mark_dirty=mark_dirty,
            check=lambda: self.check_not_aborted(incoming),
            verification=self._sink.verification,
            lends_views=not getattr(self._sink, "keeps_views", False),
            ties=self._sink.ties,
        )

    def check_not_aborted(self, incoming: IncomingUpdate) -> None:
        """Raise TransferError when the update is being aborted."""
        if self._lifecycle.state is State.ABORTING:
            raise TransferError(f"update {incoming.update_id} ends: {self.abort_reason}")

    def load_target(self, layout: StreamLayout, *, whole: bool) -> LoadTarget:
        """Return the load target of a layout. Opens it with readers blocked: the model may move."""
        known = self._load_targets.find(layout)
        if known is not None or self._gate.held:  # held by an update in place, which releases it
            return known or self._load_targets.get(layout, whole=whole)
        self._gate.hold(self._lease_s)
        try:
            return self._load_targets.get(layout, whole=whole)
        finally:
            self._gate.release()


def _checked(engine: WeightTransferEngine, received: object, incoming: IncomingUpdate) -> Received:
    """Raise ProtocolError where an engine reports tensors for which it opened no load target."""
    method = f"{type(engine).__name__}.receive_weights()"
    if not isinstance(received, Received):
        raise ProtocolError(f"{method} returned a {type(received).__name__}, not a Received")
    if received.manifest.specs and received.manifest.digest not in incoming.opened:
        raise ProtocolError(
            f"{method} reports {received.manifest.nbytes} bytes for which it opened no load target"
        )
    return received


class StepLock:
    """Allows one step at a time. A step waits at most `wait_s` for the lock. Thread-safe."""

    def __init__(self, lifecycle: UpdateLifecycle, wait_s: float) -> None:
        self._lifecycle = lifecycle
        self._wait_s = wait_s
        self._work = threading.Lock()
        self._serving = ""

    @property
    def busy(self) -> bool:
        """Whether a step is running."""
        return self._work.locked()

    def serves(self, update_id: str) -> bool:
        """Whether the running step belongs to this update, and is no init or cleanup."""
        return self._serving == update_id

    @contextmanager
    def taken(self, step: str, update_id: str = "") -> Iterator[None]:
        """Hold the lock for a step. Raises UpdateConflictError when it is not free in time."""
        with self.waited_for() as ours:
            if not ours:
                raise UpdateConflictError(
                    f"{step}: the receiver has been busy for {self._wait_s:g} s with update "
                    f"{self._lifecycle.update_id}",
                    state=self._lifecycle.state.value,
                    update_id=self._lifecycle.update_id,
                )
            self._serving = update_id
            try:
                yield
            finally:
                self._serving = ""

    @contextmanager
    def waited_for(self) -> Iterator[bool]:
        """Hold the lock if it is free in time; yield whether it is held."""
        yield from self._held(self._work.acquire(timeout=self._wait_s))

    @contextmanager
    def if_free(self) -> Iterator[bool]:
        """Hold the lock if it is free now; yield whether it is held."""
        yield from self._held(self._work.acquire(blocking=False))

    def _held(self, ours: bool) -> Iterator[bool]:
        try:
            yield ours
        finally:
            if ours:
                self._work.release()


_CHECKS_PER_LEASE = 10
"""How often in the time of a lease the sender is checked for signs of life."""
_MAX_LEASES = 5
"""Leases without a message from a live sender, whose caller may compute between two messages."""
_WATCH_S = 1.0
"""Seconds between two checks of a sender whose update blocks readers between its messages."""


class UpdateSession:
    """Owns the state of one receiver. Thread-safe: steps that load or commit exclude each other.

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
        clear_cache: Callable[[], None] | None,
        on_hold: OnHold | None = None,
        on_release: OnRelease | None = None,
    ) -> None:
        self.sink = sink
        self.senders = senders
        self.lifecycle = UpdateLifecycle()
        self.load_targets = LoadTargets(sink, apply)
        self._state = threading.RLock()
        self.readiness = Readiness(self.lifecycle, senders, self._state, self.forget_dead, lease_s)
        self.gate = ReadWriteGate(
            self.readiness.refuse,
            on_hold=on_hold,
            on_release=on_release,
            gpus=lambda: sink.gpus,
        )
        self.history = History()
        self._incoming: IncomingUpdate | None = None
        step_lock = self._step_lock = StepLock(self.lifecycle, lease_s)
        senders.on_close = self._end_engine
        senders.at_work = lambda: step_lock.busy
        self._lease_s = lease_s
        self._aborted_updates = AbortedUpdates(lease_s)
        self._lease = ProgressTimer(lease_s / _CHECKS_PER_LEASE, self._expire)
        self._beat: int | None = None
        self._last_message_at = self._last_sign_at = 0.0
        self._watch = ProgressTimer(_WATCH_S, self._check_sender)
        self._loader = Loader(
            sink, senders, self.load_targets, self.gate, self.lifecycle, self._state, lease_s
        )
        self._clear_cache = clear_cache

    @property
    def busy(self) -> bool:
        """Whether a step is running."""
        return self._step_lock.busy

    @property
    def orphaned(self) -> bool:
        """Whether the sender of the open update is dead, or was refused when it reconnected."""
        incoming = self._incoming
        sender = incoming.sender if incoming else None
        return sender is not None and not self.senders.alive(sender)

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
        with self._step_lock.taken("init"):
            self._close_dead_senders()
            manifest = self.senders.open(info)
            try:
                difference = self.sink.difference(manifest)
                if difference.unexpected or difference.mismatched or difference.cut:
                    difference.check(partial=False)
                if not difference.missing and self._incoming is None:
                    # The load targets of an open update must not move.
                    self._loader.load_target(StreamLayout(manifest), whole=True)
            except BaseException:
                self.senders.close(info.sender)
                raise
            if info.fleet_version is not None:
                self.readiness.joined(info.sender, info.fleet_version)

    def _end_engine(self, engine: WeightTransferEngine) -> None:
        """End the part of an engine in the open update before it is shut down."""
        incoming = self._incoming
        if incoming is not None and incoming.engine is engine:
            incoming.end()

    def forget_dead(self) -> None:
        """Close the engines of dead senders, unless a step is running."""
        if self.lifecycle.state is State.ABORTING:
            return  # the call that ends the update waits for the lock: leave it free
        with self._step_lock.if_free() as ours:
            if ours:
                self._close_dead_senders()

    def _close_dead_senders(self) -> None:
        keep = self._incoming.sender if self._incoming else None
        self.readiness.remove_dead(self.senders.forget_dead(keep=keep))

    def shutdown(self, sender: str | None, *, leaves: bool = True) -> None:
        """Close the engine of a sender (None: of every sender).

        With `leaves` False the sender will init again, and its claim of a fleet version stays.
        Raises UpdateConflictError while an update of that sender is open.
        """
        with self._step_lock.taken("shutdown"):
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
            self.readiness.left(sender, for_good=leaves)

    @property
    def is_open(self) -> bool:
        """Whether an update is open."""
        return self._incoming is not None

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
        with self._state:
            self._aborted_updates.check(update_id)
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
            if self._incoming is None or self._incoming.update_id != update_id:
                self._loader.abort_reason = ""
                self.readiness.started()
                self.history.opened(update_id)
                self._incoming = IncomingUpdate(
                    update_id,
                    sender,
                    terms.partial,
                    anonymous=anonymous,
                    manifest_digest=terms.manifest_digest,
                )
        self._renew_lease()
        return self.reply()

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

    def load(self, update_id: str, info: UpdateInfo) -> StepReply:
        """Load the tensors of one message. An error aborts the whole update."""
        with self._step("load", update_id), self._giving_up(update_id):
            incoming = self._expect(update_id)
            started = time.perf_counter()
            incoming.note(self._loader.receive(incoming, info))
            incoming.timed("load", started)
            self._loader.check_not_aborted(incoming)
        return self.reply()

    def prepare(self, update_id: str) -> StepReply:
        """UPDATING becomes PREPARED, if the update is complete. Idempotent."""
        if self.lifecycle.state is State.PREPARED and self.lifecycle.update_id == update_id:
            self._renew_lease()
            return self.reply()
        with self._step("prepare", update_id), self._giving_up(update_id):
            incoming = self._expect(update_id)
            started = time.perf_counter()
            incoming.validate(self.sink, self.senders.manifest(incoming.sender))
            incoming.timed("settle", started)
            with self._state:
                self.lifecycle.prepared(update_id)
        return self.reply()

    def finish(
        self, update_id: str, *, digest: str | None, label: str | None, clear_cache: bool
    ) -> StepReply:
        """PREPARED becomes READY: the new weights are in use when this returns. Idempotent."""
        with self._step("finish", update_id):
            last = self.history.last_reply
            if update_id == self.lifecycle.last_finished and last is not None:
                return last
            with self._giving_up(update_id):
                incoming = self._expect(update_id, State.PREPARED)
                incoming.check_digest(digest)
                self._commit(incoming, clear_cache=clear_cache)
            try:
                with self._state:
                    if label is not None:
                        self.lifecycle.label = label
                    self._incoming = None
                    reply = self.reply(incoming, stall_s=self.gate.held_s)
                    return self.history.committed(reply, self.lifecycle.label)
            finally:
                self.gate.release()
                incoming.end()

    def abort(self, update_id: str | None, reason: str) -> StepReply:
        """Abort the update. Returns when the loader has stopped, or with ABORTING after `lease_s`.

        An update that is being committed is not aborted: the reply has its result.
        """
        with self._state:
            holder = self._incoming.update_id if self._incoming else ""
            if update_id is not None and update_id not in (holder, self.lifecycle.last_finished):
                self._aborted_updates.note(update_id)
            if self.lifecycle.terms is None or self._incoming is None:
                return self.reply()
            update_id = update_id or self._incoming.update_id
            if not (self._incoming.committing and self._incoming.update_id == update_id):
                self.lifecycle.begin_abort(update_id)
                self._loader.abort_reason = reason or "its sender aborted it"
        with self._step_lock.waited_for() as ours:
            if ours and self.lifecycle.state is State.ABORTING:
                self._give_up(update_id)
        if not ours:
            self._renew_lease()  # the abort is tried again when the lease expires
        return self.reply()

    def reply(self, incoming: IncomingUpdate | None = None, *, stall_s: float = 0.0) -> StepReply:
        """Return a reply with the receiver's state, and the received part of the open update."""
        incoming = incoming or self._incoming
        lifecycle = self.lifecycle
        if incoming is None:
            return StepReply(
                state=lifecycle.state.value,
                version=lifecycle.version,
                update_id=lifecycle.torn_by or None,
                apply=self.load_targets.apply,
            )
        reply = incoming.reply(lifecycle, stall_s)
        return reply if incoming.load_targets else replace(reply, apply=self.load_targets.apply)

    def close(self) -> None:
        """Abort the open update, wait for its loader, and close every engine.

        If the loader does not stop in time, the memory that it reads stays mapped: to unmap it
        would crash the process.
        """
        self.abort(None, "the receiver is closed")
        with self._step_lock.waited_for() as ours:
            if ours:
                self.senders.close_all()
            else:
                logger.warning("a loader is still running; the memory that it reads stays mapped")
        self._lease.close()
        self._watch.close()

    def _commit(self, incoming: IncomingUpdate, *, clear_cache: bool) -> None:
        """Swap in the new weights while no reader is active. The gate is still held afterwards."""
        started = time.perf_counter()
        with self._state:
            self._loader.check_not_aborted(incoming)
            incoming.committing = True
        if not self.gate.held:
            self.gate.hold(self._lease_s)
        try:
            if incoming.load_targets:
                with self._state:
                    # From here on a failure leaves the sink between two versions.
                    self.lifecycle.dirty = True
                self.sink.commit_all(incoming.load_targets)
            # The streams of generation do not wait for this thread's; they continue when the gate
            # is released.
            wait_for(self.sink.gpus)
            # Before the commit: new weights with a stale cache are not one complete version.
            if clear_cache and self._clear_cache is not None:
                self._clear_cache()
            with self._state:
                self.lifecycle.finish(incoming.update_id)
                self.readiness.committed(incoming.sender, partial=incoming.partial)
        except BaseException:
            self._give_up(incoming.update_id)
            raise
        incoming.timed("swap", started)

    @contextmanager
    def _step(self, step: str, update_id: str) -> Iterator[None]:
        """Hold the step lock for a step of an update; its lease does not run meanwhile."""
        self._lease.stop()
        self._watch.stop()
        try:
            with self._step_lock.taken(step, update_id):
                yield
        finally:
            self._renew_lease()

    @contextmanager
    def _giving_up(self, update_id: str) -> Iterator[None]:
        """Abort the update when a step fails, unless the step was refused in this state."""
        try:
            yield
        except (UpdateConflictError, StaleVersionError):
            if self.lifecycle.state is State.ABORTING:
                self._give_up(update_id)
            raise
        except BaseException as exc:
            logger.warning("update %s failed and is aborted: %s", update_id, exc)
            self._give_up(update_id)
            raise

    def _give_up(self, update_id: str) -> None:
        """Return to READY(v), or enter TORN. Called with the step lock; ignores other updates."""
        incoming = self._incoming
        if incoming is None or incoming.update_id != update_id:
            return
        try:
            with self._state:
                self._aborted_updates.note(update_id)  # repeated messages must not start it again
                self.lifecycle.begin_abort(update_id)
                try:
                    for load_target in incoming.load_targets:
                        load_target.discard()
                finally:
                    self.lifecycle.end_abort()
                    self._incoming = None
                    self.history.given_up(torn=self.lifecycle.state is State.TORN)
        finally:
            if self.gate.held:
                self.gate.release()
            incoming.end()

    def _expect(self, update_id: str, state: State = State.UPDATING) -> IncomingUpdate:
        with self._state:
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
            return incoming

    def _renew_lease(self) -> None:
        with self._state:
            self._lease.stop()
            if self._may_expire(self._incoming):
                self._beat = self._sender_beat()
                self._last_message_at = self._last_sign_at = time.monotonic()
                self._lease.renew(self.lifecycle.update_id)
            if self._incoming is not None and self.gate.held:
                self._watch.renew(self.lifecycle.update_id)

    def _sender_beat(self) -> int | None:
        return self.senders.beat(self._incoming.sender) if self._incoming is not None else None

    def _sender_is_connected(self) -> bool:
        """Whether the sender is connected. For another host, where no heartbeat is observed."""
        sender = self._incoming.sender if self._incoming is not None else None
        return sender is not None and self.senders.alive(sender)

    def _sender_is_active(self) -> bool:
        """Whether the sender's last message or heartbeat is recent enough to keep the lease."""
        now, beat = time.monotonic(), self._sender_beat()
        if beat != self._beat or (beat is None and self._sender_is_connected()):
            self._beat, self._last_sign_at = beat, now
        silent_s, quiet_s = now - self._last_sign_at, now - self._last_message_at
        return silent_s < self._lease_s and quiet_s < _MAX_LEASES * self._lease_s

    def _may_expire(self, incoming: IncomingUpdate | None) -> bool:
        """Whether the lease applies. A PREPARED update with a sender id waits for recovery."""
        if incoming is None:
            return False
        return self.lifecycle.state is not State.PREPARED or incoming.sender is None

    def _check_sender(self, update_id: str) -> None:
        """Release the gate where the sender is dead. Readers are refused if the weights are dirty.

        A PREPARED update stays PREPARED, for recovery by the next sender.
        """
        with self._step_lock.if_free() as ours:
            incoming = self._incoming
            if incoming is None or incoming.update_id != update_id or not self.gate.held:
                return
            gone = ours and self.orphaned
            if gone and self.lifecycle.state is State.PREPARED:
                logger.warning("the sender of update %s died before it was finished", update_id)
                self.gate.release()
            elif gone:
                self._give_up(update_id)
            else:
                self._watch.renew(update_id)

    def _expire(self, update_id: str) -> None:
        with self._state:
            current = self._incoming is not None and self._incoming.update_id == update_id
            if not current or not self._may_expire(self._incoming):
                return
            if self._step_lock.serves(update_id) or self._sender_is_active():
                self._lease.renew(update_id)
                return
        reason = f"its sender gave no sign of life for {self._lease_s:g} s"
        logger.warning("update %s is aborted: %s", update_id, reason)
        self.abort(update_id, reason)
