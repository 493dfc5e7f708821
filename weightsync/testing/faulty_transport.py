"""A transport that loses, repeats, delays and reorders messages, and kills their receiver."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weightsync.errors import ConnectError, TransportTimeout, WeightSyncError
from weightsync.testing.faults import Event, Fault, Faults
from weightsync.transports.base import Transport, WrappingTransport
from weightsync.wire import codec
from weightsync.wire.messages import CALL_OF, Reply, Request


@dataclass(slots=True)
class _Late:
    """A message that timed out at its sender: it arrives after `wait` more replies."""

    request: Request
    timeout_s: float
    wait: int


class FaultyTransport(WrappingTransport):
    """A Transport that sends messages by another transport, with the faults of `faults`.

    Give it to `connect(to=…)`. `on_kill` is called when a fault kills the receiver, in the thread
    of the message; it may end a process. A lost message raises the error of a real loss at once,
    without waiting for the timeout. `late` messages arrive in the thread of a later call, in the
    order in which they were sent, at the latest when the transport is closed.
    """

    def __init__(
        self,
        transport: Transport,
        faults: Faults | None = None,
        *,
        on_kill: Callable[[], None] | None = None,
    ) -> None:
        self.faults = faults or Faults()
        self.killed = False
        super().__init__(transport)
        self._on_kill = on_kill
        self._lock = threading.Lock()
        self._late: list[_Late] = []
        self._lost_messages = 0
        self._lost_nbytes = 0

    @property
    def sent_nbytes(self) -> int:
        """Bytes of all request bodies so far, lost ones included."""
        return self._inner.sent_nbytes + self._lost_nbytes

    @property
    def sent_messages(self) -> int:
        """Requests sent so far, lost ones included."""
        return self._inner.sent_messages + self._lost_messages

    def expand(self, paths: Sequence[str]) -> Sequence[Transport]:
        """Return transports to the workers of a server, with the same faults."""
        reached = super().expand(paths)
        return [FaultyTransport(each, self.faults, on_kill=self._on_kill) for each in reached]

    def call(self, request: Request, *, timeout_s: float) -> Reply:
        """Send one request, with its fault if it has one; see Transport.call."""
        call = CALL_OF[type(request)]
        fault = self.faults.strike(call)
        try:
            reply = self._send(request, fault, call, timeout_s)
        except WeightSyncError as exc:
            self.faults.note(Event(call, fault.act if fault else None, exc))
            raise
        finally:
            self._deliver_due()
        self.faults.note(Event(call, fault.act if fault else None))
        return reply

    def deliver_late(self) -> int:
        """Deliver all `late` messages now; return their number.

        Their errors are in the log only. A receiver that was killed gets none of them.
        """
        with self._lock:
            late, self._late = self._late, []
        for message in late:
            self._deliver(message)
        return len(late)

    def revive(self) -> None:
        """Deliver messages again after a `kill`: the receiver was restarted."""
        self.killed = False

    def close(self) -> None:
        """Deliver `late` messages, and close the other transport."""
        self.deliver_late()
        self._inner.close()

    def _send(self, request: Request, fault: Fault | None, call: str, timeout_s: float) -> Reply:
        if self.killed:
            self._lose(request)
            raise ConnectError(f"{self.target}: killed; {call} did not arrive")
        if fault is None:
            return self._inner.call(request, timeout_s=timeout_s)
        match fault.act:
            case "drop":
                self._lose(request)
                raise TransportTimeout(f"{self.target}: {call} was lost on its way")
            case "late":
                self._hold(request, timeout_s, fault.after)
                raise TransportTimeout(f"{self.target}: {call} is on its way for too long")
            case "delay":
                timeout_s = self._wait(request, fault.seconds, call, timeout_s)
            case "kill":
                self._lose(request)
                self._kill(call)
        reply = self._inner.call(request, timeout_s=timeout_s)
        match fault.act:
            case "repeat":
                reply = self._inner.call(request, timeout_s=timeout_s)
            case "drop_reply":
                raise ConnectError(f"{self.target}: the answer to {call} was lost")
            case "kill_after":
                self._kill(call)
        return reply

    def _wait(self, request: Request, seconds: float, call: str, timeout_s: float) -> float:
        """Sleep for `seconds`; return the rest of the timeout."""
        time.sleep(min(seconds, timeout_s))
        if seconds >= timeout_s:
            self._lose(request)
            raise TransportTimeout(f"{self.target}: {call} did not arrive within {timeout_s:g} s")
        return timeout_s - seconds

    def _kill(self, call: str) -> None:
        self.killed = True
        with self._lock:
            self._late.clear()
        if self._on_kill is not None:
            self._on_kill()
        raise ConnectError(f"{self.target}: killed at {call}")

    def _lose(self, request: Request) -> None:
        with self._lock:
            self._lost_messages += 1
            self._lost_nbytes += len(codec.encode(request))

    def _hold(self, request: Request, timeout_s: float, after: int) -> None:
        with self._lock:
            # One more, because the call that timed out is counted as well when it ends.
            self._late.append(_Late(request, timeout_s, after + 1))

    def _deliver_due(self) -> None:
        with self._lock:
            for message in self._late:
                message.wait -= 1
            due = [message for message in self._late if message.wait <= 0]
            self._late = [message for message in self._late if message.wait > 0]
        for message in due:
            self._deliver(message)

    def _deliver(self, message: _Late) -> None:
        call = CALL_OF[type(message.request)]
        error: WeightSyncError | None = None
        if self.killed:
            return
        try:
            self._inner.call(message.request, timeout_s=message.timeout_s)
        except WeightSyncError as exc:
            error = exc
        self.faults.note(Event(call, "late", error))
