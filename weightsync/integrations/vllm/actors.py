"""vLLM without a server as targets: an `LLM` in this process, or a Ray actor that holds an engine.

    ws.connect(model, to=vllm_targets(llm))
    ws.connect(model, to=vllm_targets(actor))

The actor's class is vLLM's `LLM` or `AsyncLLM`, or derives from one: `ray.remote(LLM).remote(...)`.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from weightsync.errors import (
    BackendUnavailableError,
    ConfigError,
    ConnectError,
    RemoteError,
    TransportTimeout,
    WeightSyncError,
)
from weightsync.integrations.vllm import rpc as vllm_door
from weightsync.integrations.vllm.server import VllmWorkerTransport, worker_transports

_GREETING_S = 300.0
"""An actor may still be loading its model."""


def vllm_targets(engine: Any, *, name: str | None = None) -> list[VllmWorkerTransport]:
    """Return what `connect(to=)` takes: a transport to every worker of a vLLM engine.

    `engine` is an `LLM`, or a Ray handle to an actor that is an `LLM` or an `AsyncLLM`, made with
    `weight_transfer_config={"backend": "weightsync"}`. An `LLM` does not generate while it is
    updated, since both are calls to it; an `AsyncLLM` is paused and resumed. Raises ConfigError for
    anything else, and for an AsyncLLM in this process, whose event loop has to run while we wait.
    """
    if type(engine).__module__.partition(".")[0] == "ray":
        control = _Engine(_through_ray(engine), name or _actor_name(engine), engine)
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
"""Takes a method's name, `timeout_s`, and the method's arguments."""


class _Engine:
    """The verbs of an engine that is no server; see VllmControl."""

    def __init__(self, call: Call, target: str, engine: Any) -> None:
        self._call = call
        self._target = target
        self._pauses = hasattr(engine, "pause_generation")
        self._sent = 0
        self._sent_nbytes = 0

    @property
    def target(self) -> str:
        """How messages name it."""
        return self._target

    @property
    def sent(self) -> tuple[int, int]:
        """Calls so far, and the bytes of what workers were told."""
        return self._sent, self._sent_nbytes

    def rpc(self, text: str, *, timeout_s: float) -> object:
        """Call every worker's door."""
        self._sent_nbytes += len(text)
        return self._do("collective_rpc", timeout_s, vllm_door.METHOD, args=(text,))

    def is_paused(self, *, timeout_s: float) -> bool:
        """Whether generation is held."""
        return bool(self._do("is_paused", timeout_s)) if self._pauses else False

    def pause(self, mode: str, *, timeout_s: float) -> None:
        """Hold generation; nothing to do where a call to the engine is what generates."""
        if self._pauses:
            self._do("pause_generation", timeout_s, mode=mode)

    def resume(self, *, timeout_s: float) -> None:
        """Let it go on."""
        if self._pauses:
            self._do("resume_generation", timeout_s)

    def reset_prefix_cache(self, *, timeout_s: float) -> None:
        """Forget what was computed with other weights."""
        if self._do("reset_prefix_cache", timeout_s, reset_running_requests=True) is False:
            raise RemoteError(
                f"{self._target}: reset_prefix_cache forgot nothing, since blocks of it are in use",
                remote_type="bool",
                remote_message="False",
            )

    def set_version(self, version: str, *, timeout_s: float) -> None:
        """Tell the engine what its weights are called."""
        self._do("update_weight_version", timeout_s, version)

    def close(self) -> None:
        """The engine is the user's."""

    def _do(self, method: str, timeout_s: float, *args: Any, **kwargs: Any) -> Any:
        self._sent += 1
        try:
            return self._call(method, timeout_s, *args, **kwargs)
        except WeightSyncError:
            raise
        except Exception as exc:
            if method == "collective_rpc" and vllm_door.has_no_door(str(exc)):
                raise BackendUnavailableError(
                    f"{self._target}: the workers of this vLLM have no engine of weightsync; make "
                    'it with weight_transfer_config={"backend": "weightsync"}, in an environment '
                    f"in which weightsync is installed ({exc})"
                ) from exc
            raise RemoteError(
                f"{self._target}: {method} raised {type(exc).__name__}: {exc}",
                remote_type=type(exc).__name__,
                remote_message=str(exc),
            ) from exc


def _in_process(engine: Any) -> Call:
    def call(method: str, _timeout_s: float, *args: Any, **kwargs: Any) -> Any:
        return getattr(engine, method)(*args, **kwargs)

    return call


def _through_ray(handle: Any) -> Call:
    ray = import_module("ray")
    errors = import_module("ray.exceptions")

    def call(method: str, timeout_s: float, *args: Any, **kwargs: Any) -> Any:
        started = time.monotonic()
        try:
            return ray.get(getattr(handle, method).remote(*args, **kwargs), timeout=timeout_s)
        except errors.GetTimeoutError as exc:
            waited = time.monotonic() - started
            raise TransportTimeout(f"the actor did not answer {method} in {waited:.0f} s") from exc
        except errors.RayTaskError:
            raise
        except errors.RayError as exc:
            raise ConnectError(f"the actor cannot be reached for {method}: {exc}") from exc

    return call


def _actor_name(handle: Any) -> str:
    return str(import_module("weightsync.transports.ray_actor").actor_name(handle))
