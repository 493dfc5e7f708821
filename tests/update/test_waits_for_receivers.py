"""How the sender waits for many receivers: it looks after all of them while some reply."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from weightsync.transports.calls import LOOK_S
from weightsync.update.fleet import Fleet

REPLIES = 40
APART_S = 0.04
"""Less than the time between two looks."""


def test_steady_replies_of_others_hide_no_silent_receiver() -> None:
    looks: list[float] = []
    calls: list[str] = []
    comm = SimpleNamespace(attend=lambda: calls.append("attend"))
    waiting: Any = SimpleNamespace(
        look=lambda: looks.append(time.monotonic()), group=SimpleNamespace(comm=comm)
    )
    futures: list[Future[Any]] = [Future() for _ in range(REPLIES)]

    def reply() -> None:
        for future in futures:
            time.sleep(APART_S)
            future.set_result(None)

    replying = threading.Thread(target=reply)
    replying.start()
    Fleet.await_all(waiting, futures, idle=lambda: calls.append("idle"))
    replying.join()
    assert len(looks) >= REPLIES * APART_S / LOOK_S / 4
    assert calls[:2] == ["attend", "idle"]
