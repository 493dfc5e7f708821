"""Named profiler scopes: torch.profiler, NVTX (Nsight Systems), or none."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from weightsync.cuda import devices
from weightsync.errors import BackendUnavailableError, ConfigError

SETTING = "WEIGHTSYNC_PROFILE"
"""Environment variable: `record_function` (torch.profiler), `nvtx` (Nsight Systems) or `off`."""

Scope = Callable[[str], AbstractContextManager[object]]


def scope(name: str) -> AbstractContextManager[object]:
    """Return a context manager that profilers show as `name`; by default it does nothing.

    WEIGHTSYNC_PROFILE is read at the first call and then holds for the process. Raises ConfigError
    for an unknown value, BackendUnavailableError for nvtx without CUDA.
    """
    return _chosen()(name)


def scope_for(setting: str) -> Scope:
    """Return the function that makes scopes for `setting`; raises the same errors as `scope`."""
    kind = setting.strip().lower() or "off"
    if kind not in _SCOPES:
        raise ConfigError(f"{SETTING} is {setting!r}; wanted {', '.join(_SCOPES)} or nothing")
    if kind == "nvtx" and not devices.is_available():
        raise BackendUnavailableError(
            f"{SETTING} is nvtx, and torch finds no CUDA GPU; use record_function"
        )
    return _SCOPES[kind]


def _recorded(name: str) -> AbstractContextManager[object]:
    return torch.profiler.record_function(name)


_SCOPES: dict[str, Scope] = {
    "off": nullcontext,
    "record_function": _recorded,
    "nvtx": devices.nvtx_range,
}


@functools.cache
def _chosen() -> Scope:
    return scope_for(os.environ.get(SETTING, ""))
