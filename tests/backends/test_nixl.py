"""What the `nixl` backend refuses, and how; tests/backends/test_contract.py has what it moves."""

from __future__ import annotations

import importlib.util
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch

from weightsync.backends.base import Endpoint
from weightsync.backends.nixl import carrier as carrier_module
from weightsync.backends.nixl.backend import RDMA_COST, TCP_COST, NixlBackend
from weightsync.backends.tcp.connection import (
    Check,
    Connection,
    Frame,
    FrameKind,
    Request,
    nothing,
)
from weightsync.backends.tcp.server import ChunkServer
from weightsync.backends.tcp.window import ChunkWindow, Pieces
from weightsync.errors import BackendUnavailableError, ProtocolError, TransferError

pytest.importorskip("nixl", reason="the package nixl, which `make venv` installs")

ADDRESS, SECRET, NBYTES, PATIENCE_S = "127.0.0.1", bytes(16), 64 << 10, 10.0
NOTHING = memoryview(b"")


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setenv("UCX_LOG_LEVEL", "error")


class Pair:
    """A host that serves one chunk, and the reading end of a connection to it."""

    def __init__(self, stack: ExitStack, nbytes: int = NBYTES) -> None:
        self.sent = torch.randint(256, (2, nbytes), dtype=torch.uint8)
        self.into = torch.zeros(2, nbytes, dtype=torch.uint8)
        self.serving, self.reading = carrier_module.NixlCarrier(), carrier_module.NixlCarrier()
        self.serving.register(list(self.sent))
        self.reading.register(list(self.into))
        self.window = ChunkWindow(2, PATIENCE_S)
        self._server = ChunkServer(ADDRESS, SECRET, self.window, PATIENCE_S, self.serving)
        self._stack = stack
        for closed in (self.window, self._server, self.reading, self.serving):
            stack.enter_context(closing(closed))
        self.connect()

    def connect(self) -> None:
        """Open a connection."""
        opened = Connection.open(ADDRESS, self._server.port, SECRET, 0, PATIENCE_S)
        self.connection = self._stack.enter_context(closing(opened))

    def leave(self) -> None:
        """End the connection, as a host does after an error."""
        self.reading.leave(self.connection)
        self.connection.close()

    def offer(self, chunk: torch.Tensor) -> None:
        """Begin another update, of this chunk."""
        self.window.begin(self.window.epoch + 1, 1, [[0]])
        self.window.offer(0, chunk.numpy().data, [])

    def head(self) -> Frame:
        """Ask for the chunk, and return its head."""
        self.connection.send_request(Request(self.window.epoch, 0, is_next=False))
        self.reading.receive_metadata(self.connection, nothing)
        return self.connection.next_frame(nothing)

    def read(self, frame: Frame, check: Check = nothing) -> None:
        """Read the chunk."""
        self.reading.receive(self.connection, frame, self.into[0].numpy().data, check)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack)


def test_a_chunk_of_the_ring_and_one_from_elsewhere(pair: Pair) -> None:
    elsewhere = torch.randint(256, (1000,), dtype=torch.uint8)
    pair.window.begin(1, 2, [[0]])
    pair.window.offer(0, pair.sent[1].numpy().data, [7])
    pair.window.offer(1, elsewhere.numpy().data, [])
    frame = pair.head()
    assert pair.connection.read_fingerprints(frame, nothing) == [7]
    pair.reading.receive(pair.connection, frame, pair.into[0].numpy().data, nothing)
    assert torch.equal(pair.into[0], pair.sent[1])
    frame = pair.connection.next_frame(nothing)
    pair.reading.receive(pair.connection, frame, pair.into[1].numpy().data[:1000], nothing)
    assert torch.equal(pair.into[1][:1000], elsewhere)


def test_a_chunk_in_several_places(pair: Pair) -> None:
    tensors = [torch.randint(256, (n,), dtype=torch.uint8) for n in (100, 7)]
    assert pair.serving.lend(tensors)
    pair.window.begin(1, 1, [[0]])
    ends = zip((64, 192), tensors, strict=True)
    pieces = Pieces([(position, t.data_ptr(), t.numel()) for position, t in ends])
    pair.window.offer(0, pieces, [])
    frame = pair.head()
    pair.into[0].fill_(7)
    pair.reading.receive(pair.connection, frame, pair.into[0].numpy().data[:199], nothing)
    arrived = pair.into[0]
    assert torch.equal(arrived[64:164], tensors[0])
    assert torch.equal(arrived[192:199], tensors[1])
    assert not arrived[:64].any()
    assert not arrived[164:192].any()
    assert arrived[199] == 7


def test_chunks_without_bytes_are_not_waited_for(pair: Pair) -> None:
    """Their heads go together; the answers to them do not count as that to a chunk with bytes."""
    pair.window.begin(1, 5, [[0]], left_out={0: {0, 1, 3, 4}})
    for j in range(5):
        pair.window.offer(j, pair.sent[j % 2].numpy().data, [j])
    frame = pair.head()
    assert pair.connection.read_fingerprints(frame, nothing) == [0]
    empty = bytearray(carrier_module._HEAD.size)
    pair.connection.read_data(memoryview(empty), nothing)
    frame = pair.connection.next_frame(nothing)  # though the one before has no answer
    assert (frame.chunk, frame.nbytes) == (1, 0)
    assert pair.connection.read_fingerprints(frame, nothing) == [1]
    pair.connection.read_data(memoryview(empty), nothing)
    frame = pair.connection.next_frame(nothing)
    assert (frame.chunk, frame.nbytes) == (2, NBYTES)
    assert pair.connection.read_fingerprints(frame, nothing) == [2]
    for _ in range(2):
        pair.connection.send_ack()
    time.sleep(0.3)
    (cursor,) = pair.window._cursors
    assert cursor.at == 2, "a chunk counts as read that was not"
    pair.read(frame)
    assert torch.equal(pair.into[0], pair.sent[0])
    for j in (3, 4):
        frame = pair.connection.next_frame(nothing)
        assert (frame.chunk, frame.nbytes) == (j, 0)
        pair.connection.read_fingerprints(frame, nothing)
        pair.reading.receive(pair.connection, frame, NOTHING, nothing)
    deadline = time.monotonic() + PATIENCE_S
    while cursor.at < 5 and time.monotonic() < deadline:  # a sender begins no other one before
        time.sleep(0.01)
    assert cursor.at == 5
    # Nor do those of this update count in the next one.
    pair.window.begin(2, 1, [[0]])
    pair.window.offer(0, pair.sent[1].numpy().data, [])
    pair.connection.send_request(Request(2, 0, is_next=False))
    frame = pair.connection.next_frame(nothing)
    (cursor,) = pair.window._cursors
    time.sleep(0.3)
    assert cursor.at == 0, "a chunk counts as read that was not"
    pair.read(frame)
    assert torch.equal(pair.into[0], pair.sent[1])


def test_pieces_that_overlap_are_refused(pair: Pair) -> None:
    pair.window.begin(1, 1, [[0]])
    address = pair.sent.data_ptr()
    pair.window.offer(0, Pieces([(0, address, 100), (64, address, 10)]), [])
    frame = pair.head()
    with pytest.raises(ProtocolError, match="overlap"):
        pair.reading.receive(pair.connection, frame, pair.into[0].numpy().data[:74], nothing)
    assert not pair.into.any()


def test_nothing_is_read_from_a_host_that_is_gone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UCX aborts a process that reads from another one to which it cannot connect any more."""
    pair.offer(pair.sent[1])
    frame = pair.head()
    asked: list[str] = []
    monkeypatch.setattr(pair.reading._agent, "transfer", asked.append)
    monkeypatch.setattr(type(pair.connection), "is_open", False)
    with pytest.raises(TransferError, match="the other host is gone"):
        pair.read(frame)
    assert not asked


def test_a_read_that_was_given_up_does_not_write_to_the_next_update() -> None:
    """The other host answers late, when the same memory gets bytes of another update."""

    def give_up() -> None:
        raise TransferError("the update was aborted by its sender")

    for attempt in range(3):
        with ExitStack() as stack:
            pair = Pair(stack, nbytes=16 << 20)
            pair.offer(pair.sent[0])
            pair.read(pair.head())
            pair.leave()
            pair.connect()
            pair.offer(pair.sent[0])
            frame = pair.head()
            with pair.serving._lock:  # it stands still
                with pytest.raises(TransferError, match="was aborted"):
                    pair.read(frame, give_up)
                pair.leave()
            pair.connect()
            pair.offer(pair.sent[1])
            pair.read(pair.head())
            assert torch.equal(pair.into[0], pair.sent[1]), f"bytes given up, try {attempt}"


def test_neighbours_are_one_region() -> None:
    memory = torch.zeros(1000, dtype=torch.uint8)
    tensors = [memory[500:600], memory[:100], memory[0:0], memory[100:200], memory[150:300]]
    start = memory.data_ptr()
    assert list(carrier_module._regions(tensors)) == [(start, 300), (start + 500, 100)]


class GpuTensor:
    """A tensor on a GPU, of which nothing but its place is asked."""

    device, nbytes = torch.device("cuda", 1), 64

    def data_ptr(self) -> int:
        return 4096


class Driver:
    """Instead of an agent with a GPU: remembers what it is asked to register."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, str]] = []

    def register_memory(self, regions: Any, mem_type: str) -> str:
        self.asked.append((regions, mem_type))
        return "registered"


@pytest.mark.parametrize("chosen", [True, False])
def test_tensors_on_a_gpu_are_lent_on_demand(chosen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(carrier_module.GPU_VARIABLE, str(int(chosen)))
    with closing(carrier_module.NixlCarrier()) as carrier:
        agent, carrier._agent = carrier._agent, Driver()
        tensor: Any = GpuTensor()
        assert carrier.lend([tensor]) is chosen
        asked = [([(4096, 64, 1, "")], "VRAM")]
        assert carrier._agent.asked == (asked if chosen else [])
        carrier._agent = agent


def test_what_lies_beyond_the_registered_memory_is_not_read(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    beyond = torch.zeros(NBYTES, dtype=torch.uint8)
    monkeypatch.setattr(
        carrier_module, "_PIECE", Lying(carrier_module._PIECE, address=beyond.data_ptr())
    )
    pair.offer(pair.sent[0])
    frame = pair.head()
    with pytest.raises(TransferError, match="read"):
        pair.read(frame)
    assert not pair.into.any()


class Lying:
    """Packs another address than the one given."""

    def __init__(self, real: struct.Struct, address: int) -> None:
        self._real, self._address, self.size = real, address, real.size
        self.iter_unpack = real.iter_unpack

    def pack(self, position: int, _: int, nbytes: int) -> bytes:
        return self._real.pack(position, self._address, nbytes)


def test_a_chunk_of_another_size_is_refused(pair: Pair) -> None:
    pair.window.begin(1, 1, [[0]])
    pair.window.offer(0, pair.sent[0].numpy().data, [])
    frame = pair.head()
    with pytest.raises(ProtocolError, match="bytes are offered"):
        pair.reading.receive(pair.connection, frame, pair.into[0].numpy().data[:8], nothing)


@pytest.mark.parametrize("metadata", [b"", b"of another session", os.urandom(4096)])
def test_metadata_of_something_else_is_an_error(
    pair: Pair, metadata: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send_metadata(connection: Connection) -> None:
        frame = Frame(FrameKind.DESCRIBES, nbytes=len(metadata))
        connection.send_frame(frame, (), memoryview(metadata))

    monkeypatch.setattr(pair.serving, "send_metadata", send_metadata)
    pair.connection.send_request(Request(1, 0, is_next=False))
    with pytest.raises(TransferError, match="connecting to another host failed"):
        pair.reading.receive_metadata(pair.connection, nothing)


def facts(**changes: Any) -> Endpoint:
    return Endpoint(keys=["HOST-a"], facts={"version": "1.5.1", "rdma": False, **changes})


def test_it_is_preferred_where_both_hosts_have_rdma() -> None:
    backend = NixlBackend()
    (with_rdma,) = backend.reach(facts(rdma=True), facts(rdma=True))
    (without,) = backend.reach(facts(rdma=True), facts())
    assert (with_rdma.cost, without.cost) == (RDMA_COST, TCP_COST)
    assert RDMA_COST < 5 < TCP_COST


def test_the_reason_for_its_cost_is_said() -> None:
    (with_rdma,) = NixlBackend().reach(facts(rdma=True), facts(rdma=True))
    (without,) = NixlBackend().reach(facts(), facts(rdma=True))
    assert with_rdma.why == "both hosts have RDMA devices"
    assert without.why.startswith("without RDMA, ")


@pytest.mark.parametrize(
    ("chosen", "devices", "on_gpu", "sets"),
    [
        (None, [], False, [None, "tcp,self"]),
        (None, ["mlx5_0"], False, [None, "^sm", "rc,self", "tcp,self"]),
        ("tcp,self", [], False, [None, "tcp,sm,self"]),
        ("rc,self", ["mlx5_0"], False, [None, "^sm", "tcp,self", "tcp,sm,self"]),
        (None, ["mlx5_0"], True, [None, "^sm", "rc,self,cuda_copy", "tcp,self,cuda_copy"]),
        ("tcp,self", [], True, [None, "tcp,self,cuda_copy", "tcp,sm,self,cuda_copy"]),
    ],
)
def test_transports_are_tried_that_should_work(
    chosen: str | None,
    devices: list[str],
    on_gpu: bool,
    sets: list[str | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for device in devices:
        (tmp_path / device).touch()
    monkeypatch.setattr("weightsync.backends.nixl.backend._RDMA", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.delenv("UCX_TLS")
    if chosen is not None:
        monkeypatch.setenv("UCX_TLS", chosen)
    trials = NixlBackend().trials()
    assert [trial.environment.get("UCX_TLS") for trial in trials] == sets
    to_others = [trial for trial in trials if "to another host" in trial.title]
    assert len(to_others) == (chosen is None)


def test_another_version_is_named() -> None:
    (reach,) = NixlBackend().reach(facts(), facts(version="0.9"))
    assert "the trainer has NIXL 1.5.1 and the receiver 0.9" in reach.why_not


def test_without_nixl_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(BackendUnavailableError, match=r"pip install '\.\[nixl\]'"):
        NixlBackend().endpoint(torch.device("cpu"))


def test_ucx_without_a_transport_between_hosts_is_an_error() -> None:
    """UCX reads its settings once for each process."""
    script = (
        "import torch; from torch import nn; import weightsync as ws\n"
        "receiver = ws.WeightReceiver(nn.Linear(2, 2))\n"
        "sent = nn.Linear(2, 2)\n"
        "try:\n"
        "    ws.connect(sent, to=receiver, backend='nixl', timeout_s=10).send_weights()\n"
        "except ws.WeightSyncError as exc:\n"
        "    print('SAID', type(exc).__name__, exc)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "UCX_TLS": "sm,self"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.partition("SAID ")[2]  # UCX prints there, too
    assert said.startswith("BackendUnavailableError"), done
    assert "NIXL failed" in said


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ("sm,self", "NIXL .*: add it to UCX_TLS, or unset UCX_TLS"),
        ("sm,self,cuda_copy", "NIXL failed"),
    ],
)
def test_a_gpu_needs_a_transport_of_its_own(
    chosen: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", chosen)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(BackendUnavailableError, match=said):
        carrier_module.NixlCarrier()


@pytest.mark.parametrize(
    ("transports", "lacks"),
    [
        ("all", False),
        ("tcp,self", True),
        ("cuda_ipc,self,sm", True),
        ("tcp,cuda", False),
        ("tcp,cuda_copy,self", False),
        ("^sm", False),
        ("^tcp,cuda_copy", True),
    ],
)
def test_transports_without_that_of_a_gpu(transports: str, lacks: bool) -> None:
    assert carrier_module._lacks_cuda(transports) is lacks
