"""Messages by a user's callable: in process, or over whatever the user carries dicts with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from weightsync.errors import RemoteError, WeightSyncError
from weightsync.transports.base import BaseTransport
from weightsync.wire import codec
from weightsync.wire.messages import CALL_OF, Reply, Request

Callback = Callable[[Mapping[str, object]], object]
"""Takes `{"call": name, "body": {…}}` to a `WeightReceiver.handle` and returns its answer."""


class CallbackTransport(BaseTransport):
    """A Transport that hands each request, as plain data, to `callback`.

    `callback` is called in the thread of the caller, in several threads at once when calls are
    in flight together; it keeps `timeout_s` by itself, if it can. `receiver.handle` is one.
    """

    def __init__(self, callback: Callback, target: str = "callback") -> None:
        super().__init__(target)
        self._callback = callback

    def call(self, request: Request, *, timeout_s: float) -> Reply:
        """Hand over one request. Errors that are not ours become RemoteError."""
        self._check_open()
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
