"""A receiver belongs to one living sender."""

from __future__ import annotations

import copy
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.children import CONTEXT, load_beforehand
from tests.protocol.strangers import NBYTES, Step
from tests.protocol.trainers import NAMES, Trainer
from tests.protocol.world import World
from tests.soak.malformed import whole_update
from weightsync.shm.segment import Segment
from weightsync.specs import MAX_VERSION
from weightsync.testing import FleetMember, InProcessFleet, TinyModel

load_beforehand("tests.test_second_sender")

pytestmark = pytest.mark.usefixtures("shm_clean")
WAIT_S = 60.0


def model(value: float) -> nn.Module:
    made = TinyModel()
    with torch.no_grad():
        for tensor in made.parameters():
            tensor.fill_(value)
    return made


@pytest.fixture
def fleet() -> Iterator[InProcessFleet]:
    with InProcessFleet(2) as fleet:
        yield fleet


def value(member: FleetMember) -> float:
    return float(member.tensors()[1]["scale"])


def connect(fleet: InProcessFleet, of: float, **settings: Any) -> ws.WeightSender:
    return ws.connect(model(of), to=fleet.to(), **settings)


def test_a_second_sender_is_refused_and_told_who_is_there(fleet: InProcessFleet) -> None:
    with connect(fleet, 1) as first:
        first.send_weights()
        with pytest.raises(ws.SenderConflictError) as refused:
            connect(fleet, 2)
        assert refused.value.owner == f"{socket.gethostname()}, pid {os.getpid()}"
        owner = fleet[0].receiver.status().owner
        assert owner is not None
        assert owner.alive
        said = str(refused.value)
        assert all(word in said for word in ("receiver-0", refused.value.owner, "takeover=True"))
        assert refused.value.since in said
        assert first.send_weights().version == 2
    with connect(fleet, 2) as second:
        assert second.send_weights().version == 3


def test_one_that_was_replaced_learns_of_it_at_its_next_send(fleet: InProcessFleet) -> None:
    with connect(fleet, 1) as first:
        first.send_weights()
        with connect(fleet, 2, takeover=True) as second:
            assert second.send_weights().version == 2
            for _ in range(2):
                with pytest.raises(ws.SenderReplacedError, match="taken over by another sender"):
                    first.send_weights()
            assert second.send_weights().version == 3
            assert value(fleet[1]) == 2
        first.send_weights()  # nobody is there any more
        assert value(fleet[1]) == 1


def value_sent_back(sender: ws.WeightSender, fleet: InProcessFleet) -> float:
    """What the fleet holds after the next two sends of one that was replaced: it is told once."""
    held = value(fleet[1])
    with pytest.raises(ws.SenderReplacedError, match="taken over by another sender") as told:
        sender.send_weights()
    assert told.value.owner == f"{socket.gethostname()}, pid {os.getpid()}"
    assert told.value.since in str(told.value)
    assert value(fleet[1]) == held, "newer weights were overwritten without a word"
    sender.send_weights()
    return value(fleet[1])


def send(sender: ws.WeightSender, by: str) -> None:
    if by == "send_weights":
        sender.send_weights()
    else:
        with sender.update() as update:
            update.send(list(model(3).named_parameters()))


@pytest.mark.parametrize("by", ["send_weights", "update"])
def test_one_that_was_replaced_learns_of_it_though_the_other_has_left(
    fleet: InProcessFleet, by: str
) -> None:
    with connect(fleet, 1) as first:
        first.send_weights()
        with connect(fleet, 2, takeover=True) as second:
            second.send_weights()
        with pytest.raises(ws.SenderReplacedError, match=r"receiver-0, receiver-1 .* has left"):
            send(first, by)
        assert [value(member) for member in fleet] == [2, 2]
        first.send_weights()
        assert [value(member) for member in fleet] == [1, 1]
        first.send_weights()
        with connect(fleet, 3, takeover=True) as third:
            third.send_weights()
        assert value_sent_back(first, fleet) == 1, "it was replaced once more"


def test_one_that_was_replaced_at_one_receiver_learns_of_it_there(fleet: InProcessFleet) -> None:
    with connect(fleet, 1) as first:
        (_, told) = first.send_weights().receivers
        with ws.connect(model(2), to=fleet[1].transport(), takeover=True) as second:
            second.send_weights()
        with pytest.raises(ws.SenderReplacedError, match=r"receiver-1 .* has left"):
            first.resync(told.target)
        assert [value(member) for member in fleet] == [1, 2]
        first.send_weights()
        assert [value(member) for member in fleet] == [1, 1]


def test_one_that_was_replaced_while_it_had_released_its_memory_learns_of_it(
    fleet: InProcessFleet,
) -> None:
    """By one that yields and lives, too."""
    with connect(fleet, 1) as first:
        first.send_weights()
        first.release()
        with connect(fleet, 2, takeover=True, yields=True) as second:
            second.send_weights()
            assert value_sent_back(first, fleet) == 1


def test_one_that_yields_is_not_told_of_those_that_took_their_turn(fleet: InProcessFleet) -> None:
    with connect(fleet, 1, yields=True) as first:
        first.send_weights()
        with connect(fleet, 2) as second:
            second.send_weights()
        assert first.send_weights().version == 3
        fleet[0].restart()
        assert first.send_weights().version == 4
        assert [value(member) for member in fleet] == [1, 1]


def test_one_whose_receiver_was_started_again_is_told_nothing(fleet: InProcessFleet) -> None:
    with connect(fleet, 1) as first:
        first.send_weights()
        first.release()
        first.send_weights()
        fleet[0].restart()
        assert first.send_weights().version == 3
        assert [value(member) for member in fleet] == [1, 1]


def test_an_update_that_is_open_is_ended_by_who_takes_over(fleet: InProcessFleet) -> None:
    pairs = list(model(1).named_parameters())

    def interrupted(first: ws.WeightSender) -> None:
        with first.update() as update:
            update.send(pairs[:1])
            with connect(fleet, 2, takeover=True) as second:
                second.send_weights()
                assert [value(member) for member in fleet] == [2, 2]
            update.send(pairs[1:])

    with connect(fleet, 1) as first, pytest.raises(ws.WeightSyncError):
        interrupted(first)
    assert [value(member) for member in fleet] == [2, 2]


def test_an_offer_that_comes_late_takes_nothing_from_who_came_after(fleet: InProcessFleet) -> None:
    """Even at a receiver that was started again, and remembers neither of them."""
    member = fleet[0]
    offers: list[Mapping[str, object]] = []

    def carry(message: Mapping[str, object]) -> object:
        if message["call"] == "init_weight_transfer_engine":
            offers.append(message)
        return member.receiver.handle(message)

    with ws.connect(model(1), to=carry) as first:
        first.send_weights()
        with ws.connect(model(2), to=member.transport(), takeover=True) as second:
            member.restart()
            first.send_weights()  # it has not heard of the other one, nor has the receiver
            second.send_weights()
            assert value(member) == 2
            for offer in offers:
                with pytest.raises(ws.WeightSyncError):
                    member.receiver.handle(offer)
            with pytest.raises(ws.SenderReplacedError):
                first.send_weights()
            second.send_weights()


def test_what_a_sender_offers_is_nobody_elses_to_own(fleet: InProcessFleet) -> None:
    """Its memory, offered once more in the name of an owner of the highest term there is."""
    offers: list[dict[str, Any]] = []
    handle = fleet[0].receiver.handle

    def carry(message: Mapping[str, Any]) -> object:
        if message["call"] == "init_weight_transfer_engine":
            offers.append(copy.deepcopy(dict(message)))
        return handle(message)

    with ws.connect(model(1), to=carry) as sender:
        sender.send_weights()
        info = offers[-1]["body"]["init_info"]
        info["owner"] |= {"id": "somebody", "term": 1 << 62}
        with pytest.raises(ws.SenderConflictError):
            handle(offers[-1])
        handle({"call": "shutdown_weight_transfer_engine", "body": {"sender": info["sender"]}})
        assert sender.send_weights().version == 2
        assert value(fleet[0]) == 1


def test_a_sender_that_was_dropped_holds_nothing(fleet: InProcessFleet) -> None:
    dropped = connect(fleet, 1)
    dropped.send_weights()
    del dropped
    with connect(fleet, 2) as second:
        assert second.send_weights().version == 2


def test_one_shots_take_turns_and_do_not_take_from_a_sender(fleet: InProcessFleet) -> None:
    receiver = fleet[0].receiver
    yielding = ws.connect(model(1), to=receiver.handle, yields=True)
    try:
        for version in (1, 3):
            assert yielding.send_weights().version == version
            assert ws.send_weights(model(2), to=receiver.handle).version == version + 1
        with ws.connect(model(3), to=receiver.handle) as sender:
            sender.send_weights()
            with pytest.raises(ws.SenderReplacedError):
                yielding.send_weights()
            for _ in range(2):  # the connection that it kept, and a new one
                with pytest.raises(ws.SenderConflictError):
                    ws.send_weights(model(2), to=receiver.handle)
            assert value(fleet[0]) == 3
        assert ws.send_weights(model(2), to=receiver.handle).version == 6
    finally:
        yielding.close()
        ws.close()


@pytest.mark.parametrize("met", [False, True])
def test_the_update_of_an_owner_that_yields_is_waited_for(fleet: InProcessFleet, met: bool) -> None:
    """By one that comes new, and by one that it took the receivers from in its turn."""
    pairs = list(model(1).named_parameters())
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(1))
        others = []
        if met:
            others.append(stack.enter_context(connect(fleet, 2, yields=True)))
            others[0].send_weights()
        first = stack.enter_context(connect(fleet, 1, yields=True))

        def send() -> int:
            second = others[0] if met else stack.enter_context(connect(fleet, 2, yields=True))
            return second.send_weights().version

        with first.update() as update:
            update.send(pairs[:1])
            coming = pool.submit(send)
            with pytest.raises(TimeoutError):
                coming.result(1.0)
            update.send(pairs[1:])
        assert coming.result(WAIT_S) == (3 if met else 2)
        assert [value(member) for member in fleet] == [2, 2]
        assert first.send_weights().version == (4 if met else 3)


def test_the_update_of_an_owner_that_yields_is_waited_for_no_longer_than_timeout_s(
    fleet: InProcessFleet,
) -> None:
    pairs = list(model(1).named_parameters())
    with connect(fleet, 1, yields=True) as first:
        with first.update() as update:
            update.send(pairs[:1])
            begin = time.monotonic()
            with pytest.raises(ws.SenderConflictError, match=f"pid {os.getpid()}"):
                connect(fleet, 2, timeout_s=1.0)
            assert time.monotonic() - begin >= 1.0
            update.send(pairs[1:])
        assert [value(member) for member in fleet] == [1, 1]


def _own(pipe: Connection) -> None:
    def carry(message: Mapping[str, object]) -> object:
        pipe.send(dict(message))
        return pipe.recv()

    with ws.connect(model(1), to=carry) as sender:
        sender.send_weights()
        pipe.send(None)
        pipe.recv()  # never comes


@contextmanager
def owner_elsewhere(receiver: ws.WeightReceiver) -> Iterator[BaseProcess]:
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_own, args=(theirs,), daemon=True)
    process.start()
    try:
        assert ours.poll(WAIT_S)
        while (message := ours.recv()) is not None:
            ours.send(receiver.handle(message))
            assert ours.poll(WAIT_S)
        yield process
    finally:
        process.kill()
        process.join(WAIT_S)
        ours.close()
        theirs.close()


def test_a_dead_senders_receiver_is_free_at_once_and_a_stopped_ones_by_takeover(
    fleet: InProcessFleet,
) -> None:
    receiver = fleet[0].receiver
    with owner_elsewhere(receiver) as owner:
        assert owner.pid is not None
        os.kill(owner.pid, signal.SIGSTOP)
        with pytest.raises(ws.SenderConflictError, match=f"pid {owner.pid}"):
            ws.connect(model(2), to=receiver.handle)
        with ws.connect(model(2), to=receiver.handle, takeover=True) as sender:
            assert sender.send_weights().version == 2
    with owner_elsewhere(receiver) as owner:
        owner.kill()
        owner.join(WAIT_S)
        with ws.connect(model(3), to=receiver.handle) as sender:
            assert sender.send_weights().version == 4


@pytest.mark.parametrize(
    "opened",
    [
        ["start"],
        ["start_named", "some"],
        ["start", "all", "prepare"],
        ["start_as_sender", "all", "prepare"],
    ],
)
def test_what_a_client_without_a_sender_left_open_is_ended_by_the_owners_next_send(
    opened: list[Step],
) -> None:
    """Its lease may be minutes long."""
    world = World(["staged", "in_place"])
    trainer = Trainer(world, packed=False, drops=False)
    world.trainers.append(trainer)
    trainer.connect(WAIT_S)
    trainer.fill()
    if "start_as_sender" not in opened:
        world.fleet[1].restart()  # so that this one does not know the owner either
    for member in world.fleet:
        for step in opened:
            world.strangers[member.name].do(step, NAMES[:1])
    assert {status.state for status in world.statuses()} <= {"UPDATING", "PREPARED"}
    assert trainer.sender is not None
    version = trainer.sender.send_weights().version
    for member in world.fleet:
        world.holds(member, version, trainer.contents)
    world.end()


@pytest.mark.parametrize("held_by", [1, 2])
def test_the_greatest_version_there_is_is_not_the_last(fleet: InProcessFleet, held_by: int) -> None:
    """A client with the token may commit it; a sender that counts goes on all the same."""
    with connect(fleet, 1) as sender:
        sender.send_weights()
        for member in list(fleet)[-held_by:]:
            commit_alone(member, version=MAX_VERSION)
            assert value(member) == 9
        assert sender.send_weights().version == 1
        assert [(value(m), m.receiver.version) for m in fleet] == [(1, 1)] * 2
        assert sender.send_weights().version == 2


def test_a_client_that_counts_passes_the_greatest_version(fleet: InProcessFleet) -> None:
    with connect(fleet, 1) as sender:
        sender.send_weights()
        commit_alone(fleet[0], version=MAX_VERSION)
        commit_alone(fleet[0], version=None)
        assert fleet[0].receiver.version == 1
        assert sender.send_weights().version == 2
        assert [(value(m), m.receiver.version) for m in fleet] == [(1, 2)] * 2


def commit_alone(member: FleetMember, *, version: int | None) -> None:
    """One whole update by handles in its message, as a client does that is no sender."""
    with Segment.create(NBYTES) as segment:
        start = {"version": version} if version is not None else {}
        for call, body in (
            ("start_weight_update", start),
            ("update_weights", {"update_info": whole_update(model(9), segment)}),
            ("finish_weight_update", {}),
        ):
            member.receiver.handle({"call": call, "body": body})
