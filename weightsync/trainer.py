"""The sending side: one update after another, to every receiver at once."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import TracebackType
from typing import Self

import torch

from weightsync.backends.ipc_sender import IpcOptions
from weightsync.errors import (
    ConfigError,
    ProtocolError,
    StaleVersionError,
    UnknownSenderError,
    WeightSyncError,
)
from weightsync.report import SyncReport
from weightsync.samehost.janitor import sweep
from weightsync.sending.fleet import Answer, Fleet, Member, raise_first
from weightsync.sending.outgoing import Update
from weightsync.sending.roads import Connection, offer, take_road, withdraw
from weightsync.transports.base import Transport
from weightsync.transports.callback import CallbackTransport
from weightsync.transports.http_client import HttpTransport
from weightsync.weights.module_tensors import Rename
from weightsync.weights.source import WeightSource, as_source
from weightsync.wire.messages import (
    AbortRequest,
    FinishRequest,
    Request,
    StartTerms,
    Status,
    StatusRequest,
)

logger = logging.getLogger(__name__)

Targets = (
    str | Callable[..., object] | Transport | Iterable[str | Callable[..., object] | Transport]
)

DEFAULT_TIMEOUT_S = 300.0
_STATUS_TIMEOUT_S = 10.0


def connect(  # noqa: PLR0913  # the settings of a connection, all keyword-only
    source: object,
    to: Targets,
    *,
    dtype: torch.dtype | None = None,
    rename: Rename | None = None,
    backend: str = "auto",
    packed: bool | None = None,
    bucket_nbytes: int | None = None,
    num_buckets: int | None = None,
    verify: bool = True,
    token: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    adopt: bool = True,
) -> WeightSender:
    """Return a sender of `source` to every receiver in `to`; everything large is allocated now.

    `source`: an nn.Module, a state dict, a callable that returns fresh `(name, tensor)` pairs, or a
    WeightSource. `to`: a URL, a Ray actor, a callable that carries plain dicts
    (`receiver.handle`), a Transport, or several. `dtype` casts floating-point tensors on the way;
    `rename` maps names. `packed` None lets receivers read stable parameters where they are and
    streams others through buckets; `bucket_nbytes` and `num_buckets` size those. `adopt` allows
    parameters in host memory to be moved into shared memory. `verify` fingerprints what arrives;
    `timeout_s` bounds every wait for progress.

    Raises ConfigError, ManifestMismatchError when the tensors do not fit a receiver, SegmentError
    when `/dev/shm` has no room, BackendUnavailableError when no road works, ConnectError or
    AuthError.
    """
    if timeout_s <= 0:
        raise ConfigError(f"timeout_s must be positive, not {timeout_s}")
    sweep()
    fleet = Fleet(make_transports(to, token=token))
    try:
        options = IpcOptions(
            packed=packed,
            bucket_nbytes=bucket_nbytes,
            num_buckets=num_buckets,
            adopt=adopt,
            timeout_s=timeout_s,
        )
        made = as_source(source, dtype=dtype, rename=rename)
        return WeightSender(made, fleet, options, backend=backend, verify=verify)
    except BaseException:
        fleet.close()
        raise


def make_transports(to: Targets, *, token: str | None) -> list[Transport]:
    """Return a transport per receiver. Raises ConfigError for a target of no known kind."""
    alone = (
        isinstance(to, str) or callable(to) or hasattr(to, "call") or not isinstance(to, Iterable)
    )
    targets = [to] if alone else list(to)  # type: ignore[arg-type]  # the line above
    if not targets:
        raise ConfigError("to= names no receiver")
    return [_make_transport(target, token) for target in targets]


def _make_transport(target: object, token: str | None) -> Transport:
    if isinstance(target, str):
        return HttpTransport(target, token)
    if type(target).__module__.partition(".")[0] == "ray":  # an actor's handle, so Ray is there
        made: Transport = import_module("weightsync.transports.ray_actor").RayActorTransport(target)
        return made
    if hasattr(target, "call") and hasattr(target, "target"):
        return target  # type: ignore[return-value]  # a protocol, checked by its members
    if callable(target):
        return CallbackTransport(target, getattr(target, "__qualname__", "callback"))
    raise ConfigError(
        f"cannot send to a {type(target).__name__}; give a URL, a Ray actor, a callable that takes "
        "and returns dicts, or a Transport"
    )


class WeightSender:
    """Keeps receivers in step with a source. Made by `connect`; use it from one thread.

    `version` is the last version that receivers hold; `verify` may be changed between updates.
    """

    def __init__(
        self,
        source: WeightSource,
        fleet: Fleet,
        options: IpcOptions,
        *,
        backend: str,
        verify: bool,
    ) -> None:
        self._source = source
        self._fleet = fleet
        self._options = options
        self._backend = backend
        self.verify = verify
        self._closed = False
        self._turn = threading.Lock()
        self._pid = os.getpid()
        self.version = 0
        self._connection: Connection | None = None
        self._connect()

    @property
    def road(self) -> str:
        """How the bytes go."""
        return self._connected().engine.road

    def send_weights(
        self, version: int | None = None, *, label: str | None = None, rewind: bool = False
    ) -> SyncReport:
        """Bring every receiver to the source's current weights; return when all use them.

        `version` None is one more than the last. Versions grow, unless `rewind` says that the
        trainer went back to an older checkpoint. The source may change again when this returns.
        Raises VerificationError, TransferError, TransportError or ProtocolError; the receivers are
        then as they were, except those that errors or their status call TORN.
        """
        return self._send_weights(version, label, rewind, threading.Event())

    async def asend_weights(
        self, version: int | None = None, *, label: str | None = None, rewind: bool = False
    ) -> SyncReport:
        """`send_weights` without blocking the event loop.

        Cancelled, it stops the transfer and returns when nothing reads the source any more.
        """
        stop = threading.Event()
        work = asyncio.to_thread(self._send_weights, version, label, rewind, stop)
        task = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            stop.set()
            with suppress(WeightSyncError):
                await task
            raise

    @contextmanager
    def update(
        self,
        version: int | None = None,
        *,
        label: str | None = None,
        rewind: bool = False,
        partial: bool = False,
    ) -> Iterator[Update]:
        """An update whose tensors you send yourself; it commits at the end of the block, or aborts.

        `partial` allows a subset of the model (LoRA): it builds on the version held. The report is
        `update.last_report` afterwards.
        """
        with self._taking_turn():
            connection = self._ready()
            version = self.version + 1 if version is None else version
            update = Update(self._fleet, connection.engine, self._options, verify=self.verify)
            base = self.version if partial else None
            terms = StartTerms(
                version=version, label=label, rewind=rewind, partial=partial, base_version=base
            )
            try:
                update.start(terms)
                yield update
                update.prepare()
                update.finish()
            except BaseException as exc:
                update.abort(f"the sender's block ended with {type(exc).__name__}")
                if isinstance(exc, WeightSyncError):
                    self._recover(exc)
                raise
            self.version = version
            update.last_report = update.report(version, label, dict(connection.skipped))

    def release(self) -> None:
        """Unregister all memory, so that it may be offloaded or freed; the next send connects."""
        with self._taking_turn():
            self._disconnect()

    def close(self) -> None:
        """Have receivers close what they opened, move adopted parameters back, free everything.

        Does nothing in a forked child: everything belongs to the parent.
        """
        if self._closed or os.getpid() != self._pid:
            return
        with self._taking_turn():
            self._closed = True
            try:
                self._disconnect()
            finally:
                self._fleet.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _send_weights(
        self, version: int | None, label: str | None, rewind: bool, stop: threading.Event
    ) -> SyncReport:
        with self._taking_turn():
            self._ready()
            try:
                return self._send_once(version, label, rewind, stop)
            except WeightSyncError as exc:
                met = self._recover(exc)
                follows = version is None and isinstance(exc, StaleVersionError)
                if stop.is_set() or not (met or follows):
                    raise
            return self._send_once(version, label, rewind, stop)

    def _send_once(
        self, version: int | None, label: str | None, rewind: bool, stop: threading.Event
    ) -> SyncReport:
        connection = self._connected()
        version = self.version + 1 if version is None else version
        terms = StartTerms(
            version=version,
            label=label,
            rewind=rewind,
            manifest_digest=connection.engine.manifest.digest,
        )
        update = Update(
            self._fleet, connection.engine, self._options, verify=self.verify, stop=stop
        )
        update.send_whole(terms)
        self.version = version
        return update.report(version, label, dict(connection.skipped))

    @contextmanager
    def _taking_turn(self) -> Iterator[None]:
        """One update at a time: its ring has one writer. Raises ConfigError when one is at work."""
        if not self._turn.acquire(blocking=False):
            raise ConfigError(
                "this sender is at work already, in another thread or in an update() block around "
                "this call; use it from one thread, one update after another"
            )
        try:
            yield
        finally:
            self._turn.release()

    def _connected(self) -> Connection:
        if self._closed or self._connection is None:
            raise ConfigError("this sender is closed or released; send_weights() connects again")
        return self._connection

    def _connect(self) -> Connection:
        """Take a road to everyone, and take over what a dead sender left."""
        connection = take_road(self._source, self._fleet, self._options, backend=self._backend)
        self._connection = connection
        try:
            self._greet(connection.answers)
        except BaseException:
            self._disconnect()
            raise
        return connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            withdraw(connection.engine, self._fleet, self._options.timeout_s)

    def _ready(self) -> Connection:
        """Connect after `release`, or where registered memory moved; end what is still open."""
        if self._closed:
            raise ConfigError("this sender is closed; connect again")
        if self._connection is not None and self._connection.engine.needs_init:
            self._disconnect()
        connection = self._connection or self._connect()
        for member in self._fleet.members:
            self._settle(member)
        return connection

    def _greet(self, answers: list[Answer]) -> None:
        """Take over the fleet: learn its version, and end what a dead sender left open."""
        self.version = max([self.version, *(answer.status.version for answer in answers)])
        orphans = {a.status.update_id for a in answers if a.status.orphaned and a.status.update_id}
        for update_id in orphans:
            committed = any(a.status.last_finished == update_id for a in answers)
            holders = [a.member for a in answers if a.status.update_id == update_id]
            logger.warning(
                "update %s of a dead sender is %s",
                update_id,
                "finished" if committed else "aborted",
            )
            request: Request = (
                FinishRequest(update_id=update_id)
                if committed
                else AbortRequest(update_id=update_id, reason="its sender died")
            )
            done = self._fleet.ask(request, timeout_s=self._options.timeout_s, members=holders)
            raise_first(done, f"ending update {update_id} of a dead sender")
            versions = [a.step.version for a in done]
            self.version = max([self.version, *versions])

    def _settle(self, member: Member) -> None:
        """Tell a member again what it could not be told the last time."""
        requests: list[Request] = []
        if member.unfinished is not None:
            requests.append(FinishRequest(update_id=member.unfinished))
        if member.unaborted is not None:
            requests.append(AbortRequest(update_id=member.unaborted, reason="as told before"))
        for request in requests:
            answer = self._fleet.ask(request, timeout_s=self._options.timeout_s, members=[member])[
                0
            ]
            if answer.error is not None and not isinstance(answer.error, ProtocolError):
                raise answer.error
            if answer.error is None:
                self.version = max(self.version, answer.step.version)
        member.unfinished = member.unaborted = None

    def _recover(self, failure: WeightSyncError) -> bool:
        """After a failed update: learn what receivers hold, connect those who do not know us.

        Returns whether there were such.
        """
        timeout_s = self._options.timeout_s
        answers = self._fleet.ask(StatusRequest(), timeout_s=min(timeout_s, _STATUS_TIMEOUT_S))
        known = [(a.member, a.reply) for a in answers if isinstance(a.reply, Status)]
        self.version = max([self.version, *(status.version for _, status in known)])
        unknown = isinstance(failure, UnknownSenderError)
        strangers = [m for m, status in known if unknown or status.instance != m.instance]
        if not strangers or self._connection is None:
            return False
        logger.warning("connecting again: %s", ", ".join(member.target for member in strangers))
        offer(self._connection.engine, self._fleet, timeout_s, members=strangers)
        return True
