"""Messages by a user's callable: in process, or over whatever the user carries dicts with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from weightsync.errors import ConnectError, RemoteError, WeightSyncError
from weightsync.wire import codec
from weightsync.wire.messages import CALL_OF, Reply, Request

Callback = Callable[[Mapping[str, object]], object]
"""Takes `{"call": name, "body": {…}}` to a `WeightReceiver.handle` and returns its answer."""


class CallbackTransport:
    """A Transport that hands each request, as plain data, to `callback`.

    `callback` is called in the thread of the caller, in several threads at once when calls are
    in flight together; it keeps `timeout_s` by itself, if it can. `receiver.handle` is one.
    """

    def __init__(self, callback: Callback, target: str = "callback") -> None:
        self._callback = callback
        self._target = target
        self._lock = threading.Lock()
        self._closed = False
        self._sent_nbytes = 0
        self._sent_messages = 0

    @property
    def target(self) -> str:
        """The name given when this was made."""
        return self._target

    @property
    def sent_nbytes(self) -> int:
        """Bytes that the bodies so far take as JSON."""
        return self._sent_nbytes

    @property
    def sent_messages(self) -> int:
        """Requests handed to the callback so far."""
        return self._sent_messages

    def call(self, request: Request, *, timeout_s: float) -> Reply:
        """Hand over one request. Errors that are not ours become RemoteError."""
        if self._closed:
            raise ConnectError(f"{self._target}: this transport is closed; connect again")
        self._count(len(codec.encode(request)))
        try:
            answer = self._callback(codec.to_plain(request))
        except WeightSyncError:
            raise
        except Exception as exc:
            raise RemoteError(
                f"{self._target}: {CALL_OF[type(request)]} raised {type(exc).__name__}: {exc}",
                remote_type=type(exc).__name__,
                remote_message=str(exc),
            ) from exc
        return codec.reply_from_plain(CALL_OF[type(request)], answer)

    def close(self) -> None:
        """Refuse further calls."""
        self._closed = True

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._sent_nbytes += nbytes
            self._sent_messages += 1
