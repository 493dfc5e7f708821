"""Whether a receiver may generate, and if not, why."""

from __future__ import annotations

import threading
from collections.abc import Callable

from weightsync.errors import NotReadyError
from weightsync.lifecycle import UpdateLifecycle
from weightsync.receiving.peers import Peers


class Readiness:
    """Looks at weights and fleets. `state` guards `lifecycle`; `forget_dead` closes dead senders.

    A sender says at init which version its fleet holds. Who holds an older one is JOINING until a
    whole update commits, or until nobody is connected any more who said so.
    """

    def __init__(
        self,
        lifecycle: UpdateLifecycle,
        peers: Peers,
        state: threading.RLock,
        forget_dead: Callable[[], None],
    ) -> None:
        self._lifecycle = lifecycle
        self._peers = peers
        self._state = state
        self._forget_dead = forget_dead
        self._told: dict[str, int] = {}

    def refuse(self) -> None:
        """Raise NotReadyError when the weights in use are not one whole, current version."""
        if self._lifecycle.awaited:
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
        if lifecycle.awaited and not (lifecycle.torn_by or lifecycle.touched):
            return (
                f"this receiver holds version {lifecycle.version} and joined a fleet that "
                f"holds version {lifecycle.awaited}; its sender has to bring it up to date: "
                "call send_weights() or resync()"
            )
        return (
            f"the weights are {lifecycle.state.value}: update {lifecycle.update_id} changed them "
            "and did not finish; a full update heals this: call send_weights() again"
        )

    def joined(self, sender: str, fleet_version: int) -> None:
        """A sender said which version the rest of its fleet holds."""
        with self._state:
            self._told[sender] = fleet_version
            self._look()

    def parted(self) -> None:
        """Some sender left, or died: a fleet without its sender is not waited for."""
        with self._state:
            if self._lifecycle.awaited:
                self._look()

    def _look(self) -> None:
        self._told = {s: version for s, version in self._told.items() if self._peers.knows(s)}
        self._lifecycle.join(max(self._told.values(), default=0))
