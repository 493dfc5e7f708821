"""A backend of someone else can be built on the ring, beside those of weightsync."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn

import weightsync as ws
from tests import children
from tests.backends.pipe import Pipe
from tests.backends.test_contract import Quick, flip_buckets
from weightsync.backends import registry
from weightsync.backends.base import TransferOptions
from weightsync.backends.ipc.sender import IpcTrainerEngine
from weightsync.backends.ring import MAX_READERS, MAX_RELAYS, Relay
from weightsync.shm.ring import WANTED
from weightsync.weights.copying.fingerprint import table_digest
from weightsync.weights.sources.base import StateDictSource

children.load_beforehand("tests.backends.pipe")
pytestmark = pytest.mark.usefixtures("shm_clean")


@pytest.fixture(autouse=True)
def unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(registry, "_endpoints", {})


class TestPipe(Quick):
    """The contract, by a backend that knows the public names of the ring alone."""

    backend = Pipe

    def corrupt(self, monkeypatch: pytest.MonkeyPatch) -> None:
        flip_buckets(monkeypatch)


class Receiver:
    """A receiver with a model of its own, on this host or on one that has another name as well."""

    def __init__(self, *host: str) -> None:
        self.model = large(0)
        self.receiver = ws.WeightReceiver(self.model)
        self.receiver._session.senders.keys.extend(host)

    def holds(self, model: nn.Module) -> bool:
        mine, theirs = self.model.state_dict(), model.state_dict()
        return all(torch.equal(mine[name], theirs[name]) for name in theirs)


def large(value: float) -> nn.Module:
    """A model of many more chunks than a ring of the tests has buckets."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(40)))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


@pytest.fixture
def near_and_far() -> Iterator[tuple[Receiver, Receiver]]:
    near, far = Receiver(), Receiver("HOST-elsewhere")
    with closing(near.receiver), closing(far.receiver):
        yield near, far


@pytest.mark.parametrize("is_made", [False, True], ids=["stable", "made"])
def test_two_backends_relay_one_ring(
    near_and_far: tuple[Receiver, Receiver], is_made: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a reader of its own, so no chunk is overwritten that one of them has not sent."""
    monkeypatch.setenv("WEIGHTSYNC_ADDRESS", "127.0.0.1")
    ws.register_backend(Pipe)
    model = large(1)
    source: Any = model.state_dict if is_made else model
    to = [each.receiver.handle for each in near_and_far]
    with ws.connect(
        source, to=to, backend=["pipe", "tcp"], bucket_nbytes=32 << 10, num_buckets=2, timeout_s=20
    ) as sender:
        for value in (2, 3, 4, 5):
            for parameter in model.parameters():
                nn.init.constant_(parameter, value)
            report = sender.send_weights()
            assert [receiver.path for receiver in report.receivers] == ["pipe", "tcp"]
            assert report.verified != "none"
            assert all(each.holds(model) for each in near_and_far)


@pytest.fixture
def ring() -> Iterator[IpcTrainerEngine]:
    source = StateDictSource({"w": torch.arange(4096)})
    options = TransferOptions(packed=True, bucket_nbytes=4096, num_buckets=2, timeout_s=0.5)
    with closing(IpcTrainerEngine(source, options)) as engine:
        yield engine


def test_a_ring_has_an_index_for_each_of_a_few_backends(ring: IpcTrainerEngine) -> None:
    indices = [ring.add_relay() for _ in range(MAX_RELAYS)]
    assert len({*indices}) == MAX_RELAYS
    assert min(indices) >= MAX_READERS
    assert max(indices) < ring.shape.num_readers
    with pytest.raises(ws.ConfigError, match="at most 4 relays"):
        ring.add_relay()


def test_engines_without_a_ring_are_named() -> None:
    class Other(ws.TrainerWeightTransferEngine):
        def begin(self, readers: Any, *, verify: bool, source: Any) -> None: ...
        def transfer(self, check: Any) -> None: ...
        def end(self) -> None: ...
        @property
        def table_digest(self) -> None: ...
        def close(self) -> None: ...

    with pytest.raises(ws.ConfigError, match="none of the engines of shelf has a ring"):
        ws.RingEngine.of({"shelf": Other()})


def test_only_a_packed_update_is_relayed(ring: IpcTrainerEngine) -> None:
    with pytest.raises(ws.ConfigError, match="no packed update is in progress"):
        ring.stream(ring.add_relay())


def relayed(ring: IpcTrainerEngine, index: int, *, verify: bool) -> tuple[bytes, list[int]]:
    """Send an update to one relay; return the bytes and fingerprints that it got."""
    got: list[bytes] = []
    table: list[int] = []
    ring.begin([index], verify=verify)
    stream = ring.stream(index)

    def run(check: Any) -> None:
        for j in range(len(stream.layout.chunks)):
            data, fingerprints = stream.read(j, check)
            got.append(bytes(data.numpy()))
            table.extend(fingerprints)
            stream.release(j)

    relay = Relay(run)
    ring.transfer(relay.check)
    relay.finish(lambda: None)
    ring.end()
    return b"".join(got), table


def test_a_relay_gets_the_bytes_and_their_fingerprints(ring: IpcTrainerEngine) -> None:
    index, sent = ring.add_relay(), bytes(torch.arange(4096).numpy())
    got, table = relayed(ring, index, verify=True)
    assert got == sent
    assert ring.table_digest == table_digest(table)
    assert relayed(ring, index, verify=False) == (sent, [])


def test_a_relay_that_falls_silent_ends_the_update_and_one_that_beats_does_not(
    ring: IpcTrainerEngine,
) -> None:
    index, go_on = ring.add_relay(), threading.Event()
    ring.begin([index], verify=True)
    stream = ring.stream(index)
    with pytest.raises(ws.TransferTimeout, match=f"reader {index} "):
        ring.transfer(lambda: None)
    assert ring.late_readers == [index]
    ring.end()
    ring.begin([index], verify=True)
    stream = ring.stream(index)

    def run(check: Any) -> None:
        for j in range(len(stream.layout.chunks)):
            while not j and not go_on.wait(0.02):  # much longer than the timeout of the ring
                check()
                stream.beat()
            stream.read(j, check)
            stream.release(j)

    relay = Relay(run)
    timer = threading.Timer(1.5, go_on.set)
    timer.start()
    ring.transfer(relay.check)
    relay.finish(lambda: None)
    assert go_on.is_set()
    timer.join()


def test_what_a_relay_raises_is_the_error_of_the_update(ring: IpcTrainerEngine) -> None:
    index = ring.add_relay()
    for raised, expected in (
        (ws.TransferError("no route"), "^no route$"),
        (OSError("no route"), "could not be relayed: OSError"),
    ):
        ring.begin([index], verify=True)

        def run(check: Any, raised: Exception = raised) -> None:
            raise raised

        relay = Relay(run)
        with pytest.raises(ws.TransferError, match=expected):
            ring.transfer(relay.check)
        with pytest.raises(ws.TransferError, match=expected):
            relay.finish(lambda: None)
        ring.end()


def test_a_relay_that_is_stopped_raises_in_its_next_check() -> None:
    waits = threading.Event()

    def run(check: Any) -> None:
        while True:
            waits.set()
            check()
            time.sleep(0.001)

    relay = Relay(run)
    assert waits.wait(20)
    relay.stop()
    relay.stop()
    assert relay.has_ended
    with pytest.raises(ws.TransferError, match="aborted by its sender"):
        relay.check()


def test_a_ring_that_all_have_left_packs_nothing(ring: IpcTrainerEngine) -> None:
    index = ring.add_relay()
    ring.begin([index], verify=True)
    stream = ring.stream(index)
    stream.leave()
    ring.transfer(lambda: None)
    assert ring.written_nbytes == 0
    assert not any(bucket.any() for bucket in ring.buckets)
    stream.release(len(stream.layout.chunks) - 1)  # shows what was sent from elsewhere
    assert ring.progress().taken_nbytes(index) == stream.layout.nbytes
    ring.end()


def test_a_relay_that_leaves_while_the_ring_waits_for_it_alone(
    ring: IpcTrainerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, control = ring.add_relay(), ring._control
    ring.begin([index], verify=True)
    stream = ring.stream(index)
    fence = control.fence

    def leave_before_the_sleep() -> None:
        if control.words[WANTED]:
            stream.leave()  # as its thread may at any moment
        fence()

    monkeypatch.setattr(control, "fence", leave_before_the_sleep)
    ring.transfer(lambda: None)
    assert control.active == ()
    assert ring.written_nbytes == stream.layout.nbytes
    ring.end()
