"""One update on a receiver: its steps, its load targets, what arrived, and how it ends."""

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
    """What one update has brought so far."""

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
        """Take part in this update; the first time it begins."""
        self.opened.add(layout.manifest.digest)
        if load_target in self.load_targets:
            self.load_targets.remove(load_target)  # what came last is committed last
        else:
            load_target.begin()
        self.load_targets.append(load_target)
        return load_target

    def begin(self, engine: WeightTransferEngine) -> None:
        """An engine moves weights for this update; the first time it is told so."""
        if engine is not self.engine:
            self.end()
            self.engine = engine
            engine.start_weight_update()

    def end(self) -> None:
        """The update is over, well or not."""
        engine, self.engine = self.engine, None
        try:
            if engine is not None:
                engine.finish_weight_update()
        except Exception:  # the update is over: what it brought is in use, or discarded
            logger.exception("%s.finish_weight_update() failed", type(engine).__name__)

    def note(self, received: Received) -> None:
        """Add what one message brought."""
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
        """The weakest proof of any part."""
        return min(self.levels, key=_STRENGTH.index, default="none")

    @property
    def table_digest(self) -> str | None:
        """Names the fingerprints of everything that arrived, in order; None without any."""
        return table_digest(self.fingerprints) if self.fingerprints else None

    @property
    def apply(self) -> Apply:
        """How the weights land: in place if any of them does."""
        return (
            "in_place"
            if any(load_target.in_place for load_target in self.load_targets)
            else "staged"
        )

    @property
    def extra_nbytes(self) -> int:
        """What the landings hold beside the model."""
        return sum(load_target.peak_extra_nbytes for load_target in self.load_targets)

    def validate(self, sink: WeightSink, offered: Manifest | None) -> None:
        """Everything was sent: raise ManifestMismatchError for tensors that never came."""
        for load_target in self.load_targets:
            load_target.validate()
        self._check_ties(sink)
        announced = self.manifest_digest
        if announced is not None and len(self.manifests) == 1 and not self.partial:
            digest = self.manifests[0].digest
            if digest != announced:
                raise ProtocolError(
                    f"update {self.update_id} was announced with manifest {announced}, what came "
                    f"is {digest}; send what was announced"
                )
        wanted = sink.manifest or offered
        if self.partial:
            return
        if wanted is None:
            if not any(manifest.specs for manifest in self.manifests):
                raise ProtocolError(
                    f"update {self.update_id} brought no tensors; send them with update_weights "
                    "before it is finished"
                )
            sink.difference(union(self.manifests, sink.ties)).check(partial=False)
            return
        if any(not sink.difference(m).missing for m in self._whole_ones(sink)):
            return
        arrived = {name for manifest in self.manifests for name in manifest.index}
        missing = [name for name, names in wanted.places().items() if arrived.isdisjoint(names)]
        if missing:
            raise ManifestMismatchError(missing=missing)

    def _check_ties(self, sink: WeightSink) -> None:
        """Two names of one tensor came in several messages: raise where their bytes differ."""
        wrong = [
            f"{name}: offered as {name} and {alias} with other bytes, wanted as one tied tensor"
            for alias, name in sink.ties.items()
            if alias in self.tied and self.tied.get(name, self.tied[alias]) != self.tied[alias]
        ]
        if wrong:
            raise ManifestMismatchError(mismatched=wrong)

    def _whole_ones(self, sink: WeightSink) -> list[Manifest]:
        """Without a declared manifest no single message can be known to be whole."""
        return self.manifests if sink.manifest is not None else []

    def check_digest(self, expected: str | None) -> None:
        """Raise VerificationError unless the sender's table is the one that was compared with."""
        if expected is not None and self.table_digest not in (None, expected):
            raise VerificationError(
                f"the sender's fingerprints are named {expected}, those found beside the data "
                f"{self.table_digest}: the table was changed on the way; send the update again"
            )

    def reply(self, lifecycle: UpdateLifecycle, stall_s: float) -> StepReply:
        """Say what arrived so far, and where the receiver stands."""
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
    """The landings of one sink, by manifest: the last whole model's, and a few subsets'."""

    def __init__(self, sink: WeightSink, choice: ApplyChoice) -> None:
        if choice not in ("auto", "staged", "in_place"):
            raise ConfigError(f"apply must be auto, staged or in_place, not {choice!r}")
        self._sink = sink
        self._choice = choice
        self._whole: tuple[str, LoadTarget] | None = None
        self._subsets: OrderedDict[str, LoadTarget] = OrderedDict()
        self._generation = 0
        self.apply: Apply = "in_place" if choice == "in_place" else "staged"

    def find(self, plan: StreamLayout) -> LoadTarget | None:
        """Return the landing of `plan` if there is one that still fits the sink."""
        generation = self._sink.refresh()
        if generation != self._generation:
            self._generation, self._whole = generation, None
            self._subsets.clear()
        digest = plan.manifest.digest
        if self._whole and self._whole[0] == digest:
            return self._whole[1]
        if digest in self._subsets:
            self._subsets.move_to_end(digest)
        return self._subsets.get(digest)

    def get(self, plan: StreamLayout, *, whole: bool) -> LoadTarget:
        """Return where the tensors of `plan` go, made now if it is not known."""
        known = self.find(plan)
        if known is not None:
            return known
        digest = plan.manifest.digest
        if whole:
            self.apply = self._choose(plan)
        load_target = self._land(plan)
        if whole:
            self._whole = (digest, load_target)
        else:
            self._subsets[digest] = load_target
            while len(self._subsets) > _KEPT_SUBSETS:
                self._subsets.popitem(last=False)
        return load_target

    def _land(self, plan: StreamLayout) -> LoadTarget:
        """Make a landing; without room for a staged one in place, where that may be chosen."""
        try:
            return self._sink.open_target(plan, self.apply)
        except TransferError:
            if self._choice != "auto" or self.apply == "in_place":
                raise
            self._warn(plan)
            self.apply = "in_place"
            return self._sink.open_target(plan, self.apply)

    def _choose(self, plan: StreamLayout) -> Apply:
        if self._choice != "auto":
            return self._choice
        if arena.fits(self._sink.staged_nbytes(plan), self._sink.device):
            return "staged"
        self._warn(plan)
        return "in_place"

    def _warn(self, plan: StreamLayout) -> None:
        device = self._sink.device
        logger.warning(
            "no room on %s to stage %d bytes (%d are free): weights in use are written in place, "
            "and an update that fails half way leaves the receiver TORN",
            device,
            self._sink.staged_nbytes(plan),
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
        """The update whose time runs, None where no time runs."""
        with self._changed:
            return None if self._deadline is None else self._update_id

    def renew(self, update_id: str) -> None:
        """Start the time for `update_id` again."""
        with self._changed:
            self._deadline, self._update_id = time.monotonic() + self.seconds, update_id
            if self._thread is None or not self._thread.is_alive():  # as in a forked child
                self._start()
            elif self._sleeps:  # else it wakes at an earlier deadline, and looks again
                self._changed.notify()

    def stop(self) -> None:
        """No update is waited for."""
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
        """Return seconds to wait, None to sleep until told otherwise; 0 when the time is over."""
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
    """Loads for one receiver; called with its work lock. `state` guards `lifecycle`."""

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
        """Bring the tensors of one message to their landing. Raises what the engine raises."""
        reception = self._reception(incoming)
        if isinstance(info, EmptyUpdate):
            return Received(Manifest(()))
        if not isinstance(info, RegisteredUpdate):
            return receive_handles(info, self._senders.keys, reception)
        engine = self._senders.get(info.sender)
        incoming.sender = info.sender
        offered = self._senders.manifest(info.sender)
        if info.manifest is None and offered is not None:
            check_manifest(self._sink, offered, partial=incoming.partial)
        incoming.begin(engine)
        return _checked(engine, engine.receive_weights(info, reception), incoming)

    def _reception(self, incoming: IncomingUpdate) -> LoadContext:
        def open_target(plan: StreamLayout) -> LoadTarget:
            # A session of messages without ids may cut what belongs together: settle looks at all.
            more_follows = incoming.anonymous and not incoming.partial
            check_manifest(self._sink, plan.manifest, partial=True, more_follows=more_follows)
            whole = not incoming.partial and not self._sink.difference(plan.manifest).missing
            return incoming.use(self.load_target(plan, whole=whole), plan)

        def touch() -> None:
            if incoming.load_targets[-1].in_place and not self._lifecycle.dirty:
                self._gate.hold(self._lease_s)
                with self._state:
                    self._lifecycle.touch(incoming.update_id)

        return LoadContext(
            open_target=open_target,
            touch=touch,
            check=lambda: self.check_not_aborted(incoming),
            verification=self._sink.verification,
            lends_views=not getattr(self._sink, "keeps_views", False),
            ties=self._sink.ties,
        )

    def check_not_aborted(self, incoming: IncomingUpdate) -> None:
        """Raise TransferError when the update is being aborted."""
        if self._lifecycle.state is State.ABORTING:
            raise TransferError(f"update {incoming.update_id} ends: {self.abort_reason}")

    def load_target(self, plan: StreamLayout, *, whole: bool) -> LoadTarget:
        """Return the plan's landing; to make one may move the model, so nobody reads meanwhile."""
        known = self._load_targets.find(plan)
        if known is not None or self._gate.held:  # by an update in place, which releases it itself
            return known or self._load_targets.get(plan, whole=whole)
        self._gate.hold(self._lease_s)
        try:
            return self._load_targets.get(plan, whole=whole)
        finally:
            self._gate.release()


def _checked(engine: WeightTransferEngine, received: object, incoming: IncomingUpdate) -> Received:
    """Raise ProtocolError where an engine reports what it asked no load target for."""
    method = f"{type(engine).__name__}.receive_weights()"
    if not isinstance(received, Received):
        raise ProtocolError(f"{method} returned a {type(received).__name__}, not a Received")
    if received.manifest.specs and received.manifest.digest not in incoming.opened:
        raise ProtocolError(
            f"{method} reports {received.manifest.nbytes} bytes for which it opened no load target"
        )
    return received


class StepLock:
    """One step at a time. A step waits `wait_s` for its turn. Thread-safe."""

    def __init__(self, lifecycle: UpdateLifecycle, wait_s: float) -> None:
        self._lifecycle = lifecycle
        self._wait_s = wait_s
        self._work = threading.Lock()
        self._serving = ""

    @property
    def busy(self) -> bool:
        """Whether a step is at work now."""
        return self._work.locked()

    def serves(self, update_id: str) -> bool:
        """Whether the step at work is one of this update, and not an init or a look around."""
        return self._serving == update_id

    @contextmanager
    def taken(self, step: str, update_id: str = "") -> Iterator[None]:
        """Be at work. Raises UpdateConflictError when the turn does not come in time."""
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
        """Yield whether the turn came in time."""
        yield from self._held(self._work.acquire(timeout=self._wait_s))

    @contextmanager
    def if_free(self) -> Iterator[bool]:
        """Yield whether nobody was at work; never waits."""
        yield from self._held(self._work.acquire(blocking=False))

    def _held(self, ours: bool) -> Iterator[bool]:
        try:
            yield ours
        finally:
            if ours:
                self._work.release()


_LOOKS = 10
"""How often in a lease it is looked at whether the sender lives."""
_LEASES = 5
"""For a sender whose caller computes between two messages of one update."""
_WATCH_S = 1.0
"""How often it is looked whether a sender lives that keeps readers out between its messages."""


class UpdateSession:
    """Owns the state of one receiver. Thread-safe; loading and committing take turns.

    `lease_s`: how long an update may go without progress before it is given up; between messages
    of a sender that is seen to live _LEASES times as long.
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
        turns = self._turns = StepLock(self.lifecycle, lease_s)
        senders.at_work = lambda: turns.busy
        self._lease_s = lease_s
        self._overtaken = AbortedUpdates(lease_s)
        self._lease = ProgressTimer(lease_s / _LOOKS, self._expire)
        self._beat: int | None = None
        self._told_at = self._heard_at = 0.0
        self._watch = ProgressTimer(_WATCH_S, self._look_at_sender)
        self._loader = Loader(
            sink, senders, self.load_targets, self.gate, self.lifecycle, self._state, lease_s
        )
        self._clear_cache = clear_cache

    @property
    def busy(self) -> bool:
        """Whether a step is at work now."""
        return self._turns.busy

    @property
    def orphaned(self) -> bool:
        """Whether the sender of the open update is dead, or was refused when it connected anew."""
        incoming = self._incoming
        sender = incoming.sender if incoming else None
        return sender is not None and not self.senders.alive(sender)

    def init(self, info: InitInfo) -> None:
        """Open what a sender offers, check its names, and make room. Raises what does not fit."""
        replaced = self.senders.replaces(info)
        if replaced is not None and self.lifecycle.state is State.UPDATING:
            # Its loader may wait for a sender that is stopped. One that is PREPARED is left for the
            # new owner to end: others may have committed it.
            self.abort(None, f"{describe(replaced)} was replaced as the owner of this receiver")
        with self._turns.taken("init"):
            self._part_from_dead()
            manifest = self.senders.open(info)
            try:
                difference = self.sink.difference(manifest)
                if difference.unexpected or difference.mismatched or difference.cut:
                    difference.check(partial=False)
                if not difference.missing and self._incoming is None:
                    # While an update is open its landings must stay where they are.
                    self._loader.load_target(StreamLayout(manifest), whole=True)
            except BaseException:
                self.senders.close(info.sender)
                raise
            if info.fleet_version is not None:
                self.readiness.joined(info.sender, info.fleet_version)

    def forget_dead(self) -> None:
        """Let go of what dead senders had shared, unless a step is at work."""
        if self.lifecycle.state is State.ABORTING:
            return  # who ends the update waits for its turn: looking around must not take it
        with self._turns.if_free() as ours:
            if ours:
                self._part_from_dead()

    def _part_from_dead(self) -> None:
        keep = self._incoming.sender if self._incoming else None
        self.readiness.parted(self.senders.forget_dead(keep=keep))

    def shutdown(self, sender: str | None, *, leaves: bool = True) -> None:
        """Close what a sender (None: every sender) had opened. Refused while its update is open.

        Who does not leave will init again; what it said of its fleet is not forgotten.
        """
        with self._turns.taken("shutdown"):
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
        """Before anything starts: the sender is known, and sends the model that it announced."""
        self.senders.get(sender)
        manifest = self.senders.manifest(sender)
        digest = manifest.digest if manifest is not None else None
        if terms is not None and terms.manifest_digest not in (None, digest):
            raise ProtocolError(
                f"the update is of manifest {terms.manifest_digest}, init announced {digest}; "
                "init again with the new manifest"
            )

    def start(
        self, update_id: str, terms: StartTerms, *, sender: str | None, anonymous: bool = False
    ) -> StepReply:
        """READY becomes UPDATING. Messages without an id belong to an `anonymous` update only."""
        with self._state:
            self._overtaken.check(update_id)
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
        """Return the update that a message means: the one it names, or the anonymous session."""
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
        """Bring in the tensors of one message. What fails gives the whole update up."""
        with self._step("load", update_id), self._giving_up(update_id):
            incoming = self._expect(update_id)
            started = time.perf_counter()
            incoming.note(self._loader.receive(incoming, info))
            incoming.timed("load", started)
            self._loader.check_not_aborted(incoming)
        return self.reply()

    def prepare(self, update_id: str) -> StepReply:
        """UPDATING becomes PREPARED, if everything is there. Done already: nothing happens."""
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
        """PREPARED becomes READY: the new weights are in use when this returns."""
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
        """Forget the update. Returns when the loader has stopped, or ABORTING while it has not.

        It is too late for one that is being committed: the answer says what became of it.
        """
        with self._state:
            holder = self._incoming.update_id if self._incoming else ""
            if update_id is not None and update_id not in (holder, self.lifecycle.last_finished):
                self._overtaken.note(update_id)
            if self.lifecycle.terms is None or self._incoming is None:
                return self.reply()
            update_id = update_id or self._incoming.update_id
            if not (self._incoming.committing and self._incoming.update_id == update_id):
                self.lifecycle.begin_abort(update_id)
                self._loader.abort_reason = reason or "its sender aborted it"
        with self._turns.waited_for() as ours:
            if ours and self.lifecycle.state is State.ABORTING:
                self._give_up(update_id)
        if not ours:
            self._renew_lease()  # it is tried again then
        return self.reply()

    def reply(self, incoming: IncomingUpdate | None = None, *, stall_s: float = 0.0) -> StepReply:
        """Say where the receiver stands."""
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
        """Give up the open update, wait for its loader, and close every engine.

        A loader that does not stop in time keeps what it reads: unmapping it would be a crash.
        """
        self.abort(None, "the receiver is closed")
        with self._turns.waited_for() as ours:
            if ours:
                self.senders.close_all()
            else:
                logger.warning("a loader is still at work; what it reads stays mapped")
        self._lease.close()
        self._watch.close()

    def _commit(self, incoming: IncomingUpdate, *, clear_cache: bool) -> None:
        """Swap the weights in while nobody reads. Done, the gate is still held."""
        started = time.perf_counter()
        with self._state:
            self._loader.check_not_aborted(incoming)
            incoming.committing = True
        if not self.gate.held:
            self.gate.hold(self._lease_s)
        try:
            if incoming.load_targets:
                with self._state:
                    # From here a failure leaves the sink between two versions.
                    self.lifecycle.dirty = True
                self.sink.commit_all(incoming.load_targets)
            # Generation's streams know nothing of this thread's, and go on when the gate is open.
            wait_for(self.sink.gpus)
            # Before the commit counts: new weights over a stale cache are not one whole version.
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
        """Be at work for an update: no lease runs meanwhile."""
        self._lease.stop()
        self._watch.stop()
        try:
            with self._turns.taken(step, update_id):
                yield
        finally:
            self._renew_lease()

    @contextmanager
    def _giving_up(self, update_id: str) -> Iterator[None]:
        """A step that fails ends its update, unless it was refused for not being of this update."""
        try:
            yield
        except (UpdateConflictError, StaleVersionError):
            if self.lifecycle.state is State.ABORTING:
                self._give_up(update_id)
            raise
        except BaseException as exc:
            logger.warning("update %s failed and is given up: %s", update_id, exc)
            self._give_up(update_id)
            raise

    def _give_up(self, update_id: str) -> None:
        """Back to READY(v), or TORN. Called with the work lock; nothing to do when it is over."""
        incoming = self._incoming
        if incoming is None or incoming.update_id != update_id:
            return
        try:
            with self._state:
                self._overtaken.note(update_id)  # what repeats its messages may not begin it again
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
                self._told_at = self._heard_at = time.monotonic()
                self._lease.renew(self.lifecycle.update_id)
            if self._incoming is not None and self.gate.held:
                self._watch.renew(self.lifecycle.update_id)

    def _sender_beat(self) -> int | None:
        return self.senders.beat(self._incoming.sender) if self._incoming is not None else None

    def _sender_is_connected(self) -> bool:
        """What is known of a sender on another host, whose heartbeat is unseen."""
        sender = self._incoming.sender if self._incoming is not None else None
        return sender is not None and self.senders.alive(sender)

    def _is_heard_of(self) -> bool:
        """Whether its sender's message or heartbeat is new enough to wait for another message."""
        now, beat = time.monotonic(), self._sender_beat()
        if beat != self._beat or (beat is None and self._sender_is_connected()):
            self._beat, self._heard_at = beat, now
        silent_s, quiet_s = now - self._heard_at, now - self._told_at
        return silent_s < self._lease_s and quiet_s < _LEASES * self._lease_s

    def _may_expire(self, incoming: IncomingUpdate | None) -> bool:
        """PREPARED waits for its sender's successor; where none can know of it, it expires too."""
        if incoming is None:
            return False
        return self.lifecycle.state is not State.PREPARED or incoming.sender is None

    def _look_at_sender(self, update_id: str) -> None:
        """Readers do not wait for a sender that is dead: weights that it left half way refuse them.

        What is PREPARED stays so, for a successor to finish.
        """
        with self._turns.if_free() as ours:
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
            if self._turns.serves(update_id) or self._is_heard_of():
                self._lease.renew(update_id)
                return
        reason = f"nothing was heard of its sender for {self._lease_s:g} s"
        logger.warning("update %s is given up: %s", update_id, reason)
        self.abort(update_id, reason)
