"""What `weightsync doctor` sees of GPUs; processes of their own look, since drivers may hang."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from weightsync.cli.doctor_findings import Finding, Level, ok, problem, warning
from weightsync.cli.doctor_pairs import CUDA_IPC, Gpu, GpuOffer, opened_by_another, partner
from weightsync.cuda.handles import expandable_setting
from weightsync.errors import WeightSyncError

_DEVICES = ("/dev/nvidiactl", "/dev/dxg")
_STAGED = "GPU weights go through host memory instead (the shared_memory path)"


def has_gpu() -> bool:
    """Whether an NVIDIA GPU is attached and torch can use such GPUs; asks no driver."""
    return torch.version.cuda is not None and _attached()


def look_at_gpus() -> Sequence[Finding]:
    """GPUs with their UUIDs, MIG, the driver beside torch, and expandable segments."""
    return [*_list_findings(), *look_at_allocator()]


def look_at_allocator() -> Sequence[Finding]:
    """Whether torch was asked for memory that has no handle."""
    setting = expandable_setting()
    if setting is None:
        return [ok("allocator", "expandable segments are off")]
    return [
        warning(
            "allocator",
            f"{setting} asks for expandable segments, whose memory is not shared by handle; "
            f"{_STAGED}",
            f"take expandable_segments:True out of {setting} on the trainer",
        )
    ]


def try_cuda_ipc() -> Sequence[Finding]:
    """One process offers memory of every GPU, another opens it and checks its bytes."""
    if not has_gpu():
        return [Finding(CUDA_IPC, Level.OK, "not tried: there is no GPU", works=False)]
    try:
        with partner("offer-gpu-memory") as owner:
            offer = msgspec.json.decode(owner.hear(), type=GpuOffer)
            why = offer.why or opened_by_another(offer.probes).why
    except WeightSyncError as exc:
        why = str(exc)
    if not why:
        seen = f"another process opened memory on {len(offer.probes)} GPUs and read its bytes"
        return [Finding(CUDA_IPC, Level.OK, seen, works=True)]
    remedy = (
        "one container for both (or --ipc=host --pid=host), --cap-add=SYS_PTRACE, no MIG, no "
        "expandable segments"
    )
    return [Finding(CUDA_IPC, Level.WARNING, f"{why}; {_STAGED}", remedy, works=False)]


def _list_findings() -> Sequence[Finding]:
    if torch.version.cuda is None:
        return [_without_cuda()]
    if not _attached():
        return [ok("gpu", "no NVIDIA GPU is attached")]
    with partner("list-gpus") as other:
        gpus = msgspec.json.decode(other.hear(), type=list[Gpu])
    if not gpus:
        return [
            problem(
                "gpu",
                "an NVIDIA GPU is attached, and torch sees none",
                "look at nvidia-smi, CUDA_VISIBLE_DEVICES, and docker run --gpus",
            )
        ]
    return [*map(_judge_gpu, gpus), judge_driver(_driver_version(), torch.version.cuda)]


def _judge_gpu(gpu: Gpu) -> Finding:
    seen = f"{gpu.ordinal}: {gpu.name}, {gpu.total_nbytes / 1e9:.0f} GB, {gpu.key}"
    if gpu.key.startswith("MIG-") or " MIG " in gpu.name:
        remedy = "turn MIG off for CUDA IPC: nvidia-smi -mig 0"
        return warning("gpu", f"{seen}: a MIG slice, not shared by handle; {_STAGED}", remedy)
    return ok("gpu", seen)


def _without_cuda() -> Finding:
    if _attached():
        return warning(
            "gpu",
            f"an NVIDIA GPU is attached, and torch {torch.__version__} is built without CUDA",
            "install torch's CUDA build (see pytorch.org)",
        )
    return ok("gpu", "none: torch is built without CUDA")


def judge_driver(driver: tuple[int, int] | None, built_for: str) -> Finding:
    """Compare the newest CUDA that the driver knows with the one torch was built for."""
    wanted = tuple(int(n) for n in re.findall(r"\d+", built_for)[:2])
    if driver is None:
        return warning("driver", "libcuda.so.1 cannot be asked", "install the NVIDIA driver")
    seen = f"the driver knows CUDA {driver[0]}.{driver[1]}, torch is built for {built_for}"
    if driver[0] < wanted[0]:
        remedy = f"update the driver, or install a torch for CUDA {driver[0]}"
        return problem("driver", seen, remedy)
    return ok("driver", seen)


def _driver_version() -> tuple[int, int] | None:
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion
    except (OSError, AttributeError):
        return None
    version = ctypes.c_int()
    if ask(ctypes.byref(version)):
        return None
    return version.value // 1000, version.value % 1000 // 10


def _attached() -> bool:
    return any(Path(device).exists() for device in _DEVICES)
