"""`python -m weightsync.cli.doctor_helper TRIAL …`: the other process of a trial of the doctor."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable

import msgspec
import torch

from weightsync.backends.ipc.memory import ProbeMemory
from weightsync.backends.tcp.connection import Connection, Request, nothing
from weightsync.cli.child import take_stdout
from weightsync.cuda.handles import local_gpu_keys, why_not
from weightsync.cuda.memory import check_probe
from weightsync.errors import WeightSyncError
from weightsync.shm.host_keys import host_key
from weightsync.wire.offers import ProbeInfo

START_S = 45.0
"""How long a process may take to import torch and answer."""

TCP_S = 20.0
_SYS_PIDFD_GETFD = 438  # the same number on every architecture

Send = Callable[[bytes], None]


class Gpu(msgspec.Struct, kw_only=True):
    """One GPU that torch sees, by its device key."""

    ordinal: int
    key: str
    name: str
    total_nbytes: int


class GpuOffer(msgspec.Struct, kw_only=True):
    """Probes in the memory of every GPU, or the reason why senders do not share that memory."""

    probes: list[ProbeInfo]
    why_not: str = ""


def open_probes(send: Send) -> None:
    """Open the probes that the next line offers; send the reason why that failed, or ""."""
    probes = msgspec.json.decode(sys.stdin.buffer.readline(), type=list[ProbeInfo])
    reason = ""
    try:
        for probe in probes:
            check_probe(probe, _keys(probe))
    except WeightSyncError as exc:
        reason = str(exc)
    send(msgspec.json.encode(reason))


def _keys(probe: ProbeInfo) -> list[str]:
    """Return the device keys of this process; those of GPUs only for a probe on a GPU."""
    on_gpu = any(not key.startswith("HOST-") for key in probe.handle)
    return [*(local_gpu_keys() if on_gpu else ()), host_key()]


def offer_gpu_memory(send: Send) -> None:
    """Send a GpuOffer, and keep its memory until a line arrives."""
    ordinals = local_gpu_keys().values()
    if reason := why_not():
        send(msgspec.json.encode(GpuOffer(probes=[], why_not=reason)))
        return
    probes = [ProbeMemory(torch.device("cuda", ordinal)) for ordinal in ordinals]
    send(msgspec.json.encode(GpuOffer(probes=[probe.info() for probe in probes])))
    sys.stdin.buffer.readline()


def list_gpus(send: Send) -> None:
    """Send a list of the GPUs that torch sees."""
    gpus = []
    for key, ordinal in local_gpu_keys().items():
        found = torch.cuda.get_device_properties(ordinal)
        gpus.append(Gpu(ordinal=ordinal, key=key, name=found.name, total_nbytes=found.total_memory))
    send(msgspec.json.encode(gpus))


def read_chunk(send: Send, address: str, port: str, secret: str) -> None:
    """Read a chunk that the doctor serves, and send back what arrived."""
    connection = Connection.open(address, int(port), bytes.fromhex(secret), 0, TCP_S)
    try:
        connection.send_request(Request(1, 0, is_next=False))
        frame = connection.next_frame(nothing)
        received = bytearray(frame.nbytes)
        connection.read_data(memoryview(received), nothing)
    finally:
        connection.close()
    send(bytes(received))


def take_descriptor(send: Send, pid: str, descriptor: str) -> None:
    """Take a file descriptor of the process `pid`; send the reason why that failed, or ""."""
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(int(pid))
    taken = libc.syscall(_SYS_PIDFD_GETFD, process, int(descriptor), 0)
    send(msgspec.json.encode("" if taken >= 0 else os.strerror(ctypes.get_errno())))


TRIALS: dict[str, Callable[..., None]] = {
    "open": open_probes,
    "offer-gpu-memory": offer_gpu_memory,
    "list-gpus": list_gpus,
    "tcp": read_chunk,
    "take": take_descriptor,
}


if __name__ == "__main__":
    TRIALS[sys.argv[1]](take_stdout(), *sys.argv[2:])
