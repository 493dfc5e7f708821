"""A process with a sender and a receiver, and too little shared memory or memory."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch
from torch import nn

import weightsync as ws
from weightsync.errors import WeightSyncError

MODEL_NBYTES = 64 << 20


def model() -> nn.Linear:
    return nn.Linear(MODEL_NBYTES // 4 // 1024, 1024, bias=False)


def hook(pairs: object) -> None:
    """A `load_weights` hook that drops the tensors."""


def too_little_memory() -> None:
    """Limit the address space so that a second model does not fit."""
    source = model()
    receiver = ws.WeightReceiver(hook, apply="staged")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + MODEL_NBYTES * 7 // 8  # threads of the sender have stacks, too
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with ws.connect(source, to=receiver.handle, packed=True, bucket_nbytes=1 << 20):
        print("connected")


def too_little_shared_memory() -> None:
    """A model whose parameters do not fit into /dev/shm, then a ring that does."""
    source = model()
    held = nn.Linear(source.in_features, source.out_features, bias=False)
    receiver = ws.WeightReceiver(held)
    try:
        ws.connect(source, to=receiver.handle, packed=False)
    except WeightSyncError as exc:
        print(f"{type(exc).__name__}: {exc}", flush=True)
    left = [path.name for path in Path("/dev/shm").iterdir()]
    assert not left, left
    with ws.connect(source, to=receiver.handle, packed=True) as sender:
        report = sender.send_weights()
    assert torch.equal(held.weight, source.weight)
    print(report.verified, flush=True)
    receiver.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        globals()[sys.argv[1]]()
    except WeightSyncError as exc:
        print(f"{type(exc).__name__}: {exc}", flush=True)
