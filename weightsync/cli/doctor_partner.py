"""`python -m weightsync.cli.doctor_partner TRIAL`: the other process of what the doctor tries."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable

import msgspec
import torch

from weightsync.backends.gloo.group import GroupRendezvous, PrivateGroup, data_lane
from weightsync.backends.ipc.memory import ProbeMemory
from weightsync.cli.doctor import GLOO_S, START_S, Answer, Gpu, GpuOffer
from weightsync.cuda.handles import local_gpu_keys, why_not
from weightsync.cuda.memory import check_probe
from weightsync.errors import WeightSyncError
from weightsync.shm.host_keys import host_key
from weightsync.wire.offers import ProbeInfo

_SYS_PIDFD_GETFD = 438  # the same number on every architecture


def say(answer: object) -> None:
    """Answer with one line."""
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


def open_probes() -> None:
    """Open the probes that the next line offers, and say whether they hold their bytes."""
    probes = msgspec.json.decode(sys.stdin.buffer.readline(), type=list[ProbeInfo])
    try:
        for probe in probes:
            check_probe(probe, _keys(probe))
    except WeightSyncError as exc:
        say(Answer(works=False, why=str(exc)))
    else:
        say(Answer(works=True))


def _keys(probe: ProbeInfo) -> list[str]:
    """Return who this process is; GPUs are only asked where it matters."""
    on_gpu = any(not key.startswith("HOST-") for key in probe.handle)
    return [*(local_gpu_keys() if on_gpu else ()), host_key()]


def offer_gpu_memory() -> None:
    """Offer a probe on every GPU, and keep them until a line comes."""
    ordinals = local_gpu_keys().values()
    if why := why_not():
        say(GpuOffer(probes=[], why=why))
        return
    probes = [ProbeMemory(torch.device("cuda", ordinal)) for ordinal in ordinals]
    say(GpuOffer(probes=[probe.info() for probe in probes]))
    sys.stdin.buffer.readline()


def list_gpus() -> None:
    """Say which GPUs torch sees."""
    gpus = []
    for key, ordinal in local_gpu_keys().items():
        properties = torch.cuda.get_device_properties(ordinal)
        gpus.append(
            Gpu(
                ordinal=ordinal, key=key, name=properties.name, total_nbytes=properties.total_memory
            )
        )
    say(gpus)


def join_group(address: str, port: str) -> None:
    """Take part in a private group of two, and send back what comes."""
    meeting = GroupRendezvous.reach(address, int(port), epoch=1, timeout_s=START_S)
    meeting.enter(1, GLOO_S)
    group = PrivateGroup(meeting, 1, 2, GLOO_S)
    try:
        received = torch.zeros(64, dtype=torch.uint8)
        group.receive(received, 0, data_lane(0)).wait(GLOO_S)
        group.send(received, 0, data_lane(1)).wait(GLOO_S)
        sys.stdin.buffer.readline()  # or its connections would end before all was read
    finally:
        group.close()
        meeting.close()


def take_descriptor(pid: str, descriptor: str) -> None:
    """Take a file descriptor of the process `pid`."""
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(int(pid))
    taken = libc.syscall(_SYS_PIDFD_GETFD, process, int(descriptor), 0)
    why = "" if taken >= 0 else os.strerror(ctypes.get_errno())
    say(Answer(works=taken >= 0, why=why))


TRIALS: dict[str, Callable[..., None]] = {
    "open": open_probes,
    "offer-gpu-memory": offer_gpu_memory,
    "list-gpus": list_gpus,
    "gloo": join_group,
    "take": take_descriptor,
}


if __name__ == "__main__":
    TRIALS[sys.argv[1]](*sys.argv[2:])
