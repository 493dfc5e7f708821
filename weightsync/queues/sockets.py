"""ZeroMQ sockets of queues: addresses, and messages that fit no slot or go to another host."""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import socket
import struct
import tempfile
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from weightsync.errors import (
    BackendUnavailableError,
    ConfigError,
    ConnectError,
    PeerLostError,
    ProtocolError,
    TransferError,
)
from weightsync.queues.message_codec import Encoded
from weightsync.shm.addresses import source_address
from weightsync.shm.segment import DIRECTORY, SOCKET_SUFFIX
from weightsync.shm.wait import WaitPolicy

if TYPE_CHECKING:
    import zmq


try:
    import zmq
except ImportError as exc:
    raise BackendUnavailableError(
        "message queues need pyzmq; pip install 'weightsync[server]'"
    ) from exc

LOCAL, REMOTE = b"L", b"R"
"""Topics: messages that fit no slot, for this host; all messages, for other hosts."""
DATA, READY, BYE = 1, 2, 3
_HEADER = struct.Struct("<BQ")
_ACK = struct.Struct("<cqQ")
_NAME = struct.Struct("<cq")
_ACK_MARK, _NAME_MARK, _LEAVE_MARK = b"a", b"n", b"l"
WINDOW_MESSAGES = 256
_LINGER_MS = 5000
_HEARTBEAT_MS = 2000
_SILENCE_MS = 10000
_POLL_S = 0.05


def socket_path(segment: str) -> Path:
    """Return where the local socket of the queue with this control segment lies."""
    return DIRECTORY / f"{segment}{SOCKET_SUFFIX}"


def host_address(connect_ip: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address that `connect_ip` spells. Raises ConfigError unless it is one host's."""
    try:
        address = ipaddress.ip_address(connect_ip)
    except ValueError:
        raise ConfigError(
            f"connect_ip is {connect_ip!r}; give an IPv4 or IPv6 address of this host"
        ) from None
    if address.is_unspecified:
        raise ConfigError(
            f"connect_ip {connect_ip} means every address; give the one that readers connect to"
        )
    return address


_ANYWHERE = "192.0.2.1"  # an address for documentation, on no network


def own_address(toward: str | None = None) -> str:
    """Return this host's address on the way to another, by its routes; no packet is sent.

    By default the other is `MASTER_ADDR`, or else any on other networks. Raises ConfigError.
    """
    toward = toward or os.environ.get("MASTER_ADDR") or _ANYWHERE
    try:
        return source_address(toward)
    except OSError as exc:
        raise ConfigError(f"no way to {toward} ({exc}); give connect_ip") from exc


class Publisher:
    """The writer's socket. `joined` and `lost` are ranks, of either kind of reader."""

    def __init__(self, *, path: Path | None, connect_ip: str | None, window_nbytes: int) -> None:
        """Bind to the local `path` and to a free port of `connect_ip`, whichever are given."""
        self.joined: set[tuple[bytes, int]] = set()
        self.lost: dict[int, str] = {}
        self.remote: tuple[int, ...] = ()
        self.path = path
        self.tcp_endpoint: str | None = None
        self._window_nbytes = window_nbytes
        self._acknowledged: dict[int, int] = {}
        self._flying: deque[tuple[int, int]] = deque()
        self._flying_nbytes = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        # At exit too; a forked child is not the one to remove it.
        self._remove = weakref.finalize(self, _remove_own, path, os.getpid())
        try:
            self._bind(path, connect_ip)
        except BaseException:
            self.hide()
            self._context.destroy(linger=0)
            raise

    def _bind(self, path: Path | None, connect_ip: str | None) -> None:
        _set_options(self._socket)
        try:
            if path is not None:
                self._socket.bind(f"ipc://{path}")
                path.chmod(0o600)
            if connect_ip is not None:
                address = host_address(connect_ip)
                _set_heartbeat(self._socket)
                self._socket.ipv6 = address.version == 6
                host = f"[{connect_ip}]" if address.version == 6 else connect_ip
                self._socket.bind(f"tcp://{host}:*")
                self.tcp_endpoint = str(self._socket.get_string(zmq.LAST_ENDPOINT))
        except zmq.ZMQError as exc:
            raise ConnectError(f"cannot bind to {connect_ip or path}: {exc}") from exc

    def pump(self, timeout_s: float = 0.0) -> None:
        """Take in who joined, who was lost and what was acknowledged; wait for the first of it."""
        if timeout_s and not self._socket.poll(_milliseconds(timeout_s)):
            return
        while True:
            try:
                note = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(note)

    def wait_joined(
        self, wanted: Callable[[], set[tuple[bytes, int]]], patience: WaitPolicy
    ) -> None:
        """Return when all the readers wanted, who may become fewer, have subscribed."""
        self.pump()
        while not self.joined.issuperset(wanted()):
            self.pump(min(patience.nap_s, _POLL_S))
            if not self.joined.issuperset(wanted()):
                patience.look(closed=bool(self.lost))

    def wait_window(self, nbytes: int, patience: WaitPolicy) -> None:
        """Return when another message of `nbytes` may be on its way to the remote readers."""
        self.pump()
        while not self._has_room(nbytes):
            self.pump(min(patience.nap_s, _POLL_S))
            if not self._has_room(nbytes):
                patience.look(closed=bool(self.lost))

    def behind(self) -> list[int]:
        """Return the remote readers that have not acknowledged everything sent."""
        last = self._flying[-1][0] if self._flying else 0
        return [rank for rank in self.remote if self._acknowledged.get(rank, 0) < last]

    def send(self, topic: bytes, number: int, message: Encoded) -> None:
        """Queue a message, copying it: the caller's memory is free when this returns."""
        parts: list[bytes | memoryview] = [topic, _HEADER.pack(DATA, number), message.body]
        self._socket.send_multipart([*parts, *message.buffers], copy=True)
        if topic == REMOTE:
            self._flying.append((number + 1, message.nbytes))
            self._flying_nbytes += message.nbytes

    def announce(self, what: int) -> None:
        """Tell the remote readers that all are there, or that no more will come."""
        self._socket.send_multipart([REMOTE, _HEADER.pack(what, 0)])

    def drop(self, rank: int) -> None:
        """Go on without a remote reader."""
        self.remote = tuple(other for other in self.remote if other != rank)
        self.lost.pop(rank, None)

    def close(self) -> None:
        """Send what is queued, for a few seconds at most, and let go; idempotent."""
        if self._socket.closed:
            return
        if self.tcp_endpoint is not None:
            self.announce(BYE)
        self.hide()
        self._context.destroy(linger=_LINGER_MS)

    def hide(self) -> None:
        """Take the local socket's name away; who is connected stays so. Idempotent."""
        self._remove()

    def _has_room(self, nbytes: int) -> bool:
        floor = min((self._acknowledged.get(rank, 0) for rank in self.remote), default=None)
        while self._flying and (floor is None or self._flying[0][0] <= floor):
            self._flying_nbytes -= self._flying.popleft()[1]
        return not self._flying or (
            len(self._flying) < WINDOW_MESSAGES
            and self._flying_nbytes + nbytes <= self._window_nbytes
        )

    def _take(self, note: bytes) -> None:
        if note[:1] in (b"\0", b"\1") and note[1:2] == _NAME_MARK:
            with suppress(struct.error):
                kind, rank = _NAME.unpack(note[2:])
                self._subscribed(kind, rank, joined=note[:1] == b"\1")
        elif note[:1] in (_ACK_MARK, _LEAVE_MARK):
            with suppress(struct.error):
                mark, rank, number = _ACK.unpack(note)
                if mark == _LEAVE_MARK:
                    self.lost[rank] = "it closed its end"
                else:
                    self._acknowledged[rank] = max(number, self._acknowledged.get(rank, 0))

    def _subscribed(self, kind: bytes, rank: int, *, joined: bool) -> None:
        if joined:
            self.joined.add((kind, rank))
        elif kind == REMOTE and rank in self.remote:
            self.lost.setdefault(rank, "its connection closed or fell silent")


class Subscriber:
    """A reader's socket. One thread uses it."""

    def __init__(self, endpoint: str, kind: bytes, rank: int) -> None:
        self.endpoint = endpoint
        self.ready = False
        self._kind: Final = kind
        self._rank = rank
        self._lost: str | None = None
        self._waiting: deque[tuple[int, list[zmq.Frame]]] = deque()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XSUB)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            _set_options(self._socket)
            if kind == REMOTE:
                _set_heartbeat(self._socket)
            self._socket.ipv6 = "[" in endpoint
            self._socket.connect(endpoint)
            self._socket.send(b"\1" + kind)
            self._socket.send(b"\1" + _NAME_MARK + _NAME.pack(kind, rank))
        except zmq.ZMQError as exc:
            self.close()
            raise ConnectError(f"cannot connect to {endpoint}: {exc}") from exc

    def writer_lost(self) -> str | None:
        """Say how it is known that no more messages will come, None while they may."""
        if self._lost is None and self._monitor.poll(0):
            self._lost = "its connection closed or fell silent"
        return self._lost

    @property
    def available(self) -> bool:
        """Say whether a message has come in."""
        return bool(self._waiting)

    def wait(self, patience: WaitPolicy) -> None:
        """Return when a message has come in."""
        while not self._waiting:
            self._take_in(patience)

    def receive(self, number: int, patience: WaitPolicy) -> tuple[memoryview, list[memoryview]]:
        """Return body and buffers of message `number`, which is the next to come."""
        self.wait(patience)
        found, frames = self._waiting.popleft()
        if found != number:
            raise TransferError(f"message {number} was lost on its way: {found} came in its place")
        body, *buffers = (frame.buffer.toreadonly() for frame in frames)
        return body, buffers

    def wait_ready(self, patience: WaitPolicy) -> None:
        """Return when the writer has announced that all readers are there."""
        while not self.ready:
            self._take_in(patience)

    def acknowledge(self, number: int) -> None:
        """Let the writer know that `number` messages were read."""
        self._socket.send(_ACK.pack(_ACK_MARK, self._rank, number))

    def close(self) -> None:
        """Leave and let go; idempotent."""
        if self._socket.closed:
            return
        if self._kind == REMOTE:
            with suppress(zmq.ZMQError):
                self._socket.send(_ACK.pack(_LEAVE_MARK, self._rank, 0), zmq.NOBLOCK)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._context.destroy(linger=500)

    def _take_in(self, patience: WaitPolicy) -> None:
        """Take the next message in, or look at the peer."""
        if not self._socket.poll(_milliseconds(patience.nap_s)):
            try:
                patience.look(closed=self._lost is not None or bool(self._monitor.poll(0)))
            except PeerLostError:
                if not self._socket.poll(0):
                    raise
            return
        frames = self._socket.recv_multipart(copy=False)
        try:
            what, number = _HEADER.unpack(frames[1].buffer)
        except (IndexError, struct.error):
            raise ProtocolError(f"{self.endpoint} sent what is no message of a queue") from None
        if what == READY:
            self.ready = True
        elif what == BYE:
            self._lost = "it closed the queue"
        elif what == DATA and len(frames) > 2:
            self._waiting.append((number, frames[2:]))


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))


def _set_options(target: zmq.Socket[bytes]) -> None:
    # No limit of ZeroMQ's own, which would drop messages: the window and the ring are the limits.
    target.sndhwm = target.rcvhwm = 0
    target.linger = 0


def _set_heartbeat(target: zmq.Socket[bytes]) -> None:
    """On TCP alone: on one host a stopped process is alive, and keeps its subscription."""
    target.heartbeat_ivl = _HEARTBEAT_MS
    target.heartbeat_timeout = _SILENCE_MS


def _remove_own(path: Path | None, pid: int) -> None:
    if path is not None and os.getpid() == pid:
        with suppress(OSError):
            path.unlink()


IPC_PATH_LIMIT = 107
"""Bytes of the longest path that a Unix socket can have."""

_KEPT = 128
_kept: deque[int] = deque()
"""Descriptors that keep ports free, oldest first."""

_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9.])?")


def socket_address(
    *,
    local_only: bool,
    host: str = "127.0.0.1",
    port: int = 0,
    directory: Path | None = None,
    bind: zmq.Socket[bytes] | None = None,
) -> str:
    """Return an address for a ZeroMQ socket: `ipc://…` if all its peers are local.

    Else `tcp://host:port`, IPv6 addresses in brackets; port 0 becomes a free one. With `bind`, that
    socket is bound to it. Without, a descriptor of this process keeps the port free for a ZeroMQ
    socket that any process of this host binds later, until this one ends or has told 128 more.
    IPC paths are fresh, and lie in `directory` (the temporary one by default). Raises ConfigError,
    and ConnectError when the socket cannot be bound.
    """
    if bind is None:
        if local_only:
            return ipc_address(directory)
        return tcp_address(host, port) if port else _held_address(host)
    address = ipc_address(directory) if local_only else tcp_address(host, port)
    import zmq  # noqa: PLC0415  # optional: who gives a socket of it has it

    try:
        if "[" in address:
            bind.ipv6 = True
        bind.bind(address)
        return bind.get_string(zmq.LAST_ENDPOINT)
    except zmq.ZMQError as exc:
        raise ConnectError(f"cannot bind to {address}: {exc}") from exc


def _held_address(host: str) -> str:
    asked = tcp_address(host, 0)
    bare = bracketed(host).strip("[]")
    try:
        family, kind, _, _, address = socket.getaddrinfo(bare, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as holder:
            # ZeroMQ sets it too: then both may be bound, as long as one of them alone listens.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(address)
            port = holder.getsockname()[1]
            _kept.append(holder.detach())  # so that nobody else is given the port
    except (OSError, UnicodeError) as exc:
        raise ConnectError(f"cannot bind to {asked}: {exc}; give a port") from exc
    if len(_kept) > _KEPT:
        os.close(_kept.popleft())
    return tcp_address(host, port)


def ipc_address(directory: Path | None = None) -> str:
    """Return `ipc://` and a fresh path. Raises ConfigError for paths that no socket can have."""
    path = (directory or Path(tempfile.gettempdir())) / f"weightsync-{secrets.token_hex(8)}.sock"
    if len(bytes(path.absolute())) > IPC_PATH_LIMIT:
        raise ConfigError(
            f"{path.absolute()} is longer than the {IPC_PATH_LIMIT} bytes that a socket's path "
            "may have; set TMPDIR to a shorter directory"
        )
    return f"ipc://{path.absolute()}"


def tcp_address(host: str, port: int) -> str:
    """Return `tcp://host:port`, IPv6 addresses in brackets. Raises ConfigError."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"{port} is no port; wanted 1 to 65535, or 0 for any free one")
    return f"tcp://{bracketed(host)}:{port}"


def bracketed(host: str) -> str:
    """Return a host as it stands before a port. Raises ConfigError for what is no host."""
    bare = host.removeprefix("[").removesuffix("]")
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        if _HOST_NAME.fullmatch(host) is None:
            raise ConfigError(f"{host!r} is no host name and no IP address") from None
        return host
    return f"[{bare}]" if address.version == 6 else host
