"""A fleet in one process is a fleet: two-phase, verified, and nothing is left behind."""

from __future__ import annotations

import pytest
import torch

import weightsync as ws
from weightsync.testing import InProcessFleet, TinyModel

pytestmark = pytest.mark.usefixtures("shm_clean")
TIMEOUT_S = 10.0


def filled(value: float) -> TinyModel:
    model = TinyModel()
    fill(model, value)
    return model


def fill(model: torch.nn.Module, value: float) -> None:
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.fill_(value)


@pytest.mark.parametrize("packed", [True, False])
def test_all_hold_what_was_sent(packed: bool) -> None:
    model = filled(float("nan"))
    with (
        InProcessFleet(3, apply=["staged", "in_place", "auto"]) as fleet,
        ws.connect(model, to=fleet.to(), packed=packed, bucket_nbytes=4096) as sender,
    ):
        assert sender.send_weights().verified == "held"
        assert fleet.versions == [1, 1, 1]
        assert all(member.holds(model.state_dict()) for member in fleet)
        assert not any(member.holds(filled(2).state_dict()) for member in fleet)
        assert len(fleet) == 3


def test_negative_zero_is_not_zero() -> None:
    with InProcessFleet(1) as fleet:
        assert fleet[0].holds(filled(0.0).state_dict())
        assert not fleet[0].holds(filled(-0.0).state_dict())
        assert not fleet[0].holds({})


def test_one_refusal_keeps_everyone_back() -> None:
    model = filled(1)
    with (
        InProcessFleet(2, apply="staged") as fleet,
        ws.connect(model, to=fleet.to(), timeout_s=TIMEOUT_S) as sender,
    ):
        sender.send_weights()
        sent = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        fill(model, 2)
        fleet[0].fail("drop", "update_weights")
        with pytest.raises(ws.TransportTimeout, match="receiver-0: update_weights was lost"):
            sender.send_weights()
        assert fleet.versions == [1, 1]
        assert all(member.holds(sent) for member in fleet)


def test_an_in_place_receiver_that_is_torn_refuses() -> None:
    model = filled(1)
    with (
        InProcessFleet(1, apply="in_place") as fleet,
        ws.connect(model, to=fleet.to(), timeout_s=TIMEOUT_S) as sender,
    ):
        fleet[0].fail("drop_reply", "update_weights")
        with pytest.raises(ws.ConnectError):
            sender.send_weights()
        with pytest.raises(ws.NotReadyError, match="TORN"):
            fleet[0].tensors()
        sender.send_weights()
        assert fleet[0].holds(model.state_dict())


def test_a_restart_is_another_receiver() -> None:
    model = filled(1)
    with (
        InProcessFleet(2) as fleet,
        ws.connect(model, to=fleet.to(), timeout_s=TIMEOUT_S) as sender,
    ):
        sender.send_weights()
        before = fleet[1].receiver.instance
        fleet[1].restart()
        assert fleet[1].receiver.instance != before
        assert fleet.versions == [1, 0]
        sender.send_weights()
        assert fleet.versions == [2, 2]


def test_every_sender_gets_transports_of_its_own() -> None:
    with InProcessFleet(1) as fleet:
        for value in (1, 2):
            with ws.connect(filled(value), to=fleet.to()) as sender:
                sender.send_weights()
        assert fleet.versions == [2]
        calls = [event.call for event in fleet[0].faults.log]
        assert calls.count("finish_weight_update") == 2
