"""Members that leave, come back or were left behind: what they are told, and said of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

import weightsync as ws
from tests.update.uniform import fill, make
from weightsync.update import membership

TIMEOUT_S = 10.0
FINISH = "finish_weight_update"


class Receiver:
    """A receiver behind a callback; `before` sees every message first, and may raise."""

    def __init__(self, name: str) -> None:
        self.__qualname__ = name
        self.model = make()
        self.receiver = ws.WeightReceiver(self.model)
        self.before: Callable[[Mapping[str, Any]], None] = lambda _: None
        self.messages: list[Mapping[str, Any]] = []

    def __call__(self, message: Mapping[str, Any]) -> object:
        self.messages.append(message)
        self.before(message)
        return self.receiver.handle(message)

    @property
    def state(self) -> tuple[str, int, float]:
        status = self.receiver.status()
        return status.state, status.version, self.model.weight[0, 0].item()


def lose(*calls: str) -> Callable[[Mapping[str, Any]], None]:
    """Lose every message of these calls."""

    def before(message: Mapping[str, Any]) -> None:
        if message["call"] in calls:
            raise ws.ConnectError("cut")

    return before


def nothing(_: Mapping[str, Any]) -> None:
    pass


def test_a_dropped_member_that_is_owed_a_finish_comes_back() -> None:
    model, a, b = make(1), Receiver("a"), Receiver("b")
    with ws.connect(model, to=[a, b], timeout_s=TIMEOUT_S, on_failure="drop") as sender:
        b.before = lose(FINISH, "shutdown_weight_transfer_engine")
        assert set(sender.send_weights().dropped) == {"b"}
        assert b.state[:2] == ("PREPARED", 0)
        b.before = nothing
        sender.add(b)
        assert sender.targets == ["a", "b"]
        assert b.state == ("READY", 1, 1)


def test_who_is_dropped_is_told_first_how_its_update_ended() -> None:
    model, a, b = make(1), Receiver("a"), Receiver("b")
    with ws.connect(model, to=[a, b], timeout_s=TIMEOUT_S, on_failure="drop") as sender:
        finishes = []

        def lose_some(message: Mapping[str, Any]) -> None:
            if message["call"] == FINISH:
                finishes.append(message)
                if len(finishes) <= 4:  # three tries, and once more before it is dropped
                    raise ws.ConnectError("cut")

        b.before = lose_some
        assert set(sender.send_weights().dropped) == {"b"}
        assert b.state == ("READY", 1, 1)


def test_close_tells_how_an_update_ended() -> None:
    model, a, b = make(1), Receiver("a"), Receiver("b")
    with ws.connect(model, to=[a, b], timeout_s=TIMEOUT_S) as sender:
        b.before = lose(FINISH)
        with pytest.raises(ws.ConnectError, match="b failed and is left behind"):
            sender.send_weights()
        b.before = nothing
    assert (a.state, b.state) == (("READY", 1, 1), ("READY", 1, 1))


def test_a_finish_that_is_asked_again_names_the_same_fingerprints() -> None:
    model, a, b = make(1), Receiver("a"), Receiver("b")
    with ws.connect(model, to=[a, b], timeout_s=TIMEOUT_S) as sender:
        b.before = lose(FINISH)
        with pytest.raises(ws.ConnectError):
            sender.send_weights()
        b.before = nothing
        sender.send_weights()
    finishes = [m["body"] for m in b.messages if m["call"] == FINISH]
    first = [body for body in finishes if body["update_id"] == finishes[0]["update_id"]]
    assert len(first) >= 2
    assert len({body["table_digest"] for body in first}) == 1
    assert first[0]["table_digest"]


def test_an_equal_version_number_is_not_the_same_weights() -> None:
    model, a, b = make(1), Receiver("a"), Receiver("b")
    with ws.connect(make(7), to=b) as other:
        other.send_weights()
    with ws.connect(model, to=a, timeout_s=TIMEOUT_S) as sender:
        sender.send_weights()
        assert sender.add(b) is not None
        assert b.state == a.state == ("READY", 1, 1)


def test_who_is_left_behind_does_not_name_the_fleets_version() -> None:
    model, a, b = make(1), Receiver("a"), Receiver("b")
    with ws.connect(model, to=[a, b], timeout_s=TIMEOUT_S) as sender:
        sender.send_weights(5)
        fill(model, 3)

        def refuse(message: Mapping[str, Any]) -> None:
            if message["call"] == FINISH:
                body = {"update_id": message["body"]["update_id"]}
                b.receiver.handle({"call": "abort_weight_update", "body": body})
                b.before = lose("update_weights")

        b.before = refuse
        with pytest.raises(ws.WeightSyncError, match="the others hold version 3"):
            sender.send_weights(3, rewind=True)
        assert sender.version == 3
        b.before = nothing
        assert sender.resync("b").version == 3
        assert b.state == a.state == ("READY", 3, 3)


def test_an_error_keeps_its_attributes_when_the_others_go_on() -> None:
    model, a, b = make(1), Receiver("a"), Receiver("b")
    with ws.connect(model, to=[a, b], timeout_s=TIMEOUT_S) as sender:

        def refuse(message: Mapping[str, Any]) -> None:
            if message["call"] == FINISH:
                raise ws.VerificationError(names=["weight"])

        b.before = refuse
        with pytest.raises(ws.VerificationError, match="left behind") as raised:
            sender.send_weights()
    assert raised.value.names == ("weight",)


def test_errors_name_the_right_one_of_similar_targets() -> None:
    model, first, tenth = make(1), Receiver("r1"), Receiver("r10")

    def fail(_: Mapping[str, Any]) -> None:
        raise ws.ConnectError("r10's switch is gone")

    with ws.connect(model, to=[first, tenth], timeout_s=TIMEOUT_S) as sender:
        first.before = fail
        with pytest.raises(ws.ConnectError, match=r"^r1: r10's switch"):
            sender.send_weights()


@pytest.mark.parametrize("version", [-1, True, 1.5, "3", 1 << 63])
def test_a_version_that_is_none_is_refused_before_anybody_is_asked(version: Any) -> None:
    receiver = Receiver("a")
    with ws.connect(make(1), to=receiver, timeout_s=TIMEOUT_S) as sender:
        asked = len(receiver.messages)
        with pytest.raises(ws.ConfigError, match="a version is an integer"):
            sender.send_weights(version)
        with pytest.raises(ws.ConfigError), sender.update(version):
            pass
        assert len(receiver.messages) == asked
        assert sender.send_weights().version == 1


def test_a_report_counts_what_connecting_again_took() -> None:
    receiver = Receiver("a")
    with ws.connect(make(1), to=receiver, timeout_s=TIMEOUT_S) as sender:
        assert sender.send_weights().connect_seconds
        steady = sender.send_weights()
        assert (steady.control_messages, dict(steady.connect_seconds)) == (2, {})
        sender.release()
        seen = len(receiver.messages)
        report = sender.send_weights()
        assert report.control_messages == len(receiver.messages) - seen > 2
        assert {"open", "offer"} <= set(report.connect_seconds)


def test_release_keeps_a_joiner_from_generating() -> None:
    model, a, b = make(1), Receiver("a"), Receiver("b")
    with ws.connect(model, to=a, timeout_s=TIMEOUT_S) as sender:
        sender.send_weights()
    with ws.connect(model, to=[a, b], timeout_s=TIMEOUT_S) as sender:
        assert b.state[0] == "CATCHING_UP"
        sender.release()
        assert b.state[0] == "CATCHING_UP"
        sender.send_weights()
        assert b.state[0] == "READY"


def test_a_joiner_is_let_go_by_a_sender_that_released_and_closed() -> None:
    model, a, b = make(1), Receiver("a"), Receiver("b")
    with ws.connect(model, to=a, timeout_s=TIMEOUT_S) as sender:
        sender.send_weights()
    with ws.connect(model, to=[a, b], timeout_s=TIMEOUT_S) as sender:
        sender.release()
        assert b.state[0] == "CATCHING_UP"
    assert b.state[:2] == ("READY", 0)


def test_a_sender_is_known_by_one_name_however_often_it_releases() -> None:
    receiver = Receiver("a")
    with ws.connect(make(1), to=receiver, timeout_s=TIMEOUT_S) as sender:
        for _ in range(3):
            sender.send_weights()
            sender.release()
    inits = [m for m in receiver.messages if m["call"] == "init_weight_transfer_engine"]
    assert len(inits) == 3
    assert len({m["body"]["init_info"]["sender"] for m in inits}) == 1


def test_members_that_never_come_back_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MAX_PENDING", 2)
    model, stays = make(1), Receiver("stays")
    with ws.connect(model, to=stays, timeout_s=TIMEOUT_S, on_failure="drop") as sender:
        left = [Receiver(f"left-{k}") for k in range(4)]
        for receiver in left:
            sender.add(receiver)
            receiver.before = lose(FINISH, "shutdown_weight_transfer_engine")
            assert set(sender.send_weights().dropped) == {receiver.__qualname__}
        assert sender._coordinator is not None
        owed = sender._coordinator.membership._pending_finishes
        assert set(owed) == {receiver.receiver.instance for receiver in left[2:]}
