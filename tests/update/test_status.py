"""Status at any time: also while a sender connects anew, and its engine is closed meanwhile."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
from torch import nn

import weightsync as ws
from weightsync.backends.ipc.backend import IpcBackend
from weightsync.backends.tcp.payload import Membership
from weightsync.backends.tcp.receiver import TcpWeightTransferEngine
from weightsync.backends.tcp.relay import HostRelay
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


class ClosedMeanwhile(TcpWeightTransferEngine):
    """Another thread closes it right after the first look at its relay."""

    _left: HostRelay | None = None

    @property
    def _relay(self) -> HostRelay | None:
        relay, self._left = self._left, None
        return relay

    @_relay.setter
    def _relay(self, relay: HostRelay | None) -> None:
        self._left = relay


def test_an_engine_that_is_closed_meanwhile_has_an_answer() -> None:
    engine = ClosedMeanwhile(IpcBackend().receiver_engine([]))
    engine._membership = cast(Membership, object())
    engine._relay = cast(HostRelay, SimpleNamespace(sender_alive=True))
    assert engine.sender_alive() is True
    assert engine.sender_alive() is None
