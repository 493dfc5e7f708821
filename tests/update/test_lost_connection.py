"""A connection that ended without a goodbye: its sender may be about to connect again."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import weightsync as ws
from weightsync.backends.tcp.payload import TcpInit
from weightsync.errors import ConnectError, SourceLostError
from weightsync.wire import codec
from weightsync.wire.messages import FinishRequest, InitRequest
from weightsync.wire.offers import InitInfo

TIMEOUT_S = 20.0
LEASE_S = 3.0
HOLD_S = 20.0


class Far:
    """A receiver that believes to be on a host of its own; messages to it may be cut."""

    def __init__(self, host: str, lease_s: float = LEASE_S, model: nn.Module | None = None) -> None:
        self.model = model or nn.Linear(4, 4)
        self.receiver = ws.WeightReceiver(self.model, lease_s=lease_s)
        self.receiver._session.senders.keys.append(host)
        self.cut = False

    def __call__(self, message: Mapping[str, object]) -> dict[str, object]:
        if self.cut:
            raise ConnectError("cut")
        return self.receiver.handle(message)

    @property
    def state(self) -> str:
        return self.receiver.status().state


def test_it_is_waited_for_no_longer_than_the_lease() -> None:
    torch.manual_seed(0)
    trained = nn.Linear(4, 4)
    first, late = Far("host-first"), Far("host-late")
    try:
        with ws.connect(trained, to=first, backend="tcp", timeout_s=TIMEOUT_S) as sender:
            sender.send_weights()
        sender = ws.connect(trained, to=[first, late], backend="tcp", timeout_s=TIMEOUT_S)
        try:
            assert late.state == "CATCHING_UP"
            late.cut = True
            sender.release()
            assert late.state == "CATCHING_UP"
            assert late.receiver.shared_memory_usage() == []
            time.sleep(LEASE_S)
            assert late.state == "READY"
        finally:
            late.cut = False
            sender.close()
    finally:
        first.receiver.close()
        late.receiver.close()


def test_its_sender_may_compute_for_longer_than_a_lease_while_the_connection_holds() -> None:
    """No heartbeat is seen across hosts: that the sender is connected counts instead."""
    torch.manual_seed(0)
    trained, far = nn.Linear(4, 4), Far("host-far", lease_s=1.0)
    try:
        with ws.connect(trained, to=far, backend="tcp", timeout_s=TIMEOUT_S) as sender:
            assert sender.send_weights().path == "tcp"
            tensors = list(trained.state_dict().items())
            with sender.update() as update:
                update.send(tensors[:1])
                time.sleep(1.6)
                update.send(tensors[1:])
            assert far.receiver.version == 2
    finally:
        far.receiver.close()


@pytest.mark.usefixtures("shm_clean")
def test_one_that_could_not_be_made_again_leaves_no_update_for_ever() -> None:
    """The old connection is over before the new one is made, so no engine tells of its sender."""
    far = Far("host-far")
    offers: list[InitInfo] = []

    def line(message: Mapping[str, object]) -> dict[str, object]:
        request = codec.from_plain(message)
        if isinstance(request, InitRequest) and request.init_info is not None:
            offers.append(request.init_info)
        far.cut = far.cut or isinstance(request, FinishRequest)
        return far(message)

    lost = ws.connect(nn.Linear(4, 4), to=line, backend="tcp", timeout_s=TIMEOUT_S)
    try:
        with pytest.raises(ConnectError):
            lost.send_weights()
        assert (far.state, far.receiver.status().orphaned) == ("PREPARED", False)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        offer = codec.decode_payload(offers[-1].payload, TcpInit)
        assert offer.member is not None
        peer = replace(offer.member.sender, port=port, address="127.0.0.1")
        nowhere = replace(offer, member=replace(offer.member, sender=peer))
        with pytest.raises(ConnectError):
            far.receiver.dispatch(InitRequest(init_info=replace(offers[-1], payload=nowhere)))
        lost.close()
        assert far.receiver.status().orphaned
        with ws.connect(nn.Linear(4, 4), to=far.receiver.handle, timeout_s=TIMEOUT_S) as sender:
            assert sender.send_weights().version == 1
    finally:
        lost.close()
        far.receiver.close()


@pytest.mark.usefixtures("shm_clean")
def test_workers_of_a_restarted_server_are_connected_beside_a_member_that_is_lost() -> None:
    """They receive the version that the others hold."""
    trained = nn.Linear(4, 4)
    here, lost = Far("host-here"), Far("host-lost")
    sender = ws.connect(trained, to=[here, lost], backend="tcp", timeout_s=TIMEOUT_S)
    try:
        sender.send_weights()
        coordinator = sender._coordinator
        assert coordinator is not None
        stale = coordinator.fleet.members[0]
        here.receiver.close(for_good=False)
        lost.cut = True
        assert coordinator.membership.connect_workers(stale) == [stale]
        assert list(here.receiver.status().senders) == [stale.sender]
        lost.cut = False
        assert sender.send_weights().version == 2
    finally:
        lost.cut = False
        sender.close()
        here.receiver.close()
        lost.receiver.close()


def test_one_that_lost_its_source_is_not_dropped_with_the_one_that_died() -> None:
    """It is sent the update again, without the other one, whose failure is noticed later."""
    dying, orphan, third = (ws.WeightReceiver(nn.Linear(4, 4)) for _ in range(3))
    calls: list[str] = []

    def dies(message: Mapping[str, object]) -> dict[str, object]:
        if message["call"] == "update_weights":
            calls.append("dies")
            time.sleep(0.5)
            raise ConnectError("gone")
        return dying.handle(message)

    def is_lost(message: Mapping[str, object]) -> dict[str, object]:
        if message["call"] == "update_weights":
            calls.append("is lost")
            if calls.count("is lost") == 1:
                raise SourceLostError("no other host has chunk 3")
        return orphan.handle(message)

    with ws.connect(
        nn.Linear(4, 4), to=[dies, is_lost, third], on_failure="drop", timeout_s=TIMEOUT_S
    ) as sender:
        report = sender.send_weights()
    assert list(report.dropped) == [dies.__qualname__]
    assert [r.version for r in (orphan, third)] == [1, 1]
    assert calls.count("is lost") == 2


def test_where_all_lost_their_source_they_are_named() -> None:
    def is_lost(message: Mapping[str, object]) -> dict[str, object]:
        if message["call"] == "update_weights":
            raise SourceLostError("no other host has chunk 3")
        return receiver.handle(message)

    receiver = ws.WeightReceiver(nn.Linear(4, 4))
    with (
        ws.connect(nn.Linear(4, 4), to=is_lost, timeout_s=TIMEOUT_S) as sender,
        pytest.raises(SourceLostError, match="no other host has chunk 3"),
    ):
        sender.send_weights()


class LosesItsSource(Far):
    """It fails in its first update at once, without a connection to any host that serves it."""

    fails = 1

    def __call__(self, message: Mapping[str, object]) -> dict[str, object]:
        if message["call"] == "update_weights" and self.fails:
            self.fails -= 1
            raise SourceLostError("no other host has chunk 3")
        return super().__call__(message)


@pytest.mark.parametrize("others", [0, 1])
def test_a_host_that_lost_its_source_is_not_waited_for(others: int) -> None:
    """Neither by the sender nor by the host before it in the chain, which has a smaller ring."""
    torch.manual_seed(0)
    trained = nn.Linear(512, 512)
    fleet = [Far(f"host-{k}", model=nn.Linear(512, 512)) for k in range(others)]
    fleet.append(LosesItsSource("host-lost", model=nn.Linear(512, 512)))
    sender = ws.connect(
        trained,
        to=fleet,
        backend="tcp",
        timeout_s=60.0,
        bucket_nbytes=64 << 10,
        num_buckets=4,
    )
    try:
        with sender:
            began = time.monotonic()
            report = sender.send_weights()
            # They would wait for 45 s.
            assert time.monotonic() - began < HOLD_S
        assert report.dropped == {}
        for far in fleet:
            assert far.receiver.version == 1
            assert all(map(torch.equal, far.model.parameters(), trained.parameters()))
    finally:
        for far in fleet:
            far.receiver.close()
