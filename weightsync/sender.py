"""The sending side: one update after another, from every rank, to every receiver at once."""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import logging
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from weightsync.backends.ipc.sender import IpcOptions
from weightsync.errors import ConfigError, ProtocolError, SenderReplacedError, WeightSyncError
from weightsync.observe import Shown, TracePath, progress_callback, watch_progress, watching
from weightsync.ranks.comm import RankComm, join_ranks
from weightsync.ranks.group import FollowerUpdate, RankGroup, following
from weightsync.ranks.worker import RankWorker
from weightsync.report import SyncReport
from weightsync.shm.ring import PATIENCE
from weightsync.shm.segment import cleanup_stale
from weightsync.specs import Manifest
from weightsync.tensors import spec_of
from weightsync.transports.base import Transport
from weightsync.transports.calls import exiting
from weightsync.transports.factory import Target, Targets, TransportFactory
from weightsync.update.coordinator import Coordinator, OnFailure, UpdateLock
from weightsync.update.fleet import Fleet
from weightsync.update.outgoing import UpdateTransaction
from weightsync.update.paths import check_backend
from weightsync.weights.module_sink import Rename
from weightsync.weights.source import NamedTensors, as_source, find_ties
from weightsync.wire.messages import LedgerEntry

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 60.0
MAX_TIMEOUT_S = 1e6
"""Eleven days: waits of the operating system overflow at some more."""
_RANKS_SLACK_S = 60.0


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
    verify_tls: bool | str = True,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    process_group: dist.ProcessGroup | None = None,
    adopt: bool = True,
    on_failure: OnFailure = "abort",
    progress: Shown = False,
    takeover: bool = False,
    yields: bool = False,
) -> WeightSender:
    """Return a sender of `source` to every receiver in `to`; everything large is allocated now.

    `source`: an nn.Module (plain, DDP or FSDP2), a state dict, a callable that returns fresh
    `(name, tensor)` pairs, or a WeightSource. `to`: a URL, a Ray actor, a callable that carries
    plain dicts (`receiver.handle`), a Transport, or several; a server of several workers counts as
    that many receivers, by its one URL. `dtype` casts floating-point tensors
    on the way; `rename` maps names. `backend`: `auto` takes for each receiver the fastest path that
    works, `ipc` only those of the same host, `distributed` the one that crosses hosts. `packed`
    None lets receivers read stable parameters where they are and streams others through buckets;
    `bucket_nbytes` (rounded up to 64) and `num_buckets` size those. `adopt` allows parameters in
    host memory to be moved into shared memory. `verify` fingerprints what arrives; `token` and
    `verify_tls` are HttpTransport's: by default the environment says both. `timeout_s` bounds every
    wait for progress. `on_failure`: `abort` leaves all receivers as they were when one fails,
    `drop` goes on without it. `progress` shows a bar, or is told of each update's `Progress` about
    ten times a second, from another thread, on rank 0. A receiver belongs to one living sender:
    `takeover` takes it from another one, whose next call raises SenderReplacedError; one that
    `yields` gives it up to anybody between its updates.

    Under torch.distributed every rank of `process_group` (None: the default group) calls this, and
    every method of the sender after it, in step; rank 0 alone talks to the receivers.

    Raises ConfigError, SenderConflictError when a receiver belongs to another living sender,
    ManifestMismatchError when the tensors do not fit a receiver or another
    rank's, SegmentError when `/dev/shm` has no room, BackendUnavailableError when no path works,
    TransferTimeout naming ranks that did not call, ConnectError or AuthError.
    """
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ConfigError(
            f"timeout_s must be positive and at most {MAX_TIMEOUT_S:.0f}, not {timeout_s}"
        )
    if on_failure not in ("abort", "drop"):
        raise ConfigError(f"on_failure must be abort or drop, not {on_failure!r}")
    check_backend(backend, packed=packed)
    on_progress = progress_callback(progress)
    cleanup_stale()
    options = IpcOptions(
        packed=packed,
        bucket_nbytes=bucket_nbytes,
        num_buckets=num_buckets,
        adopt=adopt,
        timeout_s=timeout_s,
    )
    # Rank 0 waits for receivers as long as they beat; the others wait for rank 0.
    patience_s = timeout_s * (PATIENCE + 1) + _RANKS_SLACK_S
    ranks = join_ranks(process_group, timeout_s=patience_s, join_timeout_s=timeout_s)

    reach = TransportFactory(token, verify_tls=verify_tls, timeout_s=timeout_s)

    def feed() -> RankWorker:
        return RankWorker(as_source(source, dtype=dtype, rename=rename), options, ranks)

    def coordinator(group: RankGroup) -> Coordinator:
        fleet = Fleet(reach.every(to), yields=yields)
        try:
            watch_progress(group, on_progress)
            return Coordinator(
                group, fleet, options, backend=backend, on_failure=on_failure, takeover=takeover
            )
        except BaseException:
            fleet.close()
            raise

    return WeightSender(ranks, feed, coordinator, reach.one, verify=verify)


class WeightSender:
    """Keeps receivers in step with a source. Made by `connect`; use it from one thread.

    Under several ranks each has one, and makes the same calls in the same order. `version` is the
    last version that receivers hold; `verify` may be changed between updates.
    """

    def __init__(
        self,
        ranks: RankComm,
        feed: Callable[[], RankWorker],
        coordinator: Callable[[RankGroup], Coordinator],
        reach: Callable[[Target], Transport],
        *,
        verify: bool,
    ) -> None:
        self.verify = verify
        self.version = 0
        self._reach = reach
        self._closed = False
        self._turns = UpdateLock()
        self._pid = os.getpid()
        self._coordinator: Coordinator | None = None
        try:
            group = self._group = RankGroup(ranks.together(feed), ranks)
            self._coordinator = ranks.together(lambda: coordinator(group) if group.leads else None)
        except BaseException:
            ranks.close()
            raise
        self._dropped = weakref.finalize(self, _free_dropped, group, self._coordinator, self._pid)
        self._dropped.atexit = False  # the kernel does it then
        try:
            self._together("connect", lambda leading: leading.connect())
        except BaseException:
            self._free()
            raise

    @property
    def targets(self) -> list[str]:
        """The receivers, as messages name them; nobody on ranks other than 0."""
        return (
            [member.target for member in self._coordinator.fleet.members]
            if self._coordinator
            else []
        )

    @property
    def path(self) -> str:
        """How the bytes go; several paths are joined by `+`. Empty on ranks other than 0."""
        if self._closed or self._coordinator is None or not self._coordinator.connected:
            if self._coordinator is None and not self._closed:
                return ""
            raise ConfigError("this sender is closed or released; send_weights() connects again")
        return "+".join(sorted({member.shown_path for member in self._coordinator.fleet.members}))

    @property
    def road(self) -> str:
        """Deprecated: use `path`."""
        warnings.warn("`road` is called `path` now", DeprecationWarning, stacklevel=2)
        return self.path

    @property
    def connect_seconds(self) -> Mapping[str, float]:
        """What finding the receivers took the last time, by phase; empty on ranks other than 0."""
        return dict(self._coordinator.paths.seconds) if self._coordinator else {}

    def send_weights(
        self,
        version: int | None = None,
        *,
        label: str | None = None,
        rewind: bool = False,
        trace: TracePath | None = None,
    ) -> SyncReport:
        """Bring every receiver to the source's current weights; return when all use them.

        `version` None is one more than the last. Versions grow, unless `rewind` says that the
        trainer went back to an older checkpoint. The source may change again when this returns;
        one that changes before is a VerificationError that names the tensors, and nothing is
        committed.
        `trace` is a file for a time line of this update in Chrome's trace format, from rank 0.
        Raises VerificationError, TransferError, TransportError or ProtocolError; the receivers are
        then as they were, except those that errors or their status call TORN. What any rank raises
        is raised on all.
        """
        return self._send_weights(version, label, rewind, threading.Event(), trace)

    async def asend_weights(
        self,
        version: int | None = None,
        *,
        label: str | None = None,
        rewind: bool = False,
        trace: TracePath | None = None,
    ) -> SyncReport:
        """`send_weights` without blocking the event loop.

        The source must not change before this returns: an optimizer that steps meanwhile makes it a
        VerificationError. Cancelled, it stops the transfer and returns when nothing reads the
        source any more.
        """
        stop = threading.Event()
        run = contextvars.copy_context().run
        # No task: a loop that ends cancels its tasks, and this thread would go on reading.
        sending = asyncio.get_running_loop().run_in_executor(
            None, run, self._send_weights, version, label, rewind, stop, trace
        )
        try:
            return await asyncio.shield(sending)
        except asyncio.CancelledError:
            stop.set()
            while not sending.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([sending])
            with suppress(WeightSyncError):
                sending.result()
            raise

    @contextmanager
    def update(
        self,
        version: int | None = None,
        *,
        label: str | None = None,
        rewind: bool = False,
        partial: bool = False,
        trace: TracePath | None = None,
    ) -> Iterator[UpdateTransaction | FollowerUpdate]:
        """An update whose tensors you send yourself; it commits at the end of the block, or aborts.

        `partial` allows a subset of the model (LoRA): it builds on the version held. The report is
        `update.last_report` afterwards.
        """
        with self._turns.taken():
            self._check_open()
            self._group.check_same_call(f"update({version}, partial={partial})")
            self._group.worker.stop = threading.Event()
            if self._coordinator is None:
                try:
                    with following(self._group) as followed:
                        yield followed
                finally:
                    self.version = self._group.version
                return
            self._coordinator.fleet.forgive()
            self._coordinator.verify = self.verify
            try:
                with (
                    watching(self._group, trace),
                    self._coordinator.updating(
                        version, label, rewind=rewind, partial=partial
                    ) as update,
                ):
                    yield update
            except BaseException as exc:
                self.version = self._coordinator.version
                self._tell_done(error=exc)
                raise
            self.version = self._coordinator.version
            self._tell_done(report=update.last_report)

    def add(self, target: Target) -> SyncReport | None:
        """Take a receiver in, and bring it up to date where a version was sent already.

        The source must still hold what was sent as that version. Raises what `connect` and
        `resync` raise; the fleet is then as it was.
        """
        return self._together("add", lambda coordinator: coordinator.add(self._reach(target)))

    def remove(self, target: str) -> None:
        """Let the receiver of that name (`targets`) go, or all workers of a server by its URL.

        They keep the weights that they hold.
        """
        self._together("remove", lambda coordinator: coordinator.remove(target))

    def resync(self, target: str) -> SyncReport:
        """Send the current version to one receiver or server that missed it, and to no other.

        The source must still hold what was sent as that version. Raises TransferError when it has
        changed since, which only fingerprints show (with `verify=False` a warning is logged), and
        ConfigError for an unknown target or before the first update.
        """
        report = self._together(
            "resync", lambda coordinator: coordinator.resync(coordinator.members(target))
        )
        return _required(report)

    def ledger(self) -> list[LedgerEntry]:
        """What this rank shares now, its size and age, who reads it and who has not released it."""
        return self._group.worker.ledger(
            self._coordinator.fleet.members if self._coordinator else ()
        )

    def release(self) -> None:
        """Unregister all memory, so that it may be offloaded or freed; the next send connects."""
        self._together("release", lambda coordinator: coordinator.disconnect())

    def close(self) -> None:
        """Have receivers close what they opened, move adopted parameters back, free everything.

        Does nothing in a forked child: everything belongs to the parent. Under several ranks it
        raises where one of them is gone, or makes another call; all is freed here then, too. Once
        any call has said that a rank is gone, close() works alone and does not say it again.
        """
        if self._closed or os.getpid() != self._pid:
            return
        known = self._group.comm.broken
        try:
            if exiting():
                self._part()  # the other ranks may be gone, and exit waits for nobody
            else:
                self._together("close", lambda coordinator: coordinator.disconnect(leaves=True))
        except WeightSyncError:
            self._part()
            if not known:
                raise
        finally:
            self._free()

    def _part(self) -> None:
        """Tell the receivers, as far as that goes without the other ranks."""
        self._group.comm.close()
        if self._coordinator is not None:
            self._coordinator.fleet.forgive()
            with suppress(WeightSyncError):
                self._coordinator.disconnect(leaves=True)

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
        self,
        version: int | None,
        label: str | None,
        rewind: bool,
        stop: threading.Event,
        trace: TracePath | None,
    ) -> SyncReport:
        report = self._together(
            f"send_weights({version}, rewind={rewind})",
            lambda coordinator: coordinator.send(version, label, rewind=rewind),
            stop,
            trace,
        )
        return _required(report)

    def _together(
        self,
        call: str,
        do: Callable[[Coordinator], T],
        stop: threading.Event | None = None,
        trace: TracePath | None = None,
    ) -> T | SyncReport | None:
        """Make one call on every rank: rank 0 does it, the others do what it tells them."""
        with self._turns.taken():
            self._check_open()
            self._group.check_same_call(call)
            self._group.worker.stop = stop or threading.Event()
            if self._coordinator is None:
                try:
                    return self._group.serve().report
                finally:
                    self.version = self._group.version
            self._coordinator.fleet.forgive()
            self._coordinator.verify = self.verify
            try:
                with watching(self._group, trace):
                    result = do(self._coordinator)
            except BaseException as exc:
                self.version = self._coordinator.version
                self._tell_done(error=exc)
                raise
            self.version = self._coordinator.version
            self._tell_done(report=result if isinstance(result, SyncReport) else None)
            return result

    def _tell_done(
        self, *, report: SyncReport | None = None, error: BaseException | None = None
    ) -> None:
        try:
            self._group.finish(self.version, report=report, error=error)
        except WeightSyncError:
            if error is None:
                raise
            logger.debug("the other ranks could not be told", exc_info=True)

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this sender is closed; connect again")

    def _free(self) -> None:
        self._closed = True
        self._dropped.detach()
        _free(self._group, self._coordinator)


def _free(group: RankGroup, coordinator: Coordinator | None) -> None:
    try:
        if coordinator is not None:
            coordinator.fleet.close()
    finally:
        group.close()


def _free_dropped(group: RankGroup, coordinator: Coordinator | None, pid: int) -> None:
    """A sender that was dropped without close() must not hold its receivers."""
    if os.getpid() == pid:
        logger.warning("a sender was dropped without close(); what it shared is freed")
        if group.worker.engine is not None:
            group.worker.engine.dropped()
        _free(group, coordinator)


def _required(report: SyncReport | None) -> SyncReport:
    if report is None:
        raise ProtocolError("rank 0 gave no report of the update")
    return report


Settings = tuple[object, ...]


class _LatestTensors:
    """A WeightSource of whatever the last call was given; holds it no longer than the call."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.pairs: list[tuple[str, torch.Tensor]] = []

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.pairs

    def stable_tensors(self) -> list[torch.Tensor] | None:
        return None

    def made_of(self) -> tuple[list[str], list[torch.Tensor]]:
        return [name for name, _ in self.pairs], [tensor for _, tensor in self.pairs]


@dataclass(slots=True)
class _Kept:
    """The connection of one target: what it was made for, and its sender."""

    settings: Settings
    sender: WeightSender
    latest: _LatestTensors | None


_lock = threading.RLock()
_kept: dict[Hashable, _Kept] = {}


def send_weights(  # noqa: PLR0913  # the settings of a connection, all keyword-only
    named_tensors: NamedTensors | Mapping[str, torch.Tensor] | nn.Module,
    to: Targets,
    *,
    packed: bool = True,
    version: int | None = None,
    label: str | None = None,
    rewind: bool = False,
    dtype: torch.dtype | None = None,
    verify: bool = True,
    token: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    takeover: bool = False,
) -> SyncReport:
    """Send a module, a mapping or `(name, tensor)` pairs to `to`, as one whole update.

    The connection is made by the first call and kept per target; other names, shapes or settings
    make a new one; `close()` ends it. Between two calls it yields to other senders: processes may
    call this in turn for one receiver. `takeover` takes it from a sender that does not. A generator
    is drained before anything moves: pass a module,
    or use `connect` with a callable, where all tensors at once are too much. Raises what
    `connect` and `WeightSender.send_weights` raise.
    """
    with _lock:
        settings: Settings = (packed, dtype, verify, token, timeout_s)
        key = _key(to)
        if isinstance(named_tensors, nn.Module):
            source: object = named_tensors
            settings += (id(named_tensors),)
            pairs = None
        else:
            is_mapping = isinstance(named_tensors, Mapping)
            pairs = list(named_tensors.items() if is_mapping else named_tensors)  # type: ignore[union-attr]  # the isinstance above
            aliases = find_ties(pairs)
            pairs = [(name, tensor) for name, tensor in pairs if name not in aliases]
            specs = tuple(spec_of(name, tensor, dtype) for name, tensor in pairs)
            manifest = Manifest(specs, aliases)
            source = _LatestTensors(manifest)
            settings += (manifest.digest,)
        kept = _kept.get(key)
        if kept is None or kept.settings != settings:
            kept = _reconnect(key, settings, source, to, takeover=takeover)
        if kept.latest is not None and pairs is not None:
            kept.latest.pairs = pairs
        try:
            return kept.sender.send_weights(version, label=label, rewind=rewind)
        except SenderReplacedError:
            _kept.pop(key).sender.close()  # the next call connects anew
            raise
        finally:
            if kept.latest is not None:
                kept.latest.pairs = []


def close() -> None:
    """End every connection that `send_weights` keeps; adopted parameters are moved back.

    All of them are closed, also where one raises.
    """
    with _lock, ExitStack() as closing:
        for kept in _kept.values():
            closing.callback(kept.sender.close)
        _kept.clear()


def _reconnect(
    key: Hashable, settings: Settings, source: object, to: Targets, *, takeover: bool
) -> _Kept:
    old = _kept.pop(key, None)
    if old is not None:
        old.sender.close()
    packed, dtype, verify, token, timeout_s, *_ = settings
    latest = source if isinstance(source, _LatestTensors) else None
    sender = connect(
        source,
        to,
        dtype=None if latest else dtype,  # type: ignore[arg-type]  # unpacked from the tuple above
        packed=bool(packed),
        verify=bool(verify),
        token=token,  # type: ignore[arg-type]
        timeout_s=timeout_s,  # type: ignore[arg-type]
        takeover=takeover,
        yields=True,
    )
    kept = _kept[key] = _Kept(settings, sender, latest)
    return kept


def _key(to: Targets) -> Hashable:
    if isinstance(to, str) or callable(to):
        return to
    targets = tuple(to) if isinstance(to, Iterable) and not hasattr(to, "call") else (to,)
    if not targets:
        raise ConfigError("to= names no receiver")
    return targets


atexit.register(close)
