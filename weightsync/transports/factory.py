"""Transports for the targets that `to=` names."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from importlib import import_module
from typing import Protocol

from weightsync.errors import ConfigError, TransportError
from weightsync.runtime.provided import provided
from weightsync.transports.base import BaseTransport, Transport, complete, first_refusal
from weightsync.transports.callback import CallbackTransport
from weightsync.transports.calls import CallThreads
from weightsync.transports.tokens import check_token_type


class LocalReceiver(Protocol):
    """A WeightReceiver, which is of a higher layer."""

    @property
    def sink(self) -> object: ...

    def handle(self, message: Mapping[str, object]) -> dict[str, object]: ...


_PATH = re.compile(r"(?:[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)*)?")
_REFUSAL_SHARE = 0.2
"""The part of `timeout_s` that targets have to refuse a token, after another was silent."""

Target = str | Callable[..., object] | Transport | LocalReceiver
Targets = Target | Iterable[Target]


class UrlTransports(Protocol):
    """Makes the transports for a URL: one per worker of the server there."""

    def transports(self, target: str, *, wait_s: float = 0.0) -> Sequence[BaseTransport]: ...


class TransportFactory:
    """Makes the transports of one sender, whose receivers are at the path `below` each target."""

    def __init__(
        self,
        token: str | None,
        *,
        verify_tls: bool | str = True,
        timeout_s: float = 30.0,
        below: str = "",
    ) -> None:
        check_token_type(token)
        self._token = token
        self._timeout_s = timeout_s
        self._verify_tls = verify_tls
        self._below = below
        self._addresses: UrlTransports | None = None
        self._lock = threading.Lock()

    def every(self, to: Targets, *, wait_s: float = 0.0) -> list[BaseTransport]:
        """Return a transport per receiver. Servers are probed at the same time.

        A server that does not answer yet is waited for, for `wait_s`.

        Raises ConfigError for a target of an unknown kind, AuthError for a server that refuses the
        token, TransportTimeout for a server that does not answer. An error that waiting longer
        would not change is raised at once, and in preference to a TransportError. After an error no
        transport stays open.
        """
        targets = targets_of(to, "to=")
        futures: list[Future[Sequence[BaseTransport]]] = [Future() for _ in targets]
        threads: CallThreads[Sequence[BaseTransport]] = CallThreads()
        for target, future in zip(targets, futures, strict=True):
            threads.submit(partial(self._transports, target, wait_s), future)
        threads.close()
        try:
            _raise_first(futures, _REFUSAL_SHARE * self._timeout_s)
        except BaseException:
            for future in futures:
                future.add_done_callback(_close_made)  # at once, or when it is made
            raise
        return [transport for future in futures for transport in future.result()]

    def one(self, target: object) -> BaseTransport:
        """Return the transport to one receiver. Raises ConfigError where there are several."""
        transports = self._transports(target)
        if len(transports) > 1:
            for transport in transports:
                transport.close()
            raise ConfigError(
                f"{target} has {len(transports)} workers, which are receivers by themselves; name "
                "it when you connect()"
            )
        return transports[0]

    def _transports(self, target: object, wait_s: float = 0.0) -> Sequence[BaseTransport]:
        """Return the transports to the receivers of a target, at the path below it."""
        made = self._of_target(target, wait_s)
        if not self._below:
            return made
        try:
            return [transport.below(self._below) for transport in made]
        except BaseException:
            for transport in made:
                transport.close()
            raise

    def _of_target(self, target: object, wait_s: float) -> Sequence[BaseTransport]:
        """Return the transports for a target: several for a server of several workers."""
        if not isinstance(target, str):
            return [_transport(target)]
        with self._lock:
            if self._addresses is None:
                # Loaded with the first URL: HTTP would slow down `import weightsync`.
                made: UrlTransports = provided("servers")(
                    self._token,
                    verify_tls=self._verify_tls,
                    timeout_s=self._timeout_s,
                )
                self._addresses = made
        return self._addresses.transports(target, wait_s=wait_s)


def _raise_first(futures: Sequence[Future[Sequence[BaseTransport]]], timeout_s: float) -> None:
    """Wait for all; raise the first error, but a definite one before a TransportError.

    Before that is raised, the other targets have `timeout_s` to refuse their token.
    """
    left = set(futures)
    while left:
        done, left = wait(left, return_when=FIRST_EXCEPTION)
        for future in futures:
            error = future.exception() if future in done else None
            if error is not None and not isinstance(error, TransportError):
                raise error
    failed = [error for future in futures if (error := future.exception()) is not None]
    if failed:
        made = [future.result() for future in futures if future.exception() is None]
        raise first_refusal([t for each in made for t in each], timeout_s) or failed[0]


def _close_made(future: Future[Sequence[BaseTransport]]) -> None:
    if future.exception() is None:
        for transport in future.result():
            transport.close()


def check_path(path: object) -> str:
    """Return the path of a receiver below a URL; "" is the URL itself. Raises ConfigError."""
    if not isinstance(path, str) or not _PATH.fullmatch(path):
        raise ConfigError(
            f"{path!r:.60} is no path of a receiver below a URL; give names, with / in between"
        )
    return path


def targets_of(to: Targets, argument: str) -> list[Target]:
    """Return the targets of an argument. Raises ConfigError where it names none."""
    alone = (
        isinstance(to, str) or callable(to) or hasattr(to, "call") or not isinstance(to, Iterable)
    )
    targets: list[Target] = [to] if alone else list(to)  # type: ignore[arg-type, list-item]  # above
    if not targets:
        raise ConfigError(f"{argument} names no receiver")
    return targets


def twins_of(targets: Iterable[Target]) -> list[Target]:
    """Return the targets for one more part of a set: of a transport, which is closed, its twin."""
    return [
        complete(target).twin()  # type: ignore[arg-type]  # a protocol, checked by its members
        if _is_transport(target)
        else target
        for target in targets
    ]


def described(targets: Iterable[object]) -> str:
    """Return the targets as text that is the same in every process that has the same ones.

    In any order. An object that exists in one process only is described by its kind.
    """
    text = ", ".join(sorted(map(_described, targets)))
    return text.encode("utf-8", "backslashreplace").decode()


def _described(target: object) -> str:
    if isinstance(target, str):
        return target
    if type(target).__module__.partition(".")[0] == "ray":
        return repr(target)  # a handle's class and id
    if hasattr(target, "call") and isinstance(name := getattr(target, "target", None), str):
        return name
    is_local = callable(getattr(target, "handle", None)) or callable(target)
    return "a receiver of this process" if is_local else f"a {type(target).__name__}"


def _is_transport(target: object) -> bool:
    return hasattr(target, "call") and hasattr(target, "target")


def _transport(target: object) -> BaseTransport:
    if type(target).__module__.partition(".")[0] == "ray":  # a handle, so Ray is installed
        made: BaseTransport = import_module("weightsync.transports.ray_actor").RayActorTransport(
            target
        )
        return made
    if _is_transport(target):
        return complete(target)  # type: ignore[arg-type]  # a protocol, checked by its members
    handle = getattr(target, "handle", None)
    if callable(handle) and hasattr(target, "sink"):
        return CallbackTransport(handle, handle.__qualname__)
    if hasattr(target, "named_parameters"):
        raise ConfigError(
            f"to= is a module, {type(target).__name__}; give a receiver of it: "
            "WeightReceiver(module)"
        )
    if callable(target):
        return CallbackTransport(target, getattr(target, "__qualname__", "callback"))
    raise ConfigError(
        f"cannot send to an object of {type(target).__name__}; give a URL, a Ray actor, a "
        "WeightReceiver, a callable that takes and returns dicts, or a Transport"
    )
