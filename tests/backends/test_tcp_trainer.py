"""The sender's book of hosts and rings, without a process on another host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress

import pytest
import torch

from weightsync.backends.base import Reader, Replies, TransferOptions
from weightsync.backends.ipc.sender import IpcTrainerEngine
from weightsync.backends.tcp.payload import HostRing, Peer, TcpInit
from weightsync.backends.tcp.trainer import TcpTrainerEngine
from weightsync.weights.sources.base import StateDictSource, WeightSource

pytestmark = pytest.mark.usefixtures("shm_clean")
OPTIONS = TransferOptions(packed=True, bucket_nbytes=4096, num_buckets=4)


class Fleet:
    """Readers that are connected, without anything behind them."""

    def __init__(self, source: WeightSource, ring: IpcTrainerEngine) -> None:
        self.ring = ring
        self.engine = TcpTrainerEngine(source, ring, OPTIONS)
        self.generation = 0
        self.roles: dict[int, TcpInit] = {}
        self.readers: dict[int, Reader] = {}

    def connect(self, *readers: Reader, failing: Sequence[int] = ()) -> None:
        self.generation += 1
        self.readers.update({reader.index: reader for reader in readers})
        steps = self.engine.handshake(readers, self.generation)
        with suppress(StopIteration):
            step = next(steps)
            while True:
                failed = [index for index in step.messages if index in failing]
                well = {i: role for i, role in step.messages.items() if i not in failed}
                self.roles.update(well)
                replies = {index: self.made() for index, role in well.items() if role.member}
                step = steps.send(Replies(payloads=replies, failed=failed))

    def made(self) -> HostRing:
        offer = self.ring.offer(0, self.generation)
        return HostRing(
            control=offer.control,
            data=offer.ring.data,
            probe=offer.probe,
            peer=Peer(name="", place=0, address="127.0.0.1", port=1),
            generation=self.generation,
        )

    def repair(self, among: Sequence[int] | None = None) -> list[int]:
        """Connect the unready readers before an update of these alone (None: of all)."""
        taking = list(self.readers) if among is None else among
        unready = sorted(self.engine.unready(taking))  # as in the fleet
        if unready:
            self.connect(*(self.readers[index] for index in unready))
        return unready

    def remove(self, index: int) -> None:
        self.engine.remove_reader(index)
        del self.readers[index]


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    source = StateDictSource({"w": torch.zeros(9)})
    with closing(IpcTrainerEngine(source, OPTIONS)) as ring:
        made = Fleet(source, ring)
        with closing(made.engine):
            yield made


def reader(index: int, host: str = "a") -> Reader:
    return Reader(index=index, target=f"r{index}", keys=[host], route="http://127.0.0.1:1")


def test_readers_of_a_handshake_that_failed_are_connected_before_the_next_update(
    fleet: Fleet,
) -> None:
    """That of the other member succeeded, which the engine has not taken note of."""
    fleet.connect(reader(0, "a"), reader(1, "b"), failing=[1])
    assert fleet.repair() == [0, 1]
    assert fleet.repair() == []


def test_readers_that_their_member_does_not_read_with_are_fed_by_one_of_their_own(
    fleet: Fleet,
) -> None:
    """Whatever the order of such updates: each reader is fed by one that takes part."""
    fleet.connect(reader(0), reader(1), reader(2), reader(3, "b"))
    for among, connected, members in (
        ([2, 3], [2], {0, 2, 3}),
        ([1, 2], [1], {0, 2, 3}),  # a ring of the host is there already, fed by 2
        ([1, 3], [1], {0, 1, 2, 3}),
        ([1], [], {0, 1, 2, 3}),
        ([0, 1, 2, 3], [1, 2], {0, 3}),
        ([0, 3], [], {0, 3}),
    ):
        assert fleet.repair(among) == connected
        assert fleet.repair(among) == []
        assert {index for index, role in fleet.roles.items() if role.member} == members


def test_a_ring_whose_indices_are_used_up_is_replaced(fleet: Fleet) -> None:
    """One receiver lasts, and the others of its host come and go."""
    fleet.connect(reader(0))
    rings: set[int] = set()
    for index in range(1, 3 * fleet.ring.shape.num_readers):
        fleet.connect(reader(index))
        repaired = fleet.repair()
        assert index in repaired
        assert fleet.repair() == []
        (on_ring,) = [role.ring.reader for role in roles(fleet) if role.ring]
        assert 0 < on_ring < fleet.ring.shape.num_readers
        rings.update(role.generation for role in roles(fleet) if role.ring)
        fleet.remove(index)
    assert len(rings) == 4


def roles(fleet: Fleet) -> list[TcpInit]:
    return [fleet.roles[index] for index in fleet.readers]
