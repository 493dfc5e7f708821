"""Chunks between GPUs: the wire, the agreement on it, and its faults.

Without GPUs the driver edge alone is replaced (`exact_wire`). `test_distributed` runs the same
chain of hosts over it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import torch

import weightsync as ws
from tests.backends.exact_wire import ExactWire, carried, in_place_of_nccl
from tests.backends.hosts import BUCKET_NBYTES, WAIT_S, Model, Party, party, strangers, workers
from tests.backends.wire_peer import Edge, answer, ask, content, wait_for, wires
from tests.gpu.receiver_process import EveryDtype, digests, fill, receiver_process
from weightsync.backends import data_group, nccl_data, nccl_wire
from weightsync.backends.nccl_wire import Flight
from weightsync.samehost.device_keys import host_key
from weightsync.sending.commands import Card
from weightsync.sending.feeder import Feeder
from weightsync.sending.fleet import Member
from weightsync.sending.rendezvous import DATA_VARIABLE, why_no_nccl
from weightsync.transports.callback import CallbackTransport

pytestmark = pytest.mark.usefixtures("shm_clean")

SHORT_S = 3.0
OWN = "GPU-00000000-0000-0000-0000-000000000001"
OTHER = "GPU-00000000-0000-0000-0000-000000000002"
two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="NCCL takes one rank a GPU, and this needs two ranks"
)
edges = pytest.mark.parametrize(
    "edge", ["stand-in", pytest.param("nccl", marks=[pytest.mark.gpu, two_gpus])]
)


@pytest.fixture
def stand_in() -> Iterator[None]:
    with in_place_of_nccl():
        yield


@pytest.fixture
def edge_in_place(edge: Edge) -> Iterator[Edge]:
    if edge == "nccl":
        yield edge
        return
    with in_place_of_nccl():
        yield edge


# The wire: the same for NCCL and for what stands in for it


@edges
def test_a_wire_carries_odd_sizes_in_order(edge_in_place: Edge) -> None:
    sizes = [1, 251, 65_535, 65_537, 7, 1_000_003]
    with wires(edge_in_place) as (wire, pipe, _):
        for nbytes in sizes:
            ask(pipe, nbytes)
            stage = wire.memory(nbytes)
            wire.copy(content(nbytes), stage)
            assert wait_for(wire.send(stage, 1))
            assert answer(pipe) == content(nbytes).tolist()


@edges
def test_a_wire_to_a_dead_process_ends_by_abort_and_no_process_with_it(edge_in_place: Edge) -> None:
    with wires(edge_in_place) as (wire, pipe, process):
        ask(pipe, 10)
        stage = wire.memory(1 << 20)
        assert wait_for(wire.send(stage[:10], 1))
        answer(pipe)
        process.kill()
        process.join(WAIT_S)
        flight = wire.send(stage, 1)
        with suppress(ws.TransferError):  # NCCL may notice, and need not
            assert not wait_for(flight, SHORT_S / 3)
        wire.abort()
        with pytest.raises(ws.TransferError):
            wire.send(stage, 1)
        there = torch.zeros(1 << 20, dtype=torch.uint8)
        wire.copy(content(1 << 20), stage)
        wire.copy(stage, there)
        assert torch.equal(there, content(1 << 20))


@pytest.mark.parametrize("sent", [9, 11])
def test_the_stand_in_fails_where_sizes_differ(stand_in: None, sent: int) -> None:
    with wires("stand-in") as (wire, pipe, _):
        ask(pipe, 10)
        wire.send(content(sent), 1)
        assert answer(pipe) == f"{sent} bytes were sent to who waits for 10"


# A chain of hosts: who goes by what


def stream_nbytes(fleet: Party) -> int:
    message = fleet.engine.begin([], verify=False)
    chunks = fleet.engine.stream.plan.chunks
    fleet.engine.end()
    assert message.packed
    return sum(chunk.stop - chunk.start for chunk in chunks)


def refusal(fleet: Party) -> str | None:
    assert fleet.chain is not None
    return fleet.chain.no_nccl


def send_well(fleet: Party, seed: int) -> None:
    """The last host holds what it can only have from the one before it."""
    fleet.model.fill(seed)
    assert fleet.send() == []
    assert fleet.hosts[-1][0].ask("content") == fleet.model.content()


def test_all_chunks_go_by_the_wire_with_their_exact_sizes() -> None:
    with party(1, 1, data="nccl") as fleet:
        assert refusal(fleet) is None
        first, last = (host[0] for host in fleet.hosts)
        before = len(carried)
        fleet.model.fill(1)
        assert fleet.send() == []
        sizes = carried[before:]
        assert sum(sizes) == stream_nbytes(fleet)
        assert any(nbytes % BUCKET_NBYTES for nbytes in sizes)
        # The first proved itself to both neighbours, and has sent on what it received.
        assert sum(last.ask("carried")[1:]) == sum(sizes)
        assert sum(first.ask("carried")[2:]) == 2 * sum(sizes)
        assert last.ask("content") == fleet.model.content()


def test_one_member_that_cannot_makes_all_go_by_gloo() -> None:
    with strangers(1, 1, data="nccl") as fleet:
        first, last = (host[0] for host in fleet.hosts)
        last.ask("refuse", "torch is built without NCCL")
        fleet.build()
        assert refusal(fleet) == "h1w0: torch is built without NCCL"
        send_well(fleet, 1)
        assert carried == first.ask("carried") == []
        last.ask("refuse", None)
        fleet.build()
        assert refusal(fleet) is None
        send_well(fleet, 2)
        assert carried


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks a machine without GPUs")
def test_a_member_without_cuda_says_so_by_itself() -> None:
    """Nothing stands in for anything here."""
    with workers(1, data="gloo") as hosts:
        fleet = Party(hosts, data="nccl")
        try:
            fleet.build()
            assert refusal(fleet) == "h0w0: torch finds no CUDA GPU"
            send_well(fleet, 1)
        finally:
            fleet.close()


def test_torch_is_told_to_leave_the_process_alive_only_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    before = dict(os.environ)
    with nccl_wire._settings():
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
        assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "0"
    assert dict(os.environ) == before


class _Refused(ExactWire):
    """A first transfer that fails, as for a firewall between the GPUs' networks."""

    def send(self, tensor: torch.Tensor, rank: int) -> Flight:
        raise ws.TransferError("NCCL: unhandled system error")


class _Silent(ExactWire):
    """A first transfer that never returns."""

    def send(self, tensor: torch.Tensor, rank: int) -> Flight:
        threading.Event().wait(WAIT_S)
        raise AssertionError


class _Lying(ExactWire):
    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source + 1)


@pytest.mark.parametrize(
    ("wire", "said"),
    [
        (_Refused, "the sender: NCCL: unhandled system error"),
        (_Silent, "the sender: NCCL made no connection within"),
        (_Lying, "h0w0: NCCL brought other bytes than were sent"),
    ],
)
def test_what_does_not_prove_itself_is_not_used(
    monkeypatch: pytest.MonkeyPatch, wire: type[ExactWire], said: str
) -> None:
    monkeypatch.setattr(data_group, "_PROOF_S", SHORT_S)
    with strangers(1, 1, data="nccl") as fleet:
        nccl_wire.connect = wire
        started = time.monotonic()
        fleet.build()
        assert time.monotonic() - started < WAIT_S / 4
        assert (refusal(fleet) or "").startswith(said)
        for seed in (1, 2):
            send_well(fleet, seed)


# Faults of the wire alone: the private group beside it is well


class _Stuck(ExactWire):
    """Nothing lands after the first few."""

    def receive(self, tensor: torch.Tensor, rank: int) -> Flight:
        raise AssertionError

    def send(self, tensor: torch.Tensor, rank: int) -> Flight:
        flight = super().send(tensor, rank)
        return flight if len(carried) < 4 else _Never()


class _Never:
    def landed(self) -> bool:
        return False


@contextmanager
def with_wire(wire: type[ExactWire], timeout_s: float = WAIT_S / 2) -> Iterator[Party]:
    """A sender and a member, which has another wire than the sender's `wire`."""
    with strangers(1, data="nccl", timeout_s=timeout_s) as fleet:
        nccl_wire.connect = wire
        fleet.build()
        nccl_wire.connect = ExactWire
        assert refusal(fleet) is None
        fleet.model.fill(1)
        yield fleet


def failure_of_send(fleet: Party, within_s: float) -> str:
    """What the sender and its chain say of an update that fails."""
    started = time.monotonic()
    failed = fleet.send()
    assert time.monotonic() - started < within_s
    assert fleet.chain is not None
    return f"{failed} {fleet.chain.failure}"


def test_a_wire_that_stands_still_is_a_timeout_that_names_the_host() -> None:
    with with_wire(_Stuck, SHORT_S) as fleet:
        told = failure_of_send(fleet, 4 * SHORT_S)
        assert "the host of h0w0" in told
        assert "nothing moved for" in told
        fleet.build()
        send_well(fleet, 1)


def test_a_killed_member_is_noticed_long_before_the_timeout() -> None:
    """The wire says nothing of it: the private group's connection does."""
    with with_wire(_Stuck) as fleet:
        killing = threading.Timer(SHORT_S / 3, fleet.hosts[0][0].signal, [signal.SIGKILL])
        try:
            killing.start()
            assert "the host of h0w0" in failure_of_send(fleet, WAIT_S / 4)
        finally:
            killing.cancel()


class _OutOfMemory(ExactWire):
    """A driver that fails in the second copy of an update, as torch tells it."""

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if len(carried) > 1:
            raise RuntimeError("CUDA error: out of memory")
        super().copy(source, target)


def test_a_device_that_fails_breaks_the_group_whose_next_chunk_is_awaited() -> None:
    """The head is there already: after it no word of giving up can be told from the chunk."""

    with with_wire(_OutOfMemory) as fleet:
        told = failure_of_send(fleet, WAIT_S / 4)
        assert fleet.chain is not None
        assert fleet.chain.broken
        assert "CUDA error: out of memory" in told
        fleet.build()
        send_well(fleet, 1)


class _Endless(ExactWire):
    """It is told to end, and has not for as long as `busy` is set."""

    busy = threading.Event()

    def abort(self) -> bool:
        super().abort()
        return not self.busy.is_set()


def test_buffers_are_kept_until_the_wire_has_ended() -> None:
    with with_wire(_Endless) as fleet:
        try:
            _Endless.busy.set()
            fleet.build()
            ((wire, buffers),) = nccl_data._kept
            assert isinstance(wire, _Endless)
            assert len(buffers) == nccl_data.STAGES
            _Endless.busy.clear()
            fleet.build()
            assert not nccl_data._kept
            send_well(fleet, 1)
        finally:
            _Endless.busy.clear()


# Who decides: the sender, from the members' device keys


def member(name: str, *keys: str) -> Member:
    made = Member(CallbackTransport(lambda _: None, name))
    made.keys = list(keys)
    return made


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ([OTHER, "HOST-b"], None),
        (["HOST-b"], "b has its weights on no GPU: it is HOST-b"),
        ([OWN, "HOST-b"], f"b is on {OWN} like the trainer, and NCCL takes one rank a GPU"),
    ],
)
def test_the_device_keys_decide(
    monkeypatch: pytest.MonkeyPatch, keys: list[str], said: str | None
) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    assert why_no_nccl(OWN, [member("b", *keys)]) == said


def test_two_members_on_one_gpu_go_by_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    both = [member("b", OTHER, "HOST-b"), member("c", OTHER, "HOST-c")]
    assert why_no_nccl(OWN, both) == f"c is on {OTHER} like b, and NCCL takes one rank a GPU"


def test_a_user_may_keep_nccl_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATA_VARIABLE, "gloo")
    assert why_no_nccl(OWN, [member("b", OTHER, "HOST-b")]) == f"{DATA_VARIABLE} says gloo"
    monkeypatch.setenv(DATA_VARIABLE, "carrier pigeon")
    with pytest.raises(ws.ConfigError, match="'carrier pigeon'; it may be nccl"):
        why_no_nccl(OWN, [])


def on_a_gpu(self: Feeder) -> Card:
    return Card(keys=[OWN, host_key()], stable=True, on_gpu=True)


@pytest.mark.parametrize("variable", ["", "gloo"])
def test_connect_takes_nccl_where_it_can_and_the_report_says_why_not(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setattr(Feeder, "card", on_a_gpu)
    monkeypatch.setenv(DATA_VARIABLE, variable)
    model = Model()
    with workers(2, data="nccl") as ((first, second),):
        to = [lambda message, to=each: to.ask("handle", message) for each in (first, second)]
        with ws.connect(model, to=to, backend="distributed") as sender:
            for seed in (1, 2):
                model.fill(seed)
                report = sender.send_weights()
                assert report.road == "distributed"
                assert first.ask("content") == second.ask("content") == model.content()
                why = {each.skipped_roads.get("nccl") for each in report.receivers}
                assert why == ({f"{DATA_VARIABLE} says gloo"} if variable else {None})
                assert bool(carried) is not bool(variable)
                assert bool(first.ask("carried")) is not bool(variable)


@pytest.mark.gpu
@two_gpus
def test_every_dtype_by_nccl_between_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    model = EveryDtype("cuda:0")
    with (
        receiver_process("cuda:1") as receiver,
        ws.connect(model, to=receiver, backend="distributed") as sender,
    ):
        for seed in (1, 2, 3):
            fill(model, seed)
            report = sender.send_weights()
            assert "nccl" not in report.skipped_roads, report.skipped_roads
            assert receiver.digests() == digests(model)


@pytest.mark.gpu
def test_on_one_gpu_the_bytes_go_by_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    model = EveryDtype("cuda")
    with (
        receiver_process("cuda") as receiver,
        ws.connect(model, to=receiver, backend="distributed") as sender,
    ):
        fill(model, 1)
        report = sender.send_weights()
        assert "NCCL takes one rank a GPU" in report.skipped_roads["nccl"]
        assert receiver.digests() == digests(model)
