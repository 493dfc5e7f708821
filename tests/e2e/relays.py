"""A transport between a sender and one receiver, with hooks and faults for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import weightsync as ws
from tests.e2e.processes import Remote
from weightsync.transports.base import Transport
from weightsync.transports.factory import TransportFactory
from weightsync.wire.messages import RegisteredUpdate, Reply, Request, UpdateRequest

Act = Callable[[], None]


class Relay:
    """A Transport to `remote`, or later to its replacement under the same name.

    `before` and `after` act once, at the first message of a kind. `cut` loses every message; `deaf`
    delivers messages and loses the replies. `seen` are the kinds of all messages sent, `deltas`
    the number of updates among them that were deltas.
    """

    def __init__(self, remote: Remote, name: str) -> None:
        self.name = name
        self.seen: list[type] = []
        self.deltas = 0
        self.before: dict[type, Act] = {}
        self.after: dict[type, Act] = {}
        self.cut = False
        self.deaf = False
        self.closed = False
        self.redirect(remote)

    def redirect(self, remote: Remote) -> None:
        """Send to another receiver from now on."""
        self.remote = remote
        self._inner: Transport = TransportFactory(None).one(remote.to)

    @property
    def target(self) -> str:
        return self.name

    @property
    def sent_nbytes(self) -> int:
        return self._inner.sent_nbytes

    @property
    def sent_messages(self) -> int:
        return len(self.seen)

    def call(self, request: Request, *, timeout_s: float) -> Reply:
        kind = type(request)
        self.seen.append(kind)
        if isinstance(request, UpdateRequest) and isinstance(request.update_info, RegisteredUpdate):
            self.deltas += request.update_info.delta is not None
        self._act(self.before, kind)
        self._refuse(self.cut)
        if self.deaf:
            threading.Thread(target=self._lose, args=(request, timeout_s), daemon=True).start()
            self._refuse(True)
        reply = self._inner.call(request, timeout_s=timeout_s)
        self._act(self.after, kind)
        self._refuse(self.cut)
        return reply

    def close(self) -> None:
        """Close; unlike other transports this one may be used again."""
        self.closed = True
        self._inner.close()
        self.redirect(self.remote)

    def _act(self, acts: dict[type, Act], kind: type) -> None:
        act = acts.pop(kind, None)
        if act is not None:
            act()

    def _refuse(self, lost: Any) -> None:
        if lost:
            raise ws.ConnectError(f"{self.name} is cut off")

    def _lose(self, request: Request, timeout_s: float) -> None:
        try:
            self._inner.call(request, timeout_s=timeout_s)
        except ws.WeightSyncError:
            return
