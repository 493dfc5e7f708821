"""What a transport is: the way one sender's control messages take to one receiver."""

from __future__ import annotations

import threading
from typing import Protocol

from weightsync.errors import ConnectError
from weightsync.wire.messages import Reply, Request


class Transport(Protocol):
    """Carries the calls of one sender to one receiver, and raises what the receiver raised.

    The sender makes one transport per receiver, calls it from any thread, and closes it last.
    A call may be made while another is in flight: an abort beside a long update.

    One whose target is no URL may have an attribute `local_address` (`str | None`): where the
    receiver's host reaches this one. The `distributed` backend listens there.

    Transports to workers of one server that answers for all of them at once have an attribute
    `round`, the same object for all: when one of them is silent, none is asked any more.

    One whose target may stand for several receivers has `expand(paths)`, which returns a transport
    to each, by its path below this target. The sender closes them like any other.

    One to a worker of a server that is found by itself may have `whole`, the transport to that
    server, which has `expand` and `paths`: so workers are met anew when the server was restarted
    with others. The sender closes it after the workers.
    """

    @property
    def target(self) -> str:
        """How messages to a user name the receiver: its URL, for instance. Holds no secret."""

    @property
    def sent_nbytes(self) -> int:
        """Bytes of all request bodies so far, retries included."""

    @property
    def sent_messages(self) -> int:
        """Requests sent so far, retries included."""

    def call(self, request: Request, *, timeout_s: float) -> Reply:
        """Send one request and return its reply, at the latest `timeout_s` seconds later.

        Called by the sender, for every step of an update; blocks. Raises the error the receiver
        raised, as the same class; ConnectError when the receiver cannot be reached or the
        connection breaks, TransportTimeout when no answer comes in time, AuthError when the token
        is refused, RemoteError for a foreign error of the other side. After ConnectError and
        TransportTimeout it is unknown whether the step was made: the same request may be sent
        again, since every step is idempotent by its update and a retry joins the call in flight.
        The transport stays usable after every error.
        """

    def close(self) -> None:
        """Let connections go; may be called twice. Calls afterwards raise ConnectError."""


class BaseTransport:
    """The target, the counters and the end of a Transport. Thread-safe."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._counting = threading.Lock()
        self._sent_nbytes = 0
        self._sent_messages = 0
        self._closed = False

    @property
    def target(self) -> str:
        """How messages to a user name the receiver."""
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
