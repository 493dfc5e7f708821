"""Links with a rate, a delay and loss between network namespaces.

For kernels without netem. A thread of this process takes the place of the switch of a
`host_network`: it takes each packet that a host sends, and gives it to the host that it is
addressed to. Needs root.
"""

from __future__ import annotations

import math
import random
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.hosts.namespaces import Host

GSO_SEGMENTS = 8
"""Packets that the kernel passes as one: few interrupts, and 1 ms of a link of 100 Mbit/s."""
_FRAME_NBYTES = 1 << 17
_VNET = struct.Struct("<BBHHHH")
_MAC_NBYTES = 6
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING, _SO_RCVBUFFORCE = 263, 15, 23, 33
_ETH_P_ALL = 3
_GIVEN_UP_S = 5.0


@dataclass(slots=True, eq=False)
class Uplink:
    """What one host sends: when each packet arrives, where, and how many bytes passed."""

    port: socket.socket
    waiting: deque[tuple[float, socket.socket, bytes]] = field(default_factory=deque)
    free_at: float = 0.0
    nbytes: int = 0
    packets: int = 0
    dropped: int = 0
    lost: int = 0


class Links:
    """Passes packets between hosts: each sends at `rate` bits/s, and they arrive `delay_s` later.

    A packet that would wait longer than `queue_s` for those before it is dropped, and each is lost
    with probability `loss`. `late_s` is the sum of the times by which packets were passed too late.
    The hosts are taken from the switch of their network.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        *,
        rate: float,
        delay_s: float,
        queue_s: float,
        loss: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._rate, self._delay_s, self._queue_s, self._loss = rate, delay_s, queue_s, loss
        self._random = random.Random(seed)  # noqa: S311  # no secret
        self.late_s = 0.0
        self.uplinks: list[Uplink] = []
        self._by_mac: dict[bytes, socket.socket] = {}
        segments = 1 if loss else GSO_SEGMENTS  # so that packets are lost one by one
        for host in hosts:
            host.cut()
            for space, device, own in host.ends():
                if own:
                    line = f"link set dev {device} gso_max_segs {segments}"
                    space.tool(["ip", "-batch", "-"], [line])
                else:
                    port = space.call(partial(_packet_socket, device))
                    self.uplinks.append(Uplink(port))
                    self._by_mac[bytes.fromhex(host.mac.replace(":", ""))] = port
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="links", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop to pass packets."""
        self._wake.close()
        self._thread.join(_GIVEN_UP_S)
        for uplink in self.uplinks:
            uplink.port.close()
        self._woken.close()

    def _run(self) -> None:
        by_socket = {uplink.port: uplink for uplink in self.uplinks}
        watched = [*by_socket, self._woken]
        while True:
            due = [uplink.waiting[0][0] for uplink in self.uplinks if uplink.waiting]
            wait_s = max(0.0, min(due) - time.monotonic()) if due else None
            for ready in select.select(watched, [], [], wait_s)[0]:
                if ready is self._woken:
                    return
                self._take(by_socket[ready])
            now = time.monotonic()
            for uplink in self.uplinks:
                while uplink.waiting and uplink.waiting[0][0] <= now:
                    at, target, frame = uplink.waiting.popleft()
                    self.late_s += now - at
                    _send(target, frame)

    def _take(self, uplink: Uplink) -> None:
        with suppress(BlockingIOError):
            while True:
                frame = uplink.port.recv(_FRAME_NBYTES)
                target = self._by_mac.get(frame[_VNET.size : _VNET.size + _MAC_NBYTES])
                if target is None:
                    continue  # to all hosts; they know each other
                now, nbytes = time.monotonic(), _wire_nbytes(frame)
                if uplink.free_at - now > self._queue_s:
                    uplink.dropped += 1
                    continue
                uplink.free_at = max(now, uplink.free_at) + nbytes * 8 / self._rate
                uplink.nbytes += nbytes
                uplink.packets += 1
                if self._random.random() < self._loss:
                    uplink.lost += 1
                else:
                    uplink.waiting.append((uplink.free_at + self._delay_s, target, frame))


def set_congestion(host: Host, congestion: str) -> None:
    """Set the congestion control of a host's connections, by its route.

    "NAME+kept" has no slow start after idle.
    """
    name, _, kept = congestion.partition("+")
    subnet = host.address.rpartition(".")[0]
    for space, device, own in host.ends():
        if own:
            line = f"route replace {subnet}.0/24 dev {device} src {host.address} congctl {name}"
            space.tool(["ip", "-batch", "-"], [line])
    after_idle = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")
    host.call(partial(after_idle.write_text, "0" if kept else "1"))


def _packet_socket(device: str) -> socket.socket:
    """Return a socket for the packets that arrive at a device, with their offload headers."""
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    opened.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    opened.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    opened.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 << 20)
    opened.bind((device, _ETH_P_ALL))
    opened.setblocking(False)
    return opened


def _send(target: socket.socket, frame: bytes) -> None:
    with suppress(OSError):  # a host that is going down
        target.send(frame)


def _wire_nbytes(frame: bytes) -> int:
    """Return the bytes on the wire of a frame, which may be several packets in one."""
    _, kind, header, size, _, _ = _VNET.unpack_from(frame)
    nbytes = len(frame) - _VNET.size
    if not kind or not size:
        return nbytes
    packets: int = math.ceil((nbytes - header) / size)
    return nbytes + (packets - 1) * int(header)
