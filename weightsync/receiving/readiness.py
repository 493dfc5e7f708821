"""Whether a receiver may generate, and if not, why."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from weightsync.errors import NotReadyError
from weightsync.lifecycle import UpdateLifecycle
from weightsync.receiving.peers import Senders

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
