"""Targets for vLLM without a server: an `LLM` in this process, or a Ray actor with an engine.

    ws.connect(model, to=vllm_targets(llm))
    ws.connect(model, to=vllm_targets(actor))

The actor's class is vLLM's `LLM` or `AsyncLLM`, or derives from one: `ray.remote(LLM).remote(...)`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

from weightsync.errors import (
    BackendUnavailableError,
    ConfigError,
    RemoteError,
    WeightSyncError,
)
from weightsync.integrations.vllm import rpc as vllm_rpc
from weightsync.integrations.vllm.server import (
    VllmWorkerTransport,
    cache_in_use,
    worker_transports,
)
from weightsync.transports.base import Counted

_GREETING_S = 300.0
"""An actor may still be loading its model."""


def vllm_targets(engine: Any, *, name: str | None = None) -> list[VllmWorkerTransport]:
    """Return a transport to every worker of a vLLM engine, for `connect(to=)`.

    `engine` is an `LLM`, or a Ray handle to an actor that is an `LLM` or an `AsyncLLM`, made with
    `weight_transfer_config={"backend": "weightsync"}`. An `LLM` does not generate during an update,
    because both are calls to it; an `AsyncLLM` is paused and resumed. Raises ConfigError for
    anything else, and for an AsyncLLM in this process: a call would block its event loop.
    """
    if type(engine).__module__.partition(".")[0] == "ray":
        target = name or _actor_name(engine)
        control = _Engine(_through_ray(engine, target), target, engine)
    elif inspect.iscoroutinefunction(getattr(engine, "collective_rpc", None)):
        raise ConfigError(
            "an AsyncLLM in the trainer's process cannot be waited for here; put it into a Ray "
            "actor, or serve it over HTTP"
        )
    elif callable(getattr(engine, "collective_rpc", None)):
        control = _Engine(_in_process(engine), name or type(engine).__name__, engine)
    else:
        raise ConfigError(f"{type(engine).__name__} is no vLLM engine: it has no collective_rpc")
    return worker_transports(control, timeout_s=_GREETING_S)


Call = Callable[..., Any]
"""Calls a method of an engine, given its name, `timeout_s`, and its arguments."""


class _Engine(Counted):
    """A VllmControl of an engine without a server."""

    def __init__(self, call: Call, target: str, engine: Any) -> None:
        super().__init__(target)
        self._call = call
        self._pauses = hasattr(engine, "pause_generation")

    def rpc(self, text: str, *, timeout_s: float) -> object:
        return self._do(
            "collective_rpc", timeout_s, vllm_rpc.METHOD, args=(text,), nbytes=len(text)
        )

    def is_paused(self, *, timeout_s: float) -> bool:
        return bool(self._do("is_paused", timeout_s)) if self._pauses else False

    def pause(self, mode: str, *, timeout_s: float) -> None:
        """Pause generation; does nothing for an `LLM`, which generates only inside a call."""
        if self._pauses:
            self._do("pause_generation", timeout_s, mode=mode)

    def resume(self, *, timeout_s: float) -> None:
        if self._pauses:
            self._do("resume_generation", timeout_s)

    def wake_up(self, tags: Sequence[str] | None, *, timeout_s: float) -> None:
        self._do("wake_up", timeout_s, None if tags is None else list(tags))

    def reset_prefix_cache(self, *, timeout_s: float) -> None:
        if self._do("reset_prefix_cache", timeout_s, reset_running_requests=True) is False:
            raise cache_in_use(self.target)

    def set_version(self, version: str, *, timeout_s: float) -> None:
        self._do("update_weight_version", timeout_s, version)

    def close(self) -> None:
        """Do nothing: the engine belongs to the user."""

    def _do(self, method: str, timeout_s: float, *args: Any, nbytes: int = 0, **kwargs: Any) -> Any:
        self._count(nbytes)
        try:
            return self._call(method, timeout_s, *args, **kwargs)
        except Exception as exc:
            if isinstance(exc, WeightSyncError) and not isinstance(exc, RemoteError):
                raise
            if method == "collective_rpc" and vllm_rpc.lacks_engine(str(exc)):
                raise BackendUnavailableError(
                    f"{self._target}: the workers of this vLLM have no engine of weightsync; make "
                    'it with weight_transfer_config={"backend": "weightsync"}, in an environment '
                    f"in which weightsync is installed ({exc})"
                ) from exc
            if isinstance(exc, RemoteError):
                raise
            raise RemoteError(
                f"{self._target}: {method} raised {type(exc).__name__}: {exc}",
                remote_type=type(exc).__name__,
                remote_message=str(exc),
            ) from exc


_calling: WeakKeyDictionary[Any, threading.Lock] = WeakKeyDictionary()
"""A lock for each engine of this process: an `LLM` has one socket, which one thread may use."""


def _in_process(engine: Any) -> Call:
    lock = _calling.setdefault(engine, threading.Lock())

    def call(method: str, _timeout_s: float, *args: Any, **kwargs: Any) -> Any:
        with lock:
            return getattr(engine, method)(*args, **kwargs)

    return call


def _through_ray(handle: Any, target: str) -> Call:
    ray_actor = import_module("weightsync.transports.ray_actor")

    def call(method: str, timeout_s: float, *args: Any, **kwargs: Any) -> Any:
        ref = ray_actor.submit(getattr(handle, method), target, method, *args, **kwargs)
        return ray_actor.result_of(ref, timeout_s, target, method)

    return call


def _actor_name(handle: Any) -> str:
    return str(import_module("weightsync.transports.ray_actor").actor_name(handle))
