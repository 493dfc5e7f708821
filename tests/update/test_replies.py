"""A target whose replies hold words that no receiver says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace
from torch import nn

import weightsync as ws
from weightsync.transports.base import BaseTransport
from weightsync.wire import codec
from weightsync.wire.messages import CALL_OF, REPLIES, Reply, Request, StepReply

pytestmark = pytest.mark.usefixtures("shm_clean")


@pytest.fixture
def receiver() -> Iterator[ws.WeightReceiver]:
    made = ws.WeightReceiver(nn.Linear(4, 4))
    yield made
    made.close()


class Forwards(BaseTransport):
    """A user's transport, which makes the replies itself: they are not decoded by weightsync."""

    def __init__(self, carry: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        super().__init__("forwards")
        self._carry = carry

    def call(self, request: Request, *, timeout_s: float) -> Reply:
        call, plain = CALL_OF[type(request)], dict(self._carry(codec.to_plain(request)))
        if REPLIES[call] is not StepReply:
            return codec.reply_from_plain(call, plain)
        words = {name: plain.pop(name) for name in ("state", "apply", "verified") if name in plain}
        return replace(codec.reply_from_plain(call, {"state": "READY", **plain}), **words)


@pytest.mark.parametrize("decodes", [True, False], ids=["decoded", "made by a transport"])
@pytest.mark.parametrize(
    "words", [{"verified": "sampled"}, {"state": "DONE"}, {"apply": "half"}], ids=str
)
@pytest.mark.parametrize("call", ["update_weights", "finish_weight_update"])
def test_an_unknown_word_is_refused_before_anything_depends_on_it(
    receiver: ws.WeightReceiver, call: str, words: dict[str, str], decodes: bool
) -> None:
    lies = False

    def carry(message: dict[str, Any]) -> dict[str, Any]:
        reply = receiver.handle(message)
        return {**reply, **words} if lies and message["call"] == call else reply

    to: Any = carry if decodes else Forwards(carry)
    with ws.connect(nn.Linear(4, 4), to=to) as sender:
        assert sender.send_weights().version == 1
        lies = True
        with pytest.raises(ws.ProtocolError, match=next(iter(words.values()))):
            sender.send_weights()
        if call == "update_weights":
            assert receiver.version == 1, "it was committed"
            assert receiver.status().state == "READY"
        lies = False
        assert sender.send_weights().version == receiver.version


@pytest.mark.parametrize(
    ("call", "says", "message"),
    [
        ("update_weights", {"state": "UPDATING"}, "is UPDATING at version 1 .* not PREPARED"),
        ("update_weights", {"update_id": "other"}, "in update other, not PREPARED"),
        ("finish_weight_update", {"state": "PREPARED"}, "is PREPARED at version 2 "),
        ("finish_weight_update", {"state": "TORN"}, "is TORN at version 2 "),
        ("finish_weight_update", {"version": 1}, "is READY at version 1 .* at version 2 "),
        ("finish_weight_update", {"update_id": "other"}, "in update other, not READY"),
        ("finish_weight_update", {"state": "DONE"}, r"'DONE' - at `\$\.state`"),
        ("finish_weight_update", {"verified": None}, r"at `\$\.verified`"),
    ],
    ids=str,
)
def test_a_fleet_holds_what_its_replies_say_and_gets_no_second_update(
    receiver: ws.WeightReceiver, call: str, says: dict[str, Any], message: str
) -> None:
    """One of two receivers replies otherwise than a receiver that did the step."""
    lies = False
    other = ws.WeightReceiver(nn.Linear(4, 4))
    begun: list[str] = []

    def carry(request: dict[str, Any]) -> dict[str, Any]:
        begun.extend([request["call"]] if request["call"] == "update_weights" else [])
        reply = receiver.handle(request)
        return {**reply, **says} if lies and request["call"] == call else reply

    with ws.connect(nn.Linear(4, 4), to=[carry, other.handle]) as sender:
        sender.send_weights()
        lies = True
        begun.clear()
        with pytest.raises(ws.ProtocolError, match=message) as caught:
            sender.send_weights()
        assert len(begun) == 1
        is_committed = call == "finish_weight_update"
        assert other.version == receiver.version == (2 if is_committed else 1)
        assert ("did not confirm it, while the others hold version 2" in str(caught.value)) == (
            is_committed
        )
        lies = False
        report = sender.send_weights()
        assert (report.verified, report.version) == ("held", receiver.version)
        assert other.version == receiver.version
    other.close()


def test_a_block_of_a_fleet_is_checked_as_well(receiver: ws.WeightReceiver) -> None:
    trainer = nn.Linear(4, 4)
    says: dict[str, dict[str, Any]] = {}

    def carry(request: dict[str, Any]) -> dict[str, Any]:
        return {**receiver.handle(request), **says.get(request["call"], {})}

    with ws.connect(trainer, to=carry) as sender:
        for call, state in (("prepare", "UPDATING"), ("finish", "PREPARED")):
            says[f"{call}_weight_update"] = {"state": state}
            with (
                pytest.raises(ws.ProtocolError, match=f"is {state} at version"),
                sender.update() as u,
            ):
                u.send(trainer.named_parameters())
            says.clear()
            assert receiver.status().state == "READY"
        with sender.update() as update:
            update.send(trainer.named_parameters())
    assert update.last_report is not None
    assert update.last_report.verified == "held"
