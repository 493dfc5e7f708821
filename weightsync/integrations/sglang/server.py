"""An SGLang server as a receiver: its control endpoints, and a stand-in in this process."""

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
    AuthError,
    BackendUnavailableError,
    ConfigError,
    ConnectError,
    ProtocolError,
    RemoteError,
    TransferError,
    TransportError,
    WeightSyncError,
)
from weightsync.integrations.pause_watch import PauseWatch
from weightsync.integrations.sglang.files import WeightDirectory, read_manifest
from weightsync.integrations.sglang.sink import FilesSink
from weightsync.receiver import WeightReceiver
from weightsync.transports.base import BaseTransport
from weightsync.transports.http import HttpTransport, json_object
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
from weightsync.wire.offers import DistributedInit

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
        told = json_object(answer)
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
            status, answer = self.get(call, timeout_s=timeout_s)
            if status == 200:
                return json_object(answer) or None
            self._refuse_status(call, status, answer)
        return None

    def _ask(self, call: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        status, answer = self._exchange(call, json.dumps(body).encode(), timeout_s)
        told = json_object(answer)
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
            said = _reason(json_object(answer), answer)
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


logger = logging.getLogger(__name__)

SCHEME = "sglang+"
_GREETING_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangTarget:
    """One server: where it is, and how it is used.

    `directory` is one that both sides see under the same path; None takes shared memory, for a
    server of this host. `check_names` compares names with those of the server's own checkpoint,
    where that is a directory that can be read here.
    """

    url: str
    directory: Path | None = None
    pause: Pause = "auto"
    check_names: bool = True

    @classmethod
    def parse(cls, target: str) -> SglangTarget | None:
        """Return what `sglang+http://host:port?directory=…&pause=…&names=any` says, else None.

        Raises ConfigError for what it cannot say.
        """
        if not target.startswith(SCHEME):
            return None
        url, _, query = target.removeprefix(SCHEME).partition("?")
        if urlsplit(url).scheme not in ("http", "https"):
            # What it says instead is not repeated: it may hold a password.
            raise ConfigError("a target of sglang+ is no HTTP URL; give sglang+http://host:port")
        said = {name: values[-1] for name, values in parse_qs(query).items()}
        unknown = sorted(said.keys() - {"directory", "pause", "names"})
        names = said.get("names", "checked")
        if unknown or names not in ("checked", "any"):
            raise ConfigError(
                f"{', '.join(unknown) or 'names=' + names} says nothing to a target of sglang+; it "
                "takes ?directory=/shared/path, pause=auto|keep|wait|abort and names=checked|any"
            )
        directory = said.get("directory")
        return cls(
            url=url,
            directory=Path(directory) if directory else None,
            pause=cast(Pause, said.get("pause", "auto")),
            check_names=names == "checked",
        )

    def __post_init__(self) -> None:
        if self.pause not in PAUSES:
            raise ConfigError(f"pause must be one of {', '.join(PAUSES)}, not {self.pause!r}")


class SglangTransport(BaseTransport):
    """A Transport to one SGLang server, by files on `shelf`. Raises what its greeting raises.

    `path` is how reports name the way of the bytes. What the server holds is taken from its
    `weight_version`, where that is a number. No call to it takes longer than `patience_s`: whether
    a server that reads files makes progress is not seen.
    """

    path = "safetensors_file"

    def __init__(
        self,
        target: SglangTarget,
        shelf: WeightDirectory,
        *,
        token: str | None = None,
        verify_tls: bool | str = True,
        patience_s: float = 300.0,
    ) -> None:
        self._patience_s = patience_s
        control = SglangControl(target.url, token, verify_tls=verify_tls)
        super().__init__(control.target)
        if target.directory is None:
            _check_host(control.target)
        control.pause_mode = target.pause
        self._control = control
        self._facts = control.greet(timeout_s=_GREETING_S)
        self._told = self._facts.weight_version
        self._knows = self._facts.checks_version
        wanted = read_manifest(Path(self._facts.model_path)) if target.check_names else None
        if wanted is None and target.check_names:
            logger.warning(
                "%s: names cannot be checked, and SGLang skips those that it does not know: its "
                "checkpoint, %s, cannot be read here",
                self._target,
                self._facts.model_path,
            )
        self._shelf = shelf
        self._sink = FilesSink(shelf, wanted, self._load)
        self._receiver = WeightReceiver(self._sink, apply="staged", version=self._facts.label)
        self._finish = FinishRequest()
        self._timeout_s = _GREETING_S
        self._owes_proceed = False
        self._pause_watch = control.watch_pauses(verify_tls=verify_tls)
        shelf.share()

    @property
    def sent_nbytes(self) -> int:
        """Bytes of the bodies that went to the server."""
        return self._control.sent_nbytes

    @property
    def sent_messages(self) -> int:
        """Requests that went to the server."""
        return self._control.sent_messages

    @property
    def facts(self) -> SglangFacts:
        """What the server said of itself when it was met."""
        return self._facts

    def call(self, request: Request, *, timeout_s: float) -> Reply:
        """Answer one request, with calls to the server where it concerns it; see Transport.call."""
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
        """Give up an open update, and remove its files; may be called twice."""
        if self._closed:
            return
        super().close()
        self._receiver.close()
        self._sink.leave()
        self._shelf.close()
        self._pause_watch.close()
        self._control.close()

    def _prepare(self, request: Request, timeout_s: float) -> None:
        """What the server has to be asked or told before its stand-in answers."""
        control, most_s = self._control, min(timeout_s, _PROBE_S)
        if isinstance(request, InitRequest) and isinstance(request.init_info, DistributedInit):
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
            self._told = request.new_version

    def _look(self, request: UpdateRequest | StartRequest, timeout_s: float) -> None:
        """Before bytes move: the server is there, and holds what it was last given."""
        terms = request.start if isinstance(request, UpdateRequest) else request
        if terms is None:
            return
        held = self._control.look(timeout_s=timeout_s).get("weight_version")
        if held == self._told or not self._knows:
            return
        if terms.partial:
            raise ProtocolError(
                f"{self._target} holds weights {held!r}, and was last given {self._told!r}: it was "
                "started again, or somebody else updated it; send a full update"
            )
        logger.warning("%s holds weights %r, not %r any more", self._target, held, self._told)

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
        """What the server did not begin is over too: its files do not wait for another try."""
        update = self._receiver.open_update
        if update is not None and update.update_id == update_id:
            self._receiver.dispatch(AbortRequest(update_id=update_id, reason=reason[:1000]))

    @contextmanager
    def _generation_held(self) -> Iterator[None]:
        """Pause the server, and always let it go on: also where its answer to that was lost."""
        mode = self._control.pause_mode
        if mode == "wait" or self._receiver.paused or self._receiver.open_update is None:
            yield  # with `wait` the server holds new requests by itself, from its update's call on
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
                exc.add_note(f"and it could not be told to generate again: {second}")
            raise
        self._proceed()

    def _proceed(self) -> None:
        self._control.proceed(timeout_s=min(self._timeout_s, _GREETING_S))
        self._owes_proceed = False
        self._pause_watch.over()

    def _load(self, directory: Path) -> None:
        """Called by the sink when all files are there."""
        version = None
        update = self._receiver.open_update
        if self._facts.weight_version is not None and update is not None:
            version = self._finish.weight_version or update.label or str(update.version)
        self._knows = False  # what it holds if this fails
        self._control.load(
            directory, version, clear_cache=self._finish.clear_cache, timeout_s=self._timeout_s
        )
        self._told, self._knows = version, self._facts.checks_version
        self._check_version(version)

    def _check_version(self, version: str | None) -> None:
        if version is None or not self._knows:
            return
        held = self._control.look(timeout_s=min(self._timeout_s, _GREETING_S))["weight_version"]
        if held != version:
            raise ProtocolError(
                f"{self._target} said that it loaded weights {version!r}, and calls those that it "
                f"holds {held!r}: does somebody else update it too? Call send_weights() again"
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


def _check_host(url: str) -> None:
    """Raise ConfigError unless the server is on this host: it must see our shared memory."""
    host = urlsplit(url).hostname or ""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as exc:
        raise ConnectError(f"{url}: its host is not known here: {exc}") from exc
    if not any(_is_ours(family, address) for family, _, _, _, address in found):
        raise ConfigError(
            f"{url} is on another host, and weights reach SGLang through files; name a directory "
            f"that both hosts see under the same path: {SCHEME}{url}?directory=/shared/path"
        )


def _is_ours(family: int, address: tuple[Any, ...]) -> bool:
    """An address that can be bound is one of this host's."""
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        try:
            trial.bind(address)
        except OSError:
            return False
        return True
