"""A Transport to Ray actors. Messages are plain data: dicts, lists, text, numbers."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from weightsync.errors import (
    ConfigError,
    ConnectError,
    ProtocolError,
    TransportTimeout,
    WeightSyncError,
)
from weightsync.transports.base import BaseTransport
from weightsync.wire import codec, problem
from weightsync.wire.messages import CALL_OF, Reply, Request

METHOD = "weightsync_handle"
"""The actor method that handles every message; returns `{"reply"}` or `{"problem"}`."""


class RayActorTransport(BaseTransport):
    """A Transport to `actor`, a handle whose class derives from `ws.ray.WeightSyncActor`.

    Errors come back as problem documents, never as pickled exceptions. `target` names the actor in
    messages; None takes its class and id. Raises ConfigError for an actor of another class.
    """

    def __init__(self, actor: Any, target: str | None = None) -> None:
        super().__init__(target or actor_name(actor))
        method = getattr(actor, METHOD, None)
        if method is None:
            raise ConfigError(
                f"{self.target} has no method {METHOD}; derive its class from "
                "ws.ray.WeightSyncActor and decorate it with @ws.ray.remote"
            )
        self._method = method

    @property
    def local_address(self) -> str | None:
        """The address of this node in the Ray cluster; None where Ray is shut down."""
        if not ray.is_initialized():
            return None
        return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]  # Ray's

    def call(self, request: Request, *, timeout_s: float) -> Reply:
        """Send one request and return its reply; see Transport.call."""
        self._check_open()
        call = CALL_OF[type(request)]
        self._count(len(codec.encode(request)))
        ref = submit(self._method, self.target, call, codec.to_plain(request))
        return _open(result_of(ref, timeout_s, self.target, call), self.target, call)


def actor_name(actor: object) -> str:
    """Return an actor's name for messages: its class and id."""
    return " ".join(re.split(r"[(), ]+", repr(actor))).strip()


def tell_all(
    actors: Sequence[Any], call: str, body: Mapping[str, object], *, timeout_s: float
) -> None:
    """Call the method `call` of all actors at once with the plain `body`, and wait for all.

    The actors may be of any class that has the method. Raises the first error, with a note for
    each actor that failed.
    """
    deadline = time.monotonic() + timeout_s
    refs = [
        (name := actor_name(actor), _attempt(submit, _method(actor, call), name, call, body))
        for actor in actors
    ]
    failed: list[tuple[str, WeightSyncError]] = []
    for name, ref in refs:
        left = max(deadline - time.monotonic(), 0.0)
        done = (
            ref if isinstance(ref, WeightSyncError) else _attempt(result_of, ref, left, name, call)
        )
        if isinstance(done, WeightSyncError):
            failed.append((name, done))
    if failed:
        for name, error in failed:
            failed[0][1].add_note(f"{call}: {name}: {error}")
        raise failed[0][1]


def _method(actor: object, call: str) -> Any:
    method = getattr(actor, call, None)
    if method is None:
        raise ConfigError(
            f"{actor_name(actor)} has no method {call}; give it one that takes a dict"
        )
    return method


def _attempt(function: Any, *args: object) -> Any:
    try:
        return function(*args)
    except WeightSyncError as exc:
        return exc


def submit(method: Any, target: str, call: str, *args: object, **kwargs: object) -> Any:
    """Call `method` of an actor, named `call` in messages; return the reference to its result."""
    if not ray.is_initialized():  # `remote` would start a cluster of its own
        raise ConnectError(f"{target}: {call} needs Ray, which has been shut down; connect again")
    try:
        return method.remote(*args, **kwargs)
    except Exception as exc:
        raise ConnectError(
            f"{target} cannot be reached: {_one_line(exc)}; is it alive, and of this cluster?"
        ) from exc


def result_of(ref: Any, timeout_s: float, target: str, call: str) -> Any:
    """Return the result of `call`, a method of an actor, or raise its error as one of ours."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except GetTimeoutError as exc:
        raise TransportTimeout(
            f"{target} did not answer {call} within {timeout_s:g} s; send it again, or give more "
            "time with timeout_s="
        ) from exc
    except RayTaskError as exc:
        cause = exc.cause if isinstance(exc.cause, Exception) else exc
        raise problem.error_of(problem.to_problem(cause), peer=target, call=call) from exc
    except RayError as exc:  # the actor died, was killed, cannot be placed or was cut off
        raise ConnectError(
            f"{target} went away during {call}: {_one_line(exc)} Start it again, and connect to "
            "the new one."
        ) from exc


def _one_line(exc: Exception) -> str:
    """Return Ray's message, which is a table, in one line."""
    return " ".join(str(exc).split())


def _open(answer: object, target: str, call: str) -> Reply:
    if isinstance(answer, Mapping) and "problem" in answer:
        try:
            said = msgspec.convert(answer["problem"], problem.Problem)
        except msgspec.ValidationError as exc:
            raise ProtocolError(
                f"{target} answered {call} with no problem document: {exc}"
            ) from exc
        raise problem.error_of(said, peer=target, call=call)
    if not isinstance(answer, Mapping) or set(answer) != {"reply"}:
        raise codec.InvalidReplyError(
            f"{target} answered {call} with {answer!r:.200}, not with a reply or a problem; is it "
            "a weightsync actor?"
        )
    return codec.reply_from_plain(call, answer["reply"])
