"""SGLang's modules where its packages for GPUs are absent, and a model of it without a server.

Importing this replaces torchvision, which SGLang imports for images, and vLLM's operators, which
its rotary embedding names on a CPU. Nothing here calls either.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

CONFIG = Qwen3Config(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=256,
    tie_word_embeddings=False,
    architectures=["Qwen3ForCausalLM"],
)


class Absent(types.ModuleType):
    """A module whose names are empty classes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _stand_in(*names: str) -> None:
    for name in names:
        module = Absent(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = []
        sys.modules[name] = module


# transformers looks for torchvision as it is imported, and must find none.
for imported in ("image_utils", "image_processing_utils", "processing_utils"):
    importlib.import_module(f"transformers.{imported}")
if importlib.util.find_spec("torchvision") is None:
    _stand_in("torchvision", "torchvision.transforms", "torchvision.transforms.functional")
    modes = type("InterpolationMode", (), {"BICUBIC": 3, "BILINEAR": 2, "NEAREST": 0, "LANCZOS": 1})
    vars(sys.modules["torchvision.transforms"])["InterpolationMode"] = modes
_stand_in("vllm", "vllm._custom_ops")


def start(directory: Path) -> torch.nn.Module:
    """Publish the arguments of a server on the CPU, and return its model, with random weights."""
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.models.qwen3 import Qwen3ForCausalLM as Served
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    CONFIG.save_pretrained(directory)
    arguments = ServerArgs(
        model_path=str(directory), device="cpu", tp_size=1, skip_tokenizer_init=True
    )
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=0, gpu_id=0))
    init_distributed_environment(
        backend="gloo",
        world_size=1,
        rank=0,
        local_rank=0,
        distributed_init_method=f"file://{directory}/store",
    )
    initialize_model_parallel()
    served: torch.nn.Module = Served(CONFIG)
    return served


def trained(seed: int) -> torch.nn.Module:
    """Return the trainer's model."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(CONFIG)
