"""Receivers that hold DTensor shards of a model of transformers, one in each process."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import weightsync as ws
from tests.e2e.serving import serve_http
from tests.megatron import models
from tests.megatron.ranks import Case
from weightsync.weights.copying.shards import gather


class Served(NamedTuple):
    case: Case
    module: nn.Module
    receiver: ws.WeightReceiver
    stop: Callable[[], None]


SERVED: list[Served] = []


def placed(name: str) -> list[Placement]:
    """As tensor parallelism has it; experts are split by their rows."""
    if any(part in name for part in ("o_proj", "down_proj.weight")):
        return [Shard(1)]
    if "gate_up_proj" in name:
        return [Shard(1)]
    if any(part in name for part in ("_proj", "embed_tokens", "lm_head")):
        return [Shard(0)]
    return [Replicate()]


def serve(rank: int, case: Case) -> str:
    """Serve a shard, and return its URL."""
    module = models.checkpoint_model(case.family, 99)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for prefix, part in module.named_modules():
        for key, parameter in list(part.named_parameters(recurse=False)):
            made = distribute_tensor(parameter.detach(), mesh, placed(f"{prefix}.{key}"))
            setattr(part, key, nn.Parameter(made))
    receiver = ws.WeightReceiver(module)
    listener = socket.create_server(("127.0.0.1", 0))
    mount, stop = serve_http(listener)
    mount("shard", receiver)
    SERVED.append(Served(case, module, receiver, stop))
    return f"http://127.0.0.1:{listener.getsockname()[1]}/shard"


def differing(rank: int, step: int) -> list[str]:
    """Return the tensors that differ from those of a step, gathered by all workers."""
    case, module, *_ = SERVED[-1]
    wanted: Any = models.checkpoint_model(case.family, step).state_dict()
    return [n for n, t in module.state_dict().items() if not gather(t).equal(wanted[n])]


def end(rank: int) -> None:
    for served in SERVED:
        served.receiver.close()
        served.stop()
    SERVED.clear()
