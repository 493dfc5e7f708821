"""Updates that carry their own handles: nothing was registered before, nothing stays open after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from msgspec.structs import replace

from weightsync.backends.base import LoadContext, Received, copy_tensors
from weightsync.backends.ipc.transfer import HookFeeder
from weightsync.cuda.memory import OpenMemory
from weightsync.errors import ConfigError, HandleError, ProtocolError, VerificationError
from weightsync.shm.host_keys import pick
from weightsync.specs import Manifest
from weightsync.weights.copy_plan import (
    CompiledUnit,
    DeviceShardRun,
    HostShardRun,
    Memory,
    ShardMemory,
)
from weightsync.weights.fingerprint import mix64, to_hex
from weightsync.weights.layout import StreamLayout
from weightsync.wire.codec import manifest_from_wire
from weightsync.wire.messages import HandlesUpdate
from weightsync.wire.offers import KeyedHandle, SegmentHandle


def receive_handles(info: HandlesUpdate, keys: list[str], reception: LoadContext) -> Received:
    """Open the handles for `keys`, bring the tensors to their landing, close.

    Raises HandleError before anything is touched when a handle does not fit its tensor, and
    VerificationError naming tensors where fingerprints were sent along.
    """
    try:
        manifest = manifest_from_wire(info)
    except ConfigError as exc:
        raise ProtocolError(f"update_info: {exc}") from exc
    opened: dict[str, OpenMemory] = {}
    tensors: list[torch.Tensor] = []
    try:
        tensors = _tensors(info, manifest, keys, opened)
        _check_fingerprints(info.fingerprints, manifest, tensors)
        manifest, kept = _tie(manifest, tensors, reception.ties)
        tensors = [tensors[i] for i in kept]
        told = info.fingerprints
        fingerprints = None if told is None else [told[i] for i in kept]
        ends = {*reception.ties, *reception.ties.values()}
        pairs = zip(manifest.specs, tensors, strict=True)
        tied = {spec.name: to_hex(mix64(t)) for spec, t in pairs if spec.name in ends}
        plan = StreamLayout(manifest)
        load_target = reception.open_target(plan)
        reception.touch()
        memory = Memory(tensors)
        if load_target.memory is None:
            lender = HookFeeder(plan, load_target, reception)
            lender.deliver_whole(memory)
            lender.finish()
        else:
            runs = copy_tensors(plan, load_target.memory, memory, reception.check)
            _check_held(fingerprints, plan, load_target.memory, runs)
        held = load_target.memory is not None
        level = reception.verification if held else "arrived"
        return Received(manifest, [], level if info.fingerprints else "none", tied)
    finally:
        del tensors
        for handle in opened.values():
            handle.close()


def _tie(
    manifest: Manifest, tensors: Sequence[torch.Tensor], ties: Mapping[str, str]
) -> tuple[Manifest, list[int]]:
    """Note as aliases what the receiver ties; return which tensors are left.

    These messages cannot say what is tied: a tied name is not offered, or twice the same bytes are.
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
    fingerprints: list[str] | None, plan: StreamLayout, target: Memory, runs: Sequence[CompiledUnit]
) -> None:
    """Read what was copied back: the fingerprints are of whole tensors, shards are compared."""
    if not isinstance(target, ShardMemory):
        _check_fingerprints(fingerprints, plan.manifest, target.tensors)
    elif fingerprints is not None:
        wrong = [
            name
            for run, program in zip(plan.runs, runs, strict=True)
            if isinstance(program, HostShardRun | DeviceShardRun) and not program.holds()
            for name in plan.names(run)
        ]
        if wrong:
            raise VerificationError(names=list(dict.fromkeys(wrong)))


def _tensors(
    info: HandlesUpdate,
    manifest: Manifest,
    keys: list[str],
    opened: dict[str, OpenMemory],
) -> list[torch.Tensor]:
    """Return `uint8[nbytes]` per tensor, every range checked."""
    sizes = [spec.nbytes for spec in manifest.specs]
    handles = info.ipc_handles
    if isinstance(handles, dict):
        told = info.tensor_sizes or []
        wrong = next((i for i, n in enumerate(sizes) if n != told[i]), None)
        if wrong is not None:
            raise HandleError(
                f"{info.names[wrong]}: tensor_sizes says {told[wrong]} bytes, its dtype and shape "
                f"make {sizes[wrong]}"
            )
        starts = [0, *accumulate(sizes)]
        parts = zip(starts, sizes, strict=False)
        return [_part(handles, keys, opened, start, n) for start, n in parts]
    pairs = zip(handles or [], sizes, strict=True)
    return [_part(handle, keys, opened, 0, n) for handle, n in pairs]


def _part(
    handles: KeyedHandle, keys: list[str], opened: dict[str, OpenMemory], start: int, nbytes: int
) -> torch.Tensor:
    """Return bytes of the memory that `handles` offer to `keys`; a segment is mapped once."""
    handle = pick(handles, keys)
    if isinstance(handle, SegmentHandle) and handle.offset <= handle.nbytes:
        start += handle.offset
        handle = replace(handle, offset=0)
    key = repr(handle)
    if key not in opened:
        opened[key] = OpenMemory(handle)
    return opened[key].part(start, nbytes)


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
