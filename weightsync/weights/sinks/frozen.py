"""Modules that compute with copies of their weights, which no update reaches: refused by name."""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch
from torch import nn

from weightsync.errors import ConfigError, shorten

logger = logging.getLogger(__name__)

_COMPILED = "_compiled_call_impl"


def check_scripted(module: nn.Module) -> None:
    """Raise ConfigError for a module that TorchScript made, or that holds such modules.

    A frozen one has its weights as constants. Of the others torch shows no tables in which a
    replaced parameter would be seen.
    """
    scripted = {
        name or type(part).__name__: part
        for name, part in module.named_modules()
        if isinstance(part, torch.jit.ScriptModule)
    }
    if not scripted:
        return
    if any(not part._c.hasattr("training") for part in scripted.values()):
        raise ConfigError(
            f"{shorten(scripted)} is a frozen ScriptModule, whose weights are constants that no "
            "update reaches; compute with the module from which it was made"
        )
    raise ConfigError(
        f"{shorten(scripted)} is a ScriptModule; give the module from which it was made, and which "
        "has the same parameters"
    )


def check_frozen(module: nn.Module) -> None:
    """Raise ConfigError where a part of the module is compiled with freezing.

    Compiled code then has the weights as constants. Only the module and its parts can be looked
    at: a compiled wrapper around it, or a compiled function that calls it, is not seen.
    """
    frozen = [
        name or type(part).__name__ for name, part in module.named_modules() if _freezes(part)
    ]
    if frozen:
        raise ConfigError(
            f"{shorten(frozen)} is compiled with freezing: its code has the weights as constants, "
            "which no update reaches; turn torch._inductor.config.freezing "
            "(TORCHINDUCTOR_FREEZING=1) off, and compile again"
        )


def warn_of_freezing(module: nn.Module) -> None:
    """Log a warning where code that is compiled around the module would freeze its weights."""
    if is_freezing():
        logger.warning(
            "torch._inductor.config.freezing is on: code that is compiled around this %s has its "
            "weights as constants that no update reaches",
            type(module).__name__,
        )


def is_freezing() -> bool:
    """Whether torch.compile freezes weights in this process, unless it is told otherwise."""
    config = sys.modules.get("torch._inductor.config")  # without it nothing is compiled
    return bool(getattr(config, "freezing", False))


def _compiled(module: nn.Module) -> Any:
    """Return what torch.compile made of a module; None where it is not compiled."""
    if "_orig_mod" in module._modules:
        return module
    return getattr(module, _COMPILED, None)


def _freezes(module: nn.Module) -> bool:
    """Whether the compiler of a module is told to freeze: by its options, or for all modules."""
    compiled = _compiled(module)
    describe = getattr(compiled, "get_compiler_config", None)
    config = describe() if callable(describe) else None
    return isinstance(config, dict) and bool(config.get("freezing"))
