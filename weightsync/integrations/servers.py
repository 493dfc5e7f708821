"""Transports for the URLs that `to=` names: finds out which system's server is there."""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Literal, get_args

from weightsync.errors import (
    AuthError,
    ProtocolError,
    RemoteError,
    TransportError,
    TransportTimeout,
    WeightSyncError,
)
from weightsync.integrations.sglang.files import WeightDirectory
from weightsync.integrations.sglang.memory import transports_to
from weightsync.integrations.sglang.server import SglangTarget, is_sglang
from weightsync.integrations.vllm.server import (
    VllmHttpControl,
    is_vllm,
    plain_url,
    worker_transports,
)
from weightsync.transports.base import Transport
from weightsync.transports.http import HttpTransport
from weightsync.wire.messages import StatusRequest

_PROBE_S = 5.0
_GREETING_S = 30.0
"""A vLLM server replies between two decode steps."""
_FILES_TIMES = 5
"""An SGLang server that loads files answers nothing: a call may take this many `timeout_s`."""


_LOADING = (502, 503, 504)
"""Statuses of a proxy whose server does not listen yet, and of a server that loads its model."""
_PAUSE_S = 0.3
_LEAST_S = 0.1
"""Seconds of a request if the time of a target is used up: enough for a server that answers."""

logger = logging.getLogger(__name__)

Engine = Literal["vllm", "sglang"]
_ENGINES = get_args(Engine)


def read_target(target: str) -> tuple[str, Engine | None]:
    """Return the plain URL of a target such as `vllm+http://host:1`, and the engine that it names.

    Raises ConfigError for an engine's scheme without a URL.
    """
    if (url := plain_url(target)) is not None:
        return url, "vllm"
    if (sglang := SglangTarget.parse(target)) is not None:
        return sglang.url, "sglang"
    return target, None


def find_engine(
    url: str, token: str | None, verify_tls: bool | str, timeout_s: float
) -> Engine | None:
    """Detect, by a request, which engine's server answers at a plain URL."""
    if is_vllm(url, token, verify_tls=verify_tls, timeout_s=timeout_s):
        return "vllm"
    if is_sglang(url, token, verify_tls=verify_tls, timeout_s=timeout_s):
        return "sglang"
    return None


class ServerTransports:
    """The transports to one sender's servers; see TransportFactory."""

    def __init__(
        self,
        token: str | None,
        *,
        verify_tls: bool | str,
        timeout_s: float = _GREETING_S,
    ) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._token = token
        self._verify_tls = verify_tls
        self._weight_dirs: dict[Path | None, WeightDirectory] = {}

    def transports(self, target: str, *, wait_s: float = 0.0) -> Sequence[Transport]:
        """Return the transports for a URL: several for a server of several workers.

        A server that does not answer yet is waited for, for `wait_s`. Called from several threads
        at once. All requests together take `timeout_s` at most. Raises TransportTimeout for a
        server that accepts a connection and does not answer within that time, or whose name is not
        resolved; ConnectError where no connection could be made within it; AuthError for a server
        of no known kind that refuses the token.
        """
        token, trust = self._token, self._verify_tls
        url, engine = read_target(target)
        if wait_s:
            _await(url, verify_tls=trust, wait_s=wait_s)
        deadline = time.monotonic() + self._timeout_s
        if engine is None:
            refused = _refusal(url, token, verify_tls=trust, timeout_s=self._timeout_s)
            if refused is not None:
                left_s = max(deadline - time.monotonic(), _LEAST_S)
                engine = find_engine(url, token, trust, min(_PROBE_S, left_s / len(_ENGINES)))
            if engine is None and isinstance(refused, AuthError):
                raise refused
        if engine == "vllm":
            return self._vllm(url, deadline)
        if engine == "sglang":
            return self._sglang(SglangTarget.parse(target) or SglangTarget(url=url))
        return [HttpTransport(url, token, verify_tls=trust)]

    def _vllm(self, url: str, deadline: float) -> Sequence[Transport]:
        control = VllmHttpControl(url, self._token, verify_tls=self._verify_tls)

        def left_s() -> float:
            return min(_GREETING_S, max(deadline - time.monotonic(), _LEAST_S))

        control.greet(timeout_s=left_s())
        return worker_transports(control, timeout_s=left_s())

    def _sglang(self, target: SglangTarget) -> Sequence[Transport]:
        return transports_to(
            target,
            lambda: self._weight_dir(target.directory),
            token=self._token,
            verify_tls=self._verify_tls,
            patience_s=_FILES_TIMES * self._timeout_s,
        )

    def _weight_dir(self, directory: Path | None) -> WeightDirectory:
        """Return the directory of snapshots, one for all servers that share it."""
        with self._lock:
            if directory not in self._weight_dirs:
                self._weight_dirs[directory] = WeightDirectory(directory)
            return self._weight_dirs[directory]


def _await(url: str, *, verify_tls: bool | str, wait_s: float) -> None:
    """Return when a server answers at a plain URL, or after `wait_s`; says once that it waits.

    Also where TLS fails: a certificate that is refused now is refused later.
    """
    deadline = time.monotonic() + wait_s
    why = ""
    with closing(HttpTransport(url, "", verify_tls=verify_tls)) as probe:
        while True:
            try:
                left_s = max(deadline - time.monotonic(), _PAUSE_S)
                status, _ = probe.get("weight_info", timeout_s=min(_PROBE_S, left_s))
                missing = f"{url} answers {status}" if status in _LOADING else ""
            except TransportError as exc:
                missing = "" if isinstance(exc.__cause__, ssl.SSLError) else str(exc)
            if not missing or time.monotonic() > deadline:
                return
            if not why:
                why = missing
                logger.warning("waiting up to %g s for a server: %s", wait_s, why)
            time.sleep(_PAUSE_S)


def _refusal(
    url: str, token: str | None, *, verify_tls: bool | str, timeout_s: float
) -> WeightSyncError | None:
    """Return the error of a server that is of another kind; None where it has our `weight_info`.

    A user's app may also have routes of other engines. None, too, for a server that refuses
    connections: the transport's first call then raises that. What took the time of a call is
    raised at once, since that call would take it again.
    """
    probe = HttpTransport(url, token, verify_tls=verify_tls)
    try:
        probe.call(StatusRequest(), timeout_s=timeout_s)
    except TransportTimeout:
        raise
    except (AuthError, ProtocolError, RemoteError) as exc:
        return exc
    except WeightSyncError as exc:
        if _took_its_time(exc):
            raise
        return None
    finally:
        probe.close()
    return None


def _took_its_time(error: BaseException | None) -> bool:
    """Whether an error comes of a connection that was not made in time."""
    while error is not None and not isinstance(error, TimeoutError):
        error = error.__cause__
    return error is not None
