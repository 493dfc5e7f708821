"""Chunks cross by one-sided reads: the reading host's NIXL fetches them from the other's ring.

The connection carries heads, fingerprints and where a chunk lies: in the ring, or in the tensors of
the trainer. Both are registered once, and an agent's metadata goes over each connection once, which
needs the sender's secret. A connection belongs to one process, so metadata of a process that is
gone is never used.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch

from weightsync.backends.nixl.backend import CUDA
from weightsync.backends.tcp.connection import Check, Connection, Frame, FrameKind
from weightsync.backends.tcp.window import NO_BYTES, Data, Pieces
from weightsync.cuda import devices
from weightsync.errors import BackendUnavailableError, ProtocolError, TransferError

logger = logging.getLogger(__name__)

GPU_VARIABLE = "WEIGHTSYNC_NIXL_GPU"
"""Environment variable: 1 lends tensors on a GPU too, to updates without verification.

Experimental: right on an H200, but 11 times as slow as the ring there; never run over RDMA.
"""
_HEAD = struct.Struct("<qQ")
"""The index of a GPU, -1 for host memory, and the number of pieces."""
_PIECE = struct.Struct("<QQQ")
_MOST_PIECES = 1 << 20
_MOST_METADATA = 1 << 24
_SPIN_S, _SLEEP_S = 0.001, 0.001
"""How long a wait looks again and again, and how long it sleeps at most between two looks then."""
_SLEEP_SHARE = 1 / 16
"""The part of a wait's time so far by which it may end late."""
_ALONE_S = 0.02
"""How long a chunk is read by the other host alone, before this one calls NIXL for it."""
_WAITING_S = 0.25


class _Landing:
    """Memory for one read at a time, registered with an agent, which `lock` guards.

    UCX does not cancel a read: the answer to one that was given up may come much later, also after
    NIXL has released its handle and left the other host. So no read is into memory of the ring,
    and the memory of one that was given up is used for nothing else until it has ended.
    """

    _lock = threading.Lock()
    _given_up: ClassVar[list[_Landing]] = []
    """Of all agents of this process: they must live until the read has ended."""
    _kept: ClassVar[list[torch.Tensor]] = []
    """Memory that may be written to at any time."""

    def __init__(self, agent: Any, lock: threading.Lock, nbytes: int) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8)
        self._agent, self._agent_lock = agent, lock
        self._peer, self._num_pieces = "", 0
        self._handle: Any = None
        with lock, _errors("registering memory"):
            self._registered = agent.register_memory([self.memory])

    def start(self, peer: str, pieces: Pieces) -> str:
        """Begin to read pieces of another host's memory; return NIXL's state of the read."""
        agent, start, device = self._agent, self.memory.data_ptr(), pieces.device or 0
        here = [(start + position, nbytes, 0) for position, _, nbytes in pieces.places]
        there = [(address, nbytes, device) for _, address, nbytes in pieces.places]
        with self._agent_lock, _errors("starting to read"):
            local = agent.get_xfer_descs(here, mem_type=_kind(on_gpu=False))
            remote = agent.get_xfer_descs(there, mem_type=_kind(on_gpu=pieces.device is not None))
            self._peer, self._num_pieces = peer, len(here)
            self._handle = agent.initialize_xfer("READ", local, remote, peer)
            return str(agent.transfer(self._handle))

    def state(self) -> str:
        """Return NIXL's state of the read."""
        with self._agent_lock, _errors("reading"):
            return str(self._agent.check_xfer_state(self._handle))

    def end(self) -> None:
        """Release a read that has ended."""
        handle, self._handle = self._handle, None
        with self._agent_lock, suppress(Exception):  # it failed before
            self._agent.release_xfer_handle(handle)

    def give_up(self) -> None:
        """Keep this until the read has ended."""
        with self._lock:
            self._given_up.append(self)

    def close(self) -> None:
        """Deregister the memory."""
        with self._agent_lock, suppress(Exception):
            self._agent.deregister_memory(self._registered)
        self._agent = self._registered = None

    @classmethod
    def is_reading(cls, agent: Any, peer: str) -> bool:
        """Whether a read that was given up may be in progress; frees those that have ended."""
        with cls._lock:
            cls._given_up[:] = [landing for landing in cls._given_up if not landing._has_ended()]
            return any((each._agent, each._peer) == (agent, peer) for each in cls._given_up)

    def _has_ended(self) -> bool:
        try:
            state = self.state()
        except TransferError:
            state = "ERR"
        if state == "PROC":
            return False
        # NIXL gives up a read of several pieces at the first error: others may still be answered.
        if state == "DONE" or self._handle is None or self._num_pieces == 1:
            self.end()
            self.close()
        else:
            self._kept.append(self.memory)
        return True


class NixlCarrier:
    """Moves chunks between registered rings. Raises BackendUnavailableError where NIXL fails.

    One lock guards the agent, which is not thread-safe. A chunk is read into memory beside the
    ring, and copied: see _Landing.
    """

    lends = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._agent: Any = _make_agent()
        self._memory: list[torch.Tensor] = []
        self._registered: Any = None
        self._lent: Any = None
        self._lent_tensors: list[torch.Tensor] = []
        self._spare = threading.Lock()
        self._landing: _Landing | None = None
        self._peers: dict[Connection, str] = {}
        self._unremoved: set[str] = set()
        self._closed = False
        # Over TCP another host's read advances only in calls of this one.
        self._helped: WeakSet[Connection] = WeakSet()
        # Chunks without bytes, whose answers are taken with that to the next one that has some.
        self._unanswered: WeakKeyDictionary[Connection, int] = WeakKeyDictionary()

    def register(self, buckets: Sequence[torch.Tensor]) -> None:
        """Register the ring, and one bucket more for chunks that are read from elsewhere."""
        self._memory = [*buckets, torch.empty_like(buckets[0])]
        with self._lock, _errors("registering memory", BackendUnavailableError):
            self._registered = self._agent.register_memory(self._memory)

    def lend(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Register the tensors' memory; False where NIXL cannot, or for a GPU without opting in."""
        with self._lock:
            self._deregister(self._lent)
        self._lent, self._lent_tensors = None, []
        if not tensors:
            return False
        device = tensors[0].device
        on_gpu = device.type == "cuda"
        if on_gpu and os.environ.get(GPU_VARIABLE) != "1":
            return False
        regions = [(start, size, device.index or 0, "") for start, size in _regions(tensors)]
        try:
            with self._lock, _errors("registering the trainer's tensors"):
                self._lent = self._agent.register_memory(regions, mem_type=_kind(on_gpu=on_gpu))
        except TransferError as exc:
            logger.warning("%s; they are packed into a ring instead", exc)
            return False
        self._lent_tensors = list(tensors)
        return True

    def send_metadata(self, connection: Connection) -> None:
        """Send the agent's metadata."""
        with self._lock, _errors("describing this process"):
            metadata = self._agent.get_agent_metadata()
        frame = Frame(FrameKind.DESCRIBES, nbytes=len(metadata))
        connection.send_frame(frame, (), memoryview(metadata))

    def receive_metadata(self, connection: Connection, check: Check) -> None:
        """Read the metadata of the other agent."""
        frame = connection.next_frame(check)
        if frame.kind is not FrameKind.DESCRIBES or frame.nbytes > _MOST_METADATA:
            raise ProtocolError(f"it sends {frame}, where metadata of NIXL comes first")
        metadata = bytearray(frame.nbytes)
        connection.read_data(memoryview(metadata), check)
        self._remove_unused()
        with self._lock, _errors("connecting to another host"):
            name = self._agent.add_remote_agent(bytes(metadata))
        self._peers[connection] = name.decode() if isinstance(name, bytes) else str(name)
        self._unremoved.discard(self._peers[connection])

    def send(
        self, connection: Connection, frame: Frame, fingerprints: Sequence[int], data: Data
    ) -> None:
        """Send the addresses of a chunk, and wait until the other host has read it."""
        if isinstance(data, Pieces):
            self._send_places(connection, frame, fingerprints, data)
            return
        memory = self._memory  # which another thread may release
        if not memory:
            raise TransferError("this host does not serve any more")
        address = _address_of(data) if data else memory[0].data_ptr()
        if any(0 <= address - m.data_ptr() <= m.numel() - len(data) for m in memory):
            self._send_places(connection, frame, fingerprints, _whole(address, data))
            return
        while not self._spare.acquire(timeout=_WAITING_S):  # another host reads from it
            connection.send_frame(Frame(FrameKind.WAITING), (), NO_BYTES)
        try:  # read again from the source
            spare = memory[-1]
            spare.numpy().data[: len(data)] = data
            self._send_places(connection, frame, fingerprints, _whole(spare.data_ptr(), data))
        finally:
            self._spare.release()

    def _send_places(
        self, connection: Connection, frame: Frame, fingerprints: Sequence[int], pieces: Pieces
    ) -> None:
        places = pieces.places
        head = _HEAD.pack(-1 if pieces.device is None else pieces.device, len(places))
        packed = b"".join([head, *(_PIECE.pack(*place) for place in places)])
        connection.send_frame(frame, fingerprints, memoryview(packed))
        unanswered = self._unanswered.get(connection, 0) + 1
        if not places:  # no memory to keep as it is: a round trip less
            self._unanswered[connection] = unanswered
            return
        self._unanswered[connection] = 0
        begun = time.monotonic()
        while unanswered:
            if connection.take_ack():
                unanswered -= 1
                continue
            if self._closed:
                raise TransferError("this host does not serve any more")
            if connection not in self._helped:
                connection.wait_readable(_ALONE_S)
                if time.monotonic() - begun > _ALONE_S:
                    self._helped.add(connection)
                continue
            with self._lock, _errors("serving a read"):
                self._agent.get_new_notifs()
            _pause(begun)

    def receive(self, connection: Connection, frame: Frame, into: memoryview, check: Check) -> None:
        """Fetch a chunk."""
        pieces = self._pieces(connection, check)
        if len(pieces) != len(into):
            raise ProtocolError(f"{len(pieces)} bytes are offered, where {len(into)} come next")
        if pieces:
            arrived = self._read(connection, pieces, check)[: len(into)]
            _clear_gaps(pieces, arrived)
            # Without the GIL, which the copy of a memoryview would hold.
            np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(arrived, np.uint8))
        if not connection.is_open:  # the other host may have used the memory for something else
            raise TransferError("the connection was closed while a chunk was read")
        connection.send_ack()

    def _read(self, connection: Connection, pieces: Pieces, check: Check) -> memoryview:
        """Return the memory in which the pieces lie until the next read."""
        if not connection.is_open:  # UCX aborts this process where it cannot connect to a dead one
            raise TransferError("the other host is gone")
        landing, self._landing, memory = self._landing, None, self._memory
        if not memory:
            raise TransferError("this host does not read any more")
        if landing is None:
            landing = _Landing(self._agent, self._lock, memory[0].numel())
        try:
            state = landing.start(self._peers[connection], pieces)
            self._wait(connection, landing, state, check)
        except BaseException:
            landing.give_up()
            raise
        landing.end()
        self._landing = landing
        return landing.memory.numpy().data

    def _wait(self, connection: Connection, landing: _Landing, state: str, check: Check) -> None:
        begun = time.monotonic()
        while state == "PROC":
            # Over TCP NIXL does not notice a process that stands still.
            if time.monotonic() - begun > connection.patience_s or not connection.is_open:
                raise TransferError(f"a read did not end within {connection.patience_s:g} s")
            _pause(begun)
            check()
            state = landing.state()
        if state != "DONE":
            raise TransferError(f"NIXL could not read from another host ({state})")

    def skip(self, connection: Connection, frame: Frame, check: Check) -> None:
        """Do not fetch a chunk."""
        self._pieces(connection, check)
        connection.send_ack()

    def leave(self, connection: Connection) -> None:
        """Disconnect from the other agent: later, if a read from it is in progress."""
        peer = self._peers.pop(connection, None)
        if peer is not None:
            self._unremoved.add(peer)
        self._remove_unused()

    def _remove_unused(self) -> None:
        """Disconnect from agents of which nothing is read any more."""
        for peer in self._unremoved.difference(self._peers.values()):
            if not _Landing.is_reading(self._agent, peer):
                with self._lock, suppress(Exception):  # the other process may be gone
                    self._agent.remove_remote_agent(peer)
                self._unremoved.discard(peer)

    def close(self) -> None:
        """Release memory and agent. Idempotent."""
        self._closed = True
        for connection in list(self._peers):
            self.leave(connection)
        self._remove_unused()
        landing, self._landing = self._landing, None
        if landing is not None:
            landing.close()
        with self._lock:
            for registered in (self._registered, self._lent):
                self._deregister(registered)
            self._agent = self._registered = self._lent = None
            self._memory, self._lent_tensors = [], []

    def _deregister(self, registered: Any) -> None:
        if registered is not None:
            with suppress(Exception):
                self._agent.deregister_memory(registered)

    def _pieces(self, connection: Connection, check: Check) -> Pieces:
        head = bytearray(_HEAD.size)
        connection.read_data(memoryview(head), check)
        device, count = _HEAD.unpack(head)
        if count > _MOST_PIECES:
            raise ProtocolError(f"a chunk of {count} pieces is offered")
        packed = bytearray(count * _PIECE.size)
        connection.read_data(memoryview(packed), check)
        pieces = Pieces(list(_PIECE.iter_unpack(packed)), None if device < 0 else device)
        end = 0
        for position, _, nbytes in pieces.places:
            if position < end:
                raise ProtocolError("the pieces of a chunk overlap")
            end = position + nbytes
        return pieces


def _make_agent() -> Any:
    hint = ""
    if devices.is_available() and _lacks_cuda(os.environ.get("UCX_TLS", "all")):
        hint = f" (with a GPU it needs {CUDA}: add it to UCX_TLS, or unset UCX_TLS)"
    with _errors(f"NIXL{hint}", BackendUnavailableError):
        from nixl._api import nixl_agent, nixl_agent_config  # noqa: PLC0415  # the extra `nixl`

        # Without NIXL's thread, which would keep a core busy also between updates.
        config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        agent = nixl_agent(f"weightsync-{uuid.uuid4().hex}", config)
    if "UCX" not in agent.backends:
        raise BackendUnavailableError("NIXL has no backend UCX here; install nixl's wheel for it")
    return agent


def _lacks_cuda(transports: str) -> bool:
    """Whether a value of UCX_TLS leaves out the transport of GPU memory; `^` excludes those listed.

    `cuda` is UCX's alias of all transports of GPUs.
    """
    listed = not {"all", "cuda", CUDA}.isdisjoint(transports.removeprefix("^").split(","))
    return listed is transports.startswith("^")


def _pause(begun: float) -> None:
    """Let other threads and processes run: for longer, the longer something takes."""
    waited = time.monotonic() - begun
    # Not sched_yield, which keeps the GIL: other connections of this process have a thread each.
    time.sleep(0 if waited < _SPIN_S else min(waited * _SLEEP_SHARE, _SLEEP_S))


def _address_of(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)


def _whole(address: int, data: memoryview) -> Pieces:
    return Pieces([(0, address, len(data))] if data else [])


def _kind(*, on_gpu: bool) -> str:
    """Return NIXL's name of a kind of memory."""
    return "VRAM" if on_gpu else "DRAM"


def _regions(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Yield address and bytes of the memory of tensors, of neighbours together."""
    start = stop = 0
    for begin, end in sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors if t.nbytes):
        if begin > stop:
            if stop:
                yield start, stop - start
            start = begin
        stop = max(stop, end)
    if stop:
        yield start, stop - start


def _clear_gaps(pieces: Pieces, into: memoryview) -> None:
    """Set the bytes between the pieces to zero."""
    memory, end = np.frombuffer(into, np.uint8), 0
    for position, _, nbytes in pieces.places:
        memory[end:position] = 0
        end = position + nbytes


@contextmanager
def _errors(what: str, error: type[Exception] = TransferError) -> Iterator[None]:
    """Raise what NIXL raises as `error`; `what` begins the message."""
    try:
        yield
    except ImportError as exc:
        raise BackendUnavailableError(f"NIXL cannot be imported: {exc}") from exc
    except Exception as exc:
        first_line = str(exc).partition("\n")[0]
        raise error(f"{what} failed: {type(exc).__name__}: {first_line}") from exc
