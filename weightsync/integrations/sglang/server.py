"""An SGLang server as a receiver: its control endpoints, and a WeightReceiver in this process."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import parse_qs, urlsplit

from weightsync.errors import (
    BackendUnavailableError,
    ConfigError,
    ConnectError,
    ProtocolError,
    RemoteError,
    TransferError,
    TransportError,
    WeightSyncError,
)
from weightsync.integrations.engine_control import EngineControl, engine_url, json_object, reason_of
from weightsync.integrations.sglang.files import WeightDirectory, read_manifest
from weightsync.integrations.sglang.pause_watch import PauseWatch
from weightsync.integrations.sglang.sink import FilesSink
from weightsync.receiver import WeightReceiver
from weightsync.shm.addresses import resolve
from weightsync.transports.base import BaseTransport
from weightsync.wire.messages import (
    AbortRequest,
    FinishRequest,
    InitRequest,
    LabelRequest,
    PauseRequest,
    Reply,
    Request,
    ResetCacheRequest,
    ResumeRequest,
    StartRequest,
    UpdateRequest,
)

Pause = Literal["auto", "keep", "wait", "abort"]
"""The fate of requests in flight while the server reads weights: `keep` retracts them and computes
their caches again, `wait` lets them end first, `abort` ends them. `auto` is `keep` where that is
safe, else `wait`."""
PAUSES: tuple[Pause, ...] = ("auto", "keep", "wait", "abort")

_KEEPS_SINCE = (0, 5, 21)
"""An older server that has retracted requests crashes when it flushes its cache."""
_PAUSES_SINCE = (0, 5, 6)
_MODES = {"keep": "retract", "abort": "abort"}
_PROBE_S = 10.0
_INFO = ("model_info", "get_model_info")
_SERVER = ("server_info", "get_server_info")
_NO_CALL = b"the server has no such call"
_MODEL_KEYS = frozenset({"model_path", "tokenizer_path", "is_generation"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangFacts:
    """Facts that a server reports about itself. `version` is () where it reports none.

    `weight_version` is None where the server has none. `checks_version` is True where one answer
    holds for all of its front processes. `in_memory`: its `replicas` have our plug-in.
    """

    model_path: str
    version: tuple[int, ...] = ()
    weight_version: str | None = None
    checks_version: bool = True
    in_memory: bool = False
    replicas: int = 1

    @property
    def label(self) -> int:
        """The version of the server's weights, where `weight_version` is one of ours; else 0."""
        text = self.weight_version or ""
        return int(text) if text.isdecimal() and len(text) < 16 else 0


class SglangControl(EngineControl):
    """Calls to the SGLang server at `url`. Each raises WeightSyncError.

    `pause_mode` is the user's choice; `greet` replaces `auto`.
    """

    pause_mode: Pause = "auto"
    auth_advice = "give as token= its --admin-api-key, or its --api-key where it has no other"

    def is_kind(self, *, timeout_s: float) -> bool:
        return bool(self.read_model_info(timeout_s=timeout_s))

    def greet(self, *, timeout_s: float) -> SglangFacts:
        """Return the server's facts. Raises BackendUnavailableError where it must not be used."""
        model = self.read_model_info(timeout_s=timeout_s)
        server = self._server_info(timeout_s)
        if server.get("weight_cache_mode") not in (None, "off"):
            raise BackendUnavailableError(
                f"{self.target} shares its weights through SGLang's weight cache ("
                f"weight_cache_mode {server['weight_cache_mode']!r}), and an update would end it; "
                "start it with --weight-cache-mode off"
            )
        named = model.get("weight_version")
        given = server.get("internal_states")
        states = [s for s in given if isinstance(s, dict)] if isinstance(given, list) else []
        facts = SglangFacts(
            model_path=str(model["model_path"]),
            version=_parse_version(server.get("version")),
            weight_version=None if named is None else str(named),
            checks_version=server.get("tokenizer_worker_num") in (None, 1),
            in_memory=any(state.get("weightsync") for state in states),
            replicas=max(len(states), 1),
        )
        self.pause_mode = self._settle_pause(facts.version)
        return facts

    def read_model_info(self, *, timeout_s: float = _PROBE_S) -> dict[str, Any]:
        """Return `/model_info`. Raises ConnectError; ProtocolError for another kind of server."""
        found = self._get_first(_INFO, timeout_s)
        if found is None or not found.keys() >= _MODEL_KEYS:
            raise ProtocolError(
                f"{self.target} is no SGLang server: it has no /model_info of SGLang's"
            )
        return found

    def pause(self, mode: str, *, timeout_s: float) -> None:
        """Pause generation; `mode` is `keep` or `abort`, for the requests in flight."""
        self.request("pause_generation", {"mode": _MODES[mode]}, timeout_s)

    def watch_pauses(self, *, verify_tls: bool | str) -> PauseWatch:
        """Return a PauseWatch, which resumes the server when this process dies."""
        url = f"{self._target}/continue_generation"
        return PauseWatch(url, self._headers, verify_tls=verify_tls)

    def proceed(self, *, timeout_s: float) -> None:
        """Resume generation."""
        self.request("continue_generation", {}, timeout_s)

    def flush_cache(self, *, timeout_s: float) -> None:
        """Flush the prefix cache. Raises RemoteError while requests are running."""
        self.request("flush_cache", {}, timeout_s)

    def set_version(self, version: str, *, timeout_s: float) -> None:
        """Set the server's `weight_version`."""
        body = {"new_version": version, "abort_all_requests": False}
        self.request("update_weight_version", body, timeout_s)

    def load(
        self, directory: Path, version: str | None, *, clear_cache: bool, timeout_s: float
    ) -> None:
        """Make the server load the files of `directory`; return when it has.

        Raises TransferError, which names the state of its weights, and AuthError, where the
        weights are unchanged.
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
                f"{self.target} did not report how its update ended ({exc}). {_TORN}"
            ) from exc
        found = json_object(answer)
        if status in (401, 403):
            raise self._error("update_weights_from_disk", status, answer)
        if status != 200 or found.get("success") is not True:
            reason = reason_of(answer)
            raise TransferError(
                f"{self.target} did not load the weights ({status}): {reason}. {_hint(reason)}"
            )

    def _server_info(self, timeout_s: float) -> dict[str, Any]:
        """Return `/server_info`; empty where the server does not answer: its version is unknown."""
        try:
            return self._get_first(_SERVER, timeout_s) or {}
        except (RemoteError, TransportError):
            return {}

    def _settle_pause(self, version: tuple[int, ...]) -> Pause:
        if self.pause_mode == "auto":
            return "keep" if version >= _KEEPS_SINCE else "wait"
        wanted = {"keep": _KEEPS_SINCE, "abort": _PAUSES_SINCE}.get(self.pause_mode, ())
        if version < wanted:
            seen = ".".join(map(str, version)) or "of an unknown version"
            raise BackendUnavailableError(
                f"{self.target} is SGLang {seen}; pause={self.pause_mode} needs "
                f"{'.'.join(map(str, wanted))} or later: use pause=wait"
            )
        return self.pause_mode

    def _get_first(self, calls: tuple[str, ...], timeout_s: float) -> dict[str, Any] | None:
        """Return the answer to the first of `calls` that the server has."""
        for call in calls:
            status, answer = self.get(call, timeout_s=timeout_s)
            if status == 200:
                return json_object(answer) or None
            if status in (401, 403) or status >= 500:
                raise self._error(call, status, answer)
        return None

    def _error(self, call: str, status: int, answer: bytes) -> WeightSyncError:
        return super()._error(call, status, _NO_CALL if status == 404 else answer)


_TORN = (
    "SGLang cannot go back: its weights are TORN, it may generate with them, and only a full "
    "update heals that: call send_weights() again"
)


is_sglang = SglangControl.serves


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


def _parse_version(text: object) -> tuple[int, ...]:
    """Return the leading numbers of a version: (0, 5, 21) of 0.5.21.post1."""
    numbers: list[int] = []
    for part in str(text or "").split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


logger = logging.getLogger(__name__)

SCHEME = "sglang+"
GREETING_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangTarget:
    """One SGLang server: its URL, and how weights reach it.

    `directory` is visible to both sides under the same path; None is shared memory, for a server
    of this host. `check_names` compares names with the server's own checkpoint, where this process
    can read it.
    """

    url: str
    directory: Path | None = None
    pause: Pause = "auto"
    check_names: bool = True

    @classmethod
    def parse(cls, target: str) -> SglangTarget | None:
        """Parse `sglang+http://host:port?directory=…&pause=…&names=any`; None for another target.

        Raises ConfigError for another scheme, or unknown options.
        """
        if not target.startswith(SCHEME):
            return None
        url, _, query = engine_url(target, SCHEME).partition("?")
        options = {name: values[-1] for name, values in parse_qs(query).items()}
        unknown = sorted(options.keys() - {"directory", "pause", "names"})
        names = options.get("names", "checked")
        if unknown or names not in ("checked", "any"):
            raise ConfigError(
                f"{', '.join(unknown) or 'names=' + names} is no option of a sglang+ target; it "
                "takes ?directory=/shared/path, pause=auto|keep|wait|abort and names=checked|any"
            )
        directory = options.get("directory")
        return cls(
            url=url,
            directory=Path(directory) if directory else None,
            pause=cast(Pause, options.get("pause", "auto")),
            check_names=names == "checked",
        )

    def __post_init__(self) -> None:
        if self.pause not in PAUSES:
            raise ConfigError(f"pause must be one of {', '.join(PAUSES)}, not {self.pause!r}")


class SglangTransport(BaseTransport):
    """A Transport to one SGLang server, by files in `weight_dir`. Raises as SglangControl.greet.

    A WeightReceiver in this process handles the requests; its sink writes the files, and makes the
    server load them. `path` is the data path's name in reports. The version of the server's weights
    is its `weight_version`, where that is a number. No call takes longer than `patience_s`, because
    the progress of a server that loads files cannot be observed. `greeted`: calls to the server,
    and what it has said of itself.
    """

    path = "safetensors_file"

    def __init__(
        self,
        target: SglangTarget,
        weight_dir: WeightDirectory,
        *,
        token: str | None = None,
        verify_tls: bool | str = True,
        patience_s: float = 300.0,
        greeted: tuple[SglangControl, SglangFacts] | None = None,
    ) -> None:
        self._patience_s = patience_s
        control = SglangControl(target.url, token, verify_tls=verify_tls)
        super().__init__(control.target)
        if target.directory is None:
            check_host(control.target)
        if greeted is None:
            control.pause_mode = target.pause
            greeted = control, control.greet(timeout_s=GREETING_S)
        control, self._facts = greeted
        self._control = control
        self._given = self._facts.weight_version
        self._is_version_known = self._facts.checks_version
        wanted = read_manifest(Path(self._facts.model_path)) if target.check_names else None
        if wanted is None and target.check_names:
            logger.warning(
                "%s: names cannot be checked, and SGLang skips those that it does not know: its "
                "checkpoint, %s, cannot be read here",
                self._target,
                self._facts.model_path,
            )
        self._weight_dir = weight_dir
        self._sink = FilesSink(weight_dir, wanted, self._load)
        self._receiver = WeightReceiver(self._sink, apply="staged", version=self._facts.label)
        self._finish = FinishRequest()
        self._timeout_s = GREETING_S
        self._owes_proceed = False
        self._pause_watch = control.watch_pauses(verify_tls=verify_tls)
        weight_dir.share()

    @property
    def sent_nbytes(self) -> int:
        """Bytes of the bodies sent to the server."""
        return self._control.sent_nbytes

    @property
    def sent_messages(self) -> int:
        """Requests sent to the server."""
        return self._control.sent_messages

    def below(self, path: str) -> BaseTransport:
        """Raise ConfigError: adapters are sent to vLLM alone."""
        raise ConfigError(
            f"{self._target} is an SGLang server, which takes no {path}; send the merged model, "
            "with MergedSource"
        )

    def call(self, request: Request, *, timeout_s: float) -> Reply:
        """Handle one request, with calls to the server where it needs them; see Transport.call."""
        self._check_open()
        timeout_s = min(timeout_s, self._patience_s)
        if isinstance(request, FinishRequest):
            return self._finish_update(request, timeout_s)
        self._prepare(request, timeout_s)
        try:
            return self._receiver.dispatch(request)
        finally:
            self._leave_what_is_over()

    def close(self) -> None:
        """Abort an open update and remove its files; may be called twice."""
        if self._closed:
            return
        super().close()
        self._receiver.close()
        self._sink.leave()
        self._weight_dir.close()
        self._pause_watch.close()
        self._control.close()

    def _prepare(self, request: Request, timeout_s: float) -> None:
        """Make the calls to the server that precede the receiver's reply."""
        control, most_s = self._control, min(timeout_s, _PROBE_S)
        init = request.init_info if isinstance(request, InitRequest) else None
        if init is not None and init.backend != "ipc":
            raise ConfigError(f"{self._target}: SGLang is reached by files; leave backend= out")
        if isinstance(request, UpdateRequest | StartRequest):
            self._look(request, most_s)
            if request.update_id is not None:
                self._sink.join(request.update_id)
        elif isinstance(request, PauseRequest):
            self._pause_by_hand(request.mode, timeout_s)
        elif isinstance(request, ResumeRequest):
            control.proceed(timeout_s=timeout_s)
        elif isinstance(request, ResetCacheRequest):
            control.flush_cache(timeout_s=timeout_s)
        elif isinstance(request, LabelRequest) and self._facts.weight_version is not None:
            control.set_version(request.new_version, timeout_s=timeout_s)
            self._given = request.new_version

    def _look(self, request: UpdateRequest | StartRequest, timeout_s: float) -> None:
        """Check, before bytes move, that the server is up and has the weights it was last given."""
        terms = request.start if isinstance(request, UpdateRequest) else request
        if terms is None:
            return
        held = self._control.read_model_info(timeout_s=timeout_s).get("weight_version")
        if held == self._given or not self._is_version_known:
            return
        if terms.partial:
            raise ProtocolError(
                f"{self._target} holds weights {held!r}, and was last sent {self._given!r}: it "
                "was restarted, or updated by another sender; send a full update"
            )
        logger.warning("%s holds weights %r, no longer %r", self._target, held, self._given)

    def _finish_update(self, request: FinishRequest, timeout_s: float) -> Reply:
        self._finish, self._timeout_s = request, timeout_s
        try:
            with self._generation_held():
                return self._receiver.dispatch(request)
        except WeightSyncError as exc:
            self._give_up(request.update_id, str(exc))
            raise
        finally:
            self._leave_what_is_over()

    def _give_up(self, update_id: str | None, reason: str) -> None:
        """Abort an update that the server did not load: its files are not kept for a retry."""
        update = self._receiver.open_update
        if update is not None and update.update_id == update_id:
            self._receiver.dispatch(AbortRequest(update_id=update_id, reason=reason[:1000]))

    @contextmanager
    def _generation_held(self) -> Iterator[None]:
        """Pause the server, and always resume it, even where the reply to the pause was lost."""
        mode = self._control.pause_mode
        if mode == "wait" or self._receiver.paused or self._receiver.open_update is None:
            yield  # with `wait` the server itself holds new requests while it loads
            if self._owes_proceed:
                self._proceed()
            return
        self._owes_proceed = True
        self._pause_watch.paused()
        try:
            self._control.pause(mode, timeout_s=self._timeout_s)
            yield
        except BaseException as exc:
            try:
                self._proceed()
            except WeightSyncError as second:
                exc.add_note(f"and its generation could not be resumed: {second}")
            raise
        self._proceed()

    def _proceed(self) -> None:
        self._control.proceed(timeout_s=min(self._timeout_s, GREETING_S))
        self._owes_proceed = False
        self._pause_watch.over()

    def _load(self, directory: Path) -> None:
        """Make the server load the files. Called by the sink when all of them are complete."""
        version = None
        update = self._receiver.open_update
        if self._facts.weight_version is not None and update is not None:
            version = self._finish.weight_version or update.label or str(update.version)
        self._is_version_known = False  # until the server has loaded them
        self._control.load(
            directory, version, clear_cache=self._finish.clear_cache, timeout_s=self._timeout_s
        )
        self._given, self._is_version_known = version, self._facts.checks_version
        self._check_version(version)

    def _check_version(self, version: str | None) -> None:
        if version is None or not self._is_version_known:
            return
        held = self._control.read_model_info(timeout_s=min(self._timeout_s, GREETING_S))[
            "weight_version"
        ]
        if held != version:
            raise ProtocolError(
                f"{self._target} replied that it loaded weights {version!r}, and now reports "
                f"{held!r}: does another sender update it too? Call send_weights() again"
            )

    def _pause_by_hand(self, mode: str, timeout_s: float) -> None:
        if mode == "wait":
            raise ConfigError(
                f"{self._target}: SGLang cannot wait for requests to end; pause with keep or abort"
            )
        self._pause_watch.take_over()
        self._control.pause(mode, timeout_s=timeout_s)

    def _leave_what_is_over(self) -> None:
        if self._receiver.open_update is None:
            self._sink.leave()


def check_host(url: str) -> None:
    """Raise ConfigError unless the server is on this host, where it sees our shared memory."""
    host = urlsplit(url).hostname or ""
    try:
        found = resolve(host)
    except OSError as exc:
        raise ConnectError(f"{url}: its host is unknown here: {exc}") from exc
    if not any(_is_ours(family, address) for family, address in found):
        raise ConfigError(
            f"{url} is on another host, and weights reach SGLang through files; name a directory "
            f"that both hosts see under the same path: {SCHEME}{url}?directory=/shared/path"
        )


def _is_ours(family: int, address: tuple[Any, ...]) -> bool:
    """Whether an address is one of this host's: only those can be bound."""
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        try:
            trial.bind(address)
        except OSError:
            return False
        return True
