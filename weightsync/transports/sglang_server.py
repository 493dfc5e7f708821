"""An SGLang server as a receiver: a stand-in for it in this process, which ends in a call to it.

SGLang takes weights without pickles from files alone. So a receiver of ours, here, takes what the
sender sends as any other does, writes it to files, and at `finish` has the server read them.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast
from urllib.parse import parse_qs, urlsplit

from weightsync.errors import ConfigError, ConnectError, ProtocolError, WeightSyncError
from weightsync.transports.base import CountingTransport
from weightsync.transports.sglang_files import read_manifest
from weightsync.transports.sglang_http import PAUSES, Pause, SglangControl, SglangFacts
from weightsync.transports.sglang_shelf import WeightDirectory
from weightsync.transports.sglang_sink import FilesSink
from weightsync.weights.sink import WeightSink
from weightsync.wire.messages import (
    AbortRequest,
    FinishRequest,
    InitRequest,
    LabelRequest,
    OpenUpdate,
    PauseRequest,
    Reply,
    Request,
    ResetCacheRequest,
    ResumeRequest,
    StartRequest,
    UpdateRequest,
)
from weightsync.wire.offers import DistributedInit

logger = logging.getLogger(__name__)

SCHEME = "sglang+"
_GREETING_S = 30.0
_PROBE_S = 10.0


class LocalReceiver(Protocol):
    """What is used of a WeightReceiver, which stands above this layer."""

    def dispatch(self, request: Request) -> Reply:
        """Answer one request."""

    @property
    def version(self) -> int:
        """The version in use."""

    @property
    def open_update(self) -> OpenUpdate | None:
        """The update at work."""

    @property
    def paused(self) -> bool:
        """Whether the sender has asked for a pause."""

    def close(self) -> None:
        """Give up an open update."""


MakeReceiver = Callable[[WeightSink, int], LocalReceiver]
"""Makes the receiver for a sink whose server holds that version."""


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


class SglangTransport(CountingTransport):
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
        make_receiver: MakeReceiver,
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
        self._receiver = make_receiver(self._sink, self._facts.label)
        self._finish = FinishRequest()
        self._timeout_s = _GREETING_S
        self._owes_proceed = False
        self._pause_watch = control.watch_pauses(verify_tls=verify_tls)
        self._closed = False
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
        if self._closed:
            raise ConnectError(f"{self._target}: this transport is closed; connect again")
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
        self._closed = True
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
