"""The receiving side: `WeightReceiver`, which handles every control message, and `fetch`."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from weightsync.arguments import as_seconds
from weightsync.backends.registry import known_endpoints
from weightsync.cuda.handles import device_keys
from weightsync.errors import ConfigError, ProtocolError, WeightSyncError
from weightsync.report import SyncReport
from weightsync.runtime.tracebacks import concise
from weightsync.shm.segment import cleanup_stale
from weightsync.specs import Manifest
from weightsync.transports.base import Transport
from weightsync.transports.factory import Target, Targets, TransportFactory, targets_of
from weightsync.update.fetch_client import (
    NoSourceError,
    fetch_from,
    fetch_from_first,
    fetch_parts,
    holds_parts,
    workers_of,
)
from weightsync.update.gate import OnCommit, OnHold, OnRelease
from weightsync.update.lifecycle import ApplyChoice, State
from weightsync.update.senders import Senders, installed_backend
from weightsync.update.session import ReceiverSession
from weightsync.weights.copying.shards import holds_shards
from weightsync.weights.sinks.base import HookSink, LoadWeights, WeightSink, users_code
from weightsync.weights.sinks.module_sink import ModuleSink, ShardedModuleSink
from weightsync.weights.tensor_kinds import warn_of_derived
from weightsync.wire import codec
from weightsync.wire.messages import (
    PROTOCOL,
    PROTOCOL_MIN,
    REPORT_CALL,
    AbortRequest,
    CheckReply,
    CheckRequest,
    FetchReply,
    FetchRequest,
    FinishRequest,
    InitReply,
    InitRequest,
    LabelRequest,
    OpenUpdate,
    PauseRequest,
    PrepareRequest,
    Protocols,
    Reply,
    Request,
    ResetCacheRequest,
    ResumeRequest,
    SharedMemoryUsage,
    ShutdownRequest,
    SleepRequest,
    StartRequest,
    Status,
    StatusRequest,
    StepReply,
    UpdateRecord,
    UpdateRequest,
    WakeRequest,
    WorkerReport,
    choose_protocol,
)
from weightsync.wire.offers import Message

if TYPE_CHECKING:
    from weightsync.update.fetch_server import FetchServer

R = TypeVar("R", bound=Message)
DEFAULT_LEASE_S = 60.0
_READING_S = 300.0
_FETCH_END_S = 10.0
"""How long a sleep waits for threads that read the weights for others."""


class WeightReceiver:
    """Receives weights into `sink`: an nn.Module, a `load_weights` hook, or a WeightSink.

    - `sink`: the module whose tensors are replaced, the hook that is given `(name, tensor)` pairs,
      or a WeightSink.
    - `apply`: `staged` writes the weights to a second copy and swaps at finish. `in_place`
      overwrites the weights in use while generation waits. `auto` stages if memory allows.
    - `manifest`: declares the tensors that a hook wants.
    - `on_pause`: called with the mode when generation has to pause.
    - `on_resume`: called when it may go on.
    - `on_commit`: called with the new version inside of each commit: the new weights are in use,
      and no decode step runs. It derives what depends on the weights (buffers, fused copies). If it
      raises, nothing is committed; see below.
    - `on_clear_cache`: called when caches of older weights have to be dropped: by
      `reset_prefix_cache`, and in a commit after `on_commit`, unless the message that finishes the
      update keeps caches (`clear_cache=False`).
    - `on_hold`: called with `timeout_s` before the weights in use are overwritten. It may block
      until no decode step runs, or raise to abort the update. For programs that generate in another
      process and do not use `reading`.
    - `on_release`: called once for each `on_hold` that returned, when that step of the update is
      over and its outcome is visible.
    - `on_sleep`: called with the level of a sleep, 1 or 2, while no decode step runs, before the
      module's memory is given back. It frees what the program keeps besides: the KV cache. If it
      raises at level 1, the receiver stays awake. A hook's weights it moves or frees as well.
    - `on_wake`: called with the tags that wake up, `weights`, `kv_cache` or both, when the module
      has memory again.
    - `lease_s`: the longest time that an update may make no progress.
    - `version`: the version of the weights in use.
    - `beside`: another receiver of this process, whose weights are used together with these, as a
      draft model's with the policy's. An update that reaches both from one `connect_set` is
      committed in both, or in neither. They share a gate: no weights of either change inside of
      `reading()` of one of them, and `on_hold` and `on_release` are those of the first.

    Where `on_commit` raises, a staged module gets its former weights back, `on_commit` is called
    once more, with the former version, and the receiver goes on with that. It is TORN where that
    fails too, and where the former weights are gone: in place, after a hook, or without memory for
    a copy of tensors that are copied over. The next update heals it. `reading()` inside of
    `on_commit` raises NotReadyError.

    A hook may write to the tensors that it is given; see HookSink.

    Every method is thread-safe. Raises ConfigError for an unsupported sink, and where a HookSink
    with `load_patches` is to be `in_place`.
    """

    def __init__(  # noqa: PLR0913  # each is one hook of its owner's, with a default
        self,
        sink: nn.Module | LoadWeights | WeightSink,
        *,
        apply: ApplyChoice = "auto",
        manifest: Manifest | None = None,
        on_pause: Callable[[str], None] | None = None,
        on_resume: Callable[[], None] | None = None,
        on_commit: OnCommit | None = None,
        on_clear_cache: Callable[[], None] | None = None,
        on_hold: OnHold | None = None,
        on_release: OnRelease | None = None,
        on_sleep: Callable[[int], None] | None = None,
        on_wake: Callable[[Sequence[str]], None] | None = None,
        lease_s: float = DEFAULT_LEASE_S,
        version: int = 0,
        beside: WeightReceiver | None = None,
    ) -> None:
        if beside is not None and (on_hold is not None or on_release is not None):
            raise ConfigError("on_hold and on_release are those of the receiver that is `beside`")
        cleanup_stale()
        self.sink = as_sink(sink, manifest=manifest)
        if apply == "in_place" and isinstance(self.sink, HookSink) and self.sink.load_patches:
            raise ConfigError(
                "load_patches is never called in place, where a hook is sent whole models; give "
                'WeightReceiver(..., apply="staged"), or a HookSink without load_patches'
            )
        if on_commit is None and isinstance(self.sink, ModuleSink):
            warn_of_derived(self.sink.module)
        self.instance = secrets.token_hex(8)
        self._session: ReceiverSession = ReceiverSession(
            self.sink,
            Senders(device_keys(self.sink.device)),
            apply=apply,
            lease_s=lease_s,
            version=version,
            clear_cache=on_clear_cache,
            on_commit=on_commit,
            on_hold=on_hold,
            on_release=on_release,
            beside=None if beside is None else beside._session,
        )
        self._on_pause = on_pause
        self._on_resume = on_resume
        self._on_clear_cache = on_clear_cache
        self._on_sleep = on_sleep
        self._on_wake = on_wake
        self._paused = threading.Event()
        self._handlers: dict[type[Message], Callable[..., Reply]] = {
            InitRequest: self._init,
            ShutdownRequest: self._shutdown,
            StartRequest: self._session.start,
            UpdateRequest: self._session.update,
            PrepareRequest: self._session.prepare,
            FinishRequest: self._session.finish,
            AbortRequest: self._session.abort,
            LabelRequest: self._label,
            CheckRequest: self._check,
            StatusRequest: lambda _: self.status(),
            ResetCacheRequest: self._reset_cache,
            PauseRequest: self._pause,
            ResumeRequest: self._resume,
            FetchRequest: self._fetch,
            SleepRequest: self._sleep,
            WakeRequest: self._wake,
        }
        self._fetches_lock = threading.Lock()
        self._fetch_server: FetchServer | None = None

    def __repr__(self) -> str:
        lifecycle = self._session.lifecycle
        return f"<WeightReceiver at version {lifecycle.version}, {lifecycle.state.value}>"

    @property
    def version(self) -> int:
        """The version of the weights in use; 0 before the first update."""
        return self._session.lifecycle.version

    @property
    def label(self) -> str | None:
        """The user's label of the weights in use."""
        return self._session.lifecycle.label

    @property
    def may_generate(self) -> bool:
        """False while the weights in use are being overwritten, or after that failed (TORN)."""
        return self._session.lifecycle.may_generate

    @property
    def asleep(self) -> Sequence[str]:
        """The tags that sleep, `weights` and `kv_cache`; empty in a receiver that is awake."""
        return self._session.lifecycle.asleep

    @property
    def paused(self) -> bool:
        """True after a pause request, until a resume request."""
        return self._paused.is_set()

    @property
    def updates_total(self) -> Mapping[str, int]:
        """Number of updates by result: `committed`, `aborted`, `torn`."""
        return dict(self._session.table.totals)

    @property
    def last_reply(self) -> StepReply | None:
        """The reply of the last committed update."""
        return self._session.table.last_reply

    @property
    def recent_updates(self) -> list[UpdateRecord]:
        """The last committed updates, at most 64, oldest first."""
        return self._session.table.recent

    @property
    def open_update(self) -> OpenUpdate | None:
        """The open update with its version; None between updates."""
        return self._session.open_update

    @contextmanager
    def reading(self, *, timeout_s: float = _READING_S) -> Iterator[int]:
        """Keep the weights unchanged during the block, for one decode step. Yields their version.

        On a GPU the step ends with the kernels on the stream that is current at the end of the
        block; that stream must wait for other streams that the step used. Raises
        NotReadyError when the weights are torn, or when an update holds them for longer than
        `timeout_s`.

        An update waits for the block, for `timeout_s` of its sender at most. Do not send to this
        receiver inside the block: that is refused with a TransferError.
        """
        with self._session.reading(timeout_s) as version:
            yield version

    def handle(self, message: Mapping[str, object]) -> dict[str, object]:
        """Handle a plain message `{"call": …, "body": {…}}` and return a plain reply.

        Every transport calls this or `dispatch`. Raises the errors of weightsync.errors.
        """
        return codec.reply_to_plain(self.dispatch(codec.from_plain(message)))

    def handle_json(self, call: str, body: bytes) -> bytes:
        """Handle the JSON of a request, and return that of its reply; blocks like `dispatch`.

        For routes in another process, which has a `weightsync.server.RemoteReceiver`. The call
        `worker_report` returns the JSON of `report()`.
        """
        if call == REPORT_CALL:
            return codec.encode(self.report())
        return codec.encode(self.dispatch(codec.decode_request(call, body)))

    def dispatch(self, request: Request) -> Reply:
        """Handle a typed message and return its reply; blocks for the duration of the step."""
        handler = self._handlers.get(type(request))
        if handler is None:
            raise ProtocolError(f"{type(request).__name__} is no request")
        return handler(request)

    def announce_finish(self, request: FinishRequest) -> None:
        """Note the finish of a part of a set, before that of another part is handled.

        For a thread that handles the finishes of all parts, one after the other: the first commits
        the parts that were announced, too, and does not wait for their requests.
        """
        self._session.announce_finish(request)

    def status(self) -> Status:
        """Return the state; never waits for a running update."""
        session, manifest = self._session, self.sink.manifest
        session.close_dead_senders()
        backends, unusable_backends = known_endpoints(self.sink.device)
        busy, orphaned, owner = session.busy, session.orphaned, session.senders.owner
        usage = self.shared_memory_usage()
        with session.lock:
            lifecycle = session.lifecycle
            prepared = lifecycle.state is State.PREPARED
            has_weights = not (lifecycle.is_discarded or "weights" in lifecycle.asleep)
            status = Status(
                instance=self.instance,
                protocol=PROTOCOL,
                protocol_min=PROTOCOL_MIN,
                state=lifecycle.state.value,
                version=lifecycle.version,
                may_generate=lifecycle.may_generate,
                apply=session.load_targets.apply,
                verification=self.sink.verification,
                label=lifecycle.label,
                update_id=lifecycle.update_id or None,
                last_finished=lifecycle.last_finished or None,
                weights_id=lifecycle.weights_id or None,
                prepared_version=lifecycle.next_version if prepared else None,
                manifest_digest=manifest.digest if manifest else None,
                busy=busy,
                orphaned=orphaned,
                paused=self.paused,
                delta_forms=session.load_targets.delta_forms,
                stream_deltas=session.load_targets.takes_stream_deltas,
                detail=lifecycle.refusal,
                device_keys=session.senders.keys,
                shared_memory=usage,
                senders=session.senders.paths(),
                owner=owner,
                fetchable=has_weights and session.load_targets.fetchable(lifecycle.weights_id),
                lends=has_weights and session.load_targets.lends(lifecycle.weights_id),
                backends=backends,
                unusable_backends=unusable_backends,
                set_id=session.set_id,
                asleep=list(lifecycle.asleep),
                sleep_level=lifecycle.sleep_level,
                discarded=lifecycle.is_discarded,
            )
        return status  # noqa: RET504  # an interrupt at a `return` inside would leave the lock taken

    def report(self) -> WorkerReport:
        """Return status, counters and recent updates, for status pages and metrics; never waits."""
        return WorkerReport(
            status=self.status(),
            updates_total=dict(self.updates_total),
            last_reply=self.last_reply,
            recent=self.recent_updates,
            open_update=self.open_update,
            fleet=self._session.table.fleet,
        )

    def shared_memory_usage(self) -> list[SharedMemoryUsage]:
        """Return every mapping that this receiver opened for senders, with size and age."""
        return self._session.senders.usage()

    def sender_alive(self, sender: str) -> bool:
        """Return whether the sender with this id is connected and its process lives."""
        return self._session.senders.alive(sender)

    def show_paused(self, paused: bool) -> None:
        """Set `paused` when generation was paused or resumed without a request. Calls no hook."""
        if paused:
            self._paused.set()
        else:
            self._paused.clear()

    def discarded(self) -> None:
        """Note that the weights in use are gone, as after their memory was freed or overwritten.

        Until a full update commits, the receiver is TORN and `reading` raises NotReadyError. No
        other receiver can fetch the weights. The next `send_weights` sends the whole model, also
        where it would have sent a delta. An open update is aborted. Raises UpdateConflictError
        where a step of an update does not end within `lease_s`.
        """
        self._session.discarded()

    def sleep(self, level: int = 1) -> None:
        """Give memory back until `wake_up`: level 1 keeps the weights on the host, 2 discards them.

        Waits for decode steps (`reading`), and aborts an open update. While it sleeps, `reading`
        raises NotReadyError, and updates, connections and fetches are refused. After level 2 the
        receiver is as after `discarded`, also when it is awake. A receiver that sleeps already
        stays as it is. On the host level 1 leaves the weights where they are.

        Raises ConfigError for a hook's weights without `on_sleep`, TransferError where decode steps
        do not end within `lease_s`, UpdateConflictError where a step of an update does not.
        """
        if level not in (1, 2):
            raise ConfigError(f"a receiver sleeps at level 1 or 2, not {level!r:.60}")
        if not self.sink.sleeps and self._on_sleep is None:
            raise ConfigError(
                "the weights of this receiver belong to a hook, so it cannot give their memory "
                "back: give WeightReceiver(..., on_sleep=, on_wake=), or call discarded() when "
                "they are gone"
            )
        if "weights" in self.asleep:
            return

        def free() -> None:
            self._end_fetches()
            if self._on_sleep is not None:
                with users_code("on_sleep"):
                    self._on_sleep(level)
            self.sink.fall_asleep(level)

        self._session.fall_asleep(level, free)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory of `tags` again: `weights`, `kv_cache`, None for all that sleeps.

        The weights come first: UpdateConflictError for the KV cache alone before them. Where
        `on_wake` raises, or there is no memory, the tags stay asleep; call it again.
        """

        def take(woken: Collection[str]) -> None:
            if "weights" in woken:
                self.sink.wake_up()
            if self._on_wake is not None:
                with users_code("on_wake"):
                    self._on_wake(list(woken))

        self._session.wake_up(tags, take)

    def show_asleep(self, level: int) -> None:
        """Note that an engine sleeps that gives its memory back itself. Calls no hook.

        Called before it does: nothing reads the weights when this has returned. A second call says
        that they are gone after all, at level 2. It calls `show_awake` when it has memory again.
        """
        if level > self._session.lifecycle.sleep_level or "weights" not in self.asleep:
            self._session.fall_asleep(level, self._end_fetches)

    def show_awake(self, tags: Sequence[str] | None = None) -> None:
        """Note that tags of an engine are awake, None: all of them; see `show_asleep`."""
        self._session.woke_up(tags)

    def close(self, *, for_good: bool = True) -> None:
        """Abort an open update and close every mapping. The weights in use stay as they are.

        `for_good`: later init and start messages raise ProtocolError. Otherwise a sender may init
        again.
        """
        self._end_fetches(wait_s=0.0)
        self._session.close(for_good=for_good)

    def _end_fetches(self, wait_s: float = _FETCH_END_S) -> None:
        """End what others fetch from this receiver. Raises TransferTimeout where one reads on."""
        with self._fetches_lock:
            lender, self._fetch_server = self._fetch_server, None
        if lender is not None:
            lender.close(wait_s)

    def _init(self, request: InitRequest) -> InitReply:
        info, probe = request.init_info, request.probe
        if probe is not None:
            installed_backend(probe.backend).check_probe(probe.payload, self._session.senders.keys)
        if info is None:
            return InitReply(
                status=self.status(),
                kept=_by_dtype(self.sink.kept()),
                quantization=self.sink.quantization,
            )
        offered = Protocols(info.protocol_min, info.protocol_max)
        chosen = choose_protocol(offered, Protocols(PROTOCOL_MIN, PROTOCOL))
        self._session.init(info)
        return InitReply(
            status=self.status(),
            path=info.path,
            payload=self._session.senders.get(info.sender).init_reply(),
            widened=self._session.widened(info.sender),
            protocol=chosen,
            wants=self._session.wants(info.sender),
            whole=self._session.whole(info.sender),
            casts=self._session.casts(info.sender),
        )

    def _shutdown(self, request: ShutdownRequest) -> Status:
        self._session.shutdown(request.sender, leaves=request.leaves)
        return self.status()

    def _label(self, request: LabelRequest) -> Status:
        with self._session.lock:
            self._session.lifecycle.label = request.new_version
        return self.status()

    def _check(self, request: CheckRequest) -> CheckReply:
        names = request.names
        expected = request.checksums
        with self.reading() as version:
            if not isinstance(expected, dict):
                if request.action == "compare":
                    raise ProtocolError("compare needs checksums: {name: 16 hex digits}")
                if request.partial:
                    whole, parts = self.sink.checksum_parts(names)
                    return CheckReply(version=version, checksums=whole, parts=parts)
                return CheckReply(version=version, checksums=self.sink.checksums(names))
            held = self.sink.checksums(names or list(expected))
        different = [name for name, value in held.items() if expected.get(name) != value]
        return CheckReply(version=version, different=different, equal=not different)

    def _fetch(self, request: FetchRequest) -> FetchReply:
        self._session.check_open()
        with self._fetches_lock:
            if self._fetch_server is None:
                # A receiver needs no modules of the sender until another one fetches from it.
                from weightsync.update.fetch_server import FetchServer  # noqa: PLC0415

                self._fetch_server = FetchServer(self._session, self.instance)
            lender = self._fetch_server
        return lender.answer(request)

    def _reset_cache(self, _: ResetCacheRequest) -> Status:
        if self._on_clear_cache is not None:
            self._on_clear_cache()
        return self.status()

    def _pause(self, request: PauseRequest) -> Status:
        self._paused.set()
        if self._on_pause is not None:
            self._on_pause(request.mode)
        return self.status()

    def _sleep(self, request: SleepRequest) -> Status:
        if request.level == 0:
            return self._pause(PauseRequest(mode=request.mode))
        if request.mode == "keep":
            raise ConfigError(
                "a sleep drops the KV cache, so no request is kept through it: mode=wait lets them "
                "end first, mode=abort ends them with the tokens that they have"
            )
        was_paused = self.paused
        self._pause(PauseRequest(mode=request.mode))
        try:
            self.sleep(request.level)
        finally:
            if not was_paused:  # what comes now is refused, or answered where it stays awake
                self._resume(ResumeRequest())
        return self.status()

    def _wake(self, request: WakeRequest) -> Status:
        tags = request.tags
        if tags is None or set(tags) - {"scheduling"}:
            self.wake_up(tags)
        if self.paused and not self.asleep and (tags is None or "scheduling" in tags):
            self._resume(ResumeRequest())
        return self.status()

    def _resume(self, _: ResumeRequest) -> Status:
        self._paused.clear()
        if self._on_resume is not None:
            self._on_resume()
        return self.status()


SOURCE_ANSWER_S = 20.0
"""How long a source of `fetch` has to answer at all. One that lives answers at once."""


@concise
def fetch(
    to: WeightReceiver | nn.Module | LoadWeights | WeightSink,
    sources: Targets,
    *,
    backend: str = "auto",
    token: str | None = None,
    verify_tls: bool | str = True,
    timeout_s: float = 60.0,
) -> SyncReport:
    """Load the weights that another receiver uses, verified, without a trainer.

    - `to`: a receiver in this process, or what `WeightReceiver` takes: then the weights are loaded
      once, and no receiver stays.
    - `sources`: URLs of receivers, or anything else that `connect` can send to. They are tried in
      this order, until one has sent its weights. Those that hold parts of tensors (shards) are
      tried last, together: see docs/sharding.md. Where one passes an update on to other hosts, or
      replaces its weights while it sends them, all are tried again, for `timeout_s` or three times.
    - `backend`, `token`, `verify_tls`, `timeout_s`: as in `connect`. A source has 20 seconds of
      that to answer at all.

    `to` gets the version and the label of the source, whatever it held before. Never run on a GPU.

    Raises the errors of the sources as one: SourceBusyError, ConnectError, NotReadyError,
    VerificationError, ConfigError for one that keeps no whole copy, ManifestMismatchError for
    other tensors, and where the parts of several sources do not make them. Raises
    SenderConflictError where `to` belongs to a living sender, UpdateConflictError where another
    sender has updated it meanwhile. `to` is then as it was, unless it loads in place.
    """
    timeout_s = as_seconds("timeout_s", timeout_s)
    answer_s = min(timeout_s, SOURCE_ANSWER_S)
    transports = TransportFactory(token, verify_tls=verify_tls, timeout_s=answer_s)
    receiver = to if isinstance(to, WeightReceiver) else WeightReceiver(to)

    options: Any = {
        "target": f"{type(to).__name__} of this process",
        "backend": backend,
        "timeout_s": timeout_s,
    }

    lenders: list[Target] = []

    def attempt(source: Target) -> SyncReport:
        workers = transports.every(source)  # each has the same weights, or its parts of them
        try:
            return fetch_from(workers[0], receiver.dispatch, **options)
        except ConfigError:
            if not holds_parts(workers[0]):
                raise
            lenders.append(source)
            raise NoSourceError(f"{workers[0].target} holds parts of tensors") from None
        finally:
            for transport in workers:
                transport.close()

    def attempt_parts() -> SyncReport:
        with ExitStack() as stack:
            workers: list[Transport] = []
            while lenders:
                with suppress(WeightSyncError):  # it has answered, and is lost since
                    for server in transports.every(lenders.pop(0)):
                        stack.callback(server.close)
                        workers += workers_of(server)
            for transport in workers:
                stack.callback(transport.close)
            return fetch_parts(workers, receiver.dispatch, **options)

    try:
        named = targets_of(sources, "sources=")
        attempts: list[Callable[[], SyncReport]] = [partial(attempt, source) for source in named]
        attempts.append(attempt_parts)
        return fetch_from_first(attempts, receiver.status, timeout_s)
    finally:
        if receiver is not to:
            receiver.close()


def as_sink(sink: object, *, manifest: Manifest | None = None) -> WeightSink:
    """Return a WeightSink for an nn.Module, a `load_weights` hook or a WeightSink."""
    if isinstance(sink, WeightSink):
        return sink
    if isinstance(sink, nn.Module):
        return ShardedModuleSink(sink) if holds_shards(sink) else ModuleSink(sink)
    if callable(sink):
        return HookSink(sink, manifest=manifest)
    raise ConfigError(
        f"cannot load weights into an object of {type(sink).__name__}; give an nn.Module, a "
        "load_weights hook or a WeightSink"
    )


def _by_dtype(kept: Mapping[str, str] | None) -> dict[str, list[str]] | None:
    """Return the names of tensors by their dtype."""
    if kept is None:
        return None
    found: dict[str, list[str]] = {}
    for name, dtype in kept.items():
        found.setdefault(dtype, []).append(name)
    return found
