"""Two sides with different ranges of protocols: they use a common one, or one error names both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from msgspec.structs import replace
from torch import nn

import weightsync as ws
from weightsync import receiver as receiver_side
from weightsync.server.workers import merge_statuses
from weightsync.update import fleet as sender_side
from weightsync.wire import codec
from weightsync.wire.messages import InitReply, Protocols, Status, choose_protocol

pytestmark = pytest.mark.usefixtures("shm_clean")

Set = Callable[[tuple[int, int], tuple[int, int]], None]


class Apart(NamedTuple):
    """The ranges of two sides that have no common protocol, and the error."""

    ours: tuple[int, int]
    theirs: tuple[int, int]
    message: str


no_common = pytest.mark.parametrize(
    "apart",
    [
        Apart((1, 1), (2, 2), "protocol: the sender has 1, the receiver 2; .* the sender's side"),
        Apart((1, 2), (3, 5), "the sender has 1 to 2, the receiver 3 to 5; .* the sender's side"),
        Apart((2, 2), (1, 1), "the sender has 2, the receiver 1; .* on the receiver's side"),
        Apart((4, 6), (1, 3), "the sender has 4 to 6, the receiver 1 to 3; .* the receiver's side"),
    ],
)


@pytest.fixture
def protocols(monkeypatch: pytest.MonkeyPatch) -> Set:
    """Sets the range of the sender, and that of the receiver."""

    def set_both(sender: tuple[int, int], receiver: tuple[int, int]) -> None:
        for side, (oldest, newest) in ((sender_side, sender), (receiver_side, receiver)):
            monkeypatch.setattr(side, "PROTOCOL_MIN", oldest)
            monkeypatch.setattr(side, "PROTOCOL", newest)

    return set_both


@pytest.fixture
def held() -> nn.Module:
    return nn.Linear(8, 8)


@pytest.fixture
def receiver(held: nn.Module) -> Iterator[ws.WeightReceiver]:
    made = ws.WeightReceiver(held)
    yield made
    made.close()


def same(one: nn.Module, other: nn.Module) -> bool:
    held = other.state_dict()
    return all(torch.equal(tensor, held[name]) for name, tensor in one.state_dict().items())


@pytest.mark.parametrize(
    ("ours", "theirs", "common"),
    [
        ((1, 1), (1, 1), 1),
        ((1, 1), (1, 2), 1),
        ((1, 2), (1, 1), 1),
        ((1, 2), (1, 2), 2),
        ((2, 2), (1, 2), 2),
        ((1, 3), (2, 2), 2),
        ((1, 3), (2, 5), 3),
    ],
)
def test_the_newest_that_both_have_is_used(
    receiver: ws.WeightReceiver,
    held: nn.Module,
    protocols: Set,
    ours: tuple[int, int],
    theirs: tuple[int, int],
    common: int,
) -> None:
    protocols(ours, theirs)
    trainer = nn.Linear(8, 8)
    chosen: list[int] = []

    def record(message: Mapping[str, Any]) -> object:
        reply = receiver.handle(message)
        if message["body"].get("init_info"):
            made = codec.reply_from_plain(message["call"], reply)
            assert isinstance(made, InitReply)
            chosen.append(made.protocol)
        return reply

    with ws.connect(trainer, to=record) as sender:
        assert chosen == [common]
        assert sender.send_weights().version == 1
    assert same(trainer, held)


@no_common
def test_without_a_common_one_nothing_is_opened(
    receiver: ws.WeightReceiver, held: nn.Module, protocols: Set, apart: Apart
) -> None:
    trainer = nn.Linear(8, 8)
    protocols(apart.ours, apart.theirs)
    with pytest.raises(ws.ProtocolError, match=apart.message):
        ws.connect(trainer, to=receiver.handle)
    status = receiver.status()
    assert (status.state, status.version, status.senders) == ("READY", 0, {})
    assert status.owner is None
    protocols(apart.ours, apart.ours)
    with ws.connect(trainer, to=receiver.handle) as sender:
        sender.send_weights()
    assert same(trainer, held)


@no_common
def test_a_receiver_that_comes_back_with_other_protocols(protocols: Set, apart: Apart) -> None:
    """Its weights stay as they are, and it is updated again once it is of a common version."""
    protocols(apart.ours, apart.ours)
    trainer, held = nn.Linear(8, 8), nn.Linear(8, 8)
    now = ws.WeightReceiver(held)

    def call(message: Mapping[str, object]) -> object:
        return now.handle(message)

    with ws.connect(trainer, to=call) as sender:
        sender.send_weights()
        now.close()
        for newer in (apart.theirs, apart.ours):
            protocols(apart.ours, newer)
            before = {name: tensor.clone() for name, tensor in held.state_dict().items()}
            now = ws.WeightReceiver(held)
            with torch.no_grad():
                trainer.weight.add_(1)
            if newer is apart.ours:
                assert sender.send_weights().verified == "held"
                assert same(trainer, held)
            else:
                with pytest.raises(ws.ProtocolError, match=apart.message):
                    sender.send_weights()
                assert all(torch.equal(held.state_dict()[name], t) for name, t in before.items())
                assert now.status().state == "READY"
            now.close()


@pytest.mark.parametrize("lacking", [[], ["backend"], ["manifest", "lease_s"]], ids=str)
@pytest.mark.parametrize("unknown", [{}, {"priority": 3}], ids=["fields of now", "a newer field"])
def test_an_init_of_a_newer_sender_is_refused_for_its_protocol(
    receiver: ws.WeightReceiver, unknown: dict[str, object], lacking: list[str]
) -> None:
    """The receiver decides, whatever the sender has seen of its status."""
    seen: list[dict[str, Any]] = []

    def record(message: Mapping[str, Any]) -> object:
        seen.append(dict(message))
        return receiver.handle(message)

    with ws.connect(nn.Linear(8, 8), to=record):
        before = replace(receiver.status(), shared_memory=[])
        body = next(m["body"] for m in seen if "init_info" in m["body"])
        newer = {**body["init_info"], "protocol_min": 2, "protocol_max": 4, **unknown}
        for name in lacking:
            del newer[name]
        for case in (newer, {**newer, "sender": "another"}):
            with pytest.raises(ws.ProtocolError, match="the sender has 2 to 4, the receiver 1;"):
                receiver.handle(
                    {"call": "init_weight_transfer_engine", "body": {"init_info": case}}
                )
        assert replace(receiver.status(), shared_memory=[]) == before


@no_common
def test_a_receiver_fetches_nothing_from_one_of_other_protocols(
    receiver: ws.WeightReceiver, held: nn.Module, protocols: Set, apart: Apart
) -> None:
    trainer, source = nn.Linear(8, 8), ws.WeightReceiver(nn.Linear(8, 8))
    with ws.connect(trainer, to=source.handle) as sender:
        sender.send_weights(3)
    protocols(apart.ours, apart.theirs)  # the source is a sender now
    with pytest.raises(ws.ProtocolError, match=apart.message):
        ws.fetch(receiver, source.handle)
    assert (receiver.status().state, receiver.version) == ("READY", 0)
    protocols(apart.ours, apart.ours)
    assert ws.fetch(receiver, source.handle).version == receiver.version == 3
    assert same(trainer, held)
    source.close()


def test_one_of_other_protocols_does_not_join_a_fleet(
    receiver: ws.WeightReceiver, held: nn.Module
) -> None:
    trainer, other = nn.Linear(8, 8), nn.Linear(8, 8)
    joining = ws.WeightReceiver(other)
    is_newer = True

    def newer(message: Mapping[str, Any]) -> object:
        reply = joining.handle(message)
        is_status = message["call"] == "weight_info" and is_newer
        return {**reply, "protocol_min": 2, "protocol": 2} if is_status else reply

    with ws.connect(trainer, to=receiver.handle) as sender:
        sender.send_weights()
        with pytest.raises(ws.ProtocolError, match=r"newer: .* sender has 1, the receiver 2;"):
            sender.add(newer)
        assert joining.status().senders == {}
        assert len(sender.send_weights().receivers) == 1
        is_newer = False
        sender.add(newer)
        assert len(sender.send_weights().receivers) == 2
        assert same(trainer, held)
        assert same(trainer, other)
    joining.close()


@pytest.mark.parametrize("more", [{}, {"state": "a new word"}, {"apply": {"layers": 3}}], ids=str)
def test_the_status_shows_it_before_any_init(
    receiver: ws.WeightReceiver, more: dict[str, object]
) -> None:
    """Whatever else it says: the other fields need not be those of this version."""
    called: list[str] = []

    def newer(message: Mapping[str, Any]) -> object:
        called.append(message["call"])
        return {**receiver.handle(message), "protocol_min": 2, "protocol": 3, **more}

    with pytest.raises(ws.ProtocolError, match=r"newer: .* sender has 1, the receiver 2 to 3"):
        ws.connect(nn.Linear(8, 8), to=newer)
    assert set(called) == {"weight_info"}


def test_a_status_of_a_common_protocol_is_refused_for_its_word(
    receiver: ws.WeightReceiver,
) -> None:
    plain = {**codec.reply_to_plain(receiver.status()), "protocol": 3, "state": "a new word"}
    with pytest.raises(codec.InvalidReplyError, match="to weight_info is not valid"):
        codec.reply_from_plain("weight_info", plain)
    whole = msgspec.json.encode(plain)
    for body in (whole, whole[:-1], b"\xff"):
        with pytest.raises(codec.InvalidReplyError, match="to weight_info is not valid"):
            codec.decode_reply("weight_info", body)
    apart = msgspec.json.encode({**plain, "protocol_min": 2})
    with pytest.raises(codec.InvalidReplyError, match="the sender has 1, the receiver 2 to 3"):
        codec.decode_reply("weight_info", apart)


@pytest.mark.parametrize("chosen", [0, 2, -1])
def test_a_receiver_that_chooses_what_was_not_offered(
    receiver: ws.WeightReceiver, held: nn.Module, chosen: int
) -> None:
    lies = True

    def choose(message: Mapping[str, Any]) -> object:
        reply = receiver.handle(message)
        is_init = message["call"] == "init_weight_transfer_engine"
        return {**reply, "protocol": chosen} if is_init and lies else reply

    with pytest.raises(ws.ProtocolError, match=f"chose protocol {chosen}; this sender has 1"):
        ws.connect(nn.Linear(8, 8), to=choose)
    assert receiver.status().senders == {}
    lies = False
    trainer = nn.Linear(8, 8)
    with ws.connect(trainer, to=choose) as sender:
        sender.send_weights()
    assert same(trainer, held)


@pytest.mark.parametrize(("one", "other"), [((3, 1), (1, 1)), ((1, 1), (2, 1))])
def test_what_is_no_range_is_refused(one: tuple[int, int], other: tuple[int, int]) -> None:
    with pytest.raises(ws.ProtocolError, match="1, which is no range"):
        choose_protocol(Protocols(*one), Protocols(*other))


def test_messages_without_a_protocol_are_of_protocol_1(receiver: ws.WeightReceiver) -> None:
    """Receivers of the first protocol do not say what they have beside it."""
    plain = codec.reply_to_plain(receiver.status())
    assert "protocol_min" not in plain
    for newest in (1, 3):
        status = codec.reply_from_plain("weight_info", {**plain, "protocol": newest})
        assert isinstance(status, Status)
        assert status.protocols == (1, newest)


def test_a_server_has_the_protocols_of_all_its_workers() -> None:
    with_range = ws.WeightReceiver(nn.Linear(1, 1))
    plain = codec.reply_to_plain(with_range.status())
    with_range.close()
    workers = {
        str(oldest): codec.reply_from_plain(
            "weight_info", {**plain, "protocol_min": oldest, "protocol": newest}
        )
        for oldest, newest in ((1, 3), (2, 4))
    }
    assert merge_statuses(workers).protocols == (2, 3)  # type: ignore[arg-type]  # statuses
