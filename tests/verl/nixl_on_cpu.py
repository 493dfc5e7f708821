"""verl's `nixl` engine without a GPU: NIXL itself is the real one, with buffers in host memory.

What is replaced belongs to CUDA: `cupy`, which the engine imports and uses for GPUs alone, pinned
memory, and `torch.cuda.synchronize`. `register_memory` and the transfers are NIXL's, by UCX.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import torch

cupy: Any = ModuleType("cupy")
cupy.ndarray = torch.Tensor  # in annotations
sys.modules.setdefault("cupy", cupy)
_zeros = torch.zeros


def zeros(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
    """Return zeros that are not pinned."""
    del pin_memory
    return _zeros(*size, **options)


patched: Any = torch
patched.cuda.synchronize = lambda *_: None
patched.zeros = zeros
importlib.import_module("verl.checkpoint_engine.nixl_checkpoint_engine")
