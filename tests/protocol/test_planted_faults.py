"""Bytes that change between the sender's fingerprint and the receiver's copy are found and named.

The receiver is another process; the bytes are changed where it reads them: in a bucket of the ring,
or in the trainer's own shared memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import weightsync as ws
from tests.e2e import models, processes
from tests.e2e.models import digests, fill
from tests.e2e.processes import Apply, Host, Remote
from tests.e2e.trainers import control_of
from tests.protocol import plants
from tests.protocol.plants import TENSOR_NBYTES, Plant, Scene
from weightsync.tensors import as_bytes

CHUNK = 1
"""The second chunk carries t2 and t3; nothing else is touched."""
EVERYTHING = ["t0", "t1", "t2", "t3"]


class Saboteur:
    """Plants once the sender has fingerprinted, and holds the receivers' message until then."""

    def __init__(self, receiver: Remote, *, packed: bool) -> None:
        self.__qualname__ = receiver.name
        self._receiver = receiver
        self._packed = packed
        self._planted = threading.Event()
        self._planted.set()

    def __call__(self, message: Mapping[str, object]) -> object:
        if message["call"] == "update_weights" and not self._packed:
            assert self._planted.wait(processes.WAIT_S)
        return self._receiver(message)

    @contextmanager
    def planting(
        self, sender: ws.WeightSender, plant: Plant, stale: torch.Tensor
    ) -> Iterator[None]:
        control: Any = control_of(sender)
        genuine = control.write_fingerprints
        calls = 0
        self._planted.clear()

        def write_fingerprints(at: int, values: Sequence[int]) -> None:
            nonlocal calls
            calls += 1
            genuine(at, values)
            if not self._packed or calls == CHUNK + 1:
                plant(self._scene(sender, stale))
                self._planted.set()

        control.write_fingerprints = write_fingerprints
        try:
            yield
        finally:
            self._planted.set()
            control.write_fingerprints = genuine

    def _scene(self, sender: ws.WeightSender, stale: torch.Tensor) -> Scene:
        engine: Any = sender._group.worker.engines["ipc"]
        if self._packed:
            slot = engine.buckets[CHUNK]
            return Scene(slot[:TENSOR_NBYTES], slot[TENSOR_NBYTES:], stale)
        return Scene(engine._memory.tensors[2], engine._memory.tensors[3], stale)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize("plant", plants.PLANTS, ids=lambda plant: plant.__name__)
def test_what_changes_on_the_way_is_refused_and_named(
    host: Host, plant: Plant, packed: bool
) -> None:
    receiver = host.receiver(model="pages")
    saboteur = Saboteur(receiver, packed=packed)
    model = models.make("pages", seed=1)
    with ws.connect(model, to=saboteur, packed=packed, bucket_nbytes=2 * TENSOR_NBYTES) as sender:
        sender.send_weights()
        held, stale = receiver.digests(), as_bytes(model.state_dict()["t2"]).clone()
        fill(model, seed=2)
        with (
            saboteur.planting(sender, plant, stale),
            pytest.raises(ws.VerificationError) as caught,
        ):
            sender.send_weights()
        # A run is what is fingerprinted together: on the packed path no more than the chunk.
        assert list(caught.value.names) == (["t2", "t3"] if packed else EVERYTHING)
        assert receiver.reading() == 1
        assert receiver.digests() == held

        fill(model, seed=3)
        assert sender.send_weights().verified == "held"
        assert receiver.digests() == digests(model)


@pytest.mark.parametrize("sink", ["module", "hook"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
def test_in_place_it_is_torn_and_says_so(host: Host, packed: bool, sink: processes.Sink) -> None:
    """A chunk before the wrong one has changed the weights already.

    Not so an unpacked hook's: it is given nothing before everything was fingerprinted.
    """
    apply: Apply = "in_place"
    receiver = host.receiver(model="pages", apply=apply, sink=sink)
    saboteur = Saboteur(receiver, packed=packed)
    model = models.make("pages", seed=1)
    with ws.connect(model, to=saboteur, packed=packed, bucket_nbytes=2 * TENSOR_NBYTES) as sender:
        sender.send_weights()
        stale = as_bytes(model.state_dict()["t2"]).clone()
        fill(model, seed=2)
        with (
            saboteur.planting(sender, plants.stale_page, stale),
            pytest.raises(ws.VerificationError) as caught,
        ):
            sender.send_weights()
        assert "t2" in caught.value.names
        if sink == "hook" and not packed:
            assert receiver.reading() == 1
        else:
            with pytest.raises(ws.NotReadyError, match="TORN"):
                receiver.reading(timeout_s=0.2)
        fill(model, seed=3)
        sender.send_weights()
        assert receiver.digests() == digests(model)
        assert receiver.reading() == sender.version


def test_without_verification_nothing_is_promised(host: Host) -> None:
    """The planted bytes do reach the receiver: it is the fingerprint that keeps them out."""
    receiver = host.receiver(model="pages")
    saboteur = Saboteur(receiver, packed=True)
    model = models.make("pages", seed=1)
    with ws.connect(
        model, to=saboteur, packed=True, bucket_nbytes=2 * TENSOR_NBYTES, verify=False
    ) as sender:
        sender.send_weights()
        with saboteur.planting(sender, plants.flipped_bit, torch.empty(0)):
            assert sender.send_weights().verified == "none"
        assert receiver.digests() != digests(model)
