"""The senders that a receiver knows, and whether it may generate."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from weightsync.backends.base import WeightTransferEngine, check_plain
from weightsync.backends.registry import get_backend
from weightsync.errors import (
    BackendUnavailableError,
    ConfigError,
    NotReadyError,
    ProtocolError,
    SenderConflictError,
    UnknownSenderError,
)
from weightsync.shm.wait import Heartbeat
from weightsync.specs import Manifest
from weightsync.update.lifecycle import UpdateLifecycle
from weightsync.wire.codec import manifest_from_wire
from weightsync.wire.messages import LedgerEntry
from weightsync.wire.offers import InitInfo, Owner, describe, utc

logger = logging.getLogger(__name__)

MAX_PEERS = 64
REMEMBERED_SENDERS = 1024
"""How many senders' newest offers are known, those that left included."""


class Senders:
    """Engines by sender id; `keys` are the device keys that they open handles with.

    They are those of one owner, of dead ones before it, and of senders that claim nothing. The
    engines' hearts beat while `at_work` says that the receiver is.
    """

    def __init__(self, keys: list[str]) -> None:
        self.keys = keys
        self._engines: dict[str, WeightTransferEngine] = {}
        self._heartbeats: dict[str, Heartbeat] = {}
        self._paths: dict[str, str] = {}
        self._manifests: dict[str, Manifest] = {}
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._opening = ""
        self.at_work: Callable[[], bool] = lambda: False
        self._owner: Owner | None = None
        self._owned: set[str] = set()

    @property
    def owner(self) -> Owner | None:
        """The last one that this receiver belonged to."""
        alive = any(self.alive(sender) for sender in list(self._owned))
        return replace(self._owner, alive=alive) if self._owner else None

    def open(self, info: InitInfo) -> Manifest:
        """Open what a sender offers, and return what it will send; its former offer is closed.

        Raises ProtocolError for an offer that is older than one that came before it, and
        SenderConflictError where this receiver belongs to another living sender.
        """
        self._check_number(info)
        replaced = self.replaces(info)
        if info.sender not in self._engines and len(self._engines) >= MAX_PEERS:
            raise ProtocolError(f"{MAX_PEERS} senders are connected already; shut one down")
        self._opening = info.sender
        try:
            manifest = self._replace(info)
        finally:
            self._opening = ""
        if info.owner is not None:
            self._belong_to(info.owner, info.sender, replaced)
        return manifest

    def replaces(self, info: InitInfo) -> Owner | None:
        """Return the living owner whose place this offer takes, if there is one.

        Raises SenderConflictError where it may not.
        """
        owner, offered = self.owner, info.owner
        if owner is None or offered is None or not owner.alive or owner.id == offered.id:
            return None
        # Whoever offers what is the living owner's own is not somebody else who takes over.
        if offered.term <= owner.term or info.sender in self._owned:
            raise SenderConflictError(
                f"this receiver belongs to the sender of {describe(owner)}; close() that one, or "
                "connect(takeover=True)",
                owner=owner.name,
                since=utc(owner.since),
            )
        return owner

    def _belong_to(self, owner: Owner, sender: str, replaced: Owner | None) -> None:
        if replaced is not None:
            logger.warning("%s takes this receiver over from %s", owner.name, describe(replaced))
            for other in [s for s in self._owned if s != sender and self.alive(s)]:
                self.close(other)
        known = self._owner
        if known is None or known.id != owner.id:
            self._owner = replace(owner, since=time.time())
            self._owned.clear()
        self._owned.add(sender)

    def _replace(self, info: InitInfo) -> Manifest:
        manifest = manifest_from_wire(info.manifest)
        engine = _engine_of(info.backend, self.keys)
        if engine.exclusive:
            self.close(info.sender)
        try:
            engine.init_transfer_engine(info)
            check_plain(engine.init_reply(), f"{type(engine).__name__}.init_reply()")
        except BaseException:
            _shut_down(engine)
            raise
        self.close(info.sender)
        self._engines[info.sender] = engine
        self._heartbeats[info.sender] = Heartbeat(engine.beat, at_work=self._works)
        self._paths[info.sender] = info.path
        self._manifests[info.sender] = manifest
        self._note_number(info)
        return manifest

    def get(self, sender: str) -> WeightTransferEngine:
        """Return a sender's engine. Raises ProtocolError when it has not called init here."""
        engine = self._engines.get(sender)
        if engine is None:
            raise UnknownSenderError(
                f"sender {sender} is not known here (was this server restarted?); "
                "call init_weight_transfer_engine first"
            )
        return engine

    def init_reply(self, sender: str) -> Any:
        """What a sender's engine here tells the one there."""
        return self.get(sender).init_reply()

    def knows(self, sender: str) -> bool:
        """Whether a sender is connected."""
        return sender in self._engines

    def manifest(self, sender: str | None) -> Manifest | None:
        """What a sender said it sends."""
        return self._manifests.get(sender) if sender is not None else None

    def alive(self, sender: str) -> bool:
        """Whether a sender is connected, or is being connected anew, and lives; any thread asks."""
        engine = self._engines.get(sender)
        if engine is not None and _sender_alive(engine):
            return True
        # One that was closed meanwhile says no as well: what counts is the one in its place.
        return self._opening == sender or (
            self._engines.get(sender) is not engine and self.alive(sender)
        )

    def beat(self, sender: str | None) -> int | None:
        """Return what grows while a sender's process is not stopped; None where it is unseen."""
        engine = self._engines.get(sender) if sender is not None else None
        return engine.sender_beat() if engine is not None else None

    def forget_dead(self, *, keep: str | None) -> list[str]:
        """Close what dead senders left, except of `keep`, whose update is still open.

        Returns those that are dead for certain: of others only what they had opened here is over.
        """
        dead = []
        for sender in list(self._engines):
            if sender == keep or self.alive(sender):
                continue
            logger.info("sender %s is gone; closing what it had opened", sender)
            engine = self._engines.get(sender)
            if engine is None or _sender_alive(engine) is not None:
                dead.append(sender)
            self.close(sender)
        return dead

    def close(self, sender: str) -> None:
        """Close one sender's engine, if there is one."""
        self._paths.pop(sender, None)
        self._manifests.pop(sender, None)
        engine = self._engines.pop(sender, None)
        if engine is not None:
            self._heartbeats.pop(sender).close()
            _shut_down(engine)

    def _works(self) -> bool:
        return self.at_work()

    def close_all(self) -> None:
        """Close every engine."""
        for sender in list(self._engines):
            self.close(sender)

    def _check_number(self, info: InitInfo) -> None:
        newest = self._numbers.get(info.sender, 0)
        if info.number < newest:
            raise ProtocolError(
                f"offer {info.number} of sender {info.sender} comes after offer {newest}, which "
                "replaced it; nothing was changed"
            )

    def _note_number(self, info: InitInfo) -> None:
        # Kept when the sender leaves: that is when a late offer would be taken for a new one.
        self._numbers[info.sender] = info.number
        self._numbers.move_to_end(info.sender)
        while len(self._numbers) > REMEMBERED_SENDERS:
            self._numbers.popitem(last=False)

    def paths(self) -> dict[str, str]:
        """Return the path of every sender that is connected."""
        return dict(self._paths)

    def ledger(self) -> list[LedgerEntry]:
        """Everything that the engines hold open."""
        return [entry for engine in list(self._engines.values()) for entry in engine.ledger()]


def _sender_alive(engine: WeightTransferEngine) -> bool | None:
    """What an engine says; None where it raises: every status and every init asks for it."""
    try:
        return engine.sender_alive()
    except Exception:
        logger.warning("%s.sender_alive() failed", type(engine).__name__, exc_info=True)
        return None


def _shut_down(engine: WeightTransferEngine) -> None:
    """Have an engine close everything; an error of it is logged, for no caller can mend that."""
    try:
        engine.shutdown()
    except Exception:
        logger.exception("%s.shutdown() failed", type(engine).__name__)


def _engine_of(name: str, keys: list[str]) -> WeightTransferEngine:
    """Return a new engine of a backend. Raises BackendUnavailableError where there is none here."""
    try:
        engine = get_backend(name).receiver_engine(keys)
    except ConfigError as exc:
        raise BackendUnavailableError(f"this receiver cannot use it: {exc}") from exc
    if not isinstance(engine, WeightTransferEngine):
        raise BackendUnavailableError(
            f"backend {name!r}: receiver_engine() returned a {type(engine).__name__}, not a "
            "WeightTransferEngine"
        )
    return engine


def check_protocol(info: InitInfo, protocol: int) -> None:
    """Raise ProtocolError unless the sender speaks our protocol too."""
    if not info.protocol_min <= protocol <= info.protocol_max:
        raise ProtocolError(
            f"the sender speaks protocols {info.protocol_min} to {info.protocol_max}, this "
            f"receiver {protocol}; install the same version of weightsync on both sides"
        )


_KEPT = 256


@dataclass(slots=True)
class _FleetClaim:
    """The version that a sender said its fleet holds.

    `during`: said since the last update began. `lost_at`: since when its engine is gone without a
    goodbye.
    """

    version: int
    during: bool = True
    withdrawn: bool = False
    lost_at: float | None = None


class Readiness:
    """Looks at weights and fleets. `state` guards `lifecycle`; `forget_dead` closes dead senders.

    A sender says at init which version its fleet holds. Who holds an older one is JOINING until a
    whole update commits, or until everybody who said so left or died. Who is lost without a goodbye
    may be about to init again, and counts for `grace_s` more seconds.
    """

    def __init__(
        self,
        lifecycle: UpdateLifecycle,
        senders: Senders,
        state: threading.RLock,
        forget_dead: Callable[[], None],
        grace_s: float,
    ) -> None:
        self._lifecycle = lifecycle
        self._senders = senders
        self._state = state
        self._forget_dead = forget_dead
        self._grace_s = grace_s
        self._told: dict[str, _FleetClaim] = {}

    def refuse(self) -> None:
        """Raise NotReadyError when the weights in use are not one whole, current version."""
        if self._lifecycle.required_version:
            self._forget_dead()
        reason = self.reason()
        if reason:
            raise NotReadyError(
                reason,
                state=self._lifecycle.state.value,
                update_id=self._lifecycle.update_id,
            )

    def reason(self) -> str:
        """Say why the weights in use may not be used; nothing where they may."""
        lifecycle = self._lifecycle
        if lifecycle.may_generate:
            return ""
        if lifecycle.required_version and not (lifecycle.torn_by or lifecycle.dirty):
            return (
                f"this receiver holds version {lifecycle.version} and joined a fleet that "
                f"holds version {lifecycle.required_version}; its sender has to bring it up to "
                "date: call send_weights() or resync()"
            )
        return (
            f"the weights are {lifecycle.state.value}: update {lifecycle.update_id} changed them "
            "and did not finish; a full update heals this: call send_weights() again"
        )

    def joined(self, sender: str, fleet_version: int) -> None:
        """A sender said which version the rest of its fleet holds."""
        with self._state:
            self._told.pop(sender, None)
            self._told[sender] = _FleetClaim(fleet_version)
            while len(self._told) > _KEPT:
                del self._told[next(iter(self._told))]
            self._look()

    def left(self, sender: str | None, *, for_good: bool) -> None:
        """A sender (None: every sender) said goodbye, or only withdrew and will init again."""
        with self._state:
            for known in list(self._told) if sender is None else [sender]:
                if for_good:
                    self._told.pop(known, None)
                elif known in self._told:
                    self._told[known].withdrawn = True
            if self._lifecycle.required_version:
                self._look()

    def parted(self, dead: Iterable[str]) -> None:
        """The fleets of `dead` senders are not waited for, nor who has been lost for too long."""
        with self._state:
            for sender in dead:
                self._told.pop(sender, None)
            if self._lifecycle.required_version:
                self._look()

    def started(self) -> None:
        """An update begins; what is told from now on may be newer than what it brings."""
        with self._state:
            for word in self._told.values():
                word.during = False

    def committed(self, sender: str | None, *, partial: bool) -> None:
        """The update of `sender` is in use: a whole one outdates what was told before it began."""
        if partial:
            return
        with self._state:
            for known, word in self._told.items():
                if known == sender or not word.during:
                    word.version = min(word.version, self._lifecycle.version)
            self._look()

    def _look(self) -> None:
        now = time.monotonic()
        self._told = {s: word for s, word in self._told.items() if self._counts(s, word, now)}
        self._lifecycle.join(max((word.version for word in self._told.values()), default=0))

    def _counts(self, sender: str, word: _FleetClaim, now: float) -> bool:
        """Whether a sender is still connected, or may come again."""
        if self._senders.knows(sender):
            word.withdrawn, word.lost_at = False, None
            return True
        if word.withdrawn:
            return word.during or word.version > self._lifecycle.version
        word.lost_at = now if word.lost_at is None else word.lost_at
        return now - word.lost_at < self._grace_s
