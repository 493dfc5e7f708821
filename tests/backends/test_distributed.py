"""Receivers on other hosts: bytes, faults and recoveries, with real processes on loopback."""

from __future__ import annotations

import gc
import signal
import time
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

import weightsync as ws
from tests.backends.hosts import (
    BUCKET_NBYTES,
    SENDER,
    Model,
    Party,
    footprint,
    mapped,
    party,
    workers,
)
from tests.offers import offered
from tests.shm.processes import Script, line_of, running
from weightsync.backends.base import TransferOptions
from weightsync.backends.gloo import relay
from weightsync.backends.gloo.header import ChunkHeader, HeaderBuffer
from weightsync.backends.gloo.payload import GlooInit, GroupInfo
from weightsync.backends.gloo.receiver import GlooWeightTransferEngine
from weightsync.backends.gloo.trainer import ring_shape
from weightsync.backends.ipc.sender import IpcTrainerEngine
from weightsync.shm.host_keys import host_key
from weightsync.weights.source import ModuleSource
from weightsync.wire.messages import InitRequest
from weightsync.wire.offers import InitInfo

pytestmark = pytest.mark.usefixtures("shm_clean")

SHORT_S = 2.0
ROOM_S = 4 * SHORT_S
"""A fault is told within the timeout; the rest is for slow machines."""


def check_all_hold(party: Party) -> None:
    wanted = party.model.content()
    for worker in party.workers:
        assert worker.ask("content") == wanted, worker.name


def send_well(party: Party, seed: int) -> None:
    party.model.fill(seed)
    assert party.send() == []
    check_all_hold(party)


def check_breaks(party: Party) -> None:
    """The word of it may still be on its way."""
    assert party.chain is not None
    deadline = time.monotonic() + ROOM_S
    while not party.chain.broken and time.monotonic() < deadline:
        time.sleep(0.02)
    assert party.chain.broken


def told(failed: list[BaseException]) -> str:
    return "; ".join(map(str, failed))


@pytest.mark.parametrize("hosts", [(2,), (1, 1, 2)])
def test_every_worker_gets_every_bit(hosts: tuple[int, ...]) -> None:
    with party(*hosts) as fleet:
        for seed in range(3):
            fleet.model.fill(seed)
            assert fleet.send(verify=seed != 1) == []
            check_all_hold(fleet)


@pytest.mark.parametrize("num_buckets", [1, 2])
def test_few_buckets_are_enough(num_buckets: int) -> None:
    with party(1, 2, num_buckets=num_buckets) as fleet:
        send_well(fleet, 1)
        send_well(fleet, 2)


def test_over_ipv6() -> None:
    with party(1, 1, address="::1") as fleet:
        send_well(fleet, 1)


def test_a_subset_travels_with_a_manifest_of_its_own() -> None:
    with party(1, 2) as fleet:
        send_well(fleet, 1)
        fleet.model.fill(2)
        names = ["large", "layers.3.weight", "nothing", "scale"]
        state = fleet.model.state_dict()
        assert fleet.send(pairs=[(name, state[name]) for name in names]) == []
        sent = fleet.model.content()
        before = fleet.model.fill(1).content()
        for worker in fleet.workers:
            assert worker.ask("content") == {**before, **{name: sent[name] for name in names}}
        send_well(fleet, 3)


def test_an_update_without_bytes() -> None:
    with party(1, 1) as fleet:
        assert fleet.send(pairs=[("nothing", torch.zeros(0, 3))]) == []
        send_well(fleet, 1)


def test_an_update_given_up_in_the_middle_leaves_the_group_usable() -> None:
    def stop(chunk: int) -> None:
        if chunk == 5:
            raise ws.TransferError("enough")

    with party(1, 2) as fleet:
        send_well(fleet, 1)
        before = fleet.model.content()
        fleet.model.fill(2)
        assert "enough" in told(fleet.send(on_chunk=stop))
        assert fleet.chain is not None
        assert not fleet.chain.broken
        for worker in fleet.workers:
            assert worker.ask("content") == before
        send_well(fleet, 3)


@pytest.mark.parametrize("culprit", [(0, 0), (1, 1)])
def test_a_worker_that_raises_ends_the_update_and_not_the_group(culprit: tuple[int, int]) -> None:
    with party(1, 2, hook=True, timeout_s=SHORT_S) as fleet:
        send_well(fleet, 1)
        bad = fleet.hosts[culprit[0]][culprit[1]]
        bad.ask("behave", {"raise_at": 3})
        started = time.monotonic()
        assert "the hook does not want this" in told(fleet.send())
        assert time.monotonic() - started < ROOM_S
        bad.ask("behave", {})
        assert fleet.chain is not None
        assert not fleet.chain.broken
        send_well(fleet, 2)


def test_a_slow_worker_is_waited_for() -> None:
    with party(1, 2, hook=True, num_buckets=2) as fleet:
        fleet.hosts[1][1].ask("behave", {"delay_s": 0.1})
        send_well(fleet, 1)


def test_a_member_that_gets_no_message_delays_nobody_for_long() -> None:
    with party(1, 1, timeout_s=SHORT_S) as fleet:
        fleet.model.fill(1)
        started = time.monotonic()
        fleet.send(silent=[fleet.hosts[0][0]], stop_after_s=SHORT_S / 10)
        assert time.monotonic() - started < SHORT_S
        send_well(fleet, 2)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_member_is_named_and_the_others_go_on(victim: int) -> None:
    with party(1, 1, 1, timeout_s=SHORT_S) as fleet:
        send_well(fleet, 1)
        dead = fleet.hosts[victim][0]

        def kill(chunk: int) -> None:
            if chunk == 4:
                dead.signal(signal.SIGKILL)

        started = time.monotonic()
        failed = fleet.send(on_chunk=kill)
        assert time.monotonic() - started < ROOM_S
        check_breaks(fleet)
        assert fleet.chain is not None
        assert f"the host of {dead.name} " in told([*failed, fleet.chain.failure or OSError()])
        fleet.hosts.pop(victim)
        fleet.build()
        send_well(fleet, 2)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_member_that_stands_still_is_named(victim: int) -> None:
    with party(1, 1, 1, timeout_s=SHORT_S) as fleet:
        send_well(fleet, 1)
        stopped = fleet.hosts[victim][0]

        def stop(chunk: int) -> None:
            if chunk == 4:
                stopped.signal(signal.SIGSTOP)

        took: list[float] = []

        def resume() -> None:
            took.append(time.monotonic() - started)
            stopped.signal(signal.SIGCONT)

        started = time.monotonic()
        failed = fleet.send(on_chunk=stop, on_failure=resume)
        assert took[0] < ROOM_S
        check_breaks(fleet)
        assert fleet.chain is not None
        assert f"the host of {stopped.name} did not take" in told(
            [*failed, fleet.chain.failure or OSError()]
        )
        fleet.build()
        send_well(fleet, 2)


def test_a_member_that_never_joins_is_named() -> None:
    with workers(1, 1) as hosts:
        fleet = Party(hosts, timeout_s=SHORT_S / 2)
        try:
            with pytest.raises(ws.TransferTimeout, match=r"1 of 2 hosts did not join.*: h1w0; can"):
                fleet.build(absent=["h1w0"])
            assert fleet.chain is not None
            assert fleet.chain.broken
            fleet.build()
            send_well(fleet, 1)
        finally:
            fleet.close()


def test_a_member_of_an_earlier_epoch_stays_out() -> None:
    with workers(1) as hosts:
        fleet = Party(hosts, timeout_s=SHORT_S / 2)
        try:
            fleet.build()
            offer, chain = fleet.offer(1), fleet.chain
            assert chain is not None
            fleet.epoch += 1
            fleet.build()
            assert fleet.chain is not None
            port = fleet.chain.info(1).port
            # Its number is not what keeps it out here.
            payload = replace(offer.payload, group=replace(offer.payload.group, port=port))
            stale = replace(offer, payload=payload, generation=1 << 40)
            with pytest.raises(ws.TransferTimeout, match=r"epoch 1.* was not complete"):
                hosts[0][0].handle(InitRequest(init_info=stale))
            with pytest.raises(ws.ProtocolError, match="comes after"):
                hosts[0][0].handle(InitRequest(init_info=offer))
        finally:
            fleet.close()


def test_a_flipped_bit_is_found() -> None:
    with party(1, 2) as fleet:
        send_well(fleet, 1)
        before = fleet.model.content()
        fleet.model.fill(2)

        def flip(chunk: int, data: torch.Tensor) -> None:
            if chunk == 2:
                data[1000] ^= 4

        failed = fleet.send(on_data=flip)
        assert [type(error) for error in failed if isinstance(error, ws.VerificationError)]
        assert "large" in told(failed)
        for worker in fleet.workers:
            assert worker.ask("content") == before
        send_well(fleet, 3)


@pytest.mark.parametrize("nbytes", [-64, 1 << 40])
def test_a_head_that_lies_ends_the_update_and_no_process(
    monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    write = HeaderBuffer.write

    def lie(self: HeaderBuffer, header: ChunkHeader) -> None:
        lied = header.nbytes + nbytes if header.chunk == 3 else header.nbytes
        write(self, header._replace(nbytes=lied))

    with party(1, 2, timeout_s=SHORT_S) as fleet:
        send_well(fleet, 1)
        before = fleet.model.content()
        with monkeypatch.context() as patched:
            patched.setattr(HeaderBuffer, "write", lie)
            fleet.model.fill(2)
            assert any(isinstance(error, ws.ProtocolError) for error in fleet.send())
        for worker in fleet.workers:
            assert worker.ask("content") == before
        fleet.build()
        send_well(fleet, 3)


def test_twenty_groups_one_after_another_leave_nothing_behind() -> None:
    gc.collect()  # what earlier tests dropped must not go in the middle of this one
    others = set(mapped())
    with party(1, 2) as fleet:
        send_well(fleet, 0)

        def prints() -> list[dict[str, int]]:
            return [footprint(), *(worker.ask("footprint") for worker in fleet.workers)]

        def held() -> set[str]:
            return {
                *(set(mapped()) - others),
                *(name for w in fleet.workers for name in w.ask("mapped")),
            }

        fleet.build()
        send_well(fleet, 1)
        before, ever = prints(), held()
        for seed in range(20):
            fleet.build()
            ever |= held()
            if seed % 5 == 0:
                send_well(fleet, seed)
        assert {path.name for path in Path("/dev/shm").iterdir()} & ever == held()
        assert prints() == before


@pytest.mark.parametrize("join_s", [5.0, 0.01])
def test_a_member_whose_sender_falls_silent_frees_its_ring(
    monkeypatch: pytest.MonkeyPatch, join_s: float
) -> None:
    """Its link is asking the store of the sender, which is stopped, and cannot answer."""
    monkeypatch.setattr(relay, "_JOIN_S", join_s)
    gc.collect()
    others = set(mapped())
    script = """
import signal
from weightsync.backends.gloo.header import ChunkHeader, HeaderBuffer, HeaderStatus
from weightsync.backends.gloo.sender import Chain
from weightsync.backends.gloo.group import HEADER_LANE
chain = Chain("127.0.0.1", ["a member"], epoch=1, timeout_s=30)
print(chain.info(1).port, flush=True)
chain.join()
head = HeaderBuffer(0)
head.write(ChunkHeader(HeaderStatus.CHUNK, 5))
chain._group.send(head.memory, 1, HEADER_LANE).wait(30)
signal.pause()
"""
    engine = GlooWeightTransferEngine([host_key()])
    with running(Script(script)) as sender:
        offer = offer_of_a_group("127.0.0.1", int(line_of(sender)))
        engine.init_transfer_engine(offer)
        assert engine._link is not None
        while engine._link._epoch != 5:
            time.sleep(0.01)
        sender.send_signal(signal.SIGSTOP)
        time.sleep(0.2)
        engine.shutdown()
        deadline = time.monotonic() + ROOM_S
        while set(mapped()) - others and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not set(mapped()) - others


def offer_of_a_group(address: str, port: int) -> InitInfo:
    """What the only member of a group is offered."""
    engine = IpcTrainerEngine(
        ModuleSource(Model()),
        TransferOptions(packed=True, bucket_nbytes=BUCKET_NBYTES, num_buckets=4),
    )
    group = GroupInfo(
        address=address,
        port=port,
        epoch=1,
        rank=1,
        members=["the sender", "a member"],
        timeout_s=30.0,
    )
    try:
        shape = ring_shape(engine.offer(0, 1))
        return offered(engine, GlooInit(group=group, shape=shape), backend="gloo")
    finally:
        engine.close()


def test_the_sender_counts_as_alive_until_its_group_ends() -> None:
    with party(1) as fleet:
        member, sender = fleet.workers[0], SENDER
        assert member.ask("alive", sender) is True
        assert fleet.chain is not None
        fleet.chain.close()
        deadline = time.monotonic() + ROOM_S
        while member.ask("alive", sender) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert member.ask("alive", sender) is False
