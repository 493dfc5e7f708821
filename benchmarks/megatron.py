"""The trainer of `benchmarks.shards` that is a model of megatron-core, TP 2 x PP 2.

The model has the shape of a Llama with tied embeddings. Its export by a gather, to compare with:
each rank broadcasts its parts, and all put full tensors together, as an export for a checkpoint
does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # torch's
from torch import nn

import weightsync as ws

HIDDEN, FFN, HEADS, GROUPS, WIDTH, VOCAB, PADDED = 1024, 2816, 8, 4, 128, 32000, 32064
SENT = torch.bfloat16
TP, PP = 2, 2


def shapes_of(mib: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a checkpoint of about `mib` MiB, an even number of layers."""
    outside: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HEADS * WIDTH, HIDDEN),
        "self_attn.k_proj": (GROUPS * WIDTH, HIDDEN),
        "self_attn.v_proj": (GROUPS * WIDTH, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * WIDTH),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (FFN, HIDDEN),
        "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
    }
    numel = sum(map(torch.Size.numel, map(torch.Size, layer.values())))
    left = (mib << 20) // SENT.itemsize - VOCAB * HIDDEN
    layers = max(2, round(left / numel / 2) * 2)
    inside = {
        f"model.layers.{i}.{name}.weight": shape
        for i in range(layers)
        for name, shape in layer.items()
    }
    return {**outside, **inside}


def build_receiver(mib: int, dtype: torch.dtype) -> nn.Module:
    """Return a module with the tensors of the checkpoint."""
    root = nn.Module()
    for i, (name, shape) in enumerate(shapes_of(mib).items()):
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.int32) % 251 + i % 5
        module.register_parameter(leaf, nn.Parameter(numbers.view(shape).to(dtype)))
    return root


def build_trainer(state: dict[str, torch.Tensor]) -> tuple[nn.Module, ws.MegatronSource]:
    """Return the model of this rank, which holds its parts of `state`, and its source."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.Tensor.cuda = lambda self: self  # type: ignore[method-assign, assignment, misc]
    logging.disable(logging.WARNING)
    parallel_state = import_module("megatron.core.parallel_state")  # not for other trainers
    gpt = import_module("megatron.core.models.gpt")
    specs = import_module("megatron.core.models.gpt.gpt_layer_specs")
    configs = import_module("megatron.core.transformer.transformer_config")

    parallel_state.initialize_model_parallel(TP, PP)
    config = configs.TransformerConfig(
        num_layers=sum(name.endswith("q_proj.weight") for name in state),
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=WIDTH,
        ffn_hidden_size=FFN,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=SENT,
        pipeline_dtype=SENT,
        tensor_model_parallel_size=TP,
        pipeline_model_parallel_size=PP,
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    model = gpt.GPTModel(
        config,
        specs.get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=PADDED,
        max_sequence_length=64,
        pre_process=stage == 0,
        post_process=stage == PP - 1,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    ).to(SENT)
    checkpoint = {"model_type": "llama", "vocab_size": VOCAB, "tie_word_embeddings": True}
    source = ws.MegatronSource(model, checkpoint)
    held = source.holdings()
    with torch.no_grad():
        for name, box, tensor in zip(held.names, held.boxes, held.tensors(), strict=True):
            for inside, part in box.parts():
                tensor[part].copy_(state[name][inside])
    return model, source


def export_of(source: ws.MegatronSource) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    """Return a callable of all ranks that yields full tensors. Collective, as each call is."""
    held = source.holdings()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, list(zip(held.names, held.boxes, strict=True)))
    owners: dict[str, dict[Any, int]] = {}
    for rank, listed in enumerate(everyone):
        for name, box in listed:
            owners.setdefault(name, {}).setdefault(box, rank)

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        own = dict(zip(zip(held.names, held.boxes, strict=True), held.tensors(), strict=True))
        for name, boxes in owners.items():
            full = torch.empty(next(iter(boxes)).shape, dtype=SENT)
            for box, rank in boxes.items():
                part = torch.empty(box.local_shape, dtype=SENT)
                if rank == dist.get_rank():
                    part.copy_(own[name, box])
                dist.broadcast(part.view(torch.uint8), rank)
                for inside, at in box.parts():
                    full[inside] = part[at]
            yield name, full

    return export
