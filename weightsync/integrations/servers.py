"""What stands behind a URL that `to=` names. Loaded with the first: HTTP takes a while to load."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from weightsync.errors import (
    AuthError,
    ProtocolError,
    RemoteError,
    TransportTimeout,
    WeightSyncError,
)
from weightsync.integrations.sglang.files import WeightDirectory
from weightsync.integrations.sglang.server import (
    SglangTarget,
    SglangTransport,
    is_sglang,
)
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
"""A vLLM server answers between decode steps."""
_FILES_TIMES = 5
"""SGLang reads files while it is asked nothing else: one call may take so many `timeout_s`."""


class ServerTransports:
    """Makes transports to the servers of one sender; see TransportFactory."""

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
        self._shelves: dict[Path | None, WeightDirectory] = {}

    def transports(self, target: str) -> Sequence[Transport]:
        """Return the transports to what a URL names: several to a vLLM of many workers.

        Called from several threads at once. Raises TransportTimeout for a server that takes a
        connection and does not answer for `timeout_s`.
        """
        sglang = SglangTarget.parse(target)
        if sglang is not None:
            return [self._sglang(sglang)]
        token, trust = self._token, self._verify_tls
        said = plain_url(target)
        if said is None:
            most_s = min(_PROBE_S, self._timeout_s)
            ours = _is_ours(target, token, verify_tls=trust, timeout_s=self._timeout_s)
            if ours or not is_vllm(target, token, verify_tls=trust, timeout_s=most_s):
                if not ours and is_sglang(target, token, verify_tls=trust, timeout_s=most_s):
                    return [self._sglang(SglangTarget(url=target))]
                return [HttpTransport(target, token, verify_tls=trust)]
        control = VllmHttpControl(said or target, token, verify_tls=trust)
        greeting_s = min(_GREETING_S, self._timeout_s)
        control.greet(timeout_s=greeting_s)
        return worker_transports(control, timeout_s=greeting_s)

    def _sglang(self, target: SglangTarget) -> Transport:
        with self._lock:
            shelf = self._shelves.get(target.directory)
            if shelf is None:
                shelf = self._shelves[target.directory] = WeightDirectory(target.directory)
        return SglangTransport(
            target,
            shelf,
            token=self._token,
            verify_tls=self._verify_tls,
            patience_s=_FILES_TIMES * self._timeout_s,
        )


def _is_ours(url: str, token: str | None, *, verify_tls: bool | str, timeout_s: float) -> bool:
    """Ask for our own `weight_info`: a user's app may have routes that other engines have, too.

    A server that cannot be reached counts as ours, whose first call says so.
    """
    probe = HttpTransport(url, token, verify_tls=verify_tls)
    try:
        probe.call(StatusRequest(), timeout_s=timeout_s)
    except TransportTimeout:
        raise
    except (AuthError, ProtocolError, RemoteError):
        return False  # the answer of another server
    except WeightSyncError:
        return True
    finally:
        probe.close()
    return True
