"""The backend of one host: CUDA IPC on its GPUs, shared memory between its processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar

import torch

from weightsync.backends.base import (
    Backend,
    Endpoint,
    Reach,
    TrainerWeightTransferEngine,
    TransferOptions,
    Trial,
    TrialPart,
    WeightTransferEngine,
    decode_payload,
)
from weightsync.backends.rank_streams import RankStreamsEngine
from weightsync.backends.ring import MAX_READERS, ProbeMemory
from weightsync.cuda import handles
from weightsync.cuda.memory import check_probe
from weightsync.shm.host_keys import host_key
from weightsync.shm.store_order import order_stores
from weightsync.weights.sources.base import WeightSource
from weightsync.wire.offers import ProbeInfo

CUDA_IPC_COST, PEER_COST, SHARED_MEMORY_COST, OTHER_GPU_COST = 0.1, 0.2, 1.1, 1.2


class IpcBackend(Backend):
    """Paths `cuda_ipc` (one GPU, or two that read each other) and `shared_memory` (one host)."""

    name: ClassVar[str] = "ipc"
    reads_in_place: ClassVar[bool] = True
    max_readers: ClassVar[int | None] = MAX_READERS

    def endpoint(self, device: torch.device) -> Any:
        """Return that streams are read, and what this process can do with the memory of GPUs.

        `no_cuda_ipc` is why this GPU's memory cannot be exported, if so. `peers` has for each other
        GPU that is seen here why this one cannot read its memory, "" where it can.
        """
        facts: dict[str, Any] = {"streams": True}
        if device.type == "cuda":
            refused = handles.why_not()
            if refused is not None:
                facts["no_cuda_ipc"] = refused
            keys = handles.device_keys(device)
            facts["peers"] = handles.peer_faults(keys[0])
        return facts

    def takes_streams(self, receiver: Endpoint) -> bool:
        """Whether a receiver says so: one of an older version does not."""
        return isinstance(receiver.facts, Mapping) and receiver.facts.get("streams") is True

    def reach(self, trainer: Endpoint, receiver: Endpoint) -> Sequence[Reach]:
        """Return both paths, by device keys. A probe shows whether a path works."""
        return [*_cuda_ipc(trainer, receiver), _shared_memory(trainer, receiver)]

    def trainer_engine(
        self,
        source: WeightSource,
        path: str,
        options: TransferOptions,
        bases: Mapping[str, TrainerWeightTransferEngine],
    ) -> TrainerWeightTransferEngine:
        """Return an engine with a ring or registered memory. Raises SegmentError."""
        # A receiver does not need the sending half.
        from weightsync.backends.ipc.sender import IpcTrainerEngine  # noqa: PLC0415

        return IpcTrainerEngine(source, options, path)

    def receiver_engine(self, device_keys: Sequence[str]) -> WeightTransferEngine:
        """Return an engine that reads a ring or registered memory, of each rank that sends."""
        from weightsync.backends.ipc.receiver import (  # noqa: PLC0415  # as above
            IpcWeightTransferEngine,
        )

        return RankStreamsEngine(lambda: IpcWeightTransferEngine(device_keys))

    def check_probe(self, payload: Any, device_keys: Sequence[str]) -> None:
        """Open the memory of a probe, and compare it. Raises HandleError or SegmentError."""
        check_probe(decode_payload(payload, ProbeInfo), list(device_keys))

    def trials(self) -> Sequence[Trial]:
        """Return a trial of each path: memory of every GPU, and a segment."""
        return [
            Trial(
                path="cuda_ipc",
                why_not="" if handles.has_gpu() else "there is no GPU",
                remedy="one container for both (or --ipc=host --pid=host), --cap-add=SYS_PTRACE, "
                "no MIG, no expandable segments; until then GPU weights go through host memory",
            ),
            Trial(
                path="shared_memory",
                remedy="check that /dev/shm is mounted, writable by this user, and not full",
                is_essential=True,
            ),
        ]

    @contextmanager
    def offer_trial(self, path: str) -> Iterator[Any]:
        """Yield memory of every GPU, or a probe in a segment."""
        if path == "cuda_ipc":
            with _gpu_trial().offer_gpus() as offers:
                yield offers
            return
        order_stores()
        with closing(ProbeMemory()) as probe:
            yield [probe.info()]

    def read_trial(self, path: str, offer: Any) -> str | Sequence[TrialPart]:
        """Open the memory of another process; of GPUs also from each other one."""
        if path == "cuda_ipc":
            parts: Sequence[TrialPart] = _gpu_trial().read_gpus(offer)
            return parts
        for probe in offer:
            check_probe(decode_payload(probe, ProbeInfo), [host_key()])
        return "another process opened a segment and read its bytes"


def _gpu_trial() -> ModuleType:
    """Return the module of the trial, which neither a trainer nor a receiver needs."""
    return import_module("weightsync.backends.ipc.trial")


def _cuda_ipc(trainer: Endpoint, receiver: Endpoint) -> list[Reach]:
    """Return the path between GPUs of a host; [] for a trainer on a CPU, without a reason."""
    gpu = trainer.gpu
    if gpu is None:
        return []
    ours, theirs = (
        facts if isinstance(facts, Mapping) else {} for facts in (trainer.facts, receiver.facts)
    )
    refused = ours.get("no_cuda_ipc", "")
    if gpu in receiver.keys:
        return [Reach("cuda_ipc", CUDA_IPC_COST, refused, gpus=(gpu, gpu))]
    peers = theirs.get("peers", {})
    if receiver.gpu is not None and isinstance(peers, Mapping) and gpu in peers:
        why_not = str(peers[gpu]) or refused
        return [Reach("cuda_ipc", PEER_COST, why_not, gpus=(gpu, receiver.gpu))]
    why_not = f"the receiver is on {', '.join(receiver.keys)}, the trainer on {gpu}"
    if receiver.gpu is not None and trainer.host == receiver.host:
        why_not += ", which the receiver does not see (CUDA_VISIBLE_DEVICES, its container)"
    return [Reach("cuda_ipc", why_not=why_not)]


def _shared_memory(trainer: Endpoint, receiver: Endpoint) -> Reach:
    if trainer.host not in receiver.keys:
        host = receiver.host or "unknown"
        return Reach(
            "shared_memory",
            why_not=f"the receiver is on host {host}, the trainer on {trainer.host}",
        )
    same = trainer.keys[0] in receiver.keys
    return Reach("shared_memory", SHARED_MEMORY_COST if same else OTHER_GPU_COST)
