"""The sending side: `connect`, `WeightSender`, and the one-call `send_weights`."""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import logging
import os
import threading
import weakref
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Sized,
)
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any, Literal, Self, TypedDict, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from weightsync.arguments import (
    Dtype,
    as_choice,
    as_count,
    as_dtype,
    as_flag,
    as_nbytes,
    as_seconds,
    as_share,
)
from weightsync.backends.base import Backend, TransferOptions
from weightsync.backends.registry import BackendChoice, adjusted, choose_backends
from weightsync.errors import (
    ConfigError,
    ProtocolError,
    SenderReplacedError,
    TransferCancelled,
    WeightSyncError,
    shorten,
)
from weightsync.observe import (
    Progress,
    ProgressObserver,
    Shown,
    call_span,
    progress_callback,
)
from weightsync.ranks.comm import compare_arguments, join_ranks
from weightsync.ranks.group import FollowerUpdate, RankGroup, following
from weightsync.ranks.replicas import CheckReplicas
from weightsync.ranks.stop import StopSignal
from weightsync.ranks.worker import RankWorker
from weightsync.report import SyncReport
from weightsync.runtime.tracebacks import concise, shortened
from weightsync.shm.segment import cleanup_stale
from weightsync.shm.wait import HEARTBEAT_TIMEOUT_FACTOR
from weightsync.specs import Manifest
from weightsync.tensors import dtype_name, spec_of
from weightsync.transports.base import BaseTransport
from weightsync.transports.calls import exit_left_s, exiting, waited_for_by
from weightsync.transports.factory import (
    Target,
    Targets,
    TransportFactory,
    check_path,
    described,
    targets_of,
)
from weightsync.update.coordinator import Coordinator, OnFailure
from weightsync.update.deltas import DeltaChoice, check_choice, why_never
from weightsync.update.described import Described, describe_together
from weightsync.update.fleet import Fleet, Member
from weightsync.update.outgoing import UpdateTransaction
from weightsync.update.paths import PathSelector
from weightsync.update.sets import SetUpdate
from weightsync.weights.inner_tensors import Expansion
from weightsync.weights.lines.memory import warm_up
from weightsync.weights.sinks.module_sink import Rename
from weightsync.weights.sources.base import (
    NamedTensors,
    WeightSource,
    as_source,
    checked_pairs,
    find_ties,
    rounded_by,
)
from weightsync.weights.sources.cast import cast_source, casts_of
from weightsync.weights.sources.finite import CheckFinite
from weightsync.weights.sources.quantized import QuantizedSource, scheme_of
from weightsync.weights.tensor_kinds import states_beside, warn_of_state
from weightsync.wire.messages import SharedMemoryUsage, Status

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 60.0
_NOTHING: Mapping[str, str] = MappingProxyType({})
_RANKS_SLACK_S = 60.0


class ConnectSettings(TypedDict, total=False):
    """The settings of `connect`, where they are documented, for what passes them on."""

    dtype: Dtype | Literal["receiver"] | None
    rename: Rename | None
    quantize: Literal["receiver"] | None
    backend: BackendChoice
    packed: bool | None
    bucket_nbytes: int | str | None
    num_buckets: int | None
    verify: bool
    check_finite: CheckFinite
    check_replicas: CheckReplicas
    token: str | None
    verify_tls: bool | str
    timeout_s: float
    wait_s: float
    process_group: dist.ProcessGroup | None
    adopt: bool
    on_failure: OnFailure
    progress: Shown
    takeover: bool
    yields: bool
    delta: DeltaChoice
    scrub: float
    at: str | None


def check_settings(
    given: Iterable[str], *, of: str, own: Iterable[str] = (), without: Mapping[str, str] = _NOTHING
) -> None:
    """Raise ConfigError for names that are no settings of `connect`, with the nearest name.

    `of` passes the settings on, and has its `own` ones beside them. `without` has the settings that
    it does not take, each with the reason.
    """
    taken = [*own, *(name for name in ConnectSettings.__annotations__ if name not in without)]
    said = []
    for name in given:
        if name in without:
            said.append(f"{of} takes no {name}: {without[name]}")
        elif name not in ConnectSettings.__annotations__:
            near = get_close_matches(name, taken, n=1)
            there = f"did you mean {near[0]}?" if near else f"there are {', '.join(taken)}"
            said.append(f"{name}: no setting of connect(), nor of {of}; {there}")
    if said:
        raise ConfigError("; ".join(said))


@concise
def connect(  # noqa: PLR0913, PLR0915  # the settings of a connection, each checked here
    source: object,
    to: Targets,
    *,
    dtype: Dtype | Literal["receiver"] | None = None,
    rename: Rename | None = None,
    quantize: Literal["receiver"] | None = None,
    backend: BackendChoice = "auto",
    packed: bool | None = None,
    bucket_nbytes: int | str | None = None,
    num_buckets: int | None = None,
    verify: bool = True,
    check_finite: CheckFinite = "off",
    check_replicas: CheckReplicas = "first",
    token: str | None = None,
    verify_tls: bool | str = True,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    wait_s: float = 0.0,
    process_group: dist.ProcessGroup | None = None,
    adopt: bool = True,
    on_failure: OnFailure = "abort",
    progress: Shown = False,
    takeover: bool = False,
    yields: bool = False,
    delta: DeltaChoice = "auto",
    scrub: float = 1 / 64,
    at: str | None = None,
) -> WeightSender:
    """Return a sender of `source` to every receiver in `to`. Allocates all large memory now.

    - `source`: an nn.Module (plain, DDP or FSDP2), a state dict, a callable that returns fresh
      `(name, tensor)` pairs or a state dict, or a WeightSource.
    - `to`: a URL, a Ray actor, a WeightReceiver in this process, a callable that carries plain
      dicts, a Transport, or several of these. A server with several workers has one URL and counts
      as that many receivers.
    - `dtype`: casts floating-point tensors before they are sent, to torch.bfloat16 or "bfloat16"
      for instance. With "receiver" each tensor is cast to the dtype in which the receivers keep it;
      one that they keep in unlike dtypes is sent as it is, and each receiver casts it.
    - `rename`: maps names; a mapping may lack some.
    - `quantize`: "receiver" quantizes linear weights by the scheme that the receivers say, as vLLM
      does of its checkpoint; see QuantizedSource, which takes a scheme.
    - `backend`: `auto` takes the cheapest path that works for each receiver, of all backends that
      are registered; `ipc` knows only paths on the same host, `tcp` the path between hosts. Also a
      `Backend` of your own, or several, in the order in which they are tried.
    - `packed`: True passes tensors through buckets. With None, receivers read stable parameters in
      place, and other tensors pass through buckets.
    - `bucket_nbytes`: size of a bucket, rounded up to 64; also "8MB".
    - `num_buckets`: number of buckets.
    - `verify`: compares fingerprints of the weights that arrive.
    - `check_finite`: looks for NaN and infinity in the source: with `warn` the report and the log
      name the tensors, with `raise` the update is a VerificationError.
    - `check_replicas`: compares the tensors that several ranks hold (plain parameters and buffers,
      replicas of shards): `first` does when they are sent the first time, `always` at every update.
      The report and the log name those that differ, of which receivers get one rank's copy.
    - `token`: HttpTransport's, by default from the environment.
    - `verify_tls`: HttpTransport's.
    - `timeout_s`: bounds every wait for progress.
    - `wait_s`: how long a server at a URL may not answer yet, because it loads its model; the log
      says once that it is waited for.
    - `process_group`: the ranks that send together; None is the default group.
    - `adopt`: allows parameters in host memory to be moved into shared memory.
    - `on_failure`: if a receiver fails, `abort` leaves all receivers as they were, and `drop`
      continues without it.
    - `progress`: shows a bar, or is a callback for each update's `Progress`, called about ten times
      a second, from another thread, on rank 0.
    - `takeover`: takes receivers from another living sender, whose next call raises
      SenderReplacedError.
    - `yields`: lets any sender take this one's receivers between updates.
    - `delta`: `auto` sends only the 64-byte lines that changed, where that is faster; `always` also
      where it is not, `off` never. It keeps an eighth of the model's bytes on every sending rank.
    - `scrub`: the share of the model that receivers read back with each delta, in turn, besides
      the lines that changed.
    - `at`: the path of the receiver below each URL, as `draft`; by default that of the source, as
      an AdapterSource has one.

    Under torch.distributed every rank of `process_group` calls this, and then every method of the
    sender in the same order, with the same arguments. Only rank 0 sends messages to the receivers,
    and shows progress; the others may name no receiver (`to=()`).

    Raises ConfigError, also where ranks give different arguments; SenderConflictError when a
    receiver belongs to another living sender; ManifestMismatchError when the tensors do not fit a
    receiver or another rank's tensors; SegmentError when `/dev/shm` has no room;
    BackendUnavailableError when no path works; TransferTimeout with the ranks that did not call;
    ConnectError or AuthError.
    """
    timeout_s = as_seconds("timeout_s", timeout_s)
    wait_s = as_seconds("wait_s", wait_s, or_zero=True)
    # Rank 0 waits for receivers while they send heartbeats; the other ranks wait for rank 0.
    ranks_timeout_s = timeout_s * (HEARTBEAT_TIMEOUT_FACTOR + 1) + _RANKS_SLACK_S
    waiting_s = ranks_timeout_s + wait_s
    ranks = join_ranks(process_group, timeout_s=waiting_s, join_timeout_s=timeout_s)

    def check() -> _Checked:
        as_flag("verify", verify)
        _check_quantize(quantize, dtype)
        as_choice("on_failure", on_failure, OnFailure)
        as_choice("delta", delta, DeltaChoice)
        check_choice(delta)
        as_choice("check_finite", check_finite, CheckFinite)
        as_choice("check_replicas", check_replicas, CheckReplicas)
        backends, unusable = choose_backends(backend)
        options = TransferOptions(
            packed=as_flag("packed", packed, optional=True),
            bucket_nbytes=as_nbytes("bucket_nbytes", bucket_nbytes),
            num_buckets=as_count("num_buckets", num_buckets),
            adopt=bool(as_flag("adopt", adopt)),
            timeout_s=timeout_s,
        )
        _check_packed(options, backends)
        return _Checked(
            options=options,
            backends=backends,
            unusable=unusable,
            scrub=as_share("scrub", scrub),
            on_progress=progress_callback(progress),
            dtype=None if dtype == "receiver" else as_dtype("dtype", dtype),
            # Rank 0 alone sends messages, so the other ranks may name no receiver.
            targets=[] if _names_none(to) and ranks.rank else targets_of(to, "to="),
        )

    def compare(checked: _Checked) -> None:
        """Raise ConfigError where the ranks differ in a setting that one of them decides on."""
        options = checked.options
        settings: dict[str, object] = {
            "dtype": dtype if checked.dtype is None else dtype_name(checked.dtype),
            "quantize": quantize,
            "backend": backend if isinstance(backend, str) else _names_of(checked.backends),
            "packed": options.packed,
            "bucket_nbytes": options.bucket_nbytes,
            "num_buckets": options.num_buckets,
            "verify": verify,
            "check_finite": check_finite,
            "check_replicas": check_replicas,
            "timeout_s": timeout_s,
            "wait_s": wait_s,
            "on_failure": on_failure,
            "takeover": takeover,
            "yields": yields,
            "delta": delta,
            "scrub": checked.scrub,
            "at": at,
        }
        given = {name: repr(value) for name, value in settings.items()}
        if checked.targets:
            given["to"] = described(checked.targets)
        compare_arguments("connect", given, ranks)

    def make_worker(checked: _Checked, made: WeightSource) -> tuple[RankWorker, str]:
        if not why_never(delta, made.manifest):
            # Compiled while the paths are opened; the first update waits for it.
            threading.Thread(target=warm_up, name="weightsync-compile", daemon=True).start()
        worker = RankWorker(
            made, checked.options, ranks, checked.backends, check_finite, check_replicas
        )
        return worker, _path_of(made, at)

    def make_coordinator(group: RankGroup, checked: _Checked) -> Coordinator:
        drops = on_failure == "drop"
        fleet = Fleet(
            group,
            reached or transports.every(checked.targets, wait_s=wait_s),
            timeout_s=timeout_s,
            drops=drops,
            yields=yields,
        )
        ordered = not isinstance(backend, str | Backend)
        paths = PathSelector(
            fleet,
            checked.options,
            checked.backends,
            ordered=ordered,
            unusable=checked.unusable,
        )
        if checked.on_progress is not None:
            group.observers.append(ProgressObserver(checked.on_progress))
        return Coordinator(fleet, paths, takeover=takeover, delta=delta, scrub=checked.scrub)

    reached: list[BaseTransport] = []
    try:
        checked = ranks.together(check)
        compare(checked)
        cleanup_stale()
        # Apart: making a worker may be a collective, which a rank with a bad source never reaches.
        to_path = partial(TransportFactory, token, verify_tls=verify_tls, timeout_s=timeout_s)
        said = None
        if "receiver" in (dtype, quantize):
            asked = to_path(below=_path_of(source, at))
            every = partial(asked.every, checked.targets, wait_s=wait_s)
            said = describe_together(ranks, every, reached, timeout_s)
        made = ranks.together(lambda: _source_to_send(source, dtype, rename, quantize, said))
        worker, below = ranks.together(lambda: make_worker(checked, made))
        _note_casts(worker, made, said, dtype)
        transports = to_path(below=below)
        group = RankGroup(worker, ranks)
        coordinator = ranks.together(
            lambda: make_coordinator(group, checked) if group.leads else None
        )
        ranks.limit(ranks_timeout_s)
    except BaseException:
        ranks.close()
        _close_all(reached)
        raise
    return WeightSender(group, coordinator, transports.one, verify=verify)


def _source_to_send(
    source: object,
    dtype: Dtype | None,
    rename: Rename | None,
    quantize: str | None,
    said: Described | None,
) -> WeightSource:
    """Return the source of what is sent: cast and quantized, also as the receivers say."""
    if said is None:
        return as_source(source, dtype=dtype, rename=rename)
    if quantize is not None:
        scheme = scheme_of(said.quantization)
        return QuantizedSource(as_source(source, dtype=dtype, rename=rename), scheme)
    kept = said.kept()
    return cast_source(source, kept.dtypes, only=kept.only, rename=rename)


def _path_of(source: object, at: str | None) -> str:
    """Return the path of the receivers below their URLs."""
    return str(getattr(source, "receiver_path", "")) if at is None else check_path(at)


def _check_quantize(quantize: object, dtype: object) -> None:
    if quantize is None:
        return
    if quantize != "receiver":
        raise ConfigError(
            f'quantize is "receiver", not {quantize!r}; a scheme is that of '
            "QuantizedSource(model, scheme)"
        )
    if dtype == "receiver":
        raise ConfigError('with quantize="receiver" name a dtype, which is cast to before')


def _note_casts(
    worker: RankWorker, source: WeightSource, said: Described | None, dtype: Dtype | None
) -> None:
    if said is not None and dtype == "receiver":
        worker.may_cast, worker.casts = said.kept().unlike, casts_of(source)


def _close_all(transports: Iterable[BaseTransport]) -> None:
    for transport in transports:
        transport.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checked:
    """The arguments of `connect` on one rank, checked."""

    targets: Sequence[Target]
    options: TransferOptions
    backends: Sequence[Backend]
    unusable: Mapping[str, str]
    scrub: float
    on_progress: Callable[[Progress], object] | None
    dtype: torch.dtype | None


def _check_packed(options: TransferOptions, backends: Sequence[Backend]) -> None:
    """Raise ConfigError where `packed=False` is given and the only backend streams."""
    if len(backends) == 1 and options.packed is False and adjusted(backends[0], options).packed:
        raise ConfigError(
            f"the {backends[0].name} backend streams: leave packed out, or set it to True"
        )


def _names_none(to: object) -> bool:
    """Whether `to` names no receiver, as on ranks other than 0."""
    return to is None or (isinstance(to, Sized) and not isinstance(to, str) and not len(to))


def _names_of(backends: Iterable[Backend]) -> list[str]:
    return [backend.name for backend in backends]


class WeightSender:
    """Sends the weights of a source to receivers, one update after the other.

    Made by `connect`; use it from one thread. Each rank has its own sender, and all ranks make the
    same calls in the same order. `verify` may be changed between updates.

    `last_send` is the future of the newest `send_async` or `asend_weights`, None before the first:
    the report, or the error. It shows what became of an `asend_weights` that was cancelled:
    TransferCancelled, or the report where the receivers had begun to commit.
    """

    def __init__(
        self,
        group: RankGroup,
        coordinator: Coordinator | None,
        make_transport: Callable[[Target], BaseTransport] | None = None,
        *,
        verify: bool = True,
    ) -> None:
        if make_transport is None:  # the arguments are those of connect()
            raise ConfigError("a WeightSender is made by weightsync.connect(source, to=...)")
        self.verify = verify
        self._group = group
        self._coordinator = coordinator
        self._make_transport = make_transport
        self._closed = False
        self._open_call: dict[str, object] = {}
        self.last_send: Future[SyncReport] | None = None
        self._in_flight: list[_InFlight] = []
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _free_dropped, group, coordinator, self._pid)
        self._finalizer.atexit = False  # at exit the kernel frees everything
        try:
            self._run("connect", lambda leading: leading.membership.connect())
        except BaseException:
            self._free()
            raise

    def __repr__(self) -> str:
        if self._closed:
            return f"<WeightSender at version {self.version}, closed>"
        coordinator = self._coordinator
        if coordinator is None:
            return f"<WeightSender at version {self.version}, rank {self._group.comm.rank}>"
        paths = {member.shown_path for member in coordinator.fleet.members}
        by = f" by {'+'.join(sorted(paths))}" if coordinator.membership.connected else ", released"
        return f"<WeightSender at version {self.version}, to {shorten(self.targets, 3)}{by}>"

    @property
    def version(self) -> int:
        """The last version that receivers hold."""
        return self._group.version

    @property
    def targets(self) -> list[str]:
        """Names of the receivers, as in messages; empty on ranks other than 0."""
        members = self._coordinator.fleet.members if self._coordinator else ()
        return [member.target for member in members]

    @property
    def _statuses(self) -> list[Status]:
        """The last known statuses of the receivers; empty on ranks other than 0."""
        members = self._coordinator.fleet.members if self._coordinator else ()
        return [member.status for member in members]

    @property
    def path(self) -> str:
        """Path of the bytes; several paths are joined by `+`. Empty on ranks other than 0.

        Raises ConfigError when the sender is closed or released.
        """
        self._settle()
        coordinator = self._coordinator
        if coordinator is None and not self._closed:
            return ""
        if coordinator is None or self._closed or not coordinator.membership.connected:
            raise ConfigError("this sender is closed or released; send_weights() connects again")
        return "+".join(sorted({member.shown_path for member in coordinator.fleet.members}))

    @property
    def connect_seconds(self) -> Mapping[str, float]:
        """Seconds of the last connection, by phase; empty on ranks other than 0."""
        return dict(self._coordinator.paths.seconds) if self._coordinator else {}

    @concise
    def send_weights(
        self,
        version: int | None = None,
        *,
        label: str | None = None,
        rewind: bool = False,
        wake: bool = False,
    ) -> SyncReport:
        """Send the source's current weights to every receiver; return when all use them.

        The source must not change before this returns: a change is a VerificationError with the
        names of the tensors, and nothing is committed. `send_async` lets it change meanwhile.

        `version` None is one more than the last version. Versions grow, unless `rewind` is set: the
        trainer went back to an older checkpoint.

        With `wake`, receivers that sleep (docs/sleep.md) are woken in the order that engines need:
        the weights, then the update, then the KV cache, and they generate. Where the update fails,
        the weights are awake, and nothing generates. Without it, a receiver that sleeps refuses an
        update with an UpdateConflictError.

        Raises VerificationError, TransferError, TransportError or ProtocolError. The receivers are
        then as they were, except those that the error or their status calls TORN. An error of one
        rank is raised on all ranks.
        """
        return self._send_weights(version, label, rewind, StopSignal(), wake=wake)

    def written(self, names: Iterable[str] | None = None) -> None:
        """Say that tensors, all by default, have the values of the next update: it reads them now.

        Call it when the optimizer has written them, for a layer at a time or for all. Verified
        updates that receivers read in place then take their fingerprints while the trainer goes on,
        on a GPU on a stream of its own; on the host this call takes them itself. A tensor that
        torch saw written since is read again by the update. One that was written without torch's
        notice, through `.data` or NumPy, fails the update with VerificationError.

        `names` are those that are sent. Of several ranks each says it for what it sends itself, by
        the names of whole tensors. Does nothing for other updates, where ranks gather, and while an
        update is in flight or within `update()`. Not run on a GPU. Raises ConfigError for names
        that are not sent, and after `close`, and ManifestMismatchError for a module that has other
        tensors than it had.
        """
        if self._closed:
            raise ConfigError("this sender is closed; connect again")
        if not self.verify or any(not flight.is_over for flight in list(self._in_flight)):
            return
        ours = object()
        if self._open_call.setdefault("call", ours) is not ours:
            return
        try:
            self._group.worker.note_written(names)
        finally:
            del self._open_call["call"]

    def send_async(
        self,
        version: int | None = None,
        *,
        label: str | None = None,
        rewind: bool = False,
        replace: bool = False,
        wake: bool = False,
    ) -> Future[SyncReport]:
        """Copy the source's weights, and send the copy from another thread: the source may change.

        Returns when the copy is made, at the speed of memory copies; the future has the report, or
        the error, which is also logged. The first call allocates memory for the copy, on the
        tensors' device, and connects again. Ranks that each send what they hold copy that: 1/N of
        the model; else every rank copies the whole model (sharded tensors are gathered). Every
        later update of this sender sends from the copy, those of `send_weights` too. A first call
        that fails frees its copy.

        One update is in flight. A further call waits for it before it copies. With `replace` it
        cancels the one in flight, whose future then has TransferCancelled, unless it was too late
        or failed. Other methods that send, or change the fleet, wait for it; `close` does, too.
        Every rank calls this, with the same arguments. `wake` is that of `send_weights`. A change
        of the source while it is copied is a VerificationError. Raises the errors of the copy.
        Never run on a GPU.
        """
        return self._start_async(version, label, rewind, replace=replace, wake=wake).future

    async def asend_weights(
        self,
        version: int | None = None,
        *,
        label: str | None = None,
        rewind: bool = False,
        snapshot: bool = False,
        wake: bool = False,
    ) -> SyncReport:
        """Do the same as `send_weights` without blocking the event loop.

        The source must not change before this returns: an optimizer step meanwhile is a
        VerificationError. With `snapshot` it may change as soon as this coroutine waits for the
        first time: it begins with what `send_async` does, and that blocks the loop: it waits for an
        update in flight, and copies.

        A cancellation stops the transfer, and returns when the source is no longer read. Where the
        receivers have everything already, they commit it all the same: `last_send` then has the
        report, or the error, which is logged. Further calls wait for the end of that update.
        """
        # Not a task: a loop that ends cancels its tasks, and the thread would continue to read.
        if snapshot:
            flight = self._start_async(version, label, rewind, logs=False, wake=wake)
        else:
            flight = _InFlight("asend_weights", logs=False, awaited=True)
            self.last_send = flight.future
            self._in_flight.append(flight)
            task = asyncio.current_task()

            def send() -> SyncReport:
                with waited_for_by((task,)):
                    return self._send_weights(version, label, rewind, flight.stop, wake=wake)

            flight.start(send)
        sending = asyncio.wrap_future(flight.future)
        try:
            return await asyncio.shield(sending)
        except asyncio.CancelledError:
            flight.stop.set()
            unread = asyncio.wrap_future(flight.stop.unread)
            ends: list[asyncio.Future[Any]] = [unread, sending]
            while not (snapshot or unread.done() or sending.done()):
                with suppress(asyncio.CancelledError):
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                with suppress(WeightSyncError):
                    sending.result()
            else:
                flight.logs = True
                sending.cancel()  # this loop may be closed before the update is over
            raise
        except WeightSyncError as exc:
            raise shortened(exc) from exc.__cause__
        finally:
            flight.awaited = False

    def update(
        self,
        version: int | None = None,
        *,
        label: str | None = None,
        rewind: bool = False,
        partial: bool = False,
        wake: bool = False,
    ) -> AbstractContextManager[UpdateTransaction | FollowerUpdate]:
        """Open an update in which the caller sends the tensors.

        The update commits at the end of the block, and aborts if the block raises. `partial` allows
        a subset of the model (LoRA), based on the version that the receivers hold. `wake` is that
        of `send_weights`. The report is `update.last_report` afterwards.
        """
        return _ConciseBlock(self._update(version, label, rewind, partial, wake))

    @contextmanager
    def _update(
        self,
        version: int | None,
        label: str | None,
        rewind: bool,
        partial: bool,
        wake: bool,
    ) -> Iterator[UpdateTransaction | FollowerUpdate]:
        as_flag("wake", wake)
        arguments = _texts(version=version, label=label, rewind=rewind, partial=partial, wake=wake)
        with self._call("update", arguments) as coordinator:
            if coordinator is None:
                with following(self._group) as followed:
                    yield followed
            else:
                with coordinator.updating(
                    version, label, rewind=rewind, partial=partial, wake=wake
                ) as update:
                    yield update

    @concise
    def add(self, target: Target) -> SyncReport | None:
        """Add a receiver, and bring it to the current version if there is one.

        It fetches that from a receiver of the fleet. Where none can send it, the source does, which
        must then still hold the weights of that version. Returns the report; None where there is no
        version yet, where it was not sent as a whole, or where it cannot be told whether the source
        has changed since (a warning says so): the next update brings it the weights. Raises the
        same errors as `connect` and `resync`; the fleet is then as it was.
        """
        return self._run(
            "add",
            lambda leading: leading.add(self._make_transport(target)),
            {"target": described([target])},
        )

    @concise
    def remove(self, target: str) -> None:
        """Remove the receiver with that name (`targets`), or all workers of a server by its URL.

        Removed receivers keep their weights.
        """
        self._run("remove", lambda leading: leading.remove(target), {"target": described([target])})

    @concise
    def resync(self, target: str) -> SyncReport:
        """Send the current version to a single receiver or server that missed it.

        The source must still hold the weights of that version. Raises TransferError if it has
        changed since, or if that cannot be told, as after a receiver joined or left by another
        path. Only fingerprints show that; with `verify=False` a warning is logged. Raises
        ConfigError for an unknown target, or before the first update.
        """
        return _required(
            self._run(
                "resync",
                lambda leading: leading.resync(leading.membership.find(target)),
                {"target": described([target])},
            )
        )

    def shared_memory_usage(self) -> list[SharedMemoryUsage]:
        """Return the memory that this rank shares: size, age, readers, and readers not done."""
        members = self._coordinator.fleet.members if self._coordinator else ()
        return self._group.worker.usage(
            {
                (member.backend, member.reader): member.target
                for member in members
                if not member.rank
            }
        )

    @concise
    def release(self) -> None:
        """Unregister all memory, so that it may be offloaded or freed. The next send reconnects."""
        self._run("release", lambda leading: leading.membership.disconnect())
        self._group.worker.drop_snapshot()

    @concise
    def close(self) -> None:
        """Disconnect from the receivers, move adopted parameters back and free all memory.

        Does nothing in a forked child, because everything belongs to the parent. With several
        ranks, raises if another rank is gone or makes another call; the memory is freed in that
        case, too. An `asend_weights` that is awaited is cancelled first. After a call has raised
        because a rank is gone, close() works without the other ranks and does not raise again.
        """
        if self._closed or os.getpid() != self._pid:
            return
        known = self._group.comm.broken
        try:
            if exiting():  # nothing waits for ranks and receivers, which may be gone
                self._end_calls(0.0)  # all are told before one is waited for
                self._end_calls(exit_left_s())
                self._disconnect_alone()
            else:
                for flight in [flight for flight in self._in_flight if flight.awaited]:
                    flight.stop.set()  # what it reads is freed here
                    flight.wait()
                self._run("close", lambda leading: leading.membership.disconnect(leaves=True))
        except WeightSyncError:
            self._disconnect_alone()
            if not known:
                raise
        finally:
            self._closed = True  # nothing more is sent
            if not exiting():
                self._settle(stop=True)
            self._free()

    def _end_calls(self, timeout_s: float) -> None:
        """At exit: have the calls of other threads leave torch, and wait for each that long."""
        for flight in list(self._in_flight):
            flight.stop.set()
        for calls in (self._group.worker.calls, self._group.comm.calls):
            calls.end(timeout_s)

    def _disconnect_alone(self) -> None:
        """Disconnect from the receivers, as far as possible without the other ranks."""
        self._group.comm.close()
        if self._coordinator is not None:
            self._coordinator.fleet.clear_silent()
            with suppress(WeightSyncError):
                self._coordinator.membership.disconnect(leaves=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @concise
    def _start_async(
        self,
        version: int | None,
        label: str | None,
        rewind: bool,
        *,
        replace: bool = False,
        logs: bool = True,
        wake: bool = False,
    ) -> _InFlight:
        as_flag("wake", wake)
        for flight in list(self._in_flight) if replace else ():
            flight.stop.set()
        arguments = _texts(version=version, label=label, rewind=rewind, wake=wake)
        self._run("send_async", lambda leading: leading.take_snapshot(), arguments)
        flight = _InFlight("send_async", logs=logs)
        self.last_send = flight.future

        def send() -> SyncReport:
            stop = flight.stop
            return self._send_weights(version, label, rewind, stop, taken=True, wake=wake)

        self._in_flight.append(flight)
        flight.start(send)
        return flight

    def _send_weights(
        self,
        version: int | None,
        label: str | None,
        rewind: bool,
        stop: StopSignal,
        *,
        taken: bool = False,
        wake: bool = False,
    ) -> SyncReport:
        as_flag("wake", wake)
        arguments = _texts(version=version, label=label, rewind=rewind, wake=wake)
        with self._call("send_weights", arguments, stop) as coordinator:
            if coordinator is None:
                return _required(self._group.serve().report)
            return coordinator.send(version, label, rewind=rewind, taken=taken, wake=wake)

    def _wake(self) -> list[Member]:
        """Wake receivers that sleep. Called by SetSender, before any of its parts is sent."""
        with self._call("wake", _NOTHING) as coordinator:
            assert coordinator is not None  # a set is sent by one rank
            return coordinator.wake()

    def _serve(self, woken: Sequence[Member]) -> None:
        """Wake the rest of them, after the update of the set."""
        with self._call("serve", _NOTHING) as coordinator:
            assert coordinator is not None
            coordinator.serve(woken)

    def _send_in_set(
        self,
        update: SetUpdate,
        version: int,
        label: str | None,
        rewind: bool,
        stop: StopSignal,
    ) -> SyncReport:
        """Send as a part of a set. Called by SetSender, in a thread for each part."""
        with update.part():
            arguments = _texts(version=version, label=label, rewind=rewind)
            with self._call("send_weights", arguments, stop) as coordinator:
                assert coordinator is not None  # a set is sent by one rank
                coordinator.fleet.set_update = update
                try:
                    return coordinator.send(version, label, rewind=rewind)
                finally:
                    coordinator.fleet.set_update = None

    def _run(
        self,
        call: str,
        do: Callable[[Coordinator], object],
        arguments: Mapping[str, str] = _NOTHING,
    ) -> SyncReport | None:
        """Make one call on every rank: rank 0 runs it, the others execute rank 0's commands."""
        with self._call(call, arguments) as coordinator:
            if coordinator is None:
                return self._group.serve().report
            do(coordinator)
            return coordinator.last_report

    @contextmanager
    def _call(
        self,
        call: str,
        arguments: Mapping[str, str],
        stop: StopSignal | None = None,
    ) -> Iterator[Coordinator | None]:
        """Open one call of the user, which all ranks make; rank 0 gets the coordinator.

        All ranks have to give the same `arguments`, as text.

        It waits for the updates that are in flight, see `_settle`. At the end of the block, rank 0
        sends the other ranks its report or its error. Raises ConfigError when another call is open,
        because a ring has one writer.
        """
        self._settle()
        group, coordinator = self._group, self._coordinator
        ours: object | None = object()
        try:
            # Not a lock: after an interrupt right here it would be unknown who has taken it.
            if self._open_call.setdefault("call", ours) is not ours:
                ours = None
                raise ConfigError(
                    "this sender is in use already, in another thread or in an update() block "
                    "around this call; use it from one thread, one update after another"
                )
            if self._closed:
                raise ConfigError("this sender is closed; connect again")
            group.check_same_call(call, arguments)
            group.worker.stop = stop or StopSignal()
            if coordinator is None:
                yield None
                return
            coordinator.fleet.clear_silent()
            coordinator.verify = self.verify
            coordinator.last_report = None
            try:
                with (
                    call_span(call, lambda: coordinator.last_report, group.observers),
                    group.observers.user_call(),
                ):
                    yield coordinator
            except BaseException as exc:
                try:
                    group.finish(coordinator.fleet.version, error=exc)
                except WeightSyncError:
                    logger.debug("the other ranks did not get the error", exc_info=True)
                raise
            group.finish(coordinator.fleet.version, report=coordinator.last_report)
        finally:
            if ours is not None and self._open_call["call"] is ours:
                del self._open_call["call"]

    def _settle(self, *, stop: bool = False) -> None:
        """Return when the updates are over that other threads send; with `stop`, cancel them.

        These are the updates of `send_async`, and of `asend_weights` after a cancellation. One that
        another thread waits for in turn was begun before it.
        """
        waited: list[_InFlight] = []
        # A callback of a future may have sent another one.
        while left := [flight for flight in self._begun_before() if flight not in waited]:
            for flight in left:
                if stop:
                    flight.stop.set()
                flight.wait()
            waited += left
        for flight in waited:
            with suppress(ValueError):  # another thread has waited, too
                self._in_flight.remove(flight)

    def _begun_before(self) -> list[_InFlight]:
        """Return the updates in flight, in the thread of one of them those before it."""
        flights = list(self._in_flight)
        own = next((flight for flight in flights if flight.is_here and not flight.is_over), None)
        before = flights if own is None else flights[: flights.index(own)]
        return [flight for flight in before if not flight.awaited]

    def _free(self) -> None:
        self._closed = True
        self._finalizer.detach()
        _free(self._group, self._coordinator)


def _free(group: RankGroup, coordinator: Coordinator | None) -> None:
    try:
        if coordinator is not None:
            coordinator.fleet.close()
    finally:
        group.close()


def _free_dropped(group: RankGroup, coordinator: Coordinator | None, pid: int) -> None:
    """Free the memory and the receivers of a sender that was dropped without close()."""
    if os.getpid() == pid:
        logger.warning("a sender was dropped without close(); its shared memory is freed")
        group.worker.expect_finalizer()
        _free(group, coordinator)


class _InFlight:
    """An update that another thread sends, for the call of that name.

    `logs` its error. While it is `awaited` by a coroutine, further calls are refused; else they
    wait for it.
    """

    def __init__(self, call: str, *, logs: bool, awaited: bool = False) -> None:
        self.logs = logs
        self.awaited = awaited
        self.future: Future[SyncReport] = Future()
        # It cannot be cancelled by itself: the ranks would make different calls.
        self.future.set_running_or_notify_cancel()
        self.stop = StopSignal()
        self._call = call
        self._over = threading.Event()
        self._thread: _SendThread | None = None

    def start(self, send: Callable[[], SyncReport]) -> None:
        """Send in a thread; the future gets its result.

        A daemon thread, for which interpreter exit does not wait.
        """
        run = contextvars.copy_context().run
        self._thread = _SendThread(
            target=run, args=(self._send, send), name="weightsync-send", daemon=True
        )
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Whether its thread is this one."""
        return self._thread is threading.current_thread()

    @property
    def is_over(self) -> bool:
        """Whether it sends no more. Callbacks of its future may still run."""
        return self._over.is_set()

    def wait(self) -> None:
        """Return when it is over, its callbacks too; those are not waited for in such a thread."""
        if self._thread is None:
            return
        if isinstance(threading.current_thread(), _SendThread):
            self._over.wait()  # callbacks of two of them might wait for each other
        else:
            self._thread.join()

    def _send(self, send: Callable[[], SyncReport]) -> None:
        try:
            report = send()
        except BaseException as exc:  # noqa: BLE001  # raised by the future
            error = shortened(exc) if isinstance(exc, WeightSyncError) else exc
            if self.logs and not isinstance(error, TransferCancelled):
                logger.warning("%s: %s: %s", self._call, type(error).__name__, error)
            self._over.set()
            self.future.set_exception(error)
        else:
            self._over.set()
            self.future.set_result(report)


class _SendThread(threading.Thread):
    """The thread of an update in flight."""


class _ConciseBlock(AbstractContextManager[T]):
    """Context manager that raises its own errors as `concise` does, and the block's unchanged."""

    def __init__(self, block: AbstractContextManager[T]) -> None:
        self._block = block

    @concise
    def __enter__(self) -> T:
        return self._block.__enter__()

    @concise
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return self._block.__exit__(kind, error, traceback)


def _texts(**arguments: object) -> dict[str, str]:
    return {name: repr(value) for name, value in arguments.items()}


def _required(report: SyncReport | None) -> SyncReport:
    if report is None:
        raise ProtocolError("rank 0 sent no report of the update")
    return report


class _LatestTensors:
    """WeightSource of the tensors of the current `send_weights` call; holds none between calls."""

    def __init__(self, manifest: Manifest, rounded: Mapping[str, str]) -> None:
        self.manifest = manifest
        self.rounded = rounded
        self.pairs: list[tuple[str, torch.Tensor]] = []

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.pairs

    def stable_tensors(self) -> list[torch.Tensor] | None:
        return None

    def made_of(self) -> tuple[list[str], list[torch.Tensor]]:
        return [name for name, _ in self.pairs], [tensor for _, tensor in self.pairs]


@dataclass(slots=True, eq=False)
class _Connection:
    """The kept connection of one target: its settings, its sender and the sender's source.

    `lock` is held during a call, and guards the rest. There is no sender before the first call has
    connected, and after a call that failed to connect.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    settings: Hashable = None
    packed: bool = True
    sender: WeightSender | None = None
    source: nn.Module | _LatestTensors | None = None

    def close(self) -> None:
        """Close the sender, if there is one."""
        sender, self.sender = self.sender, None
        source, self.source = self.source, None
        if sender is not None:
            with _reading_in_place(source, packed=self.packed):
                sender.close()


_lock = threading.Lock()
"""Guards the two tables below. Held for moments: never while a call connects or sends."""
_connections: dict[object, _Connection] = {}
_adopting: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
"""Held during a call that reads a module's parameters where they are. The first such call moves
them, and the close of its connection moves them back: another call would find them changed."""


@contextmanager
def _connection_to(key: object) -> Iterator[_Connection]:
    """Take the connection of a target for one call. Calls to one target take turns."""
    while True:
        with _lock:
            connection = _connections.setdefault(key, _Connection())
        with connection.lock:
            if _connections.get(key) is not connection:
                continue  # closed while this call waited for its turn
            try:
                yield connection
            finally:
                if connection.sender is None:
                    with _lock:
                        _connections.pop(key, None)
            return


@contextmanager
def _reading_in_place(source: object, *, packed: bool) -> Iterator[None]:
    """Keep other calls that read the same module in place from beginning meanwhile."""
    if packed or not isinstance(source, nn.Module):
        yield
        return
    with _lock:
        lock = _adopting.setdefault(source, threading.RLock())
    with lock:
        yield


@concise
def send_weights(  # noqa: PLR0913  # the settings of a connection, all keyword-only
    named_tensors: NamedTensors | Mapping[str, torch.Tensor] | nn.Module,
    to: Targets,
    *,
    packed: bool = True,
    version: int | None = None,
    label: str | None = None,
    rewind: bool = False,
    dtype: Dtype | None = None,
    verify: bool = True,
    token: str | None = None,
    verify_tls: bool | str = True,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    takeover: bool = False,
) -> SyncReport:
    """Send a module, a mapping or `(name, tensor)` pairs to `to`, as one full update.

    The first call connects, and the connection is kept per target until `close()`. Other names,
    shapes or settings make a new connection. Between two calls other senders may take the receiver,
    so several processes may call this in turn for one receiver. Threads may call this for different
    targets at the same time (with ranks, in the same order on each); calls for one target take
    turns, as do those with `packed=False` for one module. `takeover` takes the receiver from a
    sender that does not yield. The other settings are those of `connect`. A generator is exhausted
    before the transfer begins: if all tensors do not fit into memory at once, pass a module, or use
    `connect` with a callable. Raises the same errors as `connect` and `WeightSender.send_weights`.
    """
    dtype = as_dtype("dtype", dtype)
    # Read once: it may be an iterator. Ranks other than 0 may name no receiver.
    targets = () if _names_none(to) else tuple(targets_of(to, "to="))
    key: object = targets[0] if len(targets) == 1 else targets
    with _connection_to(key) as connection:
        source: nn.Module | _LatestTensors
        pairs: list[tuple[str, torch.Tensor]] = []
        if isinstance(named_tensors, nn.Module):
            source = named_tensors
            identity: Hashable = id(source)
        else:
            given = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
            expansion = Expansion()
            pairs = list(checked_pairs(given, dtype, expansion=expansion))
            aliases = find_ties(pairs)
            pairs = [(name, tensor) for name, tensor in pairs if name not in aliases]
            specs = tuple(
                spec_of(name, tensor, None if name in expansion.owners else dtype)
                for name, tensor in pairs
            )
            rounded = rounded_by(specs, [tensor.dtype for _, tensor in pairs])
            source = _LatestTensors(Manifest(specs, aliases), rounded)
            identity = source.manifest.digest
        make = partial(
            connect,
            packed=packed,
            verify=verify,
            token=token,
            verify_tls=verify_tls,
            timeout_s=timeout_s,
        )
        settings = (*make.keywords.items(), dtype, identity)
        if connection.settings != settings:
            connection.close()
        with _reading_in_place(source, packed=packed):
            sender = connection.sender
            if sender is None:
                warn_of_state(states_beside(pairs), "sent")
                cast = dtype if isinstance(source, nn.Module) else None  # pairs: in their specs
                sender = make(source, targets, dtype=cast, takeover=takeover, yields=True)
                connection.settings, connection.packed = settings, packed
                connection.source, connection.sender = source, sender
            latest = connection.source if isinstance(connection.source, _LatestTensors) else None
            if latest is not None:
                latest.pairs = pairs
            try:
                return sender.send_weights(version, label=label, rewind=rewind)
            except SenderReplacedError:
                connection.close()  # the next call reconnects
                raise
            finally:
                if latest is not None:
                    latest.pairs = []


@concise
def close() -> None:
    """Close every connection that `send_weights` keeps; adopted parameters are moved back.

    Waits for calls of other threads. If one raises, the others are closed, too.
    """
    with _lock:
        closed = dict(_connections)
    with ExitStack() as closing:
        for key, connection in closed.items():
            closing.callback(_forget, key, connection)


def _forget(key: object, connection: _Connection) -> None:
    """Close a connection after the call in it, and keep it no more."""
    with connection.lock:
        with _lock:
            if _connections.get(key) is connection:
                del _connections[key]
        connection.close()


def _close_at_exit() -> None:
    """Close every connection. Waits for no call of another thread, which would wait for a peer."""
    kept = [c.sender for c in list(_connections.values()) if c.sender is not None]
    with ExitStack() as closing:
        for sender in kept:
            closing.callback(sender.close)
        for sender in kept:
            sender._end_calls(0.0)  # all are told before one is waited for


def _forget_in_child() -> None:
    """Leave the connections to the parent, whose other threads may have held the locks."""
    global _lock, _connections, _adopting  # noqa: PLW0603  # those of this process
    _left_to_parent.append(_connections)
    _lock = threading.Lock()
    _connections, _adopting = {}, weakref.WeakKeyDictionary()


_left_to_parent: list[object] = []
"""Kept in a forked child: a sender that is dropped without close() would be warned of there."""
atexit.register(_close_at_exit)
os.register_at_fork(after_in_child=_forget_in_child)
