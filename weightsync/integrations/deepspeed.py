"""Models that DeepSpeed trains with ZeRO-3, as sources: each rank gives its part of a parameter.

ZeRO-3 flattens each parameter and gives every rank an equal run of it, in the parameter's
`ds_tensor`; the last one may be padded. The optimizer writes there, and the parameter itself is
empty between steps, or a gathered copy. So `connect` reads `ds_tensor`, and nothing is gathered
for receivers on the host of the ranks. With ZeRO-1 and 2 the parameters are whole on every rank,
and the engine is a module like another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weightsync.arguments import Dtype
from weightsync.errors import ConfigError, ManifestMismatchError, shorten
from weightsync.weights.sinks.module_sink import ModuleTensors, Rename
from weightsync.weights.sources.flat import FlatSource, Piece, Run

TRIED = ("0.19",)
"""The versions of DeepSpeed with which the tests have run, on a CPU with Gloo."""

INSTEAD = (
    "give connect() a callable that yields (name, full tensor) on every rank, see docs/sources.md"
)


def zero_source(
    model: nn.Module, *, dtype: Dtype | None, rename: Rename | None
) -> FlatSource | None:
    """Return the source of a model whose parameters ZeRO-3 has split, None of any other one.

    `model` is DeepSpeed's engine or the module in it. Raises ConfigError, naming them, for
    parameters that DeepSpeed has split in another way, quantized, or put on a disk.
    """
    found = ModuleTensors(model)
    named = list(zip(found.names, found.tensors, strict=True))
    _check(named)
    if not any(map(_is_split, found.tensors)):
        return None

    def pieces() -> list[Piece]:
        found.refresh()
        return list(_pieces(zip(found.names, found.tensors, strict=True)))

    return FlatSource(pieces, dtype=dtype, rename=rename)


def _is_split(tensor: Any) -> bool:
    """Whether ZeRO-3 has taken over a parameter."""
    return hasattr(tensor, "ds_tensor") and hasattr(tensor, "ds_shape")


def _pieces(named: Any) -> Iterator[Piece]:
    """Yield this rank's part of each parameter; what ZeRO-3 has not taken over is whole."""
    for name, tensor in named:
        if not _is_split(tensor):
            yield Piece(name, tensor)
            continue
        part, shape = tensor.ds_tensor, tuple(tensor.ds_shape)
        if part is None or part.numel() < part.ds_numel:
            raise ManifestMismatchError(
                f"{name} is not in memory (offloaded?); bring it back before it is sent",
                mismatched=[f"{name}: no memory"],
            )
        begin = dist.get_rank(tensor.ds_process_group) * part.ds_numel
        end = min(begin + part.ds_numel, tensor.ds_numel)
        yield Piece(name, part, [Run(name, shape, begin, end, 0)] if begin < end else [])


def _check(named: Sequence[tuple[str, Any]]) -> None:
    """Raise ConfigError for parameters whose parts cannot be told."""
    for what, is_so in _REFUSED.items():
        if wrong := [name for name, tensor in named if is_so(tensor)]:
            raise ConfigError(f"{len(wrong)} parameters {what}: {shorten(wrong)}; {INSTEAD}")


def _is_on_disk(tensor: Any) -> bool:
    part = getattr(tensor, "ds_tensor", None)
    where = getattr(part, "final_location", None)
    return getattr(where, "name", where) == "nvme"


def _is_quantized(tensor: Any) -> bool:
    return hasattr(getattr(tensor, "ds_tensor", None), "ds_quant_scale")


def _is_of_expert(tensor: Any) -> bool:
    """Whether a parameter is one of DeepSpeed's MoE, of which ranks have others by the same name.

    Its group has the number of these ranks in its name. Megatron's experts have no such name.
    """
    group = str(getattr(tensor, "group_name", "ep_size_1"))
    is_expert = not getattr(tensor, "allreduce", True)
    return is_expert and (_is_split(tensor) or group != "ep_size_1")


def _is_in_part_of_ranks(tensor: Any) -> bool:
    """Whether fewer ranks than those of the group share a parameter, as MiCS has it.

    Which run a rank has is then not told by its place in the group.
    """
    if not _is_split(tensor) or tensor.ds_tensor is None:
        return False
    ranks = dist.get_world_size(tensor.ds_process_group)
    return ranks < 1 or tensor.ds_tensor.ds_numel != -(-tensor.ds_numel // ranks)


def _is_replaced(tensor: torch.Tensor) -> bool:
    return bool(getattr(tensor, "ds_is_replaced_module", False))


_REFUSED = {
    "are split by DeepSpeed's tensor parallelism": _is_replaced,
    "are of experts, which every rank names from 0": _is_of_expert,
    "are quantized by ZeRO-3": _is_quantized,
    "are offloaded to a disk by ZeRO-3": _is_on_disk,
    "are split among a part of the ranks (MiCS)": _is_in_part_of_ranks,
}
