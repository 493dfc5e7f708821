"""A peer that is stopped (SIGSTOP) is an error after `timeout_s`, wherever that happens."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import nn

import weightsync as ws
from tests.e2e import models, processes, trainers
from tests.e2e.processes import Host, Remote, wait_until
from weightsync.transports.factory import Targets
from weightsync.transports.http import HttpTransport
from weightsync.wire.messages import (
    FinishRequest,
    InitRequest,
    PrepareRequest,
    Reply,
    Request,
    ShutdownRequest,
    StartRequest,
    UpdateRequest,
)

TIMEOUT_S = 1.5
BOUND_S = 8.0
"""What a busy machine makes of 1.8 s. Without a bound of ours it would be half a minute."""
SILENT = (ws.TransportTimeout, ws.TransferTimeout)

soak = pytest.mark.soak
Stop = Callable[[], None]


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with processes.host() as running:
        yield running


@pytest.fixture
def stop(host: Host) -> Iterator[Stop]:
    """Stops all receivers; they go on when the test ends."""
    assert host.process.pid is not None
    pid = host.process.pid
    try:
        yield lambda: processes.stop(pid)
    finally:
        os.kill(pid, signal.SIGCONT)


class Relay(HttpTransport):
    """Acts once, before it sends the first message of a kind."""

    def __init__(self, remote: Remote) -> None:
        super().__init__(remote.url)
        self.before: dict[type, Stop] = {}

    def call(self, request: Request, *, timeout_s: float) -> Reply:
        self.before.pop(type(request), _nothing)()
        return super().call(request, timeout_s=timeout_s)


def _nothing() -> None:
    pass


def connected(to: Targets, model: nn.Module, packed: bool) -> ws.WeightSender:
    return ws.connect(model, to=to, packed=packed, bucket_nbytes=16 << 10, timeout_s=TIMEOUT_S)


@contextmanager
def fails_in_time(target: str) -> Iterator[None]:
    begun = time.monotonic()
    with pytest.raises(SILENT) as caught:
        yield
    assert time.monotonic() - begun < BOUND_S
    assert target in str(caught.value)


def go_on(host: Host) -> None:
    assert host.process.pid is not None
    os.kill(host.process.pid, signal.SIGCONT)


PHASES: dict[str, type] = {
    "load": UpdateRequest,
    "finish": FinishRequest,
}
PIECES: dict[str, type] = {
    "start": StartRequest,
    "send": UpdateRequest,
    "prepare": PrepareRequest,
    "finish": FinishRequest,
}
FEW = {("load", True, "staged"), ("load", False, "in_place"), ("finish", True, "in_place")}


def cases(phases: dict[str, type], few: set[tuple[str, bool, str]]) -> list[object]:
    """Every phase, packed and unpacked, staged and in place: a few in each run, all in a soak."""
    return [
        pytest.param(
            phases[phase],
            packed,
            apply,
            id=f"{phase}-{'packed' if packed else 'unpacked'}-{apply}",
            marks=() if (phase, packed, apply) in few else soak,
        )
        for phase, packed, apply in itertools.product(phases, (True, False), ("staged", "in_place"))
    ]


class TestReceiver:
    def test_at_init(self, host: Host, stop: Stop) -> None:
        relay = Relay(host.receiver("http", model="plain"))
        relay.before[InitRequest] = stop
        with fails_in_time(relay.target):
            connected(relay, models.make("plain", seed=1), True)

    @pytest.mark.parametrize(("kind", "packed", "apply"), cases(PHASES, FEW))
    def test_in_an_update(
        self, host: Host, stop: Stop, kind: type, packed: bool, apply: str
    ) -> None:
        receiver = host.receiver("http", model="plain", apply=apply)
        relay = Relay(receiver)
        model = models.make("plain", seed=1)
        with connected(relay, model, packed) as sender:
            sender.send_weights()
            relay.before[kind] = stop
            with fails_in_time(relay.target):
                sender.send_weights()
            go_on(host)
            models.fill(model, seed=2)
            sender.send_weights()
            assert receiver.digests() == models.digests(model)

    @pytest.mark.parametrize(
        "packed", [True, pytest.param(False, marks=soak)], ids=["packed", "unpacked"]
    )
    def test_while_its_hook_is_at_work(self, host: Host, stop: Stop, packed: bool) -> None:
        """It has read a part of the bytes; a slow hook alone is no reason to give it up."""
        receiver = host.receiver("http", sink="hook", apply="in_place", model="plain")
        model = models.make("plain", seed=1)
        with connected(receiver.url, model, packed) as sender:
            sender.send_weights()
            receiver.hinder(delay_s=0.3)

            def stop_it() -> None:
                wait_until(lambda: not receiver.status()["may_generate"], "the hook")
                stop()

            thread = threading.Thread(target=stop_it)
            thread.start()
            try:
                with pytest.raises(SILENT):
                    sender.send_weights()
            finally:
                thread.join(processes.WAIT_S)
            go_on(host)
            receiver.hinder(delay_s=0.0)
            models.fill(model, seed=2)
            sender.send_weights()
            assert receiver.digests() == models.digests(model)

    @pytest.mark.soak
    @pytest.mark.parametrize(("kind", "packed", "apply"), cases(PIECES, set()))
    def test_in_a_block(self, host: Host, stop: Stop, kind: type, packed: bool, apply: str) -> None:
        receiver = host.receiver("http", model="plain", apply=apply)
        relay = Relay(receiver)
        model = models.make("plain", seed=1)
        with connected(relay, model, packed) as sender:
            relay.before[kind] = stop
            with fails_in_time(relay.target), sender.update() as update:
                update.send(model.named_parameters())
            go_on(host)
            sender.send_weights()
            assert receiver.digests() == models.digests(model)

    def test_one_beside_a_slow_one(self, host: Host, stop: Stop) -> None:
        """A reader that lives and takes its time does not hide one that is stopped."""
        with processes.host() as other:
            slow = other.receiver("http", sink="hook", apply="in_place", model="plain")
            gone = Relay(host.receiver("http", model="plain"))
            model = models.make("plain", seed=1)
            with connected([slow.url, gone], model, True) as sender:
                sender.send_weights()
                slow.hinder(delay_s=0.2)
                gone.before[UpdateRequest] = stop
                with fails_in_time(gone.target):
                    sender.send_weights()

    @pytest.mark.parametrize("backend", ["ipc", pytest.param("tcp", marks=soak)])
    def test_no_more_than_a_fifth_is_added(self, host: Host, stop: Stop, backend: Any) -> None:
        """With a `timeout_s` long enough to tell a fifth of it from what a machine needs."""
        relay = Relay(host.receiver("http", model="plain"))
        timeout_s, machine_s = 6.0, 4.0  # together less than two tries would take
        model = models.make("plain", seed=1)
        with ws.connect(model, to=relay, timeout_s=timeout_s, backend=backend) as sender:
            sender.send_weights()
            relay.before[UpdateRequest] = stop
            begun = time.monotonic()
            with pytest.raises(SILENT):
                sender.send_weights()
            assert timeout_s / 2 < time.monotonic() - begun < 1.2 * timeout_s + machine_s
            go_on(host)
            sender.send_weights()

    @pytest.mark.parametrize("backend", ["ipc", "tcp"])
    def test_several_add_no_more_where_the_others_go_on(
        self, host: Host, stop: Stop, backend: Any
    ) -> None:
        """Each would add a third of `timeout_s` if it were asked again for itself: 38 s here."""
        timeout_s, machine_s, count = 8.0, 15.0, 16
        relays = [Relay(host.receiver("http", model="plain")) for _ in range(count)]
        model = models.make("plain", seed=1)
        with processes.host() as other:
            lives = other.receiver("http", model="plain")
            with ws.connect(
                model,
                to=[lives.url, *relays],
                timeout_s=timeout_s,
                backend=backend,
                bucket_nbytes=16 << 10,
                on_failure="drop",
            ) as sender:
                sender.send_weights()
                models.fill(model, seed=2)
                relays[0].before[UpdateRequest] = stop
                begun = time.monotonic()
                report = sender.send_weights()
                assert timeout_s / 2 < time.monotonic() - begun < 1.2 * timeout_s + machine_s
                assert sorted(report.dropped) == sorted(relay.target for relay in relays)
                assert all("gave no sign of life" in why for why in report.dropped.values())
                assert lives.digests() == models.digests(model)
                go_on(host)
                for relay in relays[:2]:
                    sender.add(HttpTransport(relay.target))
                models.fill(model, seed=3)
                assert not sender.send_weights().dropped

    def test_at_close(self, host: Host, stop: Stop) -> None:
        relay = Relay(host.receiver("http", model="plain"))
        sender = connected(relay, models.make("plain", seed=1), True)
        relay.before[ShutdownRequest] = stop
        begun = time.monotonic()
        sender.close()
        assert time.monotonic() - begun < BOUND_S


class TestSender:
    """Its process is stopped, and not dead: a receiver gives the open update up all the same."""

    def give_up(self, receiver: Remote, state: str) -> None:
        wait_until(lambda: receiver.status()["state"] == "UPDATING", "the update to begin")
        begun = time.monotonic()
        wait_until(lambda: receiver.status()["state"] == state, "its end")
        assert time.monotonic() - begun < BOUND_S

    @pytest.mark.parametrize(
        ("packed", "apply"),
        [
            pytest.param(True, "staged"),
            pytest.param(True, "in_place", marks=soak),
            pytest.param(False, "staged", marks=soak),
            pytest.param(False, "in_place"),
        ],
    )
    def test_while_it_is_read(self, host: Host, packed: bool, apply: Any) -> None:
        receiver = host.receiver("http", model="plain", apply=apply, lease_s=TIMEOUT_S)
        args = (receiver.url, packed, TIMEOUT_S)
        with processes.started(trainers.stopped_while_read, *args):
            self.give_up(receiver, "READY" if apply == "staged" else "TORN")
        self.heal(receiver)

    @pytest.mark.parametrize("kind", [UpdateRequest, pytest.param(PrepareRequest, marks=soak)])
    def test_between_two_messages(self, host: Host, kind: type) -> None:
        receiver = host.receiver("http", model="plain", apply="staged", lease_s=TIMEOUT_S)
        args = (receiver.url, kind, True, TIMEOUT_S)
        with processes.started(trainers.stopped_before, *args):
            self.give_up(receiver, "READY")
        self.heal(receiver)

    def heal(self, receiver: Remote) -> None:
        model = models.make("plain", seed=3)
        with connected(receiver.url, model, False) as sender:
            sender.send_weights()
        assert receiver.digests() == models.digests(model)


def test_a_slow_receiver_is_waited_for(host: Host) -> None:
    """Its hook computes for longer than `timeout_s`, in the load and in the finish."""
    receiver = host.receiver("http", sink="hook", apply="in_place", model="plain")
    model = models.make("plain", seed=1)
    with connected(receiver.url, model, False) as sender:
        receiver.hinder(delay_s=2.5 * TIMEOUT_S)
        sender.send_weights()
        receiver.hinder(delay_s=0.0)
        assert receiver.digests() == models.digests(model)
