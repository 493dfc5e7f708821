"""Receivers inside Ray actors: `ws.ray.WeightSyncActor` and `@ws.ray.remote`.

    @ws.ray.remote(num_cpus=1)
    class Rollout(ws.ray.WeightSyncActor):
        def __init__(self):
            self.weightsync_receiver = ws.WeightReceiver(make_model())

Then `ws.connect(model, to=[actor, actor])` on the trainer's side.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, ClassVar, TypeVar, cast

import msgspec

from weightsync.errors import ConfigError, MissingExtraError, install_hint
from weightsync.receiver import WeightReceiver
from weightsync.transports.calls import CallThreads
from weightsync.wire import problem
from weightsync.wire.messages import ALL_CALLS

try:
    import ray

    from weightsync.transports.ray_actor import METHOD, RayActorTransport
except ImportError as exc:
    raise MissingExtraError(
        f"weightsync.ray needs more packages ({exc}); {install_hint('ray')}"
    ) from exc

__all__ = ["GROUP", "RayActorTransport", "WeightSyncActor", "remote"]

GROUP = "weightsync"
"""The concurrency group of the control methods (verbs)."""
GROUP_SIZE = 48  # an update, its retries, an abort, a status, and what 8 fetches ask for

Verb = Callable[..., Any]
F = TypeVar("F", bound=Verb)

# Ray runs plain methods of an async actor on its event loop, which a blocking method would stop.
# They run in daemon threads, at most as many as the group allows calls: interpreter exit does not
# wait for a hook that is at work in one.
_threads: CallThreads[dict[str, object]] = CallThreads()


def _grouped(method: F) -> F:
    marked: F = cast(Any, ray).method(concurrency_group=GROUP)(method)
    return marked


def _verb(call: str) -> Verb:
    """Return the actor method `call`, which takes the plain body and returns the plain reply."""

    def verb(self: WeightSyncActor, body: Mapping[str, object] | None = None) -> dict[str, object]:
        return self._receiver().handle({"call": call, "body": body or {}})

    return _named(verb, call, "WeightSyncActor")


def _async_verb(call: str) -> Verb:
    """Return the method `call` for an async actor; it runs in a thread, off the event loop."""
    blocking: Verb = getattr(WeightSyncActor, call)

    async def verb(self: WeightSyncActor, *args: object, **kwargs: object) -> dict[str, object]:
        reply: Future[dict[str, object]] = Future()
        _threads.submit(partial(blocking, self, *args, **kwargs), reply)
        return await asyncio.wrap_future(reply)

    return _named(verb, call, "_AsyncVerbs")


def _named(verb: Verb, call: str, owner: str) -> Verb:
    """Add the verb to the group, and name it by its location, so that pickle uses a reference."""
    verb.__name__, verb.__qualname__ = call, f"{owner}.{call}"
    verb.__doc__ = ALL_CALLS[call].__doc__ if call in ALL_CALLS else verb.__doc__
    return _grouped(verb)


class WeightSyncActor:
    """Base class that adds the control methods (verbs) of a receiver to an actor class.

    Decorate the class, plain or async, with `@ws.ray.remote`, and assign
    `self.weightsync_receiver`; before that every verb raises ConfigError. Each verb takes the plain
    body of its message and raises what the receiver raises. The verbs run in their own concurrency
    group, so a verb does not wait for the class's other methods, and an abort does not wait for an
    update. A class may define its own methods with these names, because senders use
    `weightsync_handle` only.

    Ray starts the calls of one caller in the order of the calls. So a call that waits for its
    arguments delays the caller's later calls, verbs included. If a trainer makes such calls, give
    `@ws.ray.remote` a `max_concurrency` of two or more.
    """

    weightsync_receiver: WeightReceiver
    _weightsync_grouped: ClassVar[bool] = False

    @_grouped
    def weightsync_handle(self, message: Mapping[str, object]) -> dict[str, object]:
        """Handle a plain message; return `{"reply": …}` or `{"problem": …}`. Never raises.

        Called by RayActorTransport.
        """
        try:
            return {"reply": self._receiver().handle(message)}
        except Exception as exc:  # noqa: BLE001  # the other side raises it
            return {"problem": msgspec.to_builtins(problem.to_problem(exc))}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raise ConfigError for plain `ray.remote`, which subclasses the class it decorates."""
        super().__init_subclass__(**kwargs)
        decorated = vars(cls).get("__ray_actor_class__")
        if decorated is not None and not vars(decorated).get("_weightsync_grouped"):
            raise ConfigError(
                f"{decorated.__name__} is decorated with ray.remote, which would make its weight "
                "verbs wait for its other methods; write @ws.ray.remote(…), with the same options"
            )

    def _receiver(self) -> WeightReceiver:
        receiver: WeightReceiver | None = getattr(self, "weightsync_receiver", None)
        if receiver is None:
            raise ConfigError(
                f"the actor {type(self).__name__} has no receiver; assign self.weightsync_receiver "
                "= ws.WeightReceiver(model) in its __init__"
            )
        return receiver


for _call in ALL_CALLS:
    setattr(WeightSyncActor, _call, _verb(_call))
VERBS = (*ALL_CALLS, METHOD)
_AsyncVerbs = type("_AsyncVerbs", (), {call: _async_verb(call) for call in VERBS})


def remote(*args: type, **options: Any) -> Any:
    """Make a Ray actor class of a subclass of WeightSyncActor; takes the options of `ray.remote`.

    `@ws.ray.remote` or `@ws.ray.remote(num_cpus=1, …)`. Adds the concurrency group of the verbs to
    the option `concurrency_groups`. Raises ConfigError for other classes.
    """
    if args and (options or len(args) > 1 or not inspect.isclass(args[0])):
        raise ConfigError(
            "write @ws.ray.remote, or @ws.ray.remote(num_cpus=…) with options by name"
        )
    if args:
        return _make_actor_class(args[0], {})
    return lambda cls: _make_actor_class(cls, options)


def _make_actor_class(cls: type, options: dict[str, Any]) -> Any:
    if not inspect.isclass(cls) or not issubclass(cls, WeightSyncActor):
        raise ConfigError(f"{cls!r} is no subclass of ws.ray.WeightSyncActor; derive it from that")
    if _is_async(cls):
        for call in VERBS:
            if getattr(cls, call) is getattr(WeightSyncActor, call):
                setattr(cls, call, getattr(_AsyncVerbs, call))
    cls._weightsync_grouped = True
    groups = {GROUP: GROUP_SIZE, **(options.get("concurrency_groups") or {})}
    return ray.remote(**{**options, "concurrency_groups": groups})(cls)


def _is_async(cls: type) -> bool:
    """Return whether Ray will run the methods of `cls` on event loops."""
    members = inspect.getmembers(cls)
    return any(inspect.iscoroutinefunction(m) or inspect.isasyncgenfunction(m) for _, m in members)
