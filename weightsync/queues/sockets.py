"""ZeroMQ sockets of message queues, for messages that fit no slot and for readers on other hosts.

Also the addresses of such sockets.
"""

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
from typing import Final

from weightsync.errors import (
    ConfigError,
    ConnectError,
    MissingExtraError,
    PeerLostError,
    ProtocolError,
    TransferError,
    install_hint,
)
from weightsync.queues.codec import Encoded
from weightsync.shm.addresses import source_address
from weightsync.shm.wait import WaitPolicy, wait

try:
    import zmq
except ImportError as exc:
    raise MissingExtraError(f"message queues need pyzmq; {install_hint('server')}") from exc

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
_HEARTBEAT_TIMEOUT_MS = 10000
_POLL_S = 0.05


def host_address(connect_ip: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parse `connect_ip`. Raises ConfigError unless it is the address of a single host."""
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


_ANYWHERE = "192.0.2.1"  # from the range for documentation, which is on no network


def own_address(toward: str | None = None) -> str:
    """Return this host's source address on the route to `toward`; no packet is sent.

    The default of `toward` is `MASTER_ADDR`, or else an address on another network. Raises
    ConfigError when there is no route.
    """
    toward = toward or os.environ.get("MASTER_ADDR") or _ANYWHERE
    try:
        return source_address(toward)
    except OSError as exc:
        raise ConfigError(f"no route to {toward} ({exc}); give connect_ip") from exc


class Publisher:
    """The writer's socket.

    `joined` has the topic and rank of each reader that subscribed, `lost` the ranks of readers that
    left, with the evidence. `remote` are the ranks of the readers on other hosts.
    """

    def __init__(self, *, path: Path | None, connect_ip: str | None, window_nbytes: int) -> None:
        """Bind to the local `path` and to a free port of `connect_ip`, if given."""
        self.joined: set[tuple[bytes, int]] = set()
        self.lost: dict[int, str] = {}
        self.remote: tuple[int, ...] = ()
        self.path = path
        self.tcp_endpoint: str | None = None
        self._window_nbytes = window_nbytes
        self._acknowledged: dict[int, int] = {}
        self._in_flight: deque[tuple[int, int]] = deque()
        self._in_flight_nbytes = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        # Runs at exit too. A forked child must not remove the path, so the pid is compared.
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
        """Process all received events; wait up to `timeout_s` for the first one.

        Events are readers that join or leave, and acknowledgements.
        """
        if timeout_s and not self._socket.poll(_milliseconds(timeout_s)):
            return
        while True:
            try:
                event = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._process_event(event)

    def wait_joined(self, wanted: Callable[[], set[tuple[bytes, int]]], policy: WaitPolicy) -> None:
        """Return when all readers in `wanted()`, which may shrink, have subscribed."""
        self._wait(lambda: self.joined.issuperset(wanted()), policy)

    def wait_window(self, nbytes: int, policy: WaitPolicy) -> None:
        """Return when the window of unacknowledged messages has room for `nbytes` more."""
        self._wait(lambda: self._has_room(nbytes), policy)

    def behind(self) -> list[int]:
        """Return the remote readers that have not acknowledged all messages."""
        last = self._in_flight[-1][0] if self._in_flight else 0
        return [rank for rank in self.remote if self._acknowledged.get(rank, 0) < last]

    def send(self, topic: bytes, number: int, message: Encoded) -> None:
        """Queue a copy of a message; the caller may reuse its memory when this returns."""
        parts: list[bytes | memoryview] = [topic, _HEADER.pack(DATA, number), message.body]
        self._socket.send_multipart([*parts, *message.buffers], copy=True)
        if topic == REMOTE:
            self._in_flight.append((number + 1, message.nbytes))
            self._in_flight_nbytes += message.nbytes

    def announce(self, kind: int) -> None:
        """Send READY (all readers joined) or BYE (no more messages) to the remote readers."""
        self._socket.send_multipart([REMOTE, _HEADER.pack(kind, 0)])

    def drop(self, rank: int) -> None:
        """Exclude a remote reader."""
        self.remote = tuple(other for other in self.remote if other != rank)
        self.lost.pop(rank, None)

    def close(self) -> None:
        """Send the queued messages, for at most `_LINGER_MS`, and close. Idempotent."""
        if self._socket.closed:
            return
        if self.tcp_endpoint is not None:
            self.announce(BYE)
        self.hide()
        self._context.destroy(linger=_LINGER_MS)

    def hide(self) -> None:
        """Remove the local socket's path; open connections stay. Idempotent."""
        self._remove()

    def _wait(self, ready: Callable[[], bool], policy: WaitPolicy) -> None:
        self.pump()
        wait(
            ready,
            lambda: policy.poll(closed=bool(self.lost)),
            sleep=lambda seconds: self.pump(min(seconds, _POLL_S)),
        )

    def _has_room(self, nbytes: int) -> bool:
        floor = min((self._acknowledged.get(rank, 0) for rank in self.remote), default=None)
        while self._in_flight and (floor is None or self._in_flight[0][0] <= floor):
            self._in_flight_nbytes -= self._in_flight.popleft()[1]
        return not self._in_flight or (
            len(self._in_flight) < WINDOW_MESSAGES
            and self._in_flight_nbytes + nbytes <= self._window_nbytes
        )

    def _process_event(self, event: bytes) -> None:
        if event[:1] in (b"\0", b"\1") and event[1:2] == _NAME_MARK:
            with suppress(struct.error):
                kind, rank = _NAME.unpack(event[2:])
                self._subscribed(kind, rank, joined=event[:1] == b"\1")
        elif event[:1] in (_ACK_MARK, _LEAVE_MARK):
            with suppress(struct.error):
                mark, rank, number = _ACK.unpack(event)
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
    """A reader's socket. Used by one thread."""

    def __init__(self, endpoint: str, kind: bytes, rank: int) -> None:
        self.endpoint = endpoint
        self.ready = False
        self._kind: Final = kind
        self._rank = rank
        self._lost: str | None = None
        self._received: deque[tuple[int, list[zmq.Frame]]] = deque()
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
        """Return why no more messages will come, or None while the writer lives."""
        if self._lost is None and self._monitor.poll(0):
            self._lost = "its connection closed or fell silent"
        return self._lost

    @property
    def available(self) -> bool:
        """True if a message was received."""
        return bool(self._received)

    def wait(self, policy: WaitPolicy) -> None:
        """Return when a message was received."""
        self._wait(lambda: bool(self._received), policy)

    def receive(self, number: int, policy: WaitPolicy) -> tuple[memoryview, list[memoryview]]:
        """Return body and buffers of the next message, which must have this `number`."""
        self.wait(policy)
        found, frames = self._received.popleft()
        if found != number:
            raise TransferError(f"message {number} was lost: message {found} came instead")
        body, *buffers = (frame.buffer.toreadonly() for frame in frames)
        return body, buffers

    def wait_ready(self, policy: WaitPolicy) -> None:
        """Return when the writer has announced that all readers joined."""
        self._wait(lambda: self.ready, policy)

    def acknowledge(self, number: int) -> None:
        """Acknowledge `number` messages in total."""
        self._socket.send(_ACK.pack(_ACK_MARK, self._rank, number))

    def close(self) -> None:
        """Leave the queue and close the socket. Idempotent."""
        if self._socket.closed:
            return
        if self._kind == REMOTE:
            with suppress(zmq.ZMQError):
                self._socket.send(_ACK.pack(_LEAVE_MARK, self._rank, 0), zmq.NOBLOCK)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._context.destroy(linger=500)

    def _wait(self, ready: Callable[[], bool], policy: WaitPolicy) -> None:
        def poll() -> float:
            try:
                return policy.poll(closed=self._lost is not None or bool(self._monitor.poll(0)))
            except PeerLostError:
                if not self._socket.poll(0):
                    raise
                return 0.0

        def ready_or_received() -> bool:
            return ready() or (self._receive() and ready())

        wait(ready_or_received, poll, sleep=lambda s: self._socket.poll(_milliseconds(s)))

    def _receive(self) -> bool:
        """Receive what the socket has now; return whether that was anything."""
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        try:
            kind, number = _HEADER.unpack(frames[1].buffer)
        except (IndexError, struct.error):
            raise ProtocolError(f"{self.endpoint} sent bytes that are no queue message") from None
        if kind == READY:
            self.ready = True
        elif kind == BYE:
            self._lost = "it closed the queue"
        elif kind == DATA and len(frames) > 2:
            self._received.append((number, frames[2:]))
        return True


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))


def _set_options(target: zmq.Socket[bytes]) -> None:
    # ZeroMQ drops messages at its high-water mark, so it is off: window and ring set the limits.
    target.sndhwm = target.rcvhwm = 0
    target.linger = 0


def _set_heartbeat(target: zmq.Socket[bytes]) -> None:
    """Enable heartbeats, on TCP only: on one host, a stopped process must keep its subscription."""
    target.heartbeat_ivl = _HEARTBEAT_MS
    target.heartbeat_timeout = _HEARTBEAT_TIMEOUT_MS


def _remove_own(path: Path | None, pid: int) -> None:
    if path is not None and os.getpid() == pid:
        with suppress(OSError):
            path.unlink()


IPC_PATH_LIMIT = 107
"""Maximum length of a Unix socket's path in bytes."""

_MAX_RESERVED = 128
_reserved: deque[int] = deque()
"""Descriptors that reserve ports, oldest first."""

_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9.])?")


def socket_address(
    *,
    local_only: bool,
    host: str = "127.0.0.1",
    port: int = 0,
    directory: Path | None = None,
    bind: zmq.Socket[bytes] | None = None,
) -> str:
    """Return an address for a ZeroMQ socket: `ipc://…` if `local_only`, else `tcp://host:port`.

    IPv6 addresses are in brackets; port 0 becomes a free port. With `bind`, that socket is bound to
    the address. Without, a descriptor of this process reserves the port for a ZeroMQ socket that
    any process of this host binds later. The reservation lasts until this process ends or has
    reserved 128 more ports. IPC paths are new names in `directory` (default: the temporary
    directory). Raises ConfigError, and ConnectError when the socket cannot be bound.
    """
    if bind is None:
        if local_only:
            return ipc_address(directory)
        return tcp_address(host, port) if port else _held_address(host)
    address = ipc_address(directory) if local_only else tcp_address(host, port)

    try:
        if "[" in address:
            bind.ipv6 = True
        bind.bind(address)
        return bind.get_string(zmq.LAST_ENDPOINT)
    except zmq.ZMQError as exc:
        raise ConnectError(f"cannot bind to {address}: {exc}") from exc


def _held_address(host: str) -> str:
    requested = tcp_address(host, 0)
    bare = bracketed(host).strip("[]")
    try:
        family, kind, _, _, address = socket.getaddrinfo(bare, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as holder:
            # ZeroMQ sets it too. Two sockets may then be bound, as long as only one listens.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(address)
            port = holder.getsockname()[1]
            _reserved.append(holder.detach())  # the kernel gives the port to no other socket
    except (OSError, UnicodeError) as exc:
        raise ConnectError(f"cannot bind to {requested}: {exc}; give a port") from exc
    if len(_reserved) > _MAX_RESERVED:
        os.close(_reserved.popleft())
    return tcp_address(host, port)


def ipc_address(directory: Path | None = None) -> str:
    """Return `ipc://` and a new path. Raises ConfigError for a path too long for a socket."""
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
        raise ConfigError(f"{port} is no port; wanted 1 to 65535, or 0 for any free port")
    return f"tcp://{bracketed(host)}:{port}"


def bracketed(host: str) -> str:
    """Return a host as written before a port. Raises ConfigError unless it is a host name or IP."""
    bare = host.removeprefix("[").removesuffix("]")
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        if _HOST_NAME.fullmatch(host) is None:
            raise ConfigError(f"{host!r} is no host name and no IP address") from None
        return host
    return f"[{bare}]" if address.version == 6 else host
