"""`python -m weightsync.cli.doctor_helper TRIAL …`: the other process of a trial of the doctor."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable

import msgspec
import torch

from weightsync.backends.gloo.group import GroupRendezvous, PrivateGroup, data_lane
from weightsync.backends.ipc.memory import ProbeMemory
from weightsync.cli.child import take_stdout
from weightsync.cuda.handles import local_gpu_keys, why_not
from weightsync.cuda.memory import check_probe
from weightsync.errors import WeightSyncError
from weightsync.shm.host_keys import host_key
from weightsync.wire.offers import ProbeInfo

START_S = 45.0
"""How long a process may take to import torch and answer."""

GLOO_S = 20.0
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


def join_group(_: Send, address: str, port: str) -> None:
    """Join a private group of two, and send the received bytes back by Gloo."""
    meeting = GroupRendezvous.reach(address, int(port), epoch=1, timeout_s=START_S)
    meeting.enter(1, GLOO_S)
    group = PrivateGroup(meeting, 1, 2, GLOO_S)
    try:
        received = torch.zeros(64, dtype=torch.uint8)
        group.receive(received, 0, data_lane(0)).wait(GLOO_S)
        group.send(received, 0, data_lane(1)).wait(GLOO_S)
        sys.stdin.buffer.readline()  # the doctor has read all; its connections may close now
    finally:
        group.close()
        meeting.close()


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
    "gloo": join_group,
    "take": take_descriptor,
}


if __name__ == "__main__":
    TRIALS[sys.argv[1]](take_stdout(), *sys.argv[2:])
