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
