"""A trainer of Megatron-Core that sends its weights to a server; the marked lines are weightsync's.

torchrun --nproc-per-node 4 examples/megatron_trainer.py Qwen3-0.6B http://127.0.0.1:8000

The first argument is the directory of a Qwen3 checkpoint. Two ranks of tensor parallelism in each
of two pipeline stages hold the model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # torch's
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

import weightsync as ws  # new

TENSOR_PARALLEL, STAGES, STEPS = 2, 2, 3


def make_model(folder: str) -> GPTModel:
    """Return this rank's part of a Qwen3, as Megatron makes it."""
    given = json.loads((Path(folder) / "config.json").read_text())
    config = TransformerConfig(
        num_layers=given["num_hidden_layers"],
        hidden_size=given["hidden_size"],
        num_attention_heads=given["num_attention_heads"],
        num_query_groups=given["num_key_value_heads"],
        kv_channels=given["head_dim"],
        ffn_hidden_size=given["intermediate_size"],
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        normalization="RMSNorm",
        use_cpu_initialization=not torch.cuda.is_available(),
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=TENSOR_PARALLEL,
        pipeline_model_parallel_size=STAGES,
    )
    padded = -(-given["vocab_size"] // 128) * 128
    return GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
        vocab_size=padded,
        max_sequence_length=given["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=given["tie_word_embeddings"],
        position_embedding_type="rope",
    )


@torch.no_grad()
def train(model: GPTModel) -> None:
    """Stand for a step of training: your forward_backward_func and optimizer."""
    for parameter in model.parameters():
        parameter.mul_(1.01)


def main(folder: str, url: str) -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    parallel_state.initialize_model_parallel(TENSOR_PARALLEL, STAGES)
    model = make_model(folder)
    source = ws.MegatronSource(model, folder)  # new: the checkpoint's names, for each rank's part
    with ws.connect(source, to=url) as sender:  # new: every rank calls it
        for _ in range(STEPS):
            train(model)
            report = sender.send_weights()  # new
            if dist.get_rank() == 0:
                print(report)
    dist.barrier()  # Python must not end while a thread of Gloo still holds tensors
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
