"""vLLM's sleep mode: the receivers of workers know it, and the engine waits for new weights.

A worker frees its weights in `sleep`, of level 2 without a copy, and vLLM itself generates from
whatever its memory holds after `wake_up`. Which of the two it was is read from vLLM's allocator.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from weightsync.errors import ConfigError
from weightsync.receiver import WeightReceiver

_ALLOCATORS = {
    "vllm.device_allocator.cumem": "CuMemAllocator",
    "vllm.device_allocator.xpumem": "XpuMemAllocator",
}
_WEIGHTS = "weights"
_MARK = "_weightsync_sleep"


def refuse_asleep(step: str) -> None:
    """Raise ConfigError while weights of this process are asleep: an access ends the process.

    Reads the allocator of vLLM's sleep mode, which a worker without that mode does not have.
    """
    if any(data.is_asleep for data in _allocations()):
        raise ConfigError(
            f"{step}: this vLLM sleeps, and its weights have no memory; wake it with "
            'wake_up(tags=["weights"]), or POST /wake_up?tags=weights, and send again'
        )


def _allocations() -> Iterator[Any]:
    """Yield what vLLM's allocator knows of each allocation of weights; nothing without one."""
    for module, name in _ALLOCATORS.items():
        made = getattr(getattr(sys.modules.get(module), name, None), "instance", None)
        for data in list(getattr(made, "pointer_to_data", {}).values()):
            if data.tag == _WEIGHTS:
                yield data


def _level_of(worker: Any, level: int) -> int:
    """Return the level at which the worker sleeps, which was asked for `level`.

    vLLM's workers on a CPU ignore it, and keep everything. An allocator that sleeps already keeps
    what it kept then. Another mechanism than vLLM's allocator is taken at its word.
    """
    asleep = [data for data in _allocations() if data.is_asleep]
    if asleep:
        return 2 if any(data.cpu_backup_tensor is None for data in asleep) else 1
    return 1 if worker.device.type == "cpu" else level


def watch_workers(base: type, receiver_of: Callable[[Any], WeightReceiver | None]) -> None:
    """Have the workers that inherit from vLLM's WorkerBase tell their receivers. Idempotent.

    Called in the process of a worker, whose class exists by then.
    """
    for kind in _heirs(base):
        for name, wrap in _WRAPPED.items():
            method = vars(kind).get(name)
            if method is not None and not hasattr(method, _MARK):
                wrapped = functools.wraps(method)(wrap(method, receiver_of))
                setattr(wrapped, _MARK, True)
                setattr(kind, name, wrapped)


def _heirs(base: Any) -> Iterator[Any]:
    for kind in base.__subclasses__():
        yield kind
        yield from _heirs(kind)


ReceiverOf = Callable[[Any], WeightReceiver | None]


def _sleep(method: Callable[..., Any], receiver_of: ReceiverOf) -> Callable[..., Any]:
    def sleep(worker: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
        receiver = receiver_of(worker)
        if receiver is None or level < 1:
            return method(worker, level, *args, **kwargs)
        receiver.show_asleep(1)  # before their memory is gone
        try:
            result = method(worker, level, *args, **kwargs)
        except BaseException:
            receiver.show_asleep(2)  # it is not known what it has freed
            raise
        receiver.show_asleep(_level_of(worker, level))
        return result

    return sleep


def _wake_up(method: Callable[..., Any], receiver_of: ReceiverOf) -> Callable[..., Any]:
    def wake_up(worker: Any, tags: Sequence[str] | None = None) -> Any:
        result = method(worker, tags)
        receiver = receiver_of(worker)
        if receiver is not None:
            receiver.show_awake(tags or None)
        return result

    return wake_up


def _discard(method: Callable[..., Any], receiver_of: ReceiverOf) -> Callable[..., Any]:
    def discard(worker: Any, tags: Sequence[str]) -> Any:
        receiver = receiver_of(worker)
        if receiver is not None and _WEIGHTS in tags:
            receiver.show_asleep(2)
        return method(worker, tags)

    return discard


_WRAPPED = {"sleep": _sleep, "wake_up": _wake_up, "discard": _discard}
