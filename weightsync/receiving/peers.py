"""The senders that a receiver knows, each with its engine."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable

from msgspec.structs import replace

from weightsync.backends.base import WeightTransferEngine
from weightsync.backends.registry import load_backend
from weightsync.errors import ProtocolError, SenderConflictError, UnknownSenderError
from weightsync.shm.wait import Heartbeat
from weightsync.specs import Manifest
from weightsync.wire.messages import LedgerEntry
from weightsync.wire.offers import DistributedInit, HostRing, Init, Offer, Owner, describe, utc

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
        self._remote: set[str] = set()
        self._paths: dict[str, str] = {}
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

    def open(self, info: Init) -> WeightTransferEngine:
        """Open what a sender offers; what it offered before is closed.

        Raises ProtocolError for an offer that is older than one that came before it, and
        SenderConflictError where this receiver belongs to another living sender.
        """
        self._check_number(info)
        replaced = self.replaces(info)
        if info.sender not in self._engines and len(self._engines) >= MAX_PEERS:
            raise ProtocolError(f"{MAX_PEERS} senders are connected already; shut one down")
        self._opening = info.sender
        try:
            engine = self._replace(info)
        finally:
            self._opening = ""
        if info.owner is not None:
            self._belong_to(info.owner, info.sender, replaced)
        return engine

    def replaces(self, info: Init) -> Owner | None:
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

    def _replace(self, info: Init) -> WeightTransferEngine:
        remote = isinstance(info, DistributedInit)
        engine = load_backend("distributed" if remote else "ipc")[1](self.keys)
        if remote:
            self.close(info.sender)  # its group is over, and /dev/shm may not hold two rings
        engine.init_transfer_engine(info)
        self.close(info.sender)
        self._engines[info.sender] = engine
        self._heartbeats[info.sender] = Heartbeat(engine.beat, at_work=self._works)
        self._paths[info.sender] = info.path
        self._note_number(info)
        if remote:
            self._remote.add(info.sender)
        return engine

    def get(self, sender: str) -> WeightTransferEngine:
        """Return a sender's engine. Raises ProtocolError when it has not called init here."""
        engine = self._engines.get(sender)
        if engine is None:
            raise UnknownSenderError(
                f"sender {sender} is not known here (was this server restarted?); "
                "call init_weight_transfer_engine first"
            )
        return engine

    def host_ring(self, sender: str) -> HostRing | None:
        """What a sender's engine made for the other workers of this host."""
        return self.get(sender).host_ring()

    def knows(self, sender: str) -> bool:
        """Whether a sender is connected."""
        return sender in self._engines

    def manifest(self, sender: str | None) -> Manifest | None:
        """What a sender said it sends."""
        engine = self._engines.get(sender) if sender is not None else None
        return engine.manifest if engine is not None else None

    def alive(self, sender: str) -> bool:
        """Whether a sender is connected, or is being connected anew, and lives; any thread asks."""
        engine = self._engines.get(sender)
        if engine is not None and engine.sender_alive():
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

        Returns those that are dead for certain: of a remote one only the private group has ended,
        which happens too when the group is made anew without this receiver.
        """
        dead = []
        for sender in list(self._engines):
            if sender != keep and not self.alive(sender):
                logger.info("sender %s is gone; closing what it had opened", sender)
                if sender not in self._remote:
                    dead.append(sender)
                self.close(sender)
        return dead

    def close(self, sender: str) -> None:
        """Close one sender's engine, if there is one."""
        self._remote.discard(sender)
        self._paths.pop(sender, None)
        engine = self._engines.pop(sender, None)
        if engine is not None:
            self._heartbeats.pop(sender).close()
            engine.shutdown()

    def _works(self) -> bool:
        return self.at_work()

    def close_all(self) -> None:
        """Close every engine."""
        for sender in list(self._engines):
            self.close(sender)

    def _check_number(self, info: Init) -> None:
        newest = self._numbers.get(info.sender, 0)
        if info.number < newest:
            raise ProtocolError(
                f"offer {info.number} of sender {info.sender} comes after offer {newest}, which "
                "replaced it; nothing was changed"
            )

    def _note_number(self, info: Init) -> None:
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


def check_protocol(info: Offer, protocol: int) -> None:
    """Raise ProtocolError unless the sender speaks our protocol too."""
    if not info.protocol_min <= protocol <= info.protocol_max:
        raise ProtocolError(
            f"the sender speaks protocols {info.protocol_min} to {info.protocol_max}, this "
            f"receiver {protocol}; install the same version of weightsync on both sides"
        )
