"""The senders that are connected to a receiver, and whether the receiver may generate."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from weightsync.backends.base import Backend, WeightTransferEngine, check_plain
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
from weightsync.wire.messages import SharedMemoryUsage
from weightsync.wire.offers import InitInfo, Owner, describe, utc

logger = logging.getLogger(__name__)

MAX_PEERS = 64
REMEMBERED_SENDERS = 1024
"""Number of senders, disconnected ones included, whose newest offer number is kept."""


class Senders:
    """Receiver engines by sender id; `keys` are the device keys with which they open handles.

    The senders belong to the current owner, to dead previous owners, or to no owner. The engines
    send heartbeats while `at_work` returns True.
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
        self.on_close: Callable[[WeightTransferEngine], None] = lambda _: None
        self._owner: Owner | None = None
        self._owned: set[str] = set()

    @property
    def owner(self) -> Owner | None:
        """The last owner of this receiver, None before the first."""
        alive = any(self.alive(sender) for sender in list(self._owned))
        return replace(self._owner, alive=alive) if self._owner else None

    def open(self, info: InitInfo) -> Manifest:
        """Open an engine for a sender, close its previous one, and return the sender's manifest.

        Raises ProtocolError for an offer that is older than one received before, or with MAX_PEERS
        other senders; SenderConflictError where this receiver belongs to another living sender.
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
            self._set_owner(info.owner, info.sender, replaced)
        return manifest

    def replaces(self, info: InitInfo) -> Owner | None:
        """Return the living owner that this offer replaces, None where there is none.

        Raises SenderConflictError where the offer may not replace it.
        """
        owner, offered = self.owner, info.owner
        if owner is None or offered is None or not owner.alive or owner.id == offered.id:
            return None
        # A sender of the living owner is not another sender that takes over.
        if offered.term <= owner.term or info.sender in self._owned:
            raise SenderConflictError(
                f"this receiver belongs to the sender of {describe(owner)}; close() that one, or "
                "connect(takeover=True)",
                owner=owner.name,
                since=utc(owner.since),
            )
        return owner

    def _set_owner(self, owner: Owner, sender: str, replaced: Owner | None) -> None:
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
        try:
            engine.check_init_info(info)
            if engine.exclusive:
                self.close(info.sender)
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
        """Return a sender's engine. Raises UnknownSenderError for one that is not connected."""
        engine = self._engines.get(sender)
        if engine is None:
            raise UnknownSenderError(
                f"sender {sender} is not known here (was this server restarted?); "
                "call init_weight_transfer_engine first"
            )
        return engine

    def init_reply(self, sender: str) -> Any:
        """Return the reply of a sender's receiver engine to its trainer engine."""
        return self.get(sender).init_reply()

    def knows(self, sender: str) -> bool:
        """Whether a sender is connected."""
        return sender in self._engines

    def manifest(self, sender: str | None) -> Manifest | None:
        """Return the manifest that a sender announced, None where it is not connected."""
        return self._manifests.get(sender) if sender is not None else None

    def alive(self, sender: str) -> bool:
        """Whether a sender is connected or reconnecting, and lives. Thread-safe."""
        engine = self._engines.get(sender)
        if engine is not None and _sender_alive(engine):
            return True
        # The engine may have been closed meanwhile: the engine that replaced it counts.
        return self._opening == sender or (
            self._engines.get(sender) is not engine and self.alive(sender)
        )

    def beat(self, sender: str | None) -> int | None:
        """Return a counter that grows while the sender's process runs; None if not observable."""
        engine = self._engines.get(sender) if sender is not None else None
        try:
            return engine.sender_beat() if engine is not None else None
        except Exception:
            logger.warning("%s.sender_beat() failed", type(engine).__name__, exc_info=True)
            return None

    def forget_dead(self, *, keep: str | None) -> list[str]:
        """Close the engines of dead senders, except of `keep`, whose update is still open.

        Returns the senders that are certainly dead. Of others only the connection is lost.
        """
        dead = []
        for sender in list(self._engines):
            if sender == keep or self.alive(sender):
                continue
            logger.info("sender %s is gone; its engine is closed", sender)
            engine = self._engines.get(sender)
            if engine is None or _sender_alive(engine) is not None:
                dead.append(sender)
            self.close(sender)
        return dead

    def close(self, sender: str) -> None:
        """Close a sender's engine, if it has one."""
        self._paths.pop(sender, None)
        self._manifests.pop(sender, None)
        engine = self._engines.pop(sender, None)
        if engine is not None:
            self._heartbeats.pop(sender).close()
            self.on_close(engine)
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
        # Kept when the sender leaves: a late offer would then be mistaken for a new one.
        self._numbers[info.sender] = info.number
        self._numbers.move_to_end(info.sender)
        while len(self._numbers) > REMEMBERED_SENDERS:
            self._numbers.popitem(last=False)

    def paths(self) -> dict[str, str]:
        """Return the path of every sender that is connected."""
        return dict(self._paths)

    def usage(self) -> list[SharedMemoryUsage]:
        """Return the shared memory that the engines hold open."""
        return [entry for engine in list(self._engines.values()) for entry in _usage(engine)]


def _usage(engine: WeightTransferEngine) -> list[SharedMemoryUsage]:
    try:
        return engine.usage()
    except Exception:
        logger.warning("%s.usage() failed", type(engine).__name__, exc_info=True)
        return []


def _sender_alive(engine: WeightTransferEngine) -> bool | None:
    """Return `sender_alive()`, None where it raises: every status and every init calls it."""
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


def installed_backend(name: str) -> Backend:
    """Return a backend that a sender named. Raises BackendUnavailableError for an unknown one."""
    try:
        return get_backend(name)
    except ConfigError as exc:
        raise BackendUnavailableError(f"this receiver cannot use it: {exc}") from exc


def _engine_of(name: str, keys: list[str]) -> WeightTransferEngine:
    """Return a new engine of a backend. Raises BackendUnavailableError where it cannot be used."""
    engine = installed_backend(name).receiver_engine(keys)
    if not isinstance(engine, WeightTransferEngine):
        raise BackendUnavailableError(
            f"backend {name!r}: receiver_engine() returned a {type(engine).__name__}, not a "
            "WeightTransferEngine"
        )
    return engine


def check_protocol(info: InitInfo, protocol: int) -> None:
    """Raise ProtocolError unless the sender supports this receiver's protocol version."""
    if not info.protocol_min <= protocol <= info.protocol_max:
        raise ProtocolError(
            f"the sender supports protocols {info.protocol_min} to {info.protocol_max}, this "
            f"receiver {protocol}; install the same version of weightsync on both sides"
        )


_KEPT = 256


@dataclass(slots=True)
class _FleetClaim:
    """The fleet version that a sender claimed at init.

    `during`: claimed since the last update began. `withdrawn`: the sender will init again.
    `lost_at`: the time, of `time.monotonic()`, at which its engine was lost without a shutdown.
    """

    version: int
    during: bool = True
    withdrawn: bool = False
    lost_at: float | None = None


class Readiness:
    """Whether a receiver may generate.

    `state` guards `lifecycle`; `forget_dead` closes the engines of dead senders.

    A sender claims at init a version that its fleet holds. A receiver with an older version is
    CATCHING_UP until a full update commits, or until all senders with such a claim left or died.
    The claim of a sender that was lost without a shutdown stays valid for `grace_s` seconds,
    because the sender may init again.
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
        self._claims: dict[str, _FleetClaim] = {}

    def refuse(self) -> None:
        """Raise NotReadyError unless the weights in use are one complete, current version."""
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
        """Return why the weights may not be used; an empty string where they may."""
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
        """Record a sender's claim of its fleet's version."""
        with self._state:
            self._claims.pop(sender, None)
            self._claims[sender] = _FleetClaim(fleet_version)
            while len(self._claims) > _KEPT:
                del self._claims[next(iter(self._claims))]
            self._evaluate()

    def left(self, sender: str | None, *, for_good: bool) -> None:
        """Remove the claim of a sender (None: of every sender) that shut down.

        Without `for_good` the sender will init again, and its claim is marked as withdrawn.
        """
        with self._state:
            for known in list(self._claims) if sender is None else [sender]:
                if for_good:
                    self._claims.pop(known, None)
                elif known in self._claims:
                    self._claims[known].withdrawn = True
            if self._lifecycle.required_version:
                self._evaluate()

    def remove_dead(self, dead: Iterable[str]) -> None:
        """Remove the claims of `dead` senders, and of senders that were lost for too long."""
        with self._state:
            for sender in dead:
                self._claims.pop(sender, None)
            if self._lifecycle.required_version:
                self._evaluate()

    def started(self) -> None:
        """Record the start of an update. Later claims may be of a newer version than its own."""
        with self._state:
            for claim in self._claims.values():
                claim.during = False

    def committed(self, sender: str | None, *, partial: bool) -> None:
        """Record the commit of an update; a full one satisfies claims made before it began."""
        if partial:
            return
        with self._state:
            for known, claim in self._claims.items():
                if known == sender or not claim.during:
                    claim.version = min(claim.version, self._lifecycle.version)
            self._evaluate()

    def _evaluate(self) -> None:
        now = time.monotonic()
        self._claims = {s: c for s, c in self._claims.items() if self._is_valid(s, c, now)}
        self._lifecycle.join(max((claim.version for claim in self._claims.values()), default=0))

    def _is_valid(self, sender: str, claim: _FleetClaim, now: float) -> bool:
        """Whether a claim is still valid: its sender is connected, or may connect again."""
        if self._senders.knows(sender):
            claim.withdrawn, claim.lost_at = False, None
            return True
        if claim.withdrawn:
            return claim.during or claim.version > self._lifecycle.version
        claim.lost_at = now if claim.lost_at is None else claim.lost_at
        return now - claim.lost_at < self._grace_s
