"""Serves the chunks of a window to the hosts that connect."""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Container
from contextlib import suppress

from weightsync.backends.tcp.carrier import Carrier, InStream
from weightsync.backends.tcp.connection import (
    Connection,
    Frame,
    FrameKind,
    Request,
    close_in_children,
)
from weightsync.backends.tcp.window import NO_BYTES, ChunkWindow, Cursor
from weightsync.errors import ConnectError, WeightSyncError
from weightsync.shm.addresses import is_assigned

logger = logging.getLogger(__name__)

_HELLO_S = 5.0
_BEAT_S = 0.25
_MAX_UNAUTHENTICATED = 256
"""Connections without the secret so far; the oldest is closed for another one."""
_UNAUTHENTICATED, _CUT = -1, -2
"""The places of connections without the secret, and of those of them that make room for others."""
_KNOWN_AFTER_S = 30.0
"""How long a host that asks for an update is kept waiting that has not begun here, at most."""


class ChunkServer:
    """Ports at which hosts that know `secret` read the chunks of `window`, one for each address.

    The first is `port` of `address`; `listen` adds others. A thread for each port accepts, and each
    connection has one. `carrier` moves the bytes, by default in the stream. A connection that never
    asks for anything shows its other end that this process lives. With `tells_lost`, for the
    sender, all hosts of an update have such a connection, and are told over it which of them have
    none any more or have failed, and which readers of their ring have: they do not wait for these.
    Raises ConnectError where the address is none of this host's.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        window: ChunkWindow,
        patience_s: float,
        carrier: Carrier | None = None,
        *,
        tells_lost: bool = False,
    ) -> None:
        self._tells_lost = tells_lost
        self._carrier = carrier or InStream()
        self._secret = secret
        self._window = window
        self._patience_s = patience_s
        self._connections: dict[Connection, int] = {}
        self._lost_readers: set[tuple[int, int, int]] = set()
        self._lost_hosts: set[tuple[int, int]] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._listening: dict[str, socket.socket] = {}
        self.port = self.listen(address)

    def listen(self, address: str) -> int:
        """Listen at an address, unless it does; return its port. Raises ConnectError."""
        if address in self._listening:
            return int(self._listening[address].getsockname()[1])
        try:
            listening = socket.create_server((address, 0), family=family_of(address), backlog=1024)
        except OSError as exc:
            raise ConnectError(
                f"cannot listen on {address}: {exc}; give an address of this host"
            ) from exc
        close_in_children(listening)
        self._listening[address] = listening
        threading.Thread(
            target=self._accept, args=(listening,), name="weightsync-accept", daemon=True
        ).start()
        return int(listening.getsockname()[1])

    def listen_only(self, addresses: Container[str]) -> None:
        """Close the ports of other addresses. Their connections stay."""
        for address in [address for address in self._listening if address not in addresses]:
            _close_port(self._listening.pop(address))

    @property
    def has_lost_address(self) -> bool:
        """Whether this host has an address no more at which hosts were told to read."""
        listening = list(self._listening.values())
        return not all(is_assigned(str(each.getsockname()[0])) for each in listening)

    def liveness(self, place: int) -> list[int]:
        """Return the counters that the host of `place` sent last, by reader of its ring."""
        with self._lock:
            found = [
                c.liveness for c, at in self._connections.items() if at == place and c.liveness
            ]
        return found[-1] if found else []

    def lose_reader(self, place: int, epoch: int, reader: int) -> None:
        """Tell the host of `place` that a reader of its ring has failed in update `epoch`."""
        with self._lock:
            self._lost_readers = {lost for lost in self._lost_readers if lost[1] == epoch}
            self._lost_readers.add((place, epoch, reader))

    def lose_host(self, place: int, epoch: int) -> None:
        """Tell all hosts that the one of `place` has failed in update `epoch`, and lives."""
        with self._lock:
            self._lost_hosts = {lost for lost in self._lost_hosts if lost[0] == epoch}
            self._lost_hosts.add((epoch, place))
        self._window.lose(place, epoch)

    def close(self) -> None:
        """Close the port, and end all connections. Idempotent."""
        with self._lock:
            self._closed = True
            connections = list(self._connections)
        self.listen_only(())
        for connection in connections:
            connection.cut()  # its own thread closes it

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                sock, _ = listening.accept()
            except OSError:
                if self._closed or listening.fileno() < 0:
                    return
                time.sleep(0.05)  # no descriptors, perhaps
                continue
            try:
                self._take(sock)
            except (OSError, RuntimeError) as exc:  # it is gone already, or there is no thread
                logger.warning("a connection cannot be served: %s", exc)
                sock.close()

    def _take(self, sock: socket.socket) -> None:
        """Serve a connection in a thread of its own."""
        connection = Connection(sock, self._patience_s)
        with self._lock:
            if self._closed:
                sock.close()
                return
            strangers = [c for c, place in self._connections.items() if place == _UNAUTHENTICATED]
            if len(strangers) >= _MAX_UNAUTHENTICATED:
                self._connections[strangers[0]] = _CUT
                strangers[0].cut()
            self._connections[connection] = _UNAUTHENTICATED
        try:
            threading.Thread(
                target=self._run, args=(connection,), name="weightsync-serve", daemon=True
            ).start()
        except RuntimeError:
            self._forget(connection)
            raise

    def _forget(self, connection: Connection) -> None:
        with self._lock:
            self._connections.pop(connection, None)

    def _run(self, connection: Connection) -> None:
        try:
            place = connection.receive_hello(self._secret, _HELLO_S)
            if place is not None:
                with self._lock:
                    self._connections[connection] = place
                # After that, so that the limit of unauthenticated ones cannot cut a host off.
                connection.send_welcome()
                self._serve(connection, place)
        except (WeightSyncError, OSError) as exc:
            logger.debug("a connection ends: %s", exc)
        finally:
            connection.close()
            self._forget(connection)

    def _serve(self, connection: Connection, place: int) -> None:
        request: Request | None = None
        has_metadata = False
        told: set[Frame] = set()

        def is_over() -> bool:
            if self._tells_lost and connection.liveness:
                self._tell_lost(connection, place, told)
            return self._closed

        while True:
            request = request or connection.wait_for_request(is_over)
            if request is None:
                return
            if not has_metadata:
                self._carrier.send_metadata(connection)
                has_metadata = True
            cursor = self._attach(connection, place, request)
            request = None if cursor is None else self._send_update(connection, cursor)

    def _tell_lost(self, connection: Connection, place: int, told: set[Frame]) -> None:
        """Tell a host what is lost in the newest update, each host and each of its readers once."""
        epoch, members = self._window.epoch, self._window.members
        with self._lock:
            lost = set(members).difference(self._connections.values())
            lost.update(at for of, at in self._lost_hosts if of == epoch)
            readers = [
                reader for at, of, reader in self._lost_readers if (at, of) == (place, epoch)
            ]
        frames = {Frame(FrameKind.LOST, epoch, member) for member in lost}
        frames.update(Frame(FrameKind.READER_LOST, epoch, reader) for reader in readers)
        for frame in frames - told:
            if frame.kind is FrameKind.LOST:
                self._window.lose(frame.chunk, epoch)
            told.add(frame)
            connection.send_frame(frame, (), NO_BYTES)

    def _attach(self, connection: Connection, place: int, request: Request) -> Cursor | None:
        """Wait for the update that is asked for; answer GONE where it does not begin in time."""
        asked_at = beat_at = time.monotonic()
        while not self._closed:
            cursor = self._window.attach(
                place,
                request.epoch,
                request.first,
                is_next=request.is_next,
                stop=connection.cut,
            )
            if cursor is not None:
                return cursor
            newer = connection.poll_request(is_idle=request.is_next)
            if newer is not None:  # it does not wait for this any more
                request, asked_at = newer, time.monotonic()
            now = time.monotonic()
            if not request.is_next and now - asked_at > min(_KNOWN_AFTER_S, self._patience_s / 2):
                connection.send_frame(Frame(FrameKind.GONE, request.epoch), (), NO_BYTES)
                return None
            if not request.is_next and now - beat_at > _BEAT_S:
                beat_at = now
                connection.send_frame(Frame(FrameKind.WAITING), (), NO_BYTES)
        return None

    def _send_update(self, connection: Connection, cursor: Cursor) -> Request | None:
        """Send chunks up to the last one; return a request that arrives before."""
        beat_at = time.monotonic()
        try:
            while not self._closed:
                offer = None  # its memory is not kept during the wait
                offer = self._window.next(cursor)
                if offer is None:
                    if (newer := connection.poll_request()) is not None:
                        return newer
                    if time.monotonic() - beat_at > _BEAT_S:
                        beat_at = time.monotonic()
                        connection.send_frame(Frame(FrameKind.WAITING), (), NO_BYTES)
                    continue
                beat_at = time.monotonic()
                frame = Frame(
                    offer.kind,
                    cursor.epoch,
                    offer.chunk,
                    offer.chunks,
                    len(offer.data),
                    len(offer.fingerprints),
                )
                if offer.kind is FrameKind.CHUNK:
                    self._carrier.send(connection, frame, offer.fingerprints, offer.data)
                else:
                    connection.send_frame(frame, (), NO_BYTES)
                if offer.kind is not FrameKind.CHUNK or self._window.sent(cursor):
                    break
        except BaseException:
            connection.cut()  # before its memory is used again: the other host must notice
            raise
        finally:
            self._window.detach(cursor)
        return None


def _close_port(listening: socket.socket) -> None:
    with suppress(OSError):
        listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
    listening.close()


def family_of(address: str) -> socket.AddressFamily:
    """Return the family of an IP address; a name counts as IPv4."""
    try:
        v6 = ipaddress.ip_address(address).version == 6
    except ValueError:
        v6 = False
    return socket.AF_INET6 if v6 else socket.AF_INET
