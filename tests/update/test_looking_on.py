"""Status at any time: also while a sender connects anew, and its engine is closed meanwhile."""

from __future__ import annotations

import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
from torch import nn

import weightsync as ws
from weightsync.backends.gloo.group import LivenessSocket
from weightsync.backends.gloo.receiver import GlooWeightTransferEngine
from weightsync.wire import codec
from weightsync.wire.messages import InitRequest, Request, StartRequest

INITS = 400
PATIENT_S = 60.0


@pytest.fixture
def hurried() -> Iterator[None]:
    """Threads take turns far more often than they do by themselves."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@pytest.mark.usefixtures("hurried", "shm_clean")
def test_a_sender_that_connects_anew_is_never_seen_dead() -> None:
    receiver = ws.WeightReceiver(nn.Linear(8, 8))
    seen: Counter[str] = Counter()
    over = threading.Event()
    sent: list[Request] = []

    def handle(message: dict[str, object]) -> dict[str, object]:
        sent.append(codec.from_plain(message))
        return receiver.handle(message)

    def look() -> None:
        while not over.is_set():
            try:
                seen["orphaned"] += receiver.status().orphaned
                seen["looks"] += 1
            except Exception as exc:  # noqa: BLE001  # whatever it is, nobody may see it
                seen[f"{type(exc).__name__}: {exc}"] += 1

    looking = threading.Thread(target=look)
    try:
        with ws.connect(nn.Linear(8, 8), to=handle, timeout_s=PATIENT_S) as sender:
            sender.send_weights()
            inits = [m for m in sent if isinstance(m, InitRequest) and m.init_info]
            offer = inits[-1].init_info
            assert offer is not None
            receiver.dispatch(StartRequest(update_id="open", version=9, sender=offer.sender))
            looking.start()
            for _ in range(INITS):
                receiver.dispatch(inits[-1])
            over.set()
            looking.join(PATIENT_S)
            assert seen.pop("looks")
            assert +seen == Counter()
    finally:
        over.set()
        if looking.ident is not None:
            looking.join(PATIENT_S)
        receiver.close()


class ClosedMeanwhile(GlooWeightTransferEngine):
    """Another thread closes it right after the first look at its connection."""

    _left: LivenessSocket | None = None

    @property
    def _liveness(self) -> LivenessSocket | None:
        connection, self._left = self._left, None
        return connection

    @_liveness.setter
    def _liveness(self, connection: LivenessSocket | None) -> None:
        self._left = connection


def test_a_group_that_is_closed_meanwhile_has_an_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        lifeline = LivenessSocket("127.0.0.1", server.getsockname()[1], PATIENT_S)
        try:
            engine = ClosedMeanwhile([])
            engine._joins = True
            engine._liveness = lifeline
            assert engine.sender_alive()
            assert not engine.sender_alive()
        finally:
            lifeline.close()
