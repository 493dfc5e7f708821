from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.transports.contract import Connect, TransportContract
from tests.transports.scripted import ScriptedReceiver
from weightsync.errors import ProtocolError, RemoteError
from weightsync.transports.base import Transport
from weightsync.transports.callback import CallbackTransport
from weightsync.wire.messages import FinishRequest, StatusRequest


class TestCallback(TransportContract):
    @pytest.fixture
    def connect(self) -> Connect:
        def connect(receiver: ScriptedReceiver) -> Transport:
            return CallbackTransport(receiver.handle, "the receiver")

        return connect


def test_the_callback_gets_plain_data() -> None:
    seen: list[Mapping[str, object]] = []

    def callback(message: Mapping[str, object]) -> object:
        seen.append(message)
        return ScriptedReceiver().handle(message)

    CallbackTransport(callback).call(FinishRequest(update_id="u1"), timeout_s=1)
    assert seen == [{"call": "finish_weight_update", "body": {"update_id": "u1"}}]


@pytest.mark.parametrize("answer", [None, 3, "ok", [], {"state": 1}, object()])
def test_an_answer_that_is_no_reply_is_refused(answer: object) -> None:
    with pytest.raises(ProtocolError, match="weight_info"):
        CallbackTransport(lambda _: answer).call(StatusRequest(), timeout_s=1)


def test_a_foreign_error_keeps_its_cause() -> None:
    cause = OSError("the wire is cut")

    def broken(_: Mapping[str, object]) -> object:
        raise cause

    with pytest.raises(RemoteError, match=r"callback: weight_info raised OSError") as caught:
        CallbackTransport(broken).call(StatusRequest(), timeout_s=1)
    assert caught.value.__cause__ is cause
