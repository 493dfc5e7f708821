"""Queues made from process groups, and readers on other hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store

from tests.hosts.fixtures import MakeNetwork, make_network
from tests.queues import message_peers as told
from tests.queues.message_peers import SMALL_SLOT, WAIT_S, Peer, end_spare_peers, peers
from weightsync.errors import ConfigError, PeerLostError, TransferTimeout
from weightsync.queues import group as queue_group
from weightsync.queues.message_queue import MessageQueue
from weightsync.queues.sockets import WINDOW_MESSAGES

__all__ = ["make_network"]

pytestmark = pytest.mark.usefixtures("shm_clean")

ROOT = Path(__file__).resolve().parents[2]
SILENCE = "its connection closed or fell silent"


@pytest.fixture(scope="module", autouse=True)
def no_process_stays() -> Iterator[None]:
    yield
    end_spare_peers()


@dataclass(frozen=True)
class OnlyAStore:
    rank: int
    world_size: int
    store: Store


def group(kind: str, path: str, rank: int, size: int) -> dist.ProcessGroup | OnlyAStore:
    store = FileStore(path, size)
    store.set_timeout(timedelta(seconds=WAIT_S))
    if kind == "store":
        return OnlyAStore(rank, size, store)
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=WAIT_S)
    )
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def pretend_host(name: str | None) -> None:
    """Be on another host as far as anyone can tell; loopback is the network."""
    if name is not None:
        vars(queue_group)["host_key"] = lambda: name
        os.environ["MASTER_ADDR"] = "127.0.0.1"


def one_to_all(kind: str, path: str, rank: int, size: int, host: str | None) -> Any:
    """Return what two broadcasts over two queues of one group gave, and who is where."""
    pretend_host(host)
    members = group(kind, path, rank, size)
    found: list[Any] = []
    for writer in (0, size - 1):
        with MessageQueue.create_from_process_group(
            members, SMALL_SLOT, 4, writer_rank=writer
        ) as queue:
            assert queue.is_writer == (rank == writer)
            message = [writer, torch.arange(3 * SMALL_SLOT)] if rank == writer else None
            got = queue.broadcast_object(message, WAIT_S)
            found.append((got[0], int(got[1].sum())))
            handle = queue.export_handle()
            found.append((handle.local_reader_ranks, handle.remote_reader_ranks))
            meet(members)
    return found


def meet(members: dist.ProcessGroup | OnlyAStore) -> None:
    """Stay until all have read."""
    queue_group.Group(members).all_gather(b"here")


def all_to_one(kind: str, path: str, rank: int, size: int, host: str | None) -> Any:
    pretend_host(host)
    members = group(kind, path, rank, size)
    writer, readers = MessageQueue.create_from_process_group_single_reader(
        members, SMALL_SLOT, 4, reader_rank=1, blocking=True
    )
    if writer is not None:
        writer.enqueue({"from": rank}, WAIT_S)
    found = [queue.dequeue(WAIT_S)["from"] for queue in readers.values()]
    meet(members)
    for queue in [*readers.values(), *([writer] if writer else [])]:
        queue.close()
    return found, sorted(readers)


def all_to_a_global_rank(path: str, rank: int) -> Any:
    """Four ranks; those of the group [1, 3] send to the reader, global rank 3."""
    members = group("torch", path, rank, 4)
    some = dist.new_group([1, 3])
    found: list[Any] = []
    if rank in (1, 3):
        writer, readers = MessageQueue.create_from_process_group_single_reader(
            some, SMALL_SLOT, 4, reader_rank=3, blocking=True
        )
        if writer is not None:
            writer.enqueue({"from": rank}, WAIT_S)
        found = [(at, queue.dequeue(WAIT_S)["from"]) for at, queue in readers.items()]
        dist.barrier(some)
        for queue in [*readers.values(), *([writer] if writer else [])]:
            queue.close()
        for reader_rank in (0, 2, 4, -1):
            with pytest.raises(ConfigError, match=r"reader_rank is a global rank .* \[1, 3\]"):
                MessageQueue.create_from_process_group_single_reader(some, reader_rank=reader_rank)
        for writer_rank in (2, -1):
            with pytest.raises(ConfigError, match="writer_rank is a rank of the group, 0 to 1"):
                MessageQueue.create_from_process_group(some, writer_rank=writer_rank)
    meet(members)
    return found


def fails_at_the_writer(kind: str, path: str, rank: int, size: int) -> None:
    members = group(kind, path, rank, size)
    MessageQueue.create_from_process_group(members, 1 << 45, 4)


def external(kind: str, path: str, rank: int, size: int, handle: Any) -> Any:
    members = group(kind, path, rank, size)
    mine = handle if rank == 0 else None
    with MessageQueue.create_from_process_group(
        members, external_writer_handle=mine, blocking=False
    ) as queue:
        queue.wait_until_ready(WAIT_S)
        return queue.dequeue(WAIT_S)


def everywhere(what: Any, path: Path, size: int, kind: str, *more: list[Any]) -> list[Any]:
    with peers(size) as members:
        for rank, peer in enumerate(members):
            peer.start(what, kind, str(path / "store"), rank, size, *(m[rank] for m in more))
        found: list[Any] = []
        for peer in members:
            try:
                found.append(peer.answer())
            except told.Failure as exc:
                found.append(exc)
        for peer in members:
            peer.kill()  # what it pretends to be is not for the next test
    return found


TOTAL = sum(range(3 * SMALL_SLOT))


@pytest.mark.parametrize("kind", ["store", "torch"])
def test_one_writer_finds_out_who_is_on_its_host(kind: str, tmp_path: Path) -> None:
    found = everywhere(one_to_all, tmp_path, 3, kind, ["HOST-a", "HOST-a", "HOST-b"])
    first, second = (0, TOTAL), (2, TOTAL)
    assert found == [[first, ((1,), (2,)), second, ((), (0, 1))]] * 3


@pytest.mark.parametrize("kind", ["store", "torch"])
def test_one_reader_has_a_queue_from_each_of_the_others(kind: str, tmp_path: Path) -> None:
    found = everywhere(all_to_one, tmp_path, 3, kind, ["HOST-a", "HOST-a", "HOST-b"])
    assert found == [([], []), ([0, 2], [0, 2]), ([], [])]


def test_the_reader_of_many_is_a_global_rank(tmp_path: Path) -> None:
    with peers(4) as members:
        for rank, peer in enumerate(members):
            peer.start(all_to_a_global_rank, str(tmp_path / "store"), rank)
        assert [peer.answer() for peer in members] == [[], [], [], [(0, 1)]]
        for peer in members:
            peer.kill()


def test_a_writer_that_cannot_make_the_queue_tells_everybody(tmp_path: Path) -> None:
    first, second = everywhere(fails_at_the_writer, tmp_path, 2, "store")
    assert first.kind == "SegmentError"
    assert second.kind == "TransferError"
    assert "rank 0 could not make its message queue" in second.message
    assert "bytes free" in second.message


def test_a_writer_outside_the_group_can_be_passed_in(tmp_path: Path) -> None:
    with (
        MessageQueue(2, 2, max_chunk_bytes=SMALL_SLOT) as queue,
        peers(2) as members,
    ):
        for rank, peer in enumerate(members):
            path = str(tmp_path / "store")
            peer.start(external, "store", path, rank, 2, queue.export_handle())
        queue.wait_until_ready(WAIT_S)
        queue.enqueue("from outside", WAIT_S)
        assert [peer.answer() for peer in members] == ["from outside"] * 2


def test_what_is_no_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="a str is no process group"):
        MessageQueue.create_from_process_group("world")  # type: ignore[arg-type]  # on purpose


# Readers that connect by TCP.


def has_ipv6() -> bool:
    path = Path("/proc/net/if_inet6")
    return path.exists() and "0" * 31 + "1 " in path.read_text(encoding="ascii")


def remote_pair(address: str, **options: Any) -> tuple[MessageQueue, MessageQueue]:
    writer = MessageQueue(1, 0, max_chunk_bytes=SMALL_SLOT, connect_ip=address, **options)
    return writer, MessageQueue.create_from_handle(writer.export_handle(), 0)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_remote_reader_gets_messages_of_every_size(address: str) -> None:
    if ":" in address and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    writer, reader = remote_pair(address)
    with writer, reader:
        assert writer.export_handle().control is None  # no memory for readers that share none
        for count in (0, 10, 5 * SMALL_SLOT):
            writer.enqueue((count, torch.ones(count)), WAIT_S)
            with reader.read(WAIT_S) as (got, tensor):
                assert (got, int(tensor.sum())) == (count, count)


def test_a_socket_listens_on_the_address_given_and_no_other() -> None:
    writer, reader = remote_pair("127.0.0.2")
    with writer, reader:
        endpoint = writer.export_handle().remote_endpoint
        assert endpoint is not None
        port = int(endpoint.rpartition(":")[2])
        listening = [
            line.split()[1]
            for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
            if line.split()[3] == "0A" and line.split()[1].endswith(f":{port:04X}")
        ]
        assert listening == [f"0200007F:{port:04X}"]


def test_readers_here_and_elsewhere_get_the_same() -> None:
    with (
        MessageQueue(2, 1, max_chunk_bytes=SMALL_SLOT, connect_ip="127.0.0.1") as writer,
        peers(2) as readers,
    ):
        for rank, reader in enumerate(readers):
            reader.call(told.attach, writer.export_handle(), rank)
            reader.start(told.ready)
        writer.wait_until_ready(WAIT_S)
        for reader in readers:
            reader.answer()
        for size in (10, 10_000, 5 * SMALL_SLOT, 20):
            writer.enqueue(bytes(size), WAIT_S)
            assert [len(reader.call(told.dequeue)) for reader in readers] == [size, size]


def test_a_remote_reader_that_is_slow_holds_the_writer_up() -> None:
    writer, reader = remote_pair("127.0.0.1")
    with writer, reader:
        for number in range(WINDOW_MESSAGES):
            writer.enqueue(number, WAIT_S)
        with pytest.raises(TransferTimeout, match="reader 0 to read the last messages"):
            writer.enqueue("too many", 0.2)
        assert [reader.dequeue(WAIT_S) for _ in range(10)] == list(range(10))
        writer.enqueue(WINDOW_MESSAGES, WAIT_S)


def test_a_remote_reader_that_never_comes_is_waited_for_until_the_timeout() -> None:
    with (
        MessageQueue(1, 0, max_chunk_bytes=SMALL_SLOT, connect_ip="127.0.0.1") as writer,
        pytest.raises(TransferTimeout, match="reader 0 to open this queue"),
    ):
        writer.enqueue(1, 0.1)


def test_a_remote_reader_that_died_is_named() -> None:
    with (
        MessageQueue(1, 0, max_chunk_bytes=SMALL_SLOT, connect_ip="127.0.0.1") as writer,
        peers(1) as (reader,),
    ):
        attach_and_meet(writer, reader)
        reader.kill()
        with pytest.raises(PeerLostError, match=f"reader 0 is gone: {SILENCE}"):
            trickle(writer)


def attach_and_meet(writer: MessageQueue, reader: Peer) -> None:
    reader.call(told.attach, writer.export_handle(), 0)
    reader.start(told.ready)
    writer.wait_until_ready(WAIT_S)
    reader.answer()


def trickle(writer: MessageQueue) -> None:
    for _ in range(2 * WINDOW_MESSAGES):
        writer.enqueue(1, WAIT_S)
        time.sleep(0.01)


def test_a_remote_reader_notices_that_its_writer_died_or_closed() -> None:
    for end, how in ((told.die, SILENCE), (told.close, "it closed the queue")):
        with peers(1) as (writer,):
            handle = writer.call(told.make_remote, "127.0.0.1")
            with MessageQueue.create_from_handle(handle, 0) as reader:
                writer.call(told.enqueue, "last")
                writer.start(end)
                assert reader.dequeue(WAIT_S) == "last"
                with pytest.raises(PeerLostError, match=how):
                    reader.dequeue(WAIT_S)
                if end is told.close:
                    writer.answer()


READER = """
import json, sys
import msgspec, torch
from weightsync.queues.message_queue import MessageQueue, QueueHandle
handle = msgspec.json.decode(sys.stdin.readline(), type=QueueHandle)
with MessageQueue.create_from_handle(handle, int(sys.argv[1])) as queue:
    queue.wait_until_ready(60)
    print(json.dumps([int(queue.dequeue(60).sum()) for _ in range(2)]), flush=True)
"""
WRITER = """
import sys
import msgspec, torch
from weightsync.queues.message_queue import MessageQueue
ip = sys.argv[1]
with MessageQueue(2, 0, connect_ip=ip, max_chunk_bytes=65536) as queue:
    print(msgspec.json.encode(queue.export_handle()).decode(), flush=True)
    queue.wait_until_ready(60)
    for count in (10, 1_000_000):
        queue.enqueue(torch.ones(count), 60)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
def test_readers_on_two_other_hosts(family: str, make_network: MakeNetwork) -> None:
    a, b, c = make_network(3).hosts
    address = a.address if family == "IPv4" else a.address6
    if address is None:
        pytest.skip("this kernel has no IPv6")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    writer = a.popen([sys.executable, "-c", WRITER, address], env=env, stdin=pipe, stdout=pipe)
    assert writer.stdout is not None
    assert writer.stdin is not None
    handle = writer.stdout.readline()
    readers = [
        host.popen([sys.executable, "-c", READER, str(rank)], env=env, stdin=pipe, stdout=pipe)
        for rank, host in enumerate((b, c))
    ]
    for reader in readers:
        assert reader.stdin is not None
        reader.stdin.write(handle)
        reader.stdin.flush()
    for reader in readers:
        out, _ = reader.communicate(timeout=WAIT_S)
        assert json.loads(out) == [10, 1_000_000]
    writer.communicate("done\n", timeout=WAIT_S)
    assert writer.returncode == 0
