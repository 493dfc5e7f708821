"""The control endpoints of a vLLM server (`VLLM_SERVER_DEV_MODE=1`), and what stands behind a URL.

A server that answered 500 has closed the connection without saying so: each call after one goes
over a fresh connection.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit

from weightsync.errors import (
    AuthError,
    BackendUnavailableError,
    ConfigError,
    ProtocolError,
    RemoteError,
    TransportError,
    WeightSyncError,
)
from weightsync.transports import vllm_door
from weightsync.transports.http import HttpTransport

SCHEME = "vllm+"
BACKEND = "weightsync"
_START = (
    'start it with --weight-transfer-config \'{"backend":"weightsync"}\', in an environment in '
    "which weightsync is installed"
)
_DEV_MODE = (
    "its control endpoints exist where it was started with VLLM_SERVER_DEV_MODE=1 (on a private "
    "network: they are not protected)"
)


class VllmHttpControl(HttpTransport):
    """The verbs of the vLLM server at `url`; see VllmControl."""

    @property
    def sent(self) -> tuple[int, int]:
        """Requests sent so far, and their bytes."""
        return self.sent_messages, self.sent_nbytes

    def greet(self, *, timeout_s: float) -> None:
        """Look before the workers' door is knocked at whether there is one.

        Where there is none a server of several workers would be out of step for good. Raises
        BackendUnavailableError saying how to start it.
        """
        size = self._ask("get_world_size", None, timeout_s)
        if not isinstance(size, dict) or size.get("world_size") == 1:
            return  # one that has no door says so, and nothing is lost
        told = self._ask("server_info?config_format=json", None, timeout_s)
        config = told.get("vllm_config") if isinstance(told, dict) else None
        if not isinstance(config, dict):
            return
        said = config.get("weight_transfer_config")
        backend = (said or {}).get("backend")
        if backend != BACKEND:
            how = f"with weight transfer backend {backend!r}" if said else "without an engine"
            raise BackendUnavailableError(f"{self.target} was started {how}; {_START}")

    def rpc(self, text: str, *, timeout_s: float) -> object:
        """Call every worker's door."""
        body = {"method": vllm_door.METHOD, "args": [text]}
        answer = self._ask("collective_rpc", body, timeout_s)
        return answer.get("results") if isinstance(answer, dict) else None

    def is_paused(self, *, timeout_s: float) -> bool:
        """Whether generation is held."""
        answer = self._ask("is_paused", None, timeout_s)
        return bool(isinstance(answer, dict) and answer.get("is_paused"))

    def pause(self, mode: str, *, timeout_s: float) -> None:
        """Hold generation."""
        self._ask(f"pause?mode={mode}", None, timeout_s)

    def resume(self, *, timeout_s: float) -> None:
        """Let it go on."""
        self._ask("resume", None, timeout_s)

    def reset_prefix_cache(self, *, timeout_s: float) -> None:
        """Forget what was computed with other weights; requests that wait compute it again."""
        told = self._ask("reset_prefix_cache?reset_running_requests=true", None, timeout_s)
        if isinstance(told, dict) and told.get("success") is False:
            raise RemoteError(
                f"{self.target}: reset_prefix_cache forgot nothing, since blocks of it are in use",
                remote_type="HTTP 200",
                remote_message="success: false",
            )

    def set_version(self, version: str, *, timeout_s: float) -> None:
        """Tell the server what its weights are called."""
        self._ask("update_weight_version", {"new_version": version}, timeout_s)

    def _ask(self, call: str, body: dict[str, Any] | None, timeout_s: float) -> object:
        data = json.dumps(body).encode() if body is not None else b""
        status, answer = self._exchange(call, data, timeout_s)
        if status == 200:
            return _decoded(answer)
        verb = call.partition("?")[0]
        if status in (401, 403):
            raise AuthError(f"{self.target} refused {verb} with {status}", status=status)
        if status == 404:
            raise BackendUnavailableError(f"{self.target} has no {verb}: {_DEV_MODE}")
        raise _answered(f"{self.target}: {verb}", status, answer)


def is_vllm(
    url: str, token: str | None, *, verify_tls: bool | str = True, timeout_s: float = 5.0
) -> bool:
    """Ask the server at `url` whether it is vLLM's; one that does not answer is not.

    What is asked is answered by its HTTP process alone, however busy the workers are.
    """
    probe = HttpTransport(url, token, verify_tls=verify_tls)
    try:
        status, answer = probe._exchange("version", b"", timeout_s)
        told = _decoded(answer) if status == 200 else None
        return isinstance(told, dict) and set(told) == {"version"}
    except (TransportError, ProtocolError):
        return False
    finally:
        probe.close()


def plain_url(target: str) -> str | None:
    """Return the URL of a target that says it is vLLM's, else None."""
    if not target.startswith(SCHEME):
        return None
    url = target.removeprefix(SCHEME)
    if urlsplit(url).scheme not in ("http", "https"):
        # What it says instead is not repeated: it may hold a password.
        raise ConfigError("a target of vllm+ is no HTTP URL; give vllm+http://host:port")
    return url


def _decoded(answer: bytes) -> object:
    try:
        return json.loads(answer) if answer else None
    except ValueError:
        return None


def _answered(what: str, status: int, answer: bytes) -> WeightSyncError:
    told = _decoded(answer)
    error = told.get("error") if isinstance(told, dict) else None
    reason = error.get("message") if isinstance(error, dict) else error
    text = str(reason or answer[:300].decode("utf-8", "replace"))
    if vllm_door.has_no_door(text):
        return BackendUnavailableError(
            f"{what}: the workers of this vLLM have no engine of weightsync; {_START} ({text})"
        )
    hint = ""
    if "Worker failed with error" in text:
        hint = (
            "; if that is about another call, an earlier one raised in one of several workers, and "
            "vLLM's answers are late by one since then: restart the server"
        )
    return RemoteError(
        f"{what} answered {status}: {text}{hint}", remote_type=f"HTTP {status}", remote_message=text
    )
