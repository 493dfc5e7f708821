"""What `to=` may name: a transport for every receiver."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path

from weightsync.errors import ConfigError
from weightsync.transports.base import Transport
from weightsync.transports.callback import CallbackTransport
from weightsync.transports.http_client import HttpTransport
from weightsync.transports.sglang_http import is_sglang
from weightsync.transports.sglang_server import MakeReceiver, SglangTarget, SglangTransport
from weightsync.transports.sglang_shelf import Shelf
from weightsync.transports.vllm_http import VllmHttpControl, is_vllm, plain_url
from weightsync.transports.vllm_server import worker_transports

Target = str | Callable[..., object] | Transport
Targets = Target | Iterable[Target]

_GREETING_S = 30.0
"""A vLLM server answers between decode steps."""


class Reach:
    """Makes transports for one sender. SGLang servers that it reaches share what is written.

    `make_receiver` makes the receiver that stands in for such a server, which is of a layer above.
    """

    def __init__(
        self,
        token: str | None,
        *,
        verify_tls: bool | str = True,
        make_receiver: MakeReceiver | None = None,
    ) -> None:
        self._token = token
        self._verify_tls = verify_tls
        self._make_receiver = make_receiver
        self._shelves: dict[Path | None, Shelf] = {}

    def every(self, to: Targets) -> list[Transport]:
        """Return a transport per receiver. Raises ConfigError for a target of no known kind."""
        alone = (
            isinstance(to, str)
            or callable(to)
            or hasattr(to, "call")
            or not isinstance(to, Iterable)
        )
        targets = [to] if alone else list(to)  # type: ignore[arg-type]  # the line above
        if not targets:
            raise ConfigError("to= names no receiver")
        made: list[Transport] = []
        try:
            for target in targets:
                made += self._transports(target)
        except BaseException:
            for transport in made:
                transport.close()
            raise
        return made

    def one(self, target: object) -> Transport:
        """Return the transport to one receiver. Raises ConfigError for a target that is several."""
        transports = self._transports(target)
        if len(transports) > 1:
            for transport in transports:
                transport.close()
            raise ConfigError(
                f"{target} has {len(transports)} workers, which are receivers by themselves; name "
                "it when you connect()"
            )
        return transports[0]

    def _transports(self, target: object) -> Sequence[Transport]:
        """Return the transports to what a target names: several to a vLLM of many workers."""
        if not isinstance(target, str):
            return [_transport(target)]
        sglang = SglangTarget.parse(target)
        if sglang is not None:
            return [self._sglang(sglang)]
        token, trust = self._token, self._verify_tls
        said = plain_url(target)
        if said is None and not is_vllm(target, token, verify_tls=trust):
            if self._make_receiver and is_sglang(target, token, verify_tls=trust):
                return [self._sglang(SglangTarget(url=target))]
            return [HttpTransport(target, token, verify_tls=trust)]
        control = VllmHttpControl(said or target, token, verify_tls=trust)
        control.greet(timeout_s=_GREETING_S)
        return worker_transports(control, timeout_s=_GREETING_S)

    def _sglang(self, target: SglangTarget) -> Transport:
        if self._make_receiver is None:
            raise ConfigError(f"{target.url}: SGLang is reached by connect()")
        shelf = self._shelves.get(target.directory)
        if shelf is None:
            shelf = self._shelves[target.directory] = Shelf(target.directory)
        return SglangTransport(
            target, shelf, self._make_receiver, token=self._token, verify_tls=self._verify_tls
        )


def make_transports(
    to: Targets, *, token: str | None, verify_tls: bool | str = True
) -> list[Transport]:
    """Return a transport per receiver, SGLang's excepted; see Reach.every."""
    return Reach(token, verify_tls=verify_tls).every(to)


def make_transport(
    target: object, token: str | None, *, verify_tls: bool | str = True
) -> Transport:
    """Return the transport to one receiver, SGLang's excepted; see Reach.one."""
    return Reach(token, verify_tls=verify_tls).one(target)


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
