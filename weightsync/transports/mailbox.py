"""Short messages between the sources of one fetch: the receiver that fetches passes them on.

Sources know neither each other's addresses nor tokens. The receiver calls all of them.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from weightsync.wire.messages import Mail


class Mailbox:
    """What one source has sent to the others, and what has arrived from each. Thread-safe.

    `place` is that of this source among the `places` of all. `alive` says whether the receiver that
    passes the messages on still calls.
    """

    def __init__(self, place: int, places: int, alive: Callable[[], bool]) -> None:
        self.place = place
        self.places = places
        self._alive = alive
        self.changed = threading.Condition()
        self._sent: deque[Mail] = deque()
        self._arrived: dict[int, deque[bytes]] = defaultdict(deque)
        self._notes: set[str] = set()
        self._lost: dict[int, None] = {}
        self._is_closed = False

    def send(self, to: int, body: bytes) -> None:
        """Send a message to the source at the place `to`. Messages to one arrive in order."""
        self._post(Mail(peer=to, body=body))

    def note(self, key: str) -> None:
        """Set a note, which all sources have from then on."""
        with self.changed:
            self._notes.add(key)
        for peer in range(self.places):
            if peer != self.place:
                self._post(Mail(kind="note", peer=peer, body=key.encode()))

    def is_noted(self, key: str) -> bool:
        """Whether any source has set this note."""
        return key in self._notes

    def _post(self, mail: Mail) -> None:
        with self.changed:
            self._sent.append(mail)
            self.changed.notify_all()

    def deliver(self, arrived: Sequence[Mail]) -> None:
        """Add messages of the others; `peer` is the place that each is from."""
        with self.changed:
            for mail in arrived:
                match mail.kind:
                    case "word":
                        self._arrived[mail.peer].append(mail.body)
                    case "note":
                        self._notes.add(mail.body.decode(errors="replace"))
                    case "lost":
                        self._lost[mail.peer] = None
            self.changed.notify_all()

    def take_sent(self) -> list[Mail]:
        """Return what is to be passed on, which may be nothing."""
        with self.changed:
            sent = list(self._sent)
            self._sent.clear()
        return sent

    def wait_sent(self, timeout_s: float, over: Callable[[], bool]) -> list[Mail]:
        """Return what is to be passed on; wait for it, until `over`. See `close` for the end."""
        until = time.monotonic() + timeout_s
        with self.changed:
            while not self._sent and not over() and time.monotonic() < until:
                self.changed.wait(max(until - time.monotonic(), 0.0))
            return self.take_sent()

    def take(self, peer: int) -> bytes | None:
        """Return the next message from a source, None where there is none yet."""
        with self.changed:
            arrived = self._arrived[peer]
            return arrived.popleft() if arrived else None

    def wait(self, timeout_s: float) -> None:
        """Wait for any change."""
        with self.changed:
            self.changed.wait(timeout_s)

    @property
    def lost(self) -> list[int]:
        """The places of the sources that were lost; this one's, where nobody passes mail on."""
        if self._is_closed or not self._alive():
            return [self.place]
        return list(self._lost)

    def close(self) -> None:
        """End all waits: no message is passed on any more."""
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()
