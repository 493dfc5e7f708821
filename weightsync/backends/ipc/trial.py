"""The trial of `cuda_ipc`: a process reads memory of each GPU there, and from each other GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from weightsync.backends.base import TrialPart, decode_payload
from weightsync.backends.ipc.landing import Landing, from_bucket
from weightsync.backends.ring import ProbeMemory, keyed_handle
from weightsync.cuda import handles, memory
from weightsync.cuda.memory import OpenMemory, check_probe
from weightsync.errors import BackendUnavailableError, HandleError, WeightSyncError
from weightsync.shm.host_keys import host_key
from weightsync.weights.copying.fingerprint import mix64
from weightsync.wire.offers import KeyedHandle, ProbeInfo

NBYTES = 64 << 20
"""Bytes that one GPU reads of another one."""
_REPEATS = 3
_DRIVER = Path("/proc/driver/nvidia/gpus")
_THROUGH_HOST = "until then bytes between these GPUs go through the memory of the host"


class GpuOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one GPU: a probe, and handles of the same bytes, one for each other GPU."""

    gpu: str
    probe: ProbeInfo
    memory: list[KeyedHandle]
    fingerprint: int


@contextmanager
def offer_gpus() -> Iterator[list[GpuOffer]]:
    """Offer memory of every GPU. Raises BackendUnavailableError without CUDA IPC."""
    gpus = handles.local_gpu_keys()
    if reason := handles.why_not():
        raise BackendUnavailableError(reason)
    with ExitStack() as stack:
        yield [
            offer_gpu(gpu, torch.device("cuda", ordinal), len(gpus) - 1, stack)
            for gpu, ordinal in gpus.items()
        ]


def offer_gpu(gpu: str, device: torch.device, readers: int, stack: ExitStack) -> GpuOffer:
    """Offer memory of one GPU, which lives as long as `stack`."""
    probe = stack.enter_context(closing(ProbeMemory(device)))
    try:
        kept = torch.randint(256, (NBYTES if readers else 1,), dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as exc:
        raise BackendUnavailableError(f"{gpu} has no {NBYTES} bytes left for a trial") from exc
    stack.callback(kept.numel)  # holds it
    return GpuOffer(
        gpu=gpu,
        probe=probe.info(),
        memory=[keyed_handle(None, kept) for _ in range(readers)],
        fingerprint=mix64(kept),
    )


def read_gpus(payload: Any) -> list[TrialPart]:
    """Read what another process offers, on each GPU and from each to each other one.

    Raises HandleError where memory cannot be read on its own GPU.
    """
    offers = [decode_payload(offer, GpuOffer) for offer in payload]
    seen = handles.local_gpu_keys()
    for offer in offers:
        check_probe(offer.probe, [*seen, host_key()])
    parts = [
        TrialPart(seen=f"another process opened memory on {len(offers)} GPUs and read its bytes")
    ]
    for offer in offers:
        left = list(offer.memory)
        parts += [_pair(offer, gpu, left, seen) for gpu in seen if gpu != offer.gpu and left]
    hidden = hidden_gpus(seen)
    if hidden:
        setting = os.environ.get("CUDA_VISIBLE_DEVICES")
        by = "" if setting is None else f" (CUDA_VISIBLE_DEVICES={setting})"
        parts.append(
            TrialPart(
                title="between GPUs",
                why_not=f"{len(hidden)} GPUs of this machine are not seen here{by}, so that their "
                "memory is not read from here",
                remedy=f"let a server see its own GPU first, then the trainer's; {_THROUGH_HOST}",
            )
        )
    elif len(seen) == 1:
        parts.append(TrialPart(title="between GPUs", seen="one GPU: there is no pair to try"))
    return parts


def _pair(offer: GpuOffer, gpu: str, left: list[KeyedHandle], seen: dict[str, int]) -> TrialPart:
    """Have GPU `gpu` read memory of another one."""
    title = f"GPU {seen.get(offer.gpu, offer.gpu)} read by GPU {seen[gpu]}"
    try:
        rate = _read(offer, left.pop(), [gpu, host_key()])
    except WeightSyncError as exc:
        remedy = (
            "nvidia-smi topo -p2p r shows what the driver allows; MIG, an IOMMU that translates, "
            f"and ACS of PCIe switches prevent it; {_THROUGH_HOST}"
        )
        return TrialPart(title=title, why_not=str(exc), remedy=remedy)
    return TrialPart(title=title, seen=f"{NBYTES >> 20} MiB at {rate / 1e9:.1f} GB/s")


def _read(offer: GpuOffer, offered: KeyedHandle, keys: Sequence[str]) -> float:
    """Return the rate at which another GPU's memory is read, in bytes per second."""
    handle, device = memory.pick_readable(offered, keys)
    if device is None:
        raise HandleError(f"{keys[0]} has this memory itself")
    with OpenMemory(handle) as opened, closing(Landing(device, offer.gpu, NBYTES)) as landing:
        arrival = from_bucket(landing.buffer(0), opened.tensor, 0, 0, NBYTES)
        if mix64(landing.land_now(arrival)) != offer.fingerprint:
            raise HandleError(
                "the driver allows it, and other bytes arrive than were sent (IOMMU, ACS)"
            )
        begin = time.perf_counter()
        for _ in range(_REPEATS):
            landing.land_now(arrival)
        return _REPEATS * NBYTES / (time.perf_counter() - begin)


def hidden_gpus(seen: dict[str, int], driver: Path = _DRIVER) -> list[str]:
    """Return the GPUs that the driver lists for this machine and this process does not see."""
    found = []
    for path in sorted(driver.glob("*/information")):
        try:
            lines = path.read_text(encoding="ascii", errors="replace").splitlines()
        except OSError:
            continue
        found += [line.partition(":")[2].strip() for line in lines if line.startswith("GPU UUID")]
    # A driver that does not know a GPU yet shows question marks.
    return [uuid for uuid in found if "?" not in uuid and uuid not in seen]
