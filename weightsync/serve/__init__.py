"""The reference inference server: a Hugging Face model that generates while weights arrive.

The names here are tools for the processes of any server. They load on first use, so
`import weightsync.serve` loads neither torch nor an optional package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightsync.serve.constant_list import ConstantList
    from weightsync.serve.process_managers import (
        APIServerProcessManager,
        ClientConfig,
        PolledManager,
        ProcessManager,
        kill_process_tree,
        shutdown,
        wait_for_completion_or_failure,
    )
    from weightsync.serve.ray_engines import RayEngines

__all__ = [
    "APIServerProcessManager",
    "ClientConfig",
    "ConstantList",
    "PolledManager",
    "ProcessManager",
    "RayEngines",
    "kill_process_tree",
    "shutdown",
    "wait_for_completion_or_failure",
]

_MODULES = {
    "constant_list": ("ConstantList",),
    "process_managers": (
        "APIServerProcessManager",
        "ClientConfig",
        "PolledManager",
        "ProcessManager",
        "kill_process_tree",
        "shutdown",
        "wait_for_completion_or_failure",
    ),
    "ray_engines": ("RayEngines",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"weightsync.serve.{module}"), name)
    raise AttributeError(f"module 'weightsync.serve' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
