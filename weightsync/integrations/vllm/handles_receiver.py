"""Loads the tensors of a HandlesUpdate from the memory of their handles. It needs torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from msgspec.structs import replace

from weightsync.backends.base import LoadContext, Received, copy_tensors
from weightsync.backends.ipc.transfer import HookFeeder
from weightsync.cuda.memory import OpenMemory
from weightsync.errors import ConfigError, HandleError, ProtocolError, VerificationError
from weightsync.integrations.vllm.handles import HandlesUpdate
from weightsync.shm.host_keys import pick
from weightsync.specs import Manifest
from weightsync.weights.copying.copy_plan import DeviceCopyUnit, HostCopyUnit, Memory
from weightsync.weights.copying.fingerprint import mix64, to_hex
from weightsync.weights.copying.layout import StreamLayout
from weightsync.wire.offers import KeyedHandle, SegmentHandle


def receive_handles(info: HandlesUpdate, keys: list[str], context: LoadContext) -> Received:
    """Load the tensors of `info`; see HandlesUpdate.receive."""
    try:
        manifest = Manifest.from_columns(info.names, info.dtype_names, info.shapes)
    except ConfigError as exc:
        raise ProtocolError(f"update_info: {exc}") from exc
    opened: dict[str, OpenMemory] = {}
    tensors: list[torch.Tensor] = []
    try:
        places = _places(info, manifest, keys, opened)
        tensors = [opened[key].part(start, nbytes) for key, start, nbytes in places]
        _check_fingerprints(info.fingerprints, manifest, tensors)
        manifest, kept = _tie(manifest, tensors, context.ties)
        tensors = [tensors[i] for i in kept]
        sent = info.fingerprints
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
        return Received(manifest, [], level if info.fingerprints else "none", tied)
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
