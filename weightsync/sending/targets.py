"""What `to=` may name: a transport for every receiver."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module

from weightsync.errors import ConfigError
from weightsync.transports.base import Transport
from weightsync.transports.callback import CallbackTransport
from weightsync.transports.http_client import HttpTransport

Target = str | Callable[..., object] | Transport
Targets = Target | Iterable[Target]


def make_transports(to: Targets, *, token: str | None) -> list[Transport]:
    """Return a transport per receiver. Raises ConfigError for a target of no known kind."""
    alone = (
        isinstance(to, str) or callable(to) or hasattr(to, "call") or not isinstance(to, Iterable)
    )
    targets = [to] if alone else list(to)  # type: ignore[arg-type]  # the line above
    if not targets:
        raise ConfigError("to= names no receiver")
    return [make_transport(target, token) for target in targets]


def make_transport(target: object, token: str | None) -> Transport:
    """Return the transport to one receiver."""
    if isinstance(target, str):
        return HttpTransport(target, token)
    if type(target).__module__.partition(".")[0] == "ray":  # an actor's handle, so Ray is there
        made: Transport = import_module("weightsync.transports.ray_actor").RayActorTransport(target)
        return made
    if hasattr(target, "call") and hasattr(target, "target"):
        return target  # type: ignore[return-value]  # a protocol, checked by its members
    if callable(target):
        return CallbackTransport(target, getattr(target, "__qualname__", "callback"))
    raise ConfigError(
        f"cannot send to a {type(target).__name__}; give a URL, a Ray actor, a callable that takes "
        "and returns dicts, or a Transport"
    )
