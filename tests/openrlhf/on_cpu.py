"""Stand-ins for what OpenRLHF calls of a GPU, so that its own code runs on a CPU.

A driver's calls do nothing, its device is the CPU, and flash-attn, which needs CUDA to be built,
is importable: OpenRLHF imports it and calls it for packed samples alone.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.distributed import device_mesh

_FLASH_ATTN = {
    "flash_attn": (),
    "flash_attn.bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"),
    "flash_attn.utils": (),
    "flash_attn.utils.distributed": ("all_gather",),
}


def pretend() -> None:
    """Put the stand-ins into this process. Idempotent; Ray calls it in each of its workers."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    cuda: Any = torch.cuda
    # A function each: torch's compiler knows them by their identity.
    cuda.synchronize = lambda *_: None
    cuda.set_device = lambda *_: None
    cuda.current_device = lambda: _Device("cpu")
    if device_mesh.init_device_mesh is not _mesh:
        _made["mesh"] = device_mesh.init_device_mesh
        device_mesh.init_device_mesh = _mesh
        vars(torch.distributed)["init_device_mesh"] = _mesh
    for name, members in _FLASH_ATTN.items():
        sys.modules.setdefault(name, _module(name, members))


class _Device(str):
    """The CPU where tensors are moved to it, and 0 in the name of a GPU."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        return "0"


_made: dict[str, Any] = {}


def _mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
    return _made["mesh"]("cpu", *args, **kwargs)


def _do_nothing(*_: object) -> None:
    pass


def _module(name: str, members: tuple[str, ...]) -> ModuleType:
    made = ModuleType(name)
    made.__spec__, made.__path__ = ModuleSpec(name, None), []
    for member in members:
        setattr(made, member, _do_nothing)
    return made
