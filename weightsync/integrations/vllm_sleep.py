"""Whether a vLLM worker sleeps: its parameters have addresses then, and no memory behind them."""

from __future__ import annotations

import sys

from weightsync.errors import ConfigError

_ALLOCATORS = {
    "vllm.device_allocator.cumem": "CuMemAllocator",
    "vllm.device_allocator.xpumem": "XpuMemAllocator",
}


def refuse_asleep(step: str) -> None:
    """Raise ConfigError while weights of this process are asleep: to touch them ends the process.

    Asks the allocator of vLLM's own sleep mode, which a worker without that mode never makes.
    """
    if _weights_asleep():
        raise ConfigError(
            f"{step}: this vLLM sleeps, and its weights have no memory; wake it with "
            'wake_up(tags=["weights"]), or POST /wake_up?tags=weights, and send again'
        )


def _weights_asleep() -> bool:
    for module, name in _ALLOCATORS.items():
        made = getattr(getattr(sys.modules.get(module), name, None), "instance", None)
        allocations = getattr(made, "pointer_to_data", {}).values()
        if any(data.tag == "weights" and data.is_asleep for data in list(allocations)):
            return True
    return False
