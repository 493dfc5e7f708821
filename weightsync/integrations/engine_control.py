"""HTTP calls to an inference engine's own server: vLLM's, SGLang's."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any
from urllib.parse import urlsplit

from weightsync.errors import ConfigError, RemoteError, WeightSyncError
from weightsync.transports.http import HttpTransport


class EngineClient(HttpTransport):
    """Calls to a server that may be an engine's own: its errors have the reason that it gives."""

    def request(self, call: str, body: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        """Return the JSON object of the answer to a POST, or a GET without `body`; {} for none."""
        data = None if body is None else json.dumps(body).encode()
        status, answer = self._exchange(call, data, timeout_s)
        found = json_object(answer)
        if status != 200 or found.get("success") is False:
            raise self._error(call.partition("?")[0], status, answer)
        return found

    def _foreign_error(self, call: str, status: int, answer: bytes) -> RemoteError:
        reason = reason_of(answer)
        return RemoteError(
            f"{self.target}: {call} answered {status}: {reason}",
            remote_type=f"HTTP {status}",
            remote_message=reason,
        )


class EngineControl(EngineClient, ABC):
    """Calls to the control endpoints of the engine at `url`. Each raises WeightSyncError."""

    auth_advice = "give its token as token="

    @classmethod
    def serves(
        cls, url: str, token: str | None, *, verify_tls: bool | str = True, timeout_s: float = 5.0
    ) -> bool:
        """Whether an engine of this kind is at `url`; False where the server does not answer.

        The probe changes nothing. Only the server's HTTP process handles it, so busy workers do not
        delay it.
        """
        probe = cls(url, token, verify_tls=verify_tls)
        try:
            return probe.is_kind(timeout_s=timeout_s)
        except WeightSyncError:
            return False
        finally:
            probe.close()

    @abstractmethod
    def is_kind(self, *, timeout_s: float) -> bool:
        """Whether the server is of this kind."""


def json_object(answer: bytes) -> dict[str, Any]:
    """Return the JSON object of an answer; empty for any other answer."""
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def reason_of(answer: bytes) -> str:
    """Return the reason in an answer that refuses: its message, or else its first bytes."""
    found = json_object(answer)
    error = found.get("error")
    inner = error.get("message") if isinstance(error, dict) else error
    reason = found.get("message") or found.get("detail") or inner
    return str(reason or answer[:300].decode("utf-8", "replace")).strip().rstrip(".")


def engine_url(target: str, scheme: str) -> str:
    """Return the URL of a target such as `vllm+http://…`. Raises ConfigError where it is none."""
    url = target.removeprefix(scheme)
    if urlsplit(url).scheme not in ("http", "https"):
        # The message leaves the target out: it may contain a password.
        raise ConfigError(f"a target of {scheme} is no HTTP URL; give {scheme}http://host:port")
    return url
