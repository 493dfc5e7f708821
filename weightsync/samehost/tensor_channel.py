"""The receiving end of a tensor queue's socket: a thread that takes packets from all senders.

The socket is `SOCK_SEQPACKET` under an abstract name: packets stay whole, the end of a process is
seen at once, and a name needs no file that a killed process would leave behind. Only processes of
our own user are heard.
"""

from __future__ import annotations

import logging
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from contextlib import suppress

from weightsync.errors import ProtocolError, WeightSyncError
from weightsync.samehost import cuda_handle, janitor
from weightsync.samehost.segment import Segment
from weightsync.samehost.tensor_arrivals import Arrival, Mailbox
from weightsync.samehost.tensor_contents import Mappings, arrival_of
from weightsync.wire.tensor_packets import (
    MAX_PACKET,
    PROTOCOL,
    Discard,
    Forget,
    Goodbye,
    Hello,
    Sent,
    Welcome,
    decode_sent,
    encode,
)

logger = logging.getLogger(__name__)

_BATCH = 64
_FULL_NAP_S = 0.002
_LOOK_S = 0.05  # how often to see whether what a sender left was asked for
_SWEEPS_S = (0.05, 0.5, 3.0)  # the kernel lets a killed process's locks go a moment later
_JOIN_S = 5.0
PROBE_NBYTES = 4096

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def own_socket(connection: socket.socket) -> socket.socket:
    """Have forked children close their copy, which would hide the end of this process."""
    _sockets.add(connection)
    return connection


def _after_fork_in_child() -> None:
    for connection in list(_sockets):
        connection.close()


os.register_at_fork(after_in_child=_after_fork_in_child)


def bound_name(address: str) -> bytes:
    """Return the abstract socket name of a queue's address."""
    return b"\0weightsync-tensors-" + address.encode("ascii")


def same_user(connection: socket.socket) -> bool:
    """Say whether the process at the other end runs as our own user."""
    layout = struct.Struct("3i")
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size)
    return bool(layout.unpack(raw)[1] == os.geteuid())


class _Peer:
    """One connection: its sender once it said hello, and that sender's segments."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.sender = ""
        self.last = 0
        self.parted = False
        self.mappings = Mappings()


class Channel:
    """Listens under a random `address` and fills `arrivals` until `close`."""

    def __init__(self, arrivals: Mailbox, *, gpus: list[str], grace_s: float) -> None:
        self.address = secrets.token_hex(16)
        self._arrivals = arrivals
        self._gpus = gpus
        self._grace_s = grace_s
        self._peers: set[_Peer] = set()
        self._ended: list[tuple[float, _Peer]] = []
        self._sweeps: list[float] = []
        self._buffer = memoryview(bytearray(MAX_PACKET + 1))
        self._stopping = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._listener = own_socket(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        self._listener.bind(bound_name(self.address))
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._wake, self._waker = map(own_socket, socket.socketpair())
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="weightsync-tensors", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; the senders see it as the queue's end. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        with suppress(OSError):
            self._waker.send(b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                if self._arrivals.full:
                    time.sleep(_FULL_NAP_S)  # the senders wait while nobody reads
                else:
                    self._step()
                self._clear_up(time.monotonic())
        finally:
            self._end()

    def _step(self) -> None:
        for key, _ in self._selector.select(self._next_errand_s()):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, _Peer):
                self._hear(key.data)

    def _next_errand_s(self) -> float | None:
        if self._ended or self._arrivals.any_late:
            return _LOOK_S
        return max(min(self._sweeps) - time.monotonic(), 0.0) if self._sweeps else None

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as exc:
            logger.warning("a sender of tensors could not be taken: %s", exc)
            time.sleep(_LOOK_S)  # out of descriptors, most likely: it stays in line
            return
        own_socket(connection)
        if not same_user(connection):
            connection.close()
            return
        connection.setblocking(False)
        peer = _Peer(connection)
        self._peers.add(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _hear(self, peer: _Peer) -> None:
        """Take what a sender has sent, at most a batch of it."""
        arrived: list[Arrival] = []
        end = ""
        try:
            for _ in range(_BATCH):
                nbytes = peer.connection.recv_into(self._buffer)
                if nbytes == 0:
                    end = "closed its end" if peer.parted else "died"
                    break
                self._obey(decode_sent(self._buffer[:nbytes]), peer, arrived)
        except BlockingIOError:
            pass
        except OSError as exc:
            end = "closed its end" if peer.parted else f"was cut off ({exc})"
        except ProtocolError as exc:
            end = f"sent what no sender sends ({exc})"
            logger.warning("a sender of tensors was cut off: %s", exc)
        if arrived:
            self._arrivals.add(arrived)
        if end:
            self._part(peer, end)

    def _obey(self, packet: Sent, peer: _Peer, arrived: list[Arrival]) -> None:
        if isinstance(packet, Hello):
            self._welcome(packet, peer)
        elif not peer.sender:
            raise ProtocolError("the first packet was no hello")
        elif isinstance(packet, Goodbye):
            peer.parted = True
            with suppress(OSError):
                peer.connection.send(b"\0")  # all that came before is mapped: names may go
        elif isinstance(packet, Forget):
            peer.mappings.forget(packet.name)
        elif isinstance(packet, Discard):
            self._arrivals.add(arrived)
            arrived.clear()
            self._arrivals.discard(peer.sender, packet.sequence)
        else:
            handle = packet.handle
            if handle.sender != peer.sender or handle.sequence <= peer.last:
                raise ProtocolError(
                    f"tensor {handle.sequence} of {handle.sender} came from {peer.sender} "
                    f"after its number {peer.last}"
                )
            peer.last = handle.sequence
            arrived.append(arrival_of(packet, peer.mappings))

    def _welcome(self, hello: Hello, peer: _Peer) -> None:
        refusal = _why_refused(hello)
        if not refusal and (peer.sender or not self._arrivals.meet(hello.sender, hello.name)):
            refusal = "a sender of this id was met before"
        with suppress(OSError):
            peer.connection.send(encode(Welcome(self._gpus, refusal)))
        if refusal:
            raise ProtocolError(refusal)
        peer.sender = hello.sender

    def _part(self, peer: _Peer, reason: str) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()
        self._peers.discard(peer)
        now = time.monotonic()
        if peer.sender:
            self._arrivals.part(peer.sender, reason)
            self._ended.append((now + self._grace_s, peer))
        if not peer.parted:
            self._sweeps.extend(now + delay for delay in _SWEEPS_S)

    def _clear_up(self, now: float) -> None:
        """Remove what senders left that ended: segments of dead ones, tensors nobody asked for."""
        if any(when <= now for when in self._sweeps):
            self._sweeps = [when for when in self._sweeps if when > now]
            janitor.cleanup_stale()
        self._arrivals.drop_late(now)
        for until, peer in list(self._ended):
            if until <= now or not self._arrivals.waiting_of(peer.sender):
                self._ended.remove((until, peer))
                left = self._arrivals.drop_all_of(peer.sender)
                peer.mappings.close()
                if left:
                    logger.warning("%d tensors of a sender that ended were never asked for", left)

    def _end(self) -> None:
        for peer in self._peers:
            peer.connection.close()
        self._arrivals.close()
        for peer in [*self._peers, *(peer for _, peer in self._ended)]:
            peer.mappings.close()
        self._selector.close()
        for connection in (self._listener, self._wake, self._waker):
            connection.close()


def _why_refused(hello: Hello) -> str:
    """Return why shared memory does not work between the sender and this process, "" if it does."""
    if hello.protocol != PROTOCOL:
        return f"the sender speaks version {hello.protocol}, this queue {PROTOCOL}"
    if hello.probe.nbytes != PROBE_NBYTES:
        return f"a probe has {PROBE_NBYTES} bytes, this has {hello.probe.nbytes}"
    try:
        with Segment.open(hello.probe.name, nbytes=PROBE_NBYTES, writable=True) as probe:
            word = int.from_bytes(bytes(probe.buffer[:8]), "little")
    except WeightSyncError as exc:
        return f"the receiver cannot open the sender's shared memory: {exc}"
    return "" if word == hello.word else "the receiver sees other bytes in the sender's memory"


def openable_gpus() -> list[str]:
    """Return the device keys of the GPUs whose memory this process can open by handle."""
    return [] if cuda_handle.why_not() else list(cuda_handle.local_gpu_keys())
