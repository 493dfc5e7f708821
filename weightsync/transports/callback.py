"""A Transport that calls a function of the user: in process, or over the user's own RPC."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from weightsync.errors import RemoteError, WeightSyncError, text_of
from weightsync.transports.base import BaseTransport
from weightsync.wire import codec
from weightsync.wire.messages import CALL_OF, Reply, Request

Callback = Callable[[Mapping[str, object]], object]
"""Passes `{"call": name, "body": {…}}` to `WeightReceiver.handle`, and returns its reply."""


class CallbackTransport(BaseTransport):
    """A Transport that passes each request, as plain data, to `callback`.

    `callback` runs in the thread of the caller, in several threads at once where calls overlap. It
    is not given the timeout: a call ends when `callback` returns. `receiver.handle` is a callback.
    """

    def __init__(self, callback: Callback, target: str = "callback") -> None:
        super().__init__(target)
        self._callback = callback

    def call(self, request: Request, *, timeout_s: float) -> Reply:
        """Send one request; see Transport.call. Errors of other kinds become RemoteError."""
        self._check_open()
        self._count(len(codec.encode(request)))
        try:
            answer = self._callback(codec.to_plain(request))
        except WeightSyncError:
            raise
        except Exception as exc:
            raise RemoteError(
                f"{self._target}: {CALL_OF[type(request)]} raised {type(exc).__name__}: "
                f"{text_of(exc)}",
                remote_type=type(exc).__name__,
                remote_message=text_of(exc),
            ) from exc
        return codec.reply_from_plain(CALL_OF[type(request)], answer)
