"""Scenarios of a trainer and a receiver in two processes, for every device."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch

import weightsync as ws
from tests.gpu.receiver_process import (
    EveryDtype,
    ReceiverProcess,
    digests,
    fill,
    footprint,
    receiver_process,
)
from weightsync.cuda.handles import collect

Apply = Literal["staged", "in_place"]
WARM = 10
UPDATES = 50


def fast_path(device: str) -> str:
    return "cuda_ipc" if device == "cuda" else "shared_memory"


def several_updates(
    device: str, *, packed: bool, apply: Apply, verify: bool = True, other: str = ""
) -> None:
    """Every dtype and shape arrives bit for bit, update after update, by the fast path.

    The receiver is on the device `other`, where one is given.
    """
    model = EveryDtype(device)
    with (
        receiver_process(other or device, apply=apply) as receiver,
        ws.connect(model, to=receiver, packed=packed, verify=verify) as sender,
    ):
        for version in (1, 2, 3):
            fill(model, seed=version)
            report = sender.send_weights()
            assert report.version == version
            assert report.path == fast_path(device), report.skipped_paths
            assert report.peer is bool(other)
            assert report.packed is packed
            assert report.apply == apply
            assert (report.verified != "none") is verify
            assert receiver.digests() == digests(model)


OTHER_GPU = "GPU-00000000-0000-0000-0000-000000000001"


def on_another_gpu() -> None:
    """Have this process say that its weights are on another GPU than the one that is there.

    All else is real: handles of another process, torch's copies, streams and kernels.
    """
    import weightsync.receiver as receiver_module
    from weightsync.cuda import devices, handles
    from weightsync.shm.host_keys import host_key

    real = handles.local_gpu_keys()
    vars(handles)["local_gpu_keys"] = lambda: {**real, OTHER_GPU: 0}
    for module in (handles, receiver_module):
        vars(module)["device_keys"] = lambda _: [OTHER_GPU, host_key()]
    vars(devices)["can_access_peer"] = lambda *_: True


def another_gpu(*, packed: bool, apply: Apply, verify: bool = True) -> None:
    """Updates through the branch for another GPU, on one: what arrives, and what the report says.

    Its copies do not cross a link.
    """
    model = EveryDtype("cuda")
    with (
        receiver_process("cuda", apply=apply, before=on_another_gpu) as receiver,
        ws.connect(
            model, to=receiver, packed=packed, verify=verify, bucket_nbytes=512 << 10
        ) as sender,
    ):
        for version in (1, 2, 3):
            fill(model, seed=version)
            report = sender.send_weights()
            assert (report.path, report.peer) == ("cuda_ipc", True), report.skipped_paths
            assert report.receivers[0].gpus[0].receiver == OTHER_GPU
            assert report.verified == ("held" if verify else "none")
            assert receiver.digests() == digests(model)


def memory_moved(device: str) -> None:
    """Tensors that the trainer replaced by others, elsewhere, are found and sent."""
    model = EveryDtype(device)
    with (
        receiver_process(device) as receiver,
        ws.connect(model, to=receiver, packed=False) as sender,
    ):
        fill(model, seed=1)
        sender.send_weights()
        model.inner.weight.data = torch.empty_like(model.inner.weight)
        fill(model, seed=2)
        sender.send_weights()
        assert receiver.digests() == digests(model)


def no_growth(device: str, *, packed: bool) -> None:
    """Warm updates take no GPU memory, no descriptor and no segment on either side."""
    model = EveryDtype(device)
    with (
        receiver_process(device) as receiver,
        ws.connect(model, to=receiver, packed=packed) as sender,
    ):
        for seed in range(WARM):
            fill(model, seed)
            sender.send_weights()
        before = footprint(), receiver.footprint()
        for seed in range(UPDATES):
            fill(model, seed)
            sender.send_weights()
        assert (footprint(), receiver.footprint()) == before
        assert receiver.digests() == digests(model)


def memory_comes_back(device: str) -> None:
    """After close, the trainer's GPU memory can be freed: no export outlives its connection."""
    before = footprint()["gpu_allocated"]
    model = EveryDtype(device)
    with (
        receiver_process(device) as receiver,
        ws.connect(model, to=receiver, packed=False) as sender,
    ):
        fill(model, seed=1)
        sender.send_weights()
    del model, sender
    if device == "cuda":
        collect()
    assert footprint()["gpu_allocated"] <= before


def receiver_without_the_gpu(device: str) -> None:
    """The receiver's model is on the CPU: no GPU key fits, bytes are staged through the host."""
    model = EveryDtype(device)
    with receiver_process("cpu") as receiver, ws.connect(model, to=receiver) as sender:
        for seed in (1, 2):
            fill(model, seed)
            report = sender.send_weights()
            assert report.path == "shared_memory"
            assert receiver.digests() == digests(model)
    if device == "cuda":
        assert report.skipped_paths["cuda_ipc"]


class BrokenProbe:
    """A callback that spoils every CUDA handle of a probe on its way."""

    def __init__(self, receiver: ReceiverProcess) -> None:
        self.receiver = receiver
        self.spoiled = 0

    def __call__(self, message: Mapping[str, object]) -> object:
        spoiled: Any = copy.deepcopy(dict(message))
        for handle in cuda_handles(spoiled["body"].get("probe")):
            handle["handle"] = "AAAA"
            self.spoiled += 1
        return self.receiver(spoiled)


def cuda_handles(value: object) -> Iterator[dict[str, object]]:
    """Yield the CUDA handles of a part of a message."""
    if isinstance(value, dict):
        if value.get("kind") == "cuda":
            yield value
        for part in value.values():
            yield from cuda_handles(part)


def refused_probe(device: str, *, packed: bool | None) -> None:
    """A probe that cannot be opened costs the path, not the update; the report says why."""
    model = EveryDtype(device)
    with receiver_process(device) as receiver:
        callback = BrokenProbe(receiver)
        with ws.connect(model, to=callback, packed=packed) as sender:
            for seed in (1, 2):
                fill(model, seed)
                report = sender.send_weights()
                assert report.path == "shared_memory"
                assert receiver.digests() == digests(model)
    if device == "cuda":
        assert callback.spoiled > 0
        assert "malformed CUDA handle" in report.skipped_paths["cuda_ipc"]


def whatever_path(device: str) -> tuple[str, dict[str, str]]:
    """Send updates by the path that works here; return it, and the reasons against the others."""
    model = EveryDtype(device)
    with receiver_process(device) as receiver, ws.connect(model, to=receiver) as sender:
        for seed in (1, 2):
            fill(model, seed)
            report = sender.send_weights()
            assert receiver.digests() == digests(model)
    return report.path, dict(report.skipped_paths)
