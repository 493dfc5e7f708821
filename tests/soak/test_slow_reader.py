"""One reader of four is slow at every chunk: it never sees a slot that was overwritten."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

import weightsync as ws
from tests.e2e import models
from tests.e2e.models import digests, fill
from tests.e2e.processes import Apply, Host, Remote
from tests.soak.sizes import sizes
from weightsync.shm.ring import RingWriter

BUCKET_NBYTES = 16 << 10
READERS = 4


@dataclass(frozen=True)
class Size:
    updates: int
    delay_s: float


def ring() -> dict[str, Any]:
    return {"packed": True, "bucket_nbytes": BUCKET_NBYTES, "num_buckets": 2, "verify": True}


@sizes(quick=Size(updates=5, delay_s=0.002), whole=Size(updates=1_000, delay_s=0.002))
def test_no_slot_is_overwritten_while_it_is_read(host: Host, size: Size) -> None:
    receivers = four(host, size.delay_s)
    model = models.make("plain", seed=1)
    with ws.connect(model, to=receivers, **ring()) as sender:
        for update in range(size.updates):
            fill(model, seed=update)
            report = sender.send_weights()
            assert report.verified == "arrived"
            wanted = digests(model)
            assert all(receiver.digests() == wanted for receiver in receivers)


def test_a_writer_that_does_not_wait_is_found_out(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above relies on: a slot overwritten under its reader does not pass."""
    receivers = four(host, delay_s=0.01)
    monkeypatch.setattr(RingWriter, "acquire", lambda self, chunk, **_: chunk % self.control.slots)
    with (
        ws.connect(models.make("plain", seed=1), to=receivers, **ring()) as sender,
        pytest.raises(ws.TransferError),
    ):
        sender.send_weights()


def four(host: Host, delay_s: float) -> list[Remote]:
    """Hooks: what they are given was compared with its fingerprints before they see it."""
    apply: Apply = "in_place"
    return [
        host.receiver(sink="hook", apply=apply, model="plain", delay_s=delay_s if i == 0 else 0.0)
        for i in range(READERS)
    ]
