"""What `to=` may name: a transport for every receiver."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module

from weightsync.errors import ConfigError
from weightsync.transports.base import Transport
from weightsync.transports.callback import CallbackTransport
from weightsync.transports.http_client import HttpTransport
from weightsync.transports.vllm_http import VllmHttpControl, is_vllm, plain_url
from weightsync.transports.vllm_server import worker_transports

Target = str | Callable[..., object] | Transport
Targets = Target | Iterable[Target]

_GREETING_S = 30.0
"""A vLLM server answers between decode steps."""


def make_transports(
    to: Targets, *, token: str | None, verify_tls: bool | str = True
) -> list[Transport]:
    """Return a transport per receiver. Raises ConfigError for a target of no known kind."""
    alone = (
        isinstance(to, str) or callable(to) or hasattr(to, "call") or not isinstance(to, Iterable)
    )
    targets = [to] if alone else list(to)  # type: ignore[arg-type]  # the line above
    if not targets:
        raise ConfigError("to= names no receiver")
    return [transport for target in targets for transport in _transports(target, token, verify_tls)]


def make_transport(
    target: object, token: str | None, *, verify_tls: bool | str = True
) -> Transport:
    """Return the transport to one receiver. Raises ConfigError for a target that is several."""
    transports = _transports(target, token, verify_tls)
    if len(transports) > 1:
        for transport in transports:
            transport.close()
        raise ConfigError(
            f"{target} has {len(transports)} workers, which are receivers by themselves; name it "
            "when you connect()"
        )
    return transports[0]


def _transports(target: object, token: str | None, verify_tls: bool | str) -> Sequence[Transport]:
    """Return the transports to what a target names: several to a vLLM server of many workers."""
    if not isinstance(target, str):
        return [_transport(target)]
    said = plain_url(target)
    if said is None and not is_vllm(target, token, verify_tls=verify_tls):
        return [HttpTransport(target, token, verify_tls=verify_tls)]
    control = VllmHttpControl(said or target, token, verify_tls=verify_tls)
    control.greet(timeout_s=_GREETING_S)
    return worker_transports(control, timeout_s=_GREETING_S)


def _transport(target: object) -> Transport:
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
