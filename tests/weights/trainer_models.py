"""Sharded models of trainers, equal on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

WIDTH = 10


class Layer(nn.Module):
    """Sizes that no number of ranks divides: 7 rows, one row, and a bias of 3."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7, bias=False)
        self.down = nn.Linear(7, WIDTH)
        self.gate = nn.Linear(WIDTH, 1)
        self.register_buffer("rope", torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(self.up(x)) * self.gate(x)
        return out


class Decoder(nn.Module):
    """Three layers between an embedding and a tied head."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.arange(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def plain(layers: int = 3) -> Decoder:
    torch.manual_seed(7)
    return Decoder(layers)


def fsdp(layers: int = 3, *, bf16: bool = False, **options: object) -> Decoder:
    model = plain(layers)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if bf16 else MixedPrecisionPolicy()
    for part in [*model.layers, model]:
        fully_shard(part, mp_policy=policy, **options)  # type: ignore[call-overload]  # passed on
    return model


def one_dimension() -> Decoder:
    return fsdp(mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def hybrid() -> Decoder:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "shard"))
    return fsdp(mesh=mesh)


def offloaded() -> Decoder:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return fsdp(mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))


def tensor_parallel() -> Decoder:
    """FSDP over one dimension of a mesh, tensor parallelism over the other, one copied around."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    model = plain()
    for layer in model.layers:
        assert isinstance(layer, Layer)
        for linear, dim in ((layer.up, 0), (layer.down, 1)):
            linear.weight = nn.Parameter(distribute_tensor(linear.weight, mesh["tp"], [Shard(dim)]))
        layer.gate.weight = nn.Parameter(
            distribute_tensor(layer.gate.weight, mesh["tp"], [Replicate()])
        )
        layer.down.bias = nn.Parameter(
            distribute_tensor(layer.down.bias, mesh["tp"], [Replicate()])
        )
        layer.gate.bias = nn.Parameter(
            distribute_tensor(layer.gate.bias, mesh["tp"], [Replicate()])
        )
    for part in model.layers:
        fully_shard(part, mesh=mesh["dp"])
    return model


def flat(
    *, use_orig_params: bool = False, strategy: ShardingStrategy | None = None, **options: Any
) -> FullyShardedDataParallel:
    """FSDP1: each layer is a flat parameter, of which each rank has a run of elements."""

    def made(part: nn.Module) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(
            part,
            device_id=torch.device("cpu"),
            use_orig_params=use_orig_params,
            sharding_strategy=strategy,
            **options,
        )

    model = plain()
    for i, layer in enumerate(model.layers):
        model.layers[i] = made(layer)
    return made(model)


def flat_originals() -> FullyShardedDataParallel:
    return flat(use_orig_params=True)


def flat_hybrid() -> FullyShardedDataParallel:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "shard"))
    return flat(strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)


def flat_kept() -> FullyShardedDataParallel:
    """After a forward pass the gathered parameters stay, until a backward pass."""
    return flat(strategy=ShardingStrategy.SHARD_GRAD_OP)


def accelerated() -> nn.Module:
    """FSDP1 as Accelerate's `prepare` makes it. Its one choice of ours: on CPUs it takes DDP."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator: Any = Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Layer"],
    )
    made: nn.Module = accelerator.prepare(plain())
    assert isinstance(made, FullyShardedDataParallel)
    return made


def replicated() -> DistributedDataParallel:
    return DistributedDataParallel(plain())


MODELS = {made.__name__: made for made in (one_dimension, hybrid, offloaded, tensor_parallel)}


FLAT_MODELS = {
    made.__name__: made for made in (flat, flat_originals, flat_hybrid, flat_kept, accelerated)
}


def is_unsharded(model: nn.Module) -> bool:
    managed = [part for part in model.modules() if isinstance(part, FSDPModule)]
    assert managed
    return any(not isinstance(p, DTensor) for part in managed for p in part.parameters())
