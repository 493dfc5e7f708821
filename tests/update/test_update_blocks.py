"""`sender.update()` blocks, whole and partial, between updates of the whole model."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import weightsync as ws
from tests.e2e.models import digests, fill, make
from weightsync.weights.copying import arena

NAMES = list(dict(make("plain").named_parameters()))


def send(sender: ws.WeightSender, trainer: torch.nn.Module, call: str) -> ws.SyncReport | None:
    """Send all that the trainer has, or change less than all first and send that."""
    pairs = [(name, tensor.detach()) for name, tensor in trainer.named_parameters()]
    if call == "send_weights":
        return sender.send_weights()
    with sender.update(partial=call == "partial") as update:
        match call:
            case "one message":
                update.send(pairs)
            case "two messages":
                update.send(pairs[:3])
                update.send(pairs[3:])
            case "some twice":  # with the values of before, then with those of now
                update.send([(name, tensor + 1) for name, tensor in pairs[:3]])
                update.send(pairs)
                update.send(pairs[2:5])
            case "partial":
                update.send(pairs[1:4])
    return update.last_report


CALLS = ["send_weights", "one message", "two messages", "some twice", "partial"]


def change(trainer: torch.nn.Module, call: str, seed: int) -> None:
    fresh = make("plain")
    fill(fresh, seed)
    changed = NAMES[1:4] if call == "partial" else NAMES
    with torch.no_grad():
        for name in changed:
            trainer.get_parameter(name).copy_(fresh.get_parameter(name).nan_to_num())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("delta", ["off", "always"])
@pytest.mark.parametrize(
    ("apply", "swap"), [("staged", "pointer"), ("staged", "copy"), ("in_place", "pointer")]
)
def test_the_receiver_has_what_the_last_call_sent(
    apply: Any, swap: Any, delta: Any, seed: int
) -> None:
    rng = random.Random(seed)
    trainer, server = make("plain"), make("plain", 1)
    receiver = ws.WeightReceiver(ws.ModuleSink(server, swap=swap), apply=apply)
    with ws.connect(trainer, to=receiver, delta=delta) as sender:
        sender.send_weights()
        for step in range(40):
            call = rng.choice(CALLS)
            change(trainer, call, step + 2)
            report = send(sender, trainer, call)
            assert report is not None
            assert report.verified == "held"
            assert digests(server) == digests(trainer), (step, call)


@pytest.mark.parametrize("first", ["partial", "two messages"])
def test_a_part_that_was_in_place_for_want_of_memory(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole model then moves the tensors whose memory the part was written to."""
    trainer, server = make("plain"), make("plain", 1)
    receiver = ws.WeightReceiver(server, apply="auto")
    allocate, fits = arena.allocate, arena.fits

    def no_room(*_: Any) -> Any:
        raise ws.TransferError("no room")

    with ws.connect(trainer, to=receiver, delta="off") as sender:
        sender.send_weights()
        for step in range(6):
            part = step % 2 == 0
            monkeypatch.setattr(arena, "allocate", no_room if part else allocate)
            monkeypatch.setattr(arena, "fits", (lambda *_: False) if part else fits)
            call = first if part else "send_weights"
            change(trainer, call, step + 2)
            report = send(sender, trainer, call)
            assert report is not None
            assert digests(server) == digests(trainer), (step, report.apply)
