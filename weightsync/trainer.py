"""The sending side: one update after another, to every receiver at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import torch

from weightsync.backends.ipc_sender import IpcOptions
from weightsync.errors import ConfigError, UpdateConflictError, WeightSyncError
from weightsync.report import SyncReport
from weightsync.samehost.janitor import sweep
from weightsync.sending.fleet import Answer, Fleet, Member, raise_first
from weightsync.sending.outgoing import Update
from weightsync.sending.roads import offer, take_road, withdraw
from weightsync.transports.base import Transport
from weightsync.transports.callback import CallbackTransport
from weightsync.transports.http_client import HttpTransport
from weightsync.weights.source import Rename, WeightSource, as_source
from weightsync.wire.messages import (
    AbortRequest,
    FinishRequest,
    Request,
    StartTerms,
    StatusRequest,
)

logger = logging.getLogger(__name__)

Targets = (
    str | Callable[..., object] | Transport | Iterable[str | Callable[..., object] | Transport]
)

DEFAULT_TIMEOUT_S = 300.0


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
    WeightSource. `to`: a URL, a callable that carries plain dicts (`receiver.handle`), a Transport,
    or several. `dtype` casts floating-point tensors on the way; `rename` maps names. `packed` None
    lets receivers read stable parameters where they are and streams others through buckets;
    `bucket_nbytes` and `num_buckets` size those. `adopt` allows parameters in host memory to be
    moved into shared memory. `verify` fingerprints what arrives; `timeout_s` bounds every wait for
    progress.

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
    targets = [to] if isinstance(to, str) or callable(to) or hasattr(to, "call") else list(to)
    if not targets:
        raise ConfigError("to= names no receiver")
    return [_make_transport(target, token) for target in targets]


def _make_transport(target: object, token: str | None) -> Transport:
    if isinstance(target, str):
        return HttpTransport(target, token)
    if hasattr(target, "call") and hasattr(target, "target"):
        return target  # type: ignore[return-value]  # a protocol, checked by its members
    if callable(target):
        return CallbackTransport(target, getattr(target, "__qualname__", "callback"))
    raise ConfigError(
        f"cannot send to a {type(target).__name__}; give a URL, a callable that takes and returns "
        "dicts, or a Transport"
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
        self._released = False
        self.version = 0
        self._connection = take_road(source, fleet, options, backend=backend)
        self._greet(self._connection.answers)

    @property
    def road(self) -> str:
        """How the bytes go."""
        return self._connection.engine.road

    def send_weights(
        self, version: int | None = None, *, label: str | None = None, rewind: bool = False
    ) -> SyncReport:
        """Bring every receiver to the source's current weights; return when all use them.

        `version` None is one more than the last. Versions grow, unless `rewind` says that the
        trainer went back to an older checkpoint. The source may change again when this returns.
        Raises VerificationError, TransferError, TransportError or ProtocolError; the receivers are
        then as they were, except those that errors or their status call TORN.
        """
        self._ready()
        version = self.version + 1 if version is None else version
        terms = StartTerms(
            version=version,
            label=label,
            rewind=rewind,
            manifest_digest=self._connection.engine.manifest.digest,
        )
        update = Update(self._fleet, self._connection.engine, self._options, verify=self.verify)
        try:
            update.send_whole(terms)
        except WeightSyncError:
            if not self._meet_restarted():
                raise
            update = Update(self._fleet, self._connection.engine, self._options, verify=self.verify)
            update.send_whole(terms)
        self.version = version
        return update.report(version, label, dict(self._connection.skipped))

    async def asend_weights(
        self, version: int | None = None, *, label: str | None = None, rewind: bool = False
    ) -> SyncReport:
        """`send_weights` without blocking the event loop."""
        return await asyncio.to_thread(self.send_weights, version, label=label, rewind=rewind)

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
        self._ready()
        version = self.version + 1 if version is None else version
        update = Update(self._fleet, self._connection.engine, self._options, verify=self.verify)
        base = self.version if partial else None
        update.start(
            StartTerms(
                version=version, label=label, rewind=rewind, partial=partial, base_version=base
            )
        )
        try:
            yield update
            update.prepare()
            update.finish()
        except BaseException as exc:
            update.abort(f"the sender's block ended with {type(exc).__name__}")
            raise
        self.version = version
        update.last_report = update.report(version, label, dict(self._connection.skipped))

    def release(self) -> None:
        """Unregister all memory, so that it may be offloaded or freed; the next send connects."""
        withdraw(self._connection.engine, self._fleet, self._options.timeout_s)
        self._released = True

    def close(self) -> None:
        """Have receivers close what they opened, move adopted parameters back, free everything."""
        if self._closed:
            return
        self._closed = True
        try:
            if not self._released:
                withdraw(self._connection.engine, self._fleet, self._options.timeout_s)
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

    def _ready(self) -> None:
        """Connect again after `release`, or where registered GPU memory has moved."""
        if self._closed:
            raise ConfigError("this sender is closed; connect again")
        if not self._released and self._connection.engine.needs_init:
            self.release()
        if self._released:
            self._connection = take_road(
                self._source, self._fleet, self._options, backend=self._backend
            )
            self._released = False
            self._greet(self._connection.answers)
        for member in self._fleet.members:
            if member.unfinished is not None:
                self._settle(member)

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
        """Finish what this member could not be told to finish the last time."""
        request = FinishRequest(update_id=member.unfinished)
        answer = self._fleet.ask(request, timeout_s=self._options.timeout_s, members=[member])[0]
        if answer.error is not None and not isinstance(answer.error, UpdateConflictError):
            raise answer.error
        member.unfinished = None

    def _meet_restarted(self) -> bool:
        """Connect members again that were restarted; return whether there were any."""
        answers = self._fleet.ask(StatusRequest(), timeout_s=self._options.timeout_s)
        strangers = [
            a.member
            for a in answers
            if a.error is None and getattr(a.reply, "instance", "") != a.member.instance
        ]
        if not strangers:
            return False
        logger.warning("restarted, connecting again: %s", ", ".join(m.target for m in strangers))
        timeout_s = self._options.timeout_s
        offer(self._connection.engine, self._fleet, timeout_s, members=strangers)
        return True
