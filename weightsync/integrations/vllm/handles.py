"""The update_info of vLLM's IPC engine: it carries its handles, and no memory stays open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from itertools import accumulate
from typing import Self

import torch
from msgspec.structs import replace

from weightsync.backends.base import LoadContext, Received, copy_tensors
from weightsync.backends.ipc.transfer import HookFeeder
from weightsync.cuda.memory import OpenMemory
from weightsync.errors import ConfigError, HandleError, ProtocolError, VerificationError
from weightsync.shm.host_keys import pick
from weightsync.specs import Manifest
from weightsync.weights.copying.copy_plan import DeviceCopyUnit, HostCopyUnit, Memory
from weightsync.weights.copying.fingerprint import mix64, to_hex
from weightsync.weights.copying.layout import StreamLayout
from weightsync.wire.codec import decode_payload
from weightsync.wire.messages import ForeignUpdate
from weightsync.wire.offers import KeyedHandle, Name, SegmentHandle, Shape, Size
from weightsync.wire.struct_types import prepare

NO_PICKLES = (
    "ipc_handles_pickled: pickled handles are never read here, since a pickle runs code; send with "
    "weightsync: ws.send_weights(named_tensors, to=this_server)"
)


class HandlesUpdate(ForeignUpdate, frozen=True, kw_only=False):
    """Handles in the message itself; known to users as IPCWeightTransferUpdateInfo.

    `ipc_handles` is a list of one handle per tensor; `packed`, one handle for a buffer in which
    the tensors lie one after another, `tensor_sizes` bytes each. `fingerprints` are mix64 of each
    tensor, 16 hex digits. Raises ConfigError (a ValueError) where the fields do not fit together.
    """

    names: list[Name]
    dtype_names: list[str]
    shapes: list[Shape]
    ipc_handles: list[KeyedHandle] | KeyedHandle | None = None
    ipc_handles_pickled: str | None = None
    tensor_sizes: list[Size] | None = None
    packed: bool = False
    fingerprints: list[str] | None = None

    def __post_init__(self) -> None:
        if self.ipc_handles_pickled is not None:
            raise ConfigError(NO_PICKLES)
        if not isinstance(self.ipc_handles, dict if self.packed else list):
            seen = "missing" if self.ipc_handles is None else f"a {type(self.ipc_handles).__name__}"
            raise ConfigError(
                f"ipc_handles is {seen}; packed={self.packed} needs "
                + ("one dict, of the buffer" if self.packed else "a list, of one dict per tensor")
            )
        if self.packed and self.tensor_sizes is None:
            raise ConfigError("packed=True needs tensor_sizes: the bytes of each tensor")
        columns: dict[str, Sized | None] = {
            "dtype_names": self.dtype_names,
            "shapes": self.shapes,
            "ipc_handles": None if self.packed else self.ipc_handles,
            "tensor_sizes": self.tensor_sizes,
            "fingerprints": self.fingerprints,
        }
        for label, column in columns.items():
            if column is not None and len(column) != len(self.names):
                raise ConfigError(
                    f"names has {len(self.names)} entries, {label} has {len(column)}; they must "
                    "be equally long"
                )

    @classmethod
    def parse(cls, data: object) -> Self:
        """Return the update_info of plain data. Raises ProtocolError with the path of an error."""
        if isinstance(data, Mapping) and data.get("ipc_handles_pickled") is not None:
            raise ProtocolError(f"update_info.{NO_PICKLES}")  # whatever the other fields are
        return decode_payload(data, cls)

    def receive(self, keys: list[str], context: LoadContext) -> Received:
        """Open the handles for `keys`, load the tensors into their load target, and close them.

        Raises ProtocolError for a wrong entry, and HandleError for a handle that does not fit its
        tensor, before anything is written; VerificationError that names tensors where the message
        has fingerprints.
        """
        try:
            manifest = Manifest.from_columns(self.names, self.dtype_names, self.shapes)
        except ConfigError as exc:
            raise ProtocolError(f"update_info: {exc}") from exc
        opened: dict[str, OpenMemory] = {}
        tensors: list[torch.Tensor] = []
        try:
            places = _places(self, manifest, keys, opened)
            tensors = [opened[key].part(start, nbytes) for key, start, nbytes in places]
            _check_fingerprints(self.fingerprints, manifest, tensors)
            manifest, kept = _tie(manifest, tensors, context.ties)
            tensors = [tensors[i] for i in kept]
            sent = self.fingerprints
            fingerprints = None if sent is None else [sent[i] for i in kept]
            ends = {*context.ties, *context.ties.values()}
            pairs = zip(manifest.specs, tensors, strict=True)
            tied = {spec.name: to_hex(mix64(t)) for spec, t in pairs if spec.name in ends}
            layout = StreamLayout(manifest)
            load_target = context.open_target(layout)
            context.mark_dirty()
            if load_target.memory is None:
                chosen = [places[i] for i in kept]  # a hook may write to what it is given
                tensors = [opened[key].part(start, n, private=True) for key, start, n in chosen]
            memory = Memory(tensors)
            if load_target.memory is None:
                feeder = HookFeeder(layout, load_target, context)
                feeder.deliver_whole(memory)
                feeder.finish()
            else:
                units = copy_tensors(layout, load_target.memory, memory, context.check)
                _check_held(fingerprints, layout, load_target.memory, units)
            held = load_target.memory is not None
            level = context.verification if held else "arrived"
            return Received(manifest, [], level if self.fingerprints else "none", tied)
        finally:
            del tensors
            for handle in opened.values():
                handle.close()


def _tie(
    manifest: Manifest, tensors: Sequence[torch.Tensor], ties: Mapping[str, str]
) -> tuple[Manifest, list[int]]:
    """Make aliases of the receiver's tied names; return the manifest and the tensors that are left.

    These messages have no ties: the sender omits a tied name, or sends equal bytes under both.
    """
    aliases: dict[str, str] = {}
    for alias, name in ties.items():
        if name not in manifest.index:
            continue
        one, other = manifest.index[name], manifest.index.get(alias, -1)
        same = other < 0 or (
            manifest.specs[one].shape == manifest.specs[other].shape
            and manifest.specs[one].dtype == manifest.specs[other].dtype
            and torch.equal(tensors[one], tensors[other])
        )
        if same:
            aliases[alias] = name
    aliases = {alias: aliases.get(name, name) for alias, name in aliases.items()}
    kept = [i for i, spec in enumerate(manifest.specs) if spec.name not in aliases]
    return Manifest(tuple(manifest.specs[i] for i in kept), aliases), kept


def _check_held(
    fingerprints: list[str] | None,
    layout: StreamLayout,
    target: Memory,
    units: Sequence[HostCopyUnit | DeviceCopyUnit],
) -> None:
    """Read the copied tensors back. Whole tensors are fingerprinted, shards are compared."""
    if target.shares is None:
        _check_fingerprints(fingerprints, layout.manifest, target.tensors)
    elif fingerprints is not None:
        wrong = [
            name
            for unit, compiled in zip(layout.units, units, strict=True)
            if not compiled.holds()
            for name in layout.names(unit)
        ]
        if wrong:
            raise VerificationError(names=list(dict.fromkeys(wrong)))


_Place = tuple[str, int, int]
"""Where a tensor is: the key of opened memory, an offset in it, and a number of bytes."""


def _places(
    info: HandlesUpdate,
    manifest: Manifest,
    keys: list[str],
    opened: dict[str, OpenMemory],
) -> list[_Place]:
    """Open the memory of all tensors, each once; return where each tensor is."""
    sizes = [spec.nbytes for spec in manifest.specs]
    handles = info.ipc_handles
    if isinstance(handles, dict):
        stated = info.tensor_sizes or []
        wrong = next((i for i, n in enumerate(sizes) if n != stated[i]), None)
        if wrong is not None:
            raise HandleError(
                f"{info.names[wrong]}: tensor_sizes says {stated[wrong]} bytes, its dtype and "
                f"shape make {sizes[wrong]}"
            )
        starts = [0, *accumulate(sizes)]
        parts = zip(starts, sizes, strict=False)
        return [_place(handles, keys, opened, start, n) for start, n in parts]
    pairs = zip(handles or [], sizes, strict=True)
    return [_place(handle, keys, opened, 0, n) for handle, n in pairs]


def _place(
    handles: KeyedHandle, keys: list[str], opened: dict[str, OpenMemory], start: int, nbytes: int
) -> _Place:
    """Open the memory whose handle `keys` select; a segment is mapped once."""
    handle = pick(handles, keys)
    if isinstance(handle, SegmentHandle) and handle.offset <= handle.nbytes:
        start += handle.offset
        handle = replace(handle, offset=0)
    key = repr(handle)
    if key not in opened:
        opened[key] = OpenMemory(handle)
    return key, start, nbytes


def _check_fingerprints(
    fingerprints: list[str] | None, manifest: Manifest, tensors: Sequence[torch.Tensor]
) -> None:
    if fingerprints is None:
        return
    wrong = [
        spec.name
        for spec, tensor, expected in zip(manifest.specs, tensors, fingerprints, strict=True)
        if to_hex(mix64(tensor)) != expected
    ]
    if wrong:
        raise VerificationError(names=wrong)


prepare(HandlesUpdate)
