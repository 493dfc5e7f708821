"""How long a wait lasts: until its timeout, until it is called off, or until its peer is lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from weightsync.errors import TransferCancelled, TransferTimeout

logger = logging.getLogger(__name__)

LOOK_S = 0.25
"""How often a sleeping wait looks at its peer's life: also how long a lost wake-up delays it."""
CANCEL_NAP_S = 0.02
WARN_S = 60.0


class Cancel(Protocol):
    """What `threading.Event` offers, and events of multiprocessing."""

    def is_set(self) -> bool:
        """Say whether the wait is to end."""
        ...


class WaitPolicy:
    """One wait. `look` is called now and then and raises when waiting has become pointless.

    `doing` says what is waited for, `peers` raises when that will never come. `cancel` is the
    caller's, looked at often; `closing` is set by a close that also wakes the wait. A wait is
    logged every `warn_s` unless it is expected to be long (`indefinite`).
    """

    def __init__(
        self,
        doing: Callable[[], str],
        peers: Callable[[], None],
        *,
        timeout_s: float | None,
        cancel: Cancel | None = None,
        closing: Cancel | None = None,
        indefinite: bool = False,
        warn_s: float = WARN_S,
    ) -> None:
        self._doing = doing
        self._peers = peers
        self._timeout_s = timeout_s
        self._cancel = cancel
        self._closing = closing
        self._started = time.monotonic()
        self._looked = self._started
        self._warn_s = None if indefinite else warn_s
        self._warn_at = self._started + warn_s

    @property
    def nap_s(self) -> float:
        """How long to sleep at most before the next look."""
        nap_s = LOOK_S if self._cancel is None else CANCEL_NAP_S
        if self._timeout_s is None:
            return nap_s
        return min(nap_s, max(1e-4, self._started + self._timeout_s - time.monotonic()))

    def look(self, *, closed: bool = False) -> None:
        """Raise TransferCancelled, TransferTimeout, or what is known of the peers.

        `closed` says that there is news of them, so that they are looked at now.
        """
        if self._cancel is not None and self._cancel.is_set():
            raise TransferCancelled(f"called off while waiting for {self._doing()}")
        if self._closing is not None and self._closing.is_set():
            raise TransferCancelled(f"closed in this process while waiting for {self._doing()}")
        now = time.monotonic()
        if closed or now - self._looked >= LOOK_S:
            self._looked = now
            self._peers()
        if self._timeout_s is not None and now - self._started >= self._timeout_s:
            self._peers()
            raise TransferTimeout(
                f"waited {self._timeout_s:g} s for {self._doing()}; nobody is known to be dead, "
                "so wait longer, or look at what they are doing"
            )
        if self._warn_s is not None and now >= self._warn_at:
            self._warn_at += self._warn_s
            logger.warning("waiting for %s for %.0f s", self._doing(), now - self._started)
