"""Engine with the API of vLLM's IPC weight transfer; handles are part of the update message.

The caller of `IPCWeightTransferEngine.trainer_send_weights` sends the start and the finish itself.
`weightsync.send_weights` does all of that in two messages.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import compress
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import msgspec
import torch
import torch.distributed as dist

from weightsync.backends.base import LoadContext, Received
from weightsync.cuda import handles
from weightsync.cuda.handles import local_gpu_keys
from weightsync.cuda.wait import wait_for_all_streams
from weightsync.errors import (
    BackendUnavailableError,
    ConfigError,
    ProtocolError,
    TransportTimeout,
    VerificationError,
    WeightSyncError,
    install_hint,
    shorten,
)
from weightsync.integrations.vllm.handles import HandlesUpdate
from weightsync.ranks import comm
from weightsync.ranks.comm import RankComm, alone, join_ranks
from weightsync.shm.host_keys import host_key
from weightsync.shm.segment import Segment
from weightsync.specs import Manifest
from weightsync.tensors import as_bytes, contiguous_bytes, spec_of
from weightsync.weights.copying.fingerprint import mix64, to_hex
from weightsync.weights.copying.layout import aligned
from weightsync.weights.sinks.base import HookSink, LoadWeights
from weightsync.weights.sources.base import SourceWatch
from weightsync.wire import codec
from weightsync.wire.messages import UpdateRequest
from weightsync.wire.offers import KeyedHandle, SegmentHandle
from weightsync.wire.struct_types import prepare

IPCWeightTransferUpdateInfo = HandlesUpdate

NamedTensors = Iterable[tuple[str, torch.Tensor]]
DEFAULT_TIMEOUT_S = 300.0
_CALL = "trainer_send_weights()"
_GROUP_PATIENCE = 1.2
"""Factor on `timeout_s` for the other ranks, which wait while rank 0 delivers."""


class IPCWeightTransferInitInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Init info without fields: handles need no rendezvous."""


@dataclass(frozen=True, slots=True)
class IPCTrainerSendWeightsArgs:
    """Delivery settings: `send_mode` is "ray", "http", or a callable that takes the update info.

    The callable may be a coroutine function. `packed_buffer_size_bytes` is the size of the single
    buffer for packed weights. `timeout_s` bounds each delivery over HTTP, Ray or a coroutine, and
    each wait for another rank of the trainer. Raises ConfigError (a ValueError) if the mode is
    unknown or lacks its handle or URL, or if a number is not positive.
    """

    send_mode: str | Callable[[IPCWeightTransferUpdateInfo], object]
    llm_handle: object | None = None
    url: str | None = None
    packed: bool = False
    packed_buffer_size_bytes: int = 1 << 30
    token: str | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S

    def __post_init__(self) -> None:
        for name in ("packed_buffer_size_bytes", "timeout_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value > 0:
                raise ConfigError(f"{name} must be a positive number, not {value!r}")
        if callable(self.send_mode):
            return
        if self.send_mode not in ("ray", "http"):
            raise ConfigError(
                f"send_mode must be 'ray', 'http' or a callable, not {self.send_mode!r}"
            )
        if self.send_mode == "ray" and self.llm_handle is None:
            raise ConfigError("send_mode='ray' needs llm_handle: a Ray actor handle, or a list")
        if self.send_mode == "http" and self.url is None:
            raise ConfigError("send_mode='http' needs url: the server's base URL")


class IPCWeightTransferEngine:
    """Both sides of vLLM's IPC weight transfer; handles are typed JSON, never pickles.

    `config` and `parallel_config` are vLLM's, and are not used: handles need neither.
    """

    init_info_cls: ClassVar = IPCWeightTransferInitInfo
    update_info_cls: ClassVar = IPCWeightTransferUpdateInfo

    def __init__(self, config: object = None, parallel_config: object = None) -> None:
        self._keys = [*local_gpu_keys(), host_key()]

    @staticmethod
    def trainer_send_weights(
        iterator: NamedTensors,
        trainer_args: IPCTrainerSendWeightsArgs | Mapping[str, Any],
    ) -> None:
        """Send every tensor; return when the receivers have copied them.

        Under torch.distributed every rank of the default group calls this, with the same tensors in
        the same order, each on its own GPU. The handles of all ranks are merged. Rank 0 delivers
        them, and the other ranks return after the delivery.

        Unpacked weights are one message, and all tensors stay allocated until the end. Packed
        weights are one message per `packed_buffer_size_bytes`: each message takes only its own
        tensors from `iterator`.

        Raises what the receivers raised, and ConfigError for wrong arguments. Raises
        ManifestMismatchError if ranks send different tensors, and VerificationError if they send
        different bytes, also in host memory, which only one rank of a host exports. Unpacked, a
        tensor that changes during the call is a VerificationError, too: host memory is then not
        delivered, but receivers of GPU memory may already use a mixture. Packed, changes are not
        detected. An error of one rank is raised on all ranks, with the rank's number. A rank that
        does not call within `timeout_s` is a TransferTimeout with its number. After an error all
        ranks may call again.
        """
        with _trainer_ranks(_timeout_of(trainer_args)) as ranks, ExitStack() as stack:
            args = ranks.together(lambda: _typed(trainer_args))
            deliver = ranks.together(lambda: _deliverer(args, stack) if ranks.rank == 0 else None)
            hosts = ranks.exchange(host_key().encode())
            # All ranks of a host could export host memory; the first of them does.
            exports_host = hosts.index(hosts[ranks.rank]) == ranks.rank
            stack.callback(handles.collect)
            exported = (
                _packed(iterator, args.packed_buffer_size_bytes, exports_host)
                if args.packed
                else _unpacked(iterator, exports_host)
            )
            messages = stack.enter_context(closing(exported))
            while (info := _merged(ranks, messages, packed=args.packed)) is not None:
                ranks.together(partial(deliver, info) if deliver else _nothing)

    @staticmethod
    def parse_init_info(data: Mapping[str, object]) -> IPCWeightTransferInitInfo:
        """Return the typed init info. Raises ConfigError (a ValueError) for invalid data."""
        try:
            return msgspec.convert(data, IPCWeightTransferInitInfo)
        except msgspec.ValidationError as exc:
            raise ConfigError(f"init_info of this engine is empty: {exc}") from exc

    @staticmethod
    def parse_update_info(data: Mapping[str, object]) -> IPCWeightTransferUpdateInfo:
        """Return the typed update info. Raises ConfigError (a ValueError) for invalid data."""
        try:
            info = codec.parse_update_info(data)
        except ProtocolError as exc:
            raise ConfigError(str(exc)) from exc
        if not isinstance(info, HandlesUpdate):
            raise ConfigError(
                "update_info carries no handles; give names, dtype_names, shapes and ipc_handles "
                "here, and a registered update to a receiver"
            )
        return info

    def init_transfer_engine(self, init_info: object = None) -> None:
        """Do nothing: handles come with each update."""

    def start_weight_update(self) -> None:
        """Do nothing; `WeightReceiver` has the state machine."""

    def receive_weights(
        self,
        update_info: IPCWeightTransferUpdateInfo | Mapping[str, object],
        load_weights: LoadWeights,
    ) -> Received:
        """Open the handles, pass every tensor to `load_weights`, close the handles.

        Raises ConfigError (a ValueError) for another kind of update info, a HandleError that is
        also a ValueError, with the devices offered, if this process has none of them, and
        TransferError if `load_weights` kept a tensor.
        """
        if isinstance(update_info, Mapping):
            plain = update_info
        elif isinstance(update_info, HandlesUpdate):
            try:
                # One that a user made of plain data has plain dicts in the place of handles.
                plain = msgspec.to_builtins(update_info)
            except TypeError as exc:
                raise ConfigError(f"update_info has other values than plain data: {exc}") from exc
        else:
            raise ConfigError(
                f"update_info is a mapping or a HandlesUpdate, not {type(update_info).__name__}"
            )
        info = self.parse_update_info(plain)
        sink = HookSink(load_weights)
        context = LoadContext(
            open_target=lambda layout: sink.open_target(layout, "in_place"),
            mark_dirty=lambda: None,
            check=lambda: None,
            verification="arrived",
            kept_advice="copy them in load_weights",
        )
        return info.receive(self._keys, context)

    def finish_weight_update(self) -> None:
        """Do nothing; `WeightReceiver` has the state machine."""

    def shutdown(self) -> None:
        """Do nothing: no handle stays open after an update."""


def _typed(given: IPCTrainerSendWeightsArgs | Mapping[str, Any]) -> IPCTrainerSendWeightsArgs:
    if isinstance(given, IPCTrainerSendWeightsArgs):
        return given
    known = IPCTrainerSendWeightsArgs.__slots__
    unknown = [str(name) for name in given if name not in known]
    if unknown or "send_mode" not in given:
        raise ConfigError(
            f"trainer_args has {shorten(map(str, given)) or 'nothing'}; it needs send_mode and may "
            f"have {', '.join(known[1:])}"
        )
    return IPCTrainerSendWeightsArgs(**given)


# The trainer's ranks

_groups_of_ranks: WeakKeyDictionary[dist.ProcessGroup, RankComm] = WeakKeyDictionary()
"""The private group of each default group, reused by later calls."""


def _timeout_of(given: IPCTrainerSendWeightsArgs | Mapping[str, Any]) -> float:
    """Return the timeout of the first waits: ranks connect before arguments are validated."""
    value = given.get("timeout_s") if isinstance(given, Mapping) else given.timeout_s
    return value if isinstance(value, int | float) and value > 0 else DEFAULT_TIMEOUT_S


@contextmanager
def _trainer_ranks(timeout_s: float) -> Iterator[RankComm]:
    """Yield the ranks of the default group. After a failure the next call connects them again."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is None:
        yield alone()
        return
    ranks = _groups_of_ranks.pop(world, None)
    if ranks is None or ranks.broken or ranks.is_losing():
        bound_s = timeout_s * _GROUP_PATIENCE
        ranks = join_ranks(None, timeout_s=bound_s, join_timeout_s=timeout_s, call=_CALL)
    else:
        ranks.limit(timeout_s * _GROUP_PATIENCE)
    try:
        yield ranks
    except BaseException:
        ranks.close()
        raise
    _groups_of_ranks[world] = ranks


def _nothing() -> None:
    """Do nothing: the part of the other ranks while rank 0 delivers."""


class _Export(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of a message: its handles, and the fingerprints of all tensors."""

    handles: list[KeyedHandle]
    fingerprints: list[str]


@dataclass(frozen=True, slots=True)
class _Message:
    manifest: Manifest
    export: _Export


def _merged(
    ranks: RankComm, messages: Iterator[_Message], *, packed: bool
) -> IPCWeightTransferUpdateInfo | None:
    """Return the next update info with the handles of all ranks; None after the last."""
    try:
        own = next(messages, None)
    except BaseException as exc:
        ranks.agree(exc)
        raise
    manifest = own.manifest if own else Manifest(())
    comm.compare_manifests(
        manifest, ranks, advice=f"every rank has to give {_CALL} the same tensors"
    )
    bodies = ranks.exchange(msgspec.json.encode(own.export) if own else b"")
    if own is None:
        return None
    exports = [msgspec.json.decode(body, type=_Export) for body in bodies]
    handles: list[KeyedHandle] = [{} for _ in exports[0].handles]
    for part in exports:
        for into, offered in zip(handles, part.handles, strict=True):
            into.update({key: handle for key, handle in offered.items() if key not in into})
    _compare_bytes(manifest, exports, ranks)
    columns = codec.manifest_to_wire(manifest)
    return IPCWeightTransferUpdateInfo(
        names=columns.names,
        dtype_names=columns.dtype_names,
        shapes=columns.shapes,
        ipc_handles=handles[0] if packed else handles,
        tensor_sizes=[spec.nbytes for spec in manifest.specs] if packed else None,
        packed=packed,
        fingerprints=exports[0].fingerprints,
    )


def _compare_bytes(manifest: Manifest, exports: list[_Export], ranks: RankComm) -> None:
    """Raise VerificationError if fingerprints differ. All ranks compare the same lists."""
    for rank, part in enumerate(exports):
        pairs = zip(manifest.specs, exports[0].fingerprints, part.fingerprints, strict=True)
        wrong = [spec.name for spec, first, other in pairs if first != other]
        if wrong:
            raise VerificationError(
                f"the trainer's ranks send different bytes: on rank {ranks.names[rank]} "
                f"{len(wrong)} tensors are not those of rank {ranks.names[0]}: {shorten(wrong)}; "
                "gather or broadcast them first",
                names=wrong,
            )


# Export of memory: always of a GPU's, and of the host's if `exports_host`. The memory of a message
# stays valid until the next message is requested.


def _unpacked(pairs: NamedTensors, exports_host: bool) -> Generator[_Message]:
    given = list(pairs)
    watch = SourceWatch()
    with ExitStack() as stack:
        stack.callback(watch.end)  # the generator may be closed early
        watch.begin([name for name, _ in given], [tensor for _, tensor in given])
        kept = [(name, tensor.detach().contiguous()) for name, tensor in given]
        manifest = Manifest(tuple(spec_of(name, tensor) for name, tensor in kept))
        flats = [as_bytes(tensor) for _, tensor in kept]
        # An empty tensor has no GPU memory to export.
        on_host = [flat.device.type != "cuda" or not flat.numel() for flat in flats]
        segment = None
        if any(on_host) and exports_host:
            nbytes = sum(aligned(flat.numel()) for flat in compress(flats, on_host))
            segment = stack.enter_context(Segment.create(max(nbytes, 1)))
        handles: list[KeyedHandle] = []
        at = 0
        for flat, here in zip(flats, on_host, strict=True):
            if not here:
                handles.append(_gpu_handle(flat))
            elif segment is None:
                handles.append({})
            else:
                segment.tensor(at, flat.numel()).copy_(flat)
                handles.append(_host_handle(segment, at))
                at += aligned(flat.numel())
        wait_for_all_streams(flat.device for flat in flats)
        fingerprints = [to_hex(mix64(flat)) for flat in flats]
        if all(on_host):
            _check_unchanged(watch.end())  # the exported memory is a copy from here on
        yield _Message(manifest, _Export(handles=handles, fingerprints=fingerprints))
        _check_unchanged(watch.end())


def _check_unchanged(names: list[str]) -> None:
    if names:
        raise VerificationError(
            f"the source changed while it was sent: {len(names)} tensors: {shorten(names)}; let "
            "this call return before the next optimizer step, then send again: receivers that "
            "loaded these weights hold a mixture until then",
            names=names,
        )


def _packed(pairs: NamedTensors, limit: int, exports_host: bool) -> Generator[_Message]:
    """Yield one message per group: copy the group into the bucket and export the bucket."""
    bucket: _Bucket | None = None
    try:
        for group, is_last in _groups(pairs, limit):
            manifest = Manifest(tuple(spec_of(name, tensor) for name, tensor in group))
            device = next(
                (t.device for _, t in group if t.device.type == "cuda"), torch.device("cpu")
            )
            exported = exports_host or device.type == "cuda"
            if exported and (bucket is None or not bucket.fits(manifest.nbytes, device)):
                if bucket is not None:
                    bucket.close()
                nbytes = manifest.nbytes if is_last else max(manifest.nbytes, limit)
                bucket = _Bucket(nbytes, device)
            if bucket is not None and exported:
                export = bucket.fill(group)
            else:
                flats = (contiguous_bytes(tensor) for _, tensor in group)
                export = _Export(handles=[{}], fingerprints=[to_hex(mix64(f)) for f in flats])
            group.clear()
            yield _Message(manifest, export)
    finally:
        if bucket is not None:
            bucket.close()


class _Bucket:
    """Reusable memory of `device` that exports one group of tensors after the other."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._device = device
        self._segment = Segment.create(max(nbytes, 1)) if device.type == "cpu" else None
        if self._segment is None:
            self._memory = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=device)
        else:
            self._memory = self._segment.tensor()

    def fits(self, nbytes: int, device: torch.device) -> bool:
        return nbytes <= self._memory.numel() and device == self._device

    def fill(self, group: list[tuple[str, torch.Tensor]]) -> _Export:
        """Copy the tensors one after another, without gaps; drop each tensor after its copy."""
        at, fingerprints = 0, []
        for i, (name, tensor) in enumerate(group):
            flat = contiguous_bytes(tensor)
            part = self._memory[at : at + flat.numel()]
            part.copy_(flat)
            fingerprints.append(to_hex(mix64(flat)))
            at += flat.numel()
            group[i] = (name, part)
        wait_for_all_streams([self._memory.device])
        segment = self._segment
        handle = _host_handle(segment, 0) if segment else _gpu_handle(self._memory)
        return _Export(handles=[handle], fingerprints=fingerprints)

    def close(self) -> None:
        """Free the memory."""
        del self._memory
        if self._segment is not None:
            self._segment.close()


def _groups(
    pairs: NamedTensors, limit: int
) -> Iterator[tuple[list[tuple[str, torch.Tensor]], bool]]:
    """Split tensors into groups of at most `limit` bytes; a larger tensor is a group of its own.

    Yields each group and whether it is the last. The caller clears a group before it requests the
    next one.
    """
    group: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in pairs:
        nbytes = tensor.numel() * tensor.element_size()
        if group and size + nbytes > limit:
            yield group, False
            group, size = [], 0
        group.append((name, tensor.detach()))
        size += nbytes
    if group:
        yield group, True


def _host_handle(segment: Segment, offset: int) -> KeyedHandle:
    return {host_key(): SegmentHandle(name=segment.name, nbytes=segment.nbytes, offset=offset)}


def _gpu_handle(flat: torch.Tensor) -> KeyedHandle:
    exported = handles.export(flat)
    return {exported.device: exported}


# Delivery

_Deliver = Callable[[IPCWeightTransferUpdateInfo], object]


def _deliverer(args: IPCTrainerSendWeightsArgs, stack: ExitStack) -> _Deliver:
    """Return the function that delivers one message; `stack` closes its resources."""
    if callable(args.send_mode):
        return _caller(args.send_mode, args.timeout_s, stack)
    if args.send_mode == "http":
        control = import_module("weightsync.integrations.engine_control")
        transport = control.EngineClient(str(args.url), args.token)
        stack.callback(transport.close)

        def post(info: IPCWeightTransferUpdateInfo) -> None:
            # Only the status of the response matters: vLLM's body is {"message": ...}.
            transport.deliver(UpdateRequest(update_info=info), timeout_s=args.timeout_s)

        return post
    return _ray_deliverer(args.llm_handle, args.timeout_s)


def _caller(send_mode: _Deliver, timeout_s: float, stack: ExitStack) -> _Deliver:
    """Return a function that calls `send_mode` and waits for its result if that is awaitable.

    One event loop serves all messages of a call. The function raises ConfigError if it would have
    to wait in a thread that already runs an event loop, which would wait for itself.
    """
    try:
        loop_runs = asyncio.get_running_loop() is not None
    except RuntimeError:
        loop_runs = False
    runner = asyncio.Runner()  # creates its loop on first use
    stack.callback(runner.close)

    def call(info: IPCWeightTransferUpdateInfo) -> None:
        result = send_mode(info)
        if not inspect.isawaitable(result):
            return
        if loop_runs:
            if inspect.iscoroutine(result):
                result.close()
            raise ConfigError(
                f"send_mode {_name(send_mode)} has to be awaited, and {_CALL} was called by a "
                "thread whose event loop is running: call it with asyncio.to_thread(), or give a "
                "plain function"
            )
        try:
            runner.run(asyncio.wait_for(result, timeout_s))
        except WeightSyncError:
            raise  # an error of the callable itself, which may be a timeout too
        except TimeoutError as exc:
            raise TransportTimeout(
                f"send_mode {_name(send_mode)} did not end within {timeout_s:g} s and was "
                "cancelled; give more time with timeout_s="
            ) from exc

    return call


def _name(function: object) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__


def _ray_deliverer(handle: Any, timeout_s: float) -> _Deliver:
    try:
        tell_all = import_module("weightsync.transports.ray_actor").tell_all
    except ImportError as exc:
        raise BackendUnavailableError(f"send_mode='ray' needs Ray: {install_hint('ray')}") from exc
    actors = list(handle) if isinstance(handle, list | tuple) else [handle]

    def send(info: IPCWeightTransferUpdateInfo) -> None:
        body = codec.to_plain(UpdateRequest(update_info=info))["body"]
        tell_all(actors, "update_weights", body, timeout_s=timeout_s)

    return send


prepare(_Export)
