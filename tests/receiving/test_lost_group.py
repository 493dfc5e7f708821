"""A private group that ended without a goodbye: its sender may be about to make it anew."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import nn

import weightsync as ws
from weightsync.errors import ConnectError

TIMEOUT_S = 20.0
LEASE_S = 3.0


class Far:
    """A receiver that believes to be on a host of its own; messages to it may be cut."""

    def __init__(self, host: str) -> None:
        self.receiver = ws.WeightReceiver(nn.Linear(4, 4), lease_s=LEASE_S)
        self.receiver._updates.peers.keys.append(host)
        self.cut = False

    def __call__(self, message: Mapping[str, object]) -> dict[str, object]:
        if self.cut:
            raise ConnectError("cut")
        return self.receiver.handle(message)

    @property
    def state(self) -> str:
        return self.receiver.status().state


def test_it_is_waited_for_no_longer_than_the_lease() -> None:
    torch.manual_seed(0)
    trained = nn.Linear(4, 4)
    first, late = Far("host-first"), Far("host-late")
    try:
        with ws.connect(trained, to=first, backend="distributed", timeout_s=TIMEOUT_S) as sender:
            sender.send_weights()
        sender = ws.connect(trained, to=[first, late], backend="distributed", timeout_s=TIMEOUT_S)
        try:
            assert late.state == "JOINING"
            late.cut = True
            sender.release()
            assert late.state == "JOINING"
            assert late.receiver.ledger() == []
            time.sleep(LEASE_S)
            assert late.state == "READY"
        finally:
            late.cut = False
            sender.close()
    finally:
        first.receiver.close()
        late.receiver.close()
