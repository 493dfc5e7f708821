"""The sending end of a tensor queue's socket: it connects, introduces itself, posts packets."""

from __future__ import annotations

import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from weightsync.errors import (
    BackendUnavailableError,
    ConfigError,
    ConnectError,
    TransferTimeout,
    WeightSyncError,
)
from weightsync.samehost.device_keys import host_key
from weightsync.samehost.segment import Segment
from weightsync.samehost.tensor_channel import PROBE_NBYTES, bound_name, own_socket, same_user
from weightsync.wire.offers import SegmentHandle
from weightsync.wire.tensor_packets import (
    MAX_PACKET,
    PROTOCOL,
    Forget,
    Goodbye,
    Hello,
    Packet,
    TensorQueueHandle,
    Welcome,
    decode_welcome,
    encode,
    encode_packet,
)

_SEND_BUFFER = 1 << 20
_NAP_S = 0.001
_GOODBYE_S = 5.0


class SenderLink:
    """A connection to a queue that has proved that both sides see the same memory.

    `gpus` are the device keys whose memory the receiver opens. Raises BackendUnavailableError
    where shared memory does not work between the two, ConnectError when the receiver is gone.
    """

    def __init__(
        self, queue: TensorQueueHandle, *, sender: str, name: str, timeout_s: float
    ) -> None:
        self._lock = threading.Lock()
        self._closed = ""
        self._forgotten: deque[str] = deque()
        self._socket = _connect(queue, timeout_s)
        try:
            self.gpus = _introduce(self._socket, sender, name).gpus
        except BaseException:
            self._socket.close()
            raise
        self._socket.setblocking(False)

    def forget(self, segment: str) -> None:
        """Have the receiver unmap a segment before it hears of anything else."""
        self._forgotten.append(segment)

    def post(self, packet: Callable[[], Packet], deadline: float) -> None:
        """Send a packet, which is made anew under the lock for each try.

        Raises TransferTimeout when the receiver reads nothing until `deadline`, ConnectError when
        it is gone.
        """
        while not self._try_post(packet):
            if time.monotonic() >= deadline:
                raise TransferTimeout(
                    "the receiver of tensors reads nothing; it holds as many as it may, or its "
                    "process hangs"
                )
            with suppress(ValueError, OSError):  # closed meanwhile, as the next try will say
                select.select([], [self._socket], [], _NAP_S)
            time.sleep(_NAP_S)  # a socket may call itself ready with too little room for a packet

    def check(self) -> None:
        """Raise ConnectError if the receiver is gone or this end was closed."""
        self._check_open()
        try:
            ended = self._socket.recv(1) == b""
        except BlockingIOError:
            return
        except OSError as exc:
            raise self._gone(exc) from exc
        if ended:
            raise self._gone(None)

    def close(self) -> None:
        """Take leave, when the receiver has mapped all that was sent. Idempotent."""
        if self._closed:
            return
        deadline = time.monotonic() + _GOODBYE_S
        with suppress(WeightSyncError, OSError, ValueError):
            self.post(Goodbye, deadline)
            # The receiver answers, or its end closes; one that hangs is not waited for longer.
            if select.select([self._socket], [], [], max(deadline - time.monotonic(), 0.0))[0]:
                self._socket.recv(MAX_PACKET)  # left unread it would reset the connection
        self._end("this sender of tensors is closed")

    def _try_post(self, packet: Callable[[], Packet]) -> bool:
        with self._lock:
            self._check_open()
            while self._forgotten:
                if not self._try_send(Forget(self._forgotten[0])):
                    return False
                self._forgotten.popleft()
            return self._try_send(packet())

    def _try_send(self, packet: Packet) -> bool:
        raw = encode_packet(packet)
        try:
            self._socket.send(raw)
        except BlockingIOError:
            return False
        except OSError as exc:
            raise self._gone(exc) from exc
        return True

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectError(self._closed)

    def _gone(self, cause: OSError | None) -> ConnectError:
        self._end(f"the receiver of tensors is gone ({cause or 'it closed the queue'})")
        return ConnectError(self._closed)

    def _end(self, reason: str) -> None:
        self._closed = self._closed or reason
        self._socket.close()


def _introduce(connection: socket.socket, sender: str, name: str) -> Welcome:
    word = secrets.randbits(62)
    with Segment.create(PROBE_NBYTES) as probe:
        probe.buffer[:8] = word.to_bytes(8, "little")
        where = SegmentHandle(name=probe.name, nbytes=probe.nbytes)
        try:
            connection.send(encode(Hello(PROTOCOL, sender, name[:1024], where, word)))
            welcome = decode_welcome(connection.recv(MAX_PACKET))
        except OSError as exc:
            raise ConnectError(f"the tensor queue did not answer: {exc}") from exc
    if welcome.refusal:
        raise BackendUnavailableError(
            f"the tensor queue cannot be used from here: {welcome.refusal}"
        )
    return welcome


def _connect(queue: TensorQueueHandle, timeout_s: float) -> socket.socket:
    if queue.protocol != PROTOCOL:
        raise BackendUnavailableError(
            f"the tensor queue speaks version {queue.protocol}, this process {PROTOCOL}; "
            "run one weightsync on both sides"
        )
    if queue.host != host_key():
        raise BackendUnavailableError(
            f"the tensor queue is on {queue.host}, this process on {host_key()}: they share no "
            "memory (another host, or containers without --ipc=host)"
        )
    connection = own_socket(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    try:
        connection.settimeout(timeout_s)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        connection.connect(bound_name(queue.address))
        if not same_user(connection):
            raise ConfigError("the tensor queue belongs to another user; run both as one")
    except OSError as exc:
        connection.close()
        raise ConnectError(
            f"the tensor queue is not there ({exc}): its process ended, or is in a container with "
            "a network of its own"
        ) from exc
    except BaseException:
        connection.close()
        raise
    return connection
