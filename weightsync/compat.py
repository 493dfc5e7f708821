"""The names that users of other systems know, on the same wire: handles in the message itself.

`IPCWeightTransferEngine.trainer_send_weights` sends inside a start and a finish that the caller
makes. `weightsync.send_weights` does all of that, and more, in two messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from weightsync.backends.base import Received, Reception
from weightsync.backends.ipc_handles import receive_handles
from weightsync.errors import BackendUnavailableError, ConfigError, ProtocolError
from weightsync.samehost import cuda_handle
from weightsync.samehost.cuda_handle import local_gpu_keys
from weightsync.samehost.device_keys import host_key
from weightsync.samehost.segment import Segment
from weightsync.specs import Manifest
from weightsync.transports.base import Transport
from weightsync.weights.buckets import aligned
from weightsync.weights.dtypes import as_bytes, spec_of
from weightsync.weights.fingerprint import mix64, to_hex
from weightsync.weights.hook_sink import HookSink
from weightsync.weights.sink import LoadWeights
from weightsync.wire import codec
from weightsync.wire.messages import PackedUpdate, UnpackedUpdate, UpdateInfo, UpdateRequest
from weightsync.wire.offers import Init, IpcInit, KeyedHandle, SegmentHandle

IPCWeightTransferInitInfo = IpcInit
IPCWeightTransferUpdateInfo = UnpackedUpdate | PackedUpdate

NamedTensors = Sequence[tuple[str, torch.Tensor]]
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class IPCTrainerSendWeightsArgs:
    """How to deliver: `send_mode` is "ray", "http", or a callable that takes the update info.

    Raises ConfigError (a ValueError) where the mode is unknown or lacks its handle or URL.
    """

    send_mode: str | Callable[[IPCWeightTransferUpdateInfo], object]
    llm_handle: object | None = None
    url: str | None = None
    packed: bool = False
    packed_buffer_size_bytes: int = 1 << 30
    token: str | None = None

    def __post_init__(self) -> None:
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
    """Both halves under their known names; handles are typed JSON, never pickles."""

    def __init__(self) -> None:
        self._keys = [*local_gpu_keys(), host_key()]

    @staticmethod
    def trainer_send_weights(
        iterator: Iterable[tuple[str, torch.Tensor]],
        trainer_args: IPCTrainerSendWeightsArgs | Mapping[str, Any],
    ) -> None:
        """Send every tensor; returns when the receivers have copied them.

        Unpacked is one message, packed one message for each `packed_buffer_size_bytes`. Raises
        what the receivers raised, ConfigError for wrong arguments.
        """
        args = (
            trainer_args
            if isinstance(trainer_args, IPCTrainerSendWeightsArgs)
            else IPCTrainerSendWeightsArgs(**trainer_args)
        )
        deliver = _deliverer(args)
        pairs = [(name, tensor.detach().contiguous()) for name, tensor in iterator]
        groups = _groups(pairs, args.packed_buffer_size_bytes) if args.packed else iter([pairs])
        for group in groups:
            with _Export(group, packed=args.packed) as info:
                deliver(info)

    @staticmethod
    def parse_init_info(data: Mapping[str, object]) -> Init | None:
        """Return the typed init info; `{}` is None, since IPC needs no rendezvous.

        Raises ConfigError (a ValueError) saying what is invalid.
        """
        with _value_errors():
            return codec.parse_init_info(data)

    @staticmethod
    def parse_update_info(data: Mapping[str, object]) -> UpdateInfo:
        """Return the typed update info. Raises ConfigError (a ValueError) saying what is wrong."""
        with _value_errors():
            return codec.parse_update_info(data)

    def init_transfer_engine(self, init_info: object = None) -> None:
        """Nothing to do: handles come with each update."""

    def start_weight_update(self) -> None:
        """Nothing to do here; `WeightReceiver` has the state machine."""

    def receive_weights(
        self,
        update_info: IPCWeightTransferUpdateInfo | Mapping[str, object],
        load_weights: LoadWeights,
    ) -> Received:
        """Open the handles, lend every tensor to `load_weights`, close."""
        info = (
            self.parse_update_info(update_info) if isinstance(update_info, Mapping) else update_info
        )
        if not isinstance(info, UnpackedUpdate | PackedUpdate):
            raise ConfigError(
                "update_info carries no handles; give a registered update to a receiver"
            )
        sink = HookSink(load_weights)
        reception = Reception(
            land=lambda plan: sink.land(plan, "in_place"),
            touch=lambda: None,
            check=lambda: None,
            verification="arrived",
        )
        return receive_handles(info, self._keys, reception)

    def finish_weight_update(self) -> None:
        """Nothing to do here."""

    def shutdown(self) -> None:
        """Nothing stays open."""


@contextmanager
def _value_errors() -> Iterator[None]:
    """A wrong argument is a ValueError here, as users of these names expect."""
    try:
        yield
    except ProtocolError as exc:
        raise ConfigError(str(exc)) from exc


class _Export:
    """The handles of some tensors, for as long as the block lasts."""

    def __init__(self, pairs: NamedTensors, *, packed: bool) -> None:
        self._pairs = pairs
        self._packed = packed
        self._segment: Segment | None = None
        self._buffer: torch.Tensor | None = None

    def __enter__(self) -> IPCWeightTransferUpdateInfo:
        manifest = Manifest(tuple(spec_of(name, tensor) for name, tensor in self._pairs))
        specs = manifest.specs
        on_gpu = bool(self._pairs) and self._pairs[0][1].is_cuda
        handles = self._on_gpu() if on_gpu and not self._packed else self._in_one_buffer()
        columns = codec.manifest_to_wire(manifest)
        fingerprints = [to_hex(mix64(as_bytes(tensor))) for _, tensor in self._pairs]
        if self._packed:
            return PackedUpdate(
                names=columns.names,
                dtype_names=columns.dtype_names,
                shapes=columns.shapes,
                ipc_handles=handles[0],
                tensor_sizes=[spec.nbytes for spec in specs],
                fingerprints=fingerprints,
                packed=True,
            )
        return UnpackedUpdate(
            names=columns.names,
            dtype_names=columns.dtype_names,
            shapes=columns.shapes,
            ipc_handles=handles,
            fingerprints=fingerprints,
        )

    def __exit__(self, *_: object) -> None:
        self._buffer = None
        if self._segment is not None:
            self._segment.close()
        cuda_handle.collect()

    def _on_gpu(self) -> list[KeyedHandle]:
        exported = [cuda_handle.export(as_bytes(tensor)) for _, tensor in self._pairs]
        torch.cuda.synchronize()
        return [{handle.device: handle} for handle in exported]

    def _in_one_buffer(self) -> list[KeyedHandle]:
        """Copy everything into one segment (or GPU buffer); packed has no gaps."""
        starts, at = [], 0
        for _, tensor in self._pairs:
            starts.append(at)
            nbytes = tensor.numel() * tensor.element_size()
            at += nbytes if self._packed else aligned(nbytes)
        buffer = self._make_buffer(max(at, 1))
        for start, (_, tensor) in zip(starts, self._pairs, strict=True):
            flat = as_bytes(tensor)
            buffer[start : start + flat.numel()].copy_(flat)
        if self._segment is None:
            torch.cuda.synchronize()
            exported = cuda_handle.export(buffer)
            return [{exported.device: exported}]
        name, nbytes = self._segment.name, self._segment.nbytes
        starts = starts[:1] or [0] if self._packed else starts
        return [
            {host_key(): SegmentHandle(name=name, nbytes=nbytes, offset=start)} for start in starts
        ]

    def _make_buffer(self, nbytes: int) -> torch.Tensor:
        if self._pairs and self._pairs[0][1].is_cuda:
            device = self._pairs[0][1].device
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
            return self._buffer
        self._segment = Segment.create(nbytes)
        return self._segment.tensor()


def _groups(pairs: NamedTensors, limit: int) -> Iterator[NamedTensors]:
    """Cut into groups of at most `limit` bytes; a larger tensor is a group of its own."""
    group: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in pairs:
        nbytes = tensor.numel() * tensor.element_size()
        if group and size + nbytes > limit:
            yield group
            group, size = [], 0
        group.append((name, tensor))
        size += nbytes
    if group:
        yield group


def _deliverer(
    args: IPCTrainerSendWeightsArgs,
) -> Callable[[IPCWeightTransferUpdateInfo], object]:
    if callable(args.send_mode):
        return args.send_mode
    if args.send_mode == "http":
        http = import_module("weightsync.transports.http_client")
        transport: Transport = http.HttpTransport(str(args.url), args.token)

        def post(info: IPCWeightTransferUpdateInfo) -> None:
            transport.call(UpdateRequest(update_info=info), timeout_s=_TIMEOUT_S)

        return post
    return _ray_deliverer(args.llm_handle)


def _ray_deliverer(handle: Any) -> Callable[[IPCWeightTransferUpdateInfo], object]:
    try:
        tell_all = import_module("weightsync.transports.ray_actor").tell_all
    except ImportError as exc:
        raise BackendUnavailableError(
            "send_mode='ray' needs Ray: pip install 'weightsync[ray]'"
        ) from exc
    actors = list(handle) if isinstance(handle, list | tuple) else [handle]

    def send(info: IPCWeightTransferUpdateInfo) -> None:
        body = codec.to_plain(UpdateRequest(update_info=info))["body"]
        tell_all(actors, "update_weights", body, timeout_s=_TIMEOUT_S)

    return send
