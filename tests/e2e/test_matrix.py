"""Every kind of tensor, by every way, to every kind of place: bit for bit, update after update."""

from __future__ import annotations

import pytest

import weightsync as ws
from tests.e2e import models
from tests.e2e.models import BUCKET_NBYTES, digests, fill
from tests.e2e.processes import Apply, Carrier, Host, Sink

UPDATES = 4


@pytest.mark.parametrize("carrier", ["callback", "http"])
@pytest.mark.parametrize("sink", ["module", "hook"])
@pytest.mark.parametrize("apply", ["staged", "in_place"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
def test_every_tensor_arrives_bit_for_bit(
    host: Host, packed: bool, apply: Apply, sink: Sink, carrier: Carrier
) -> None:
    model = models.make("everything", seed=100)
    receiver = host.receiver(carrier, sink=sink, apply=apply)
    with ws.connect(
        model, to=receiver.to, packed=packed, bucket_nbytes=BUCKET_NBYTES, num_buckets=2
    ) as sender:
        for version in range(1, UPDATES + 1):
            fill(model, seed=version)
            report = sender.send_weights()
            wanted = digests(model)
            if sink == "hook":
                del wanted["head.weight"]
            assert receiver.digests() == wanted
            assert receiver.reading() == version == report.version
            assert (report.packed, report.apply) == (packed, apply)
            assert report.verified == ("held" if sink == "module" else "arrived")
            assert report.control_messages == 2
