"""Receivers that hold shards, one in each rank's process, behind HTTP servers of their own."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import weightsync as ws
from tests.e2e.models import digests
from tests.e2e.serving import serve_http
from tests.weights import trainer_models
from weightsync.backends.rank_streams import RankStreamsEngine
from weightsync.ranks.worker import RankWorker
from weightsync.weights.copying import shards


@dataclass
class Served:
    """A receiver of this process, its module and its server."""

    module: nn.Module
    receiver: ws.WeightReceiver
    stop: Callable[[], None]
    shard_nbytes: int


SERVED: list[Served] = []


def placements_of(name: str, tensor: torch.Tensor) -> list[Placement]:
    """As tensor parallelism has it: rows of the first projection, columns of the second."""
    if "down.weight" in name:
        return [Shard(1)]
    if tensor.dim() and ("up.weight" in name or "embed" in name or "big" in name):
        return [Shard(0)]
    return [Replicate()]


class Wide(nn.Module):
    """A projection and its inverse of 3 MiB each, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = nn.Linear(512, 1536, bias=False)
        self.down = nn.Linear(1536, 512, bias=False)
        self.norm = nn.LayerNorm(512)


class Odd(nn.Module):
    """Tensors whose rows and columns are no multiples of 2 or 3, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = nn.Linear(331, 1007, bias=False)
        self.down = nn.Linear(1007, 331)
        self.norm = nn.LayerNorm(5)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "wide": Wide,
    "odd": Odd,
    "decoder": trainer_models.plain,
    "plain": trainer_models.plain,
}


def build(kind: str) -> nn.Module:
    return KINDS[kind]()


def shard(module: nn.Module, copies: int = 1) -> nn.Module:
    """Shard the parameters of a module over all ranks, or over as many groups as `copies`."""
    size = dist.get_world_size() // copies
    mesh = init_device_mesh("cpu", (size,) if copies == 1 else (copies, size))
    known: dict[int, nn.Parameter] = {}
    for prefix, part in module.named_modules():
        for key, parameter in list(part.named_parameters(recurse=False)):
            if id(parameter) not in known:
                placed = placements_of(f"{prefix}.{key}", parameter)
                placed = [*[Replicate()] * (mesh.ndim - 1), *placed]
                made = distribute_tensor(parameter.detach().clone(), mesh, placed)
                known[id(parameter)] = nn.Parameter(made)
            setattr(part, key, known[id(parameter)])
    return module


def serve(rank: int, kind: str, apply: Any = "auto", copies: int = 1) -> str:
    """Serve a shard of a model of zeros, and return its URL."""
    module = build(kind)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.zero_()
    module = shard(module, copies)
    receiver = ws.WeightReceiver(module, apply=apply)
    listener = socket.create_server(("127.0.0.1", 0))
    mount, stop = serve_http(listener)
    mount("shard", receiver)
    locals_ = {id(t): shards.local_of(t) for t in module.state_dict().values()}
    nbytes = sum(local.nbytes for local in locals_.values())
    SERVED.append(Served(module, receiver, stop, nbytes))
    return f"http://127.0.0.1:{listener.getsockname()[1]}/shard"


def held(rank: int) -> tuple[dict[str, str], int]:
    """Return digests of the whole model, which all ranks gather, and the bytes of this shard."""
    served = SERVED[-1]
    full = ((name, shards.gather(t)) for name, t in served.module.state_dict().items())
    return digests(full), served.shard_nbytes


def fetch(rank: int, sources: list[str], backend: str = "auto") -> dict[str, Any]:
    """Fetch the weights into this shard; return the report as plain data."""
    return ws.fetch(SERVED[-1].receiver, sources, backend=backend, timeout_s=10).to_dict()


def die_in_transfer(rank: int, at: int, by: str = "SIGKILL") -> None:
    """Have rank `at` die, or stop, while it sends its part to a receiver that fetches."""
    if rank == at:
        done: list[bool] = []

        def die(self: RankWorker) -> None:
            if not done:
                done.append(True)
                os.kill(os.getpid(), signal.Signals[by])
            self._check_own()

        RankWorker._check_all = die  # type: ignore[method-assign]  # once


def die_when_loading(rank: int) -> None:
    """Have this process die while it loads its part."""

    def die(self: RankStreamsEngine, *_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    RankStreamsEngine.receive_weights = die  # type: ignore[assignment,method-assign]  # it ends


def version(rank: int) -> int:
    """Return the version of this shard."""
    return SERVED[-1].receiver.version


def write(rank: int, at: int) -> None:
    """Change one element of the shard of rank `at`, by a write to the DTensor."""
    if rank == at:
        tensor = next(SERVED[-1].module.parameters())
        with torch.no_grad():
            changed = tensor.detach().clone()
            shards.local_of(changed).view(-1)[:1] += 1
            tensor.copy_(changed)


def end(rank: int) -> None:
    """Close the receiver, and end the server."""
    for served in SERVED:
        served.receiver.close()
        served.stop()
    SERVED.clear()
