"""The contract of a transport, which carries one sender's control messages to one receiver."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from weightsync.errors import AuthError, ConfigError, ConnectError, ProtocolError, WeightSyncError
from weightsync.wire.messages import Reply, Request


class Transport(Protocol):
    """Carries the calls of one sender to one receiver, and raises what the receiver raised.

    The sender makes one transport per receiver, calls it from any thread, and closes it last.
    Calls may overlap: an abort is sent while a long update is in flight.

    What else a transport can do is declared by BaseTransport, with defaults for one that cannot.
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


def first_refusal(transports: Iterable[BaseTransport], timeout_s: float) -> AuthError | None:
    """Return the error of the first receiver that refuses its transport's token, None for none.

    All calls together take `timeout_s` at most. Other errors are ignored.
    """
    deadline = time.monotonic() + timeout_s
    for transport in transports:
        if (left_s := deadline - time.monotonic()) > 0:
            try:
                transport.check_access(left_s)
            except AuthError as exc:
                return exc
            except WeightSyncError:
                continue
    return None


class Counted:
    """A named target, and how much was sent to it. Thread-safe."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._counting = threading.Lock()
        self._sent_nbytes = 0
        self._sent_messages = 0

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

    def _count(self, nbytes: int) -> None:
        with self._counting:
            self._sent_nbytes += nbytes
            self._sent_messages += 1


class BaseTransport(Counted, ABC):
    """Base of transports: target, counters, closed flag, and what only some can do. Thread-safe.

    `path` is the name of the way of the bytes in reports, where this transport carries them too.
    `paths` are those of the workers that a server listed when its transport was made.
    """

    path: str = ""
    paths: tuple[str, ...] = ()

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self._closed = False

    @abstractmethod
    def call(self, request: Request, *, timeout_s: float) -> Reply:
        """Send one request and return its reply; see Transport.call."""

    @property
    def local_address(self) -> str | None:
        """The address at which the receiver's host reaches this one, where the target is no URL.

        The `tcp` backend listens there.
        """
        return None

    @property
    def round(self) -> object:
        """The same object for all workers of a server that replies for all of them at once.

        When one of them does not reply, the sender calls none of them any more.
        """
        return self

    @property
    def whole(self) -> BaseTransport | None:
        """For a worker of a server that lists its workers itself: the transport to that server.

        That has `expand` and `paths`. After a restart with other workers the sender connects to
        those. It closes `whole` after the workers' transports.
        """
        return None

    def expand(self, paths: Sequence[str]) -> Sequence[Transport]:
        """Return a transport to each of several receivers, by its path below this target.

        The sender closes them like any other. Raises ProtocolError where it can reach none.
        """
        raise ProtocolError(
            f"{self.target} is a server of {len(paths)} workers, and its transport reaches none of "
            "them by itself; give connect() a URL, or a transport to each worker"
        )

    def below(self, path: str) -> BaseTransport:
        """Return the transport to the receiver at `path` below this target, and give up this one.

        A target that is one receiver by itself, as an object of this process, is that receiver.
        """
        return self

    def twin(self) -> BaseTransport:
        """Return another transport to this target, for another part of a set; each is closed.

        A target that is one receiver by itself has no other part, and is its own twin.
        """
        return self

    def unload(self, timeout_s: float) -> None:
        """Have the server forget the receiver of this transport, which is below its URL.

        Raises ConfigError where the server cannot.
        """
        raise ConfigError(f"{self.target}: this is no receiver that its server can unload")

    def check_access(self, timeout_s: float) -> None:
        """Raise AuthError where the receiver refuses this transport's token; changes nothing.

        The sender calls it when another receiver cannot be reached, whose error would hide that.
        """

    def close(self) -> None:
        """Refuse further calls."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectError(f"{self._target}: this transport is closed; connect again")


class WrappingTransport(BaseTransport):
    """A transport by means of another one, all of whose attributes it forwards.

    The other one may be a user's, which has those of Transport alone. Two of the same one are
    equal.
    """

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport.target)
        self._inner = transport

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._inner is self._inner

    def __hash__(self) -> int:
        return id(self._inner)

    @property
    def target(self) -> str:
        """The receiver's name in messages to a user."""
        return self._inner.target

    @property
    def sent_nbytes(self) -> int:
        """Bytes of all request bodies so far, retries included."""
        return self._inner.sent_nbytes

    @property
    def sent_messages(self) -> int:
        """Requests sent so far, retries included."""
        return self._inner.sent_messages

    @property
    def path(self) -> str:  # type: ignore[override]  # a class attribute of transports with one path
        """The name of the way of the bytes in reports; empty for none of its own."""
        return str(getattr(self._inner, "path", ""))

    @property
    def local_address(self) -> str | None:
        """The address at which the receiver's host reaches this one."""
        address: str | None = getattr(self._inner, "local_address", None)
        return address

    @property
    def round(self) -> object:
        """The same object for all workers of a server; see BaseTransport."""
        return getattr(self._inner, "round", self)

    @property
    def whole(self) -> BaseTransport | None:
        """The transport to the server of a worker; see BaseTransport."""
        whole: Transport | None = getattr(self._inner, "whole", None)
        return None if whole is None else complete(whole)

    @property
    def paths(self) -> tuple[str, ...]:  # type: ignore[override]  # as `path`
        """The paths of a server's workers; see BaseTransport."""
        return tuple(getattr(self._inner, "paths", ()))

    def expand(self, paths: Sequence[str]) -> Sequence[Transport]:
        """Return a transport to each of several receivers; see BaseTransport."""
        expand: Callable[[Sequence[str]], Sequence[Transport]] | None
        expand = getattr(self._inner, "expand", None)
        return super().expand(paths) if expand is None else expand(paths)

    def below(self, path: str) -> BaseTransport:
        """Return the transport to the receiver at a path below; see BaseTransport."""
        below: Callable[[str], Transport] | None = getattr(self._inner, "below", None)
        return self if below is None else complete(below(path))

    def twin(self) -> BaseTransport:
        """Return another transport to this target; see BaseTransport."""
        twin: Callable[[], Transport] | None = getattr(self._inner, "twin", None)
        return self if twin is None else complete(twin())

    def unload(self, timeout_s: float) -> None:
        """Have the server forget this receiver; see BaseTransport."""
        unload: Callable[[float], None] | None = getattr(self._inner, "unload", None)
        if unload is None:
            super().unload(timeout_s)
        else:
            unload(timeout_s)

    def check_access(self, timeout_s: float) -> None:
        """Raise AuthError where the receiver refuses the token; see BaseTransport."""
        check: Callable[[float], None] | None = getattr(self._inner, "check_access", None)
        if check is not None:
            check(timeout_s)

    def call(self, request: Request, *, timeout_s: float) -> Reply:
        """Send one request and return its reply; see Transport.call."""
        return self._inner.call(request, timeout_s=timeout_s)

    def close(self) -> None:
        """Close the other transport."""
        self._inner.close()


def complete(transport: Transport) -> BaseTransport:
    """Return a transport with everything that BaseTransport declares: itself, if it has that."""
    return transport if isinstance(transport, BaseTransport) else WrappingTransport(transport)
