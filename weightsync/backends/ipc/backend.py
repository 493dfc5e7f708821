"""The backend of one host: CUDA IPC on one GPU, shared memory between processes of the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any, ClassVar

import torch

from weightsync.backends.base import (
    Backend,
    Endpoint,
    Reach,
    TrainerWeightTransferEngine,
    TransferOptions,
    Trial,
    WeightTransferEngine,
    decode_payload,
)
from weightsync.backends.rank_streams import RankStreamsEngine
from weightsync.backends.ring import MAX_READERS, ProbeMemory
from weightsync.cuda import handles
from weightsync.cuda.memory import check_probe
from weightsync.errors import BackendUnavailableError
from weightsync.shm.host_keys import host_key
from weightsync.shm.store_order import order_stores
from weightsync.weights.sources.base import WeightSource
from weightsync.wire.offers import ProbeInfo

CUDA_IPC_COST, SHARED_MEMORY_COST, OTHER_GPU_COST = 0.1, 1.1, 1.2


class IpcBackend(Backend):
    """Paths `cuda_ipc` (one GPU) and `shared_memory` (one host)."""

    name: ClassVar[str] = "ipc"
    reads_in_place: ClassVar[bool] = True
    max_readers: ClassVar[int | None] = MAX_READERS

    def endpoint(self, device: torch.device) -> Any:
        """Return that streams are read, and why this GPU's memory cannot be exported, if so."""
        refused = handles.why_not() if device.type == "cuda" else None
        return {"streams": True} | ({} if refused is None else {"no_cuda_ipc": refused})

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
    def offer_trial(self, path: str) -> Iterator[list[ProbeInfo]]:
        """Yield probes in the memory of every GPU, or one in a segment."""
        devices: list[torch.device | None] = [None]
        if path == "cuda_ipc":
            devices = [torch.device("cuda", ordinal) for ordinal in _shared_gpus()]
        else:
            order_stores()
        with ExitStack() as stack:
            yield [stack.enter_context(closing(ProbeMemory(device))).info() for device in devices]

    def read_trial(self, path: str, offer: Any) -> str:
        """Open the probes of another process."""
        probes = [decode_payload(probe, ProbeInfo) for probe in offer]
        gpus = handles.local_gpu_keys() if path == "cuda_ipc" else ()
        for probe in probes:
            check_probe(probe, [*gpus, host_key()])
        if path == "cuda_ipc":
            return f"another process opened memory on {len(probes)} GPUs and read its bytes"
        return "another process opened a segment and read its bytes"


def _shared_gpus() -> Sequence[int]:
    """Return the ordinals of all GPUs. Raises BackendUnavailableError without CUDA IPC."""
    gpus = list(handles.local_gpu_keys().values())
    if reason := handles.why_not():
        raise BackendUnavailableError(reason)
    return gpus


def _cuda_ipc(trainer: Endpoint, receiver: Endpoint) -> list[Reach]:
    """Return the path between processes of one GPU; [] for a trainer on a CPU, without a reason."""
    if trainer.gpu is None:
        return []
    if trainer.gpu not in receiver.keys:
        why_not = f"the receiver is on {', '.join(receiver.keys)}, the trainer on {trainer.gpu}"
        return [Reach("cuda_ipc", why_not=why_not)]
    facts = trainer.facts if isinstance(trainer.facts, Mapping) else {}
    return [Reach("cuda_ipc", CUDA_IPC_COST, facts.get("no_cuda_ipc", ""))]


def _shared_memory(trainer: Endpoint, receiver: Endpoint) -> Reach:
    if trainer.host not in receiver.keys:
        host = receiver.host or "unknown"
        return Reach(
            "shared_memory",
            why_not=f"the receiver is on host {host}, the trainer on {trainer.host}",
        )
    same = trainer.keys[0] in receiver.keys
    return Reach("shared_memory", SHARED_MEMORY_COST if same else OTHER_GPU_COST)
