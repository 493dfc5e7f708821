"""The contract of a transport, which carries one sender's control messages to one receiver."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Protocol

from weightsync.errors import AuthError, ConnectError, WeightSyncError
from weightsync.wire.messages import Reply, Request


class Transport(Protocol):
    """Carries the calls of one sender to one receiver, and raises what the receiver raised.

    The sender makes one transport per receiver, calls it from any thread, and closes it last.
    Calls may overlap: an abort is sent while a long update is in flight.

    Optional attributes:

    - `local_address` (`str | None`), where the target is no URL: the address at which the
      receiver's host reaches this one. The `tcp` backend listens there.
    - `round`, for workers of a server that replies for all of them at once: the same object for
      all of its workers. When one of them does not reply, the sender calls none of them any more.
    - `expand(paths)`, where the target may stand for several receivers: returns a transport to
      each, by its path below this target. The sender closes them like any other.
    - `check_access(timeout_s)`: raises AuthError where the receiver refuses this transport's token,
      and changes nothing. The sender calls it when another receiver cannot be reached, whose error
      would hide that.
    - `whole`, for a worker of a server that lists its workers itself: the transport to that
      server, which has `expand` and `paths`. After a restart with other workers the sender
      connects to those. It closes `whole` after the workers' transports.
    """

    @property
    def target(self) -> str:
        """The receiver's name in messages to a user: its URL, for instance. Contains no secret."""

    @property
    def sent_nbytes(self) -> int:
        """Bytes of all request bodies so far, retries included."""

    @property
    def sent_messages(self) -> int:
        """Requests sent so far, retries included."""

    def call(self, request: Request, *, timeout_s: float) -> Reply:
        """Send one request and return its reply, at the latest `timeout_s` seconds later.

        Called by the sender, for every step of an update; blocks. Raises the receiver's error as
        the same class; ConnectError where the receiver cannot be reached or the connection breaks,
        TransportTimeout where no reply comes in time, AuthError where the token is refused,
        RemoteError for a foreign error of the other side. After ConnectError and TransportTimeout
        it is unknown whether the step was executed. The same request may be sent again: every step
        is idempotent by its update, and a retry joins the call in flight. The transport stays
        usable after every error.
        """

    def close(self) -> None:
        """Close the connections; may be called twice. Calls afterwards raise ConnectError."""


def first_refusal(transports: Iterable[Transport], timeout_s: float) -> AuthError | None:
    """Return the error of the first receiver that refuses its transport's token, None for none.

    All calls together take `timeout_s` at most. Other errors are ignored.
    """
    deadline = time.monotonic() + timeout_s
    for transport in transports:
        check, left_s = getattr(transport, "check_access", None), deadline - time.monotonic()
        if check is not None and left_s > 0:
            try:
                check(left_s)
            except AuthError as exc:
                return exc
            except WeightSyncError:
                continue
    return None


class BaseTransport:
    """Base of our transports: target, counters and closed flag. Thread-safe."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._counting = threading.Lock()
        self._sent_nbytes = 0
        self._sent_messages = 0
        self._closed = False

    @property
    def target(self) -> str:
        """The receiver's name in messages to a user."""
        return self._target

    @property
    def sent_nbytes(self) -> int:
        """Bytes of all request bodies so far, as JSON, retries included."""
        return self._sent_nbytes

    @property
    def sent_messages(self) -> int:
        """Requests sent so far, retries included."""
        return self._sent_messages

    def close(self) -> None:
        """Refuse further calls."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectError(f"{self._target}: this transport is closed; connect again")

    def _count(self, nbytes: int) -> None:
        with self._counting:
            self._sent_nbytes += nbytes
            self._sent_messages += 1
