"""The control endpoints of an SGLang server, as its versions have them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from weightsync.errors import (
    AuthError,
    BackendUnavailableError,
    ProtocolError,
    RemoteError,
    TransferError,
    TransportError,
)
from weightsync.transports.http import HttpTransport
from weightsync.transports.pause_watch import PauseWatch

Pause = Literal["auto", "keep", "wait", "abort"]
"""What happens to requests in flight while weights are read: `keep` takes them back and computes
their caches again, `wait` lets them end first, `abort` ends them. `auto` is `keep` where that is
safe, else `wait`."""
PAUSES: tuple[Pause, ...] = ("auto", "keep", "wait", "abort")

_KEEPS_SINCE = (0, 5, 21)
"""Before, a server whose requests were taken back cannot empty its cache, and dies of trying."""
_PAUSES_SINCE = (0, 5, 6)
_MODES = {"keep": "retract", "abort": "abort"}
_PROBE_S = 10.0
_INFO = ("model_info", "get_model_info")
_SERVER = ("server_info", "get_server_info")
_MODEL_KEYS = frozenset({"model_path", "tokenizer_path", "is_generation"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangFacts:
    """What a server says of itself. `version` is () where it does not say one.

    `weight_version` is None where it has no such thing; `checks_version` says that one answer
    speaks for all of its front processes.
    """

    model_path: str
    version: tuple[int, ...] = ()
    weight_version: str | None = None
    checks_version: bool = True

    @property
    def label(self) -> int:
        """The version of weights that it holds, if that is one of ours; else 0."""
        told = self.weight_version or ""
        return int(told) if told.isdecimal() and len(told) < 16 else 0


class SglangControl(HttpTransport):
    """The verbs of the SGLang server at `url`. Each raises a WeightSyncError.

    `pause_mode` is what the user asked for; `greet` settles `auto`.
    """

    pause_mode: Pause = "auto"

    def greet(self, *, timeout_s: float) -> SglangFacts:
        """Ask what this server is. Raises BackendUnavailableError for one that must not be used."""
        model = self.look(timeout_s=timeout_s)
        server = self._server_info(timeout_s)
        if server.get("weight_cache_mode") not in (None, "off"):
            raise BackendUnavailableError(
                f"{self.target} shares its weights through SGLang's weight cache ("
                f"weight_cache_mode {server['weight_cache_mode']!r}), and an update would end it; "
                "start it with --weight-cache-mode off"
            )
        facts = SglangFacts(
            model_path=str(model["model_path"]),
            version=_parse_version(server.get("version")),
            weight_version=_text(model.get("weight_version")),
            checks_version=server.get("tokenizer_worker_num") in (None, 1),
        )
        self.pause_mode = self._settle_pause(facts.version)
        return facts

    def look(self, *, timeout_s: float = _PROBE_S) -> dict[str, Any]:
        """Return what `/model_info` says. Raises ConnectError where nobody is there."""
        told = self._first(_INFO, timeout_s)
        if told is None or not told.keys() >= _MODEL_KEYS:
            raise ProtocolError(
                f"{self.target} is no SGLang server: it has no /model_info of SGLang's"
            )
        return told

    def pause(self, mode: str, *, timeout_s: float) -> None:
        """Hold generation; what becomes of requests in flight is `keep` or `abort`."""
        self._ask("pause_generation", {"mode": _MODES[mode]}, timeout_s)

    def watch_pauses(self, *, verify_tls: bool | str) -> PauseWatch:
        """Return what lets the server go on when this process dies."""
        url = f"{self._target}/continue_generation"
        return PauseWatch(url, self._headers, verify_tls=verify_tls)

    def proceed(self, *, timeout_s: float) -> None:
        """Let generation go on."""
        self._ask("continue_generation", {}, timeout_s)

    def flush_cache(self, *, timeout_s: float) -> None:
        """Forget what was computed with other weights. RemoteError while requests are at work."""
        self._ask("flush_cache", {}, timeout_s)

    def set_version(self, version: str, *, timeout_s: float) -> None:
        """Tell the server what its weights are called."""
        body = {"new_version": version, "abort_all_requests": False}
        self._ask("update_weight_version", body, timeout_s)

    def load(
        self, directory: Path, version: str | None, *, clear_cache: bool, timeout_s: float
    ) -> None:
        """Have the server read the files of `directory`; returns when it has.

        Raises TransferError saying what its weights are now, AuthError before they were touched.
        """
        body: dict[str, Any] = {"model_path": str(directory), "load_format": "safetensors"}
        if version is not None:
            body["weight_version"] = version
        if not clear_cache:
            body["flush_cache"] = False
        try:
            status, answer = self._exchange(
                "update_weights_from_disk", json.dumps(body).encode(), timeout_s
            )
        except TransportError as exc:
            raise TransferError(
                f"{self.target} did not say how its update ended ({exc}). {_TORN}"
            ) from exc
        told = _decoded(answer)
        if status in (401, 403):
            raise self._auth_error("update_weights_from_disk", status)
        if status != 200 or told.get("success") is not True:
            raise TransferError(
                f"{self.target} did not load the weights ({status}): "
                f"{_reason(told, answer)}. {_hint(_reason(told, answer))}"
            )

    def _server_info(self, timeout_s: float) -> dict[str, Any]:
        """Old and new servers have it; one that does not answer is taken for an unknown version."""
        try:
            return self._first(_SERVER, timeout_s) or {}
        except (RemoteError, TransportError):
            return {}

    def _settle_pause(self, version: tuple[int, ...]) -> Pause:
        if self.pause_mode == "auto":
            return "keep" if version >= _KEEPS_SINCE else "wait"
        wanted = {"keep": _KEEPS_SINCE, "abort": _PAUSES_SINCE}.get(self.pause_mode, ())
        if version < wanted:
            said = ".".join(map(str, version)) or "of an unknown version"
            raise BackendUnavailableError(
                f"{self.target} is SGLang {said}; pause={self.pause_mode} needs "
                f"{'.'.join(map(str, wanted))} or later: say pause=wait"
            )
        return self.pause_mode

    def _first(self, calls: tuple[str, ...], timeout_s: float) -> dict[str, Any] | None:
        """Return the answer of the first of these names that the server knows."""
        for call in calls:
            status, answer = self._exchange(call, b"", timeout_s)
            if status == 200:
                told = _decoded(answer)
                return told or None
            self._refuse_status(call, status, answer)
        return None

    def _ask(self, call: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        status, answer = self._exchange(call, json.dumps(body).encode(), timeout_s)
        told = _decoded(answer)
        if status == 200 and told.get("success") is not False:
            return told
        self._refuse_status(call, status, answer)
        said = "and it has no such call" if status == 404 else _reason(told, answer)
        raise RemoteError(
            f"{self.target}: {call} answered {status}: {said}",
            remote_type=f"HTTP {status}",
            remote_message=said,
        )

    def _refuse_status(self, call: str, status: int, answer: bytes) -> None:
        if status in (401, 403):
            raise self._auth_error(call, status)
        if status >= 500:
            said = _reason(_decoded(answer), answer)
            raise RemoteError(
                f"{self.target}: {call} answered {status}: {said}",
                remote_type=f"HTTP {status}",
                remote_message=said,
            )

    def _auth_error(self, call: str, status: int) -> AuthError:
        return AuthError(
            f"{self.target} refused {call} with {status}; give as token= its --admin-api-key, or "
            "its --api-key where it has no other",
            status=status,
        )


_TORN = (
    "SGLang cannot go back: its weights are TORN, it may generate with them, and only a full "
    "update heals that: call send_weights() again"
)


def is_sglang(
    url: str, token: str | None, *, verify_tls: bool | str = True, timeout_s: float = 5.0
) -> bool:
    """Ask the server at `url` whether it is SGLang's; one that does not answer is not.

    What is asked changes nothing, and is answered by its HTTP process alone.
    """
    probe = SglangControl(url, token, verify_tls=verify_tls)
    try:
        probe.look(timeout_s=timeout_s)
    except (TransportError, ProtocolError, RemoteError, AuthError):
        return False
    else:
        return True
    finally:
        probe.close()


def _hint(reason: str) -> str:
    if "was not flushed" in reason:
        return (
            "It holds the new weights, and caches of the old ones: call send_weights() again, "
            "with fewer requests at work"
        )
    if "weights iterator" in reason or "model loader" in reason:
        return (
            "It had not begun to read. Does it see that directory, under the same path, and may it "
            "read there? Name another one with ?directory=, and call send_weights() again"
        )
    return _TORN


def _reason(told: dict[str, Any], answer: bytes) -> str:
    error = told.get("error")
    inner = error.get("message") if isinstance(error, dict) else error
    said = told.get("message") or told.get("detail") or inner
    return str(said or answer[:300].decode("utf-8", "replace")).strip().rstrip(".")


def _decoded(answer: bytes) -> dict[str, Any]:
    try:
        told = json.loads(answer)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _parse_version(told: object) -> tuple[int, ...]:
    """Return the numbers that a version begins with: (0, 5, 21) of 0.5.21.post1."""
    numbers: list[int] = []
    for part in str(told or "").split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _text(told: object) -> str | None:
    return None if told is None else str(told)
