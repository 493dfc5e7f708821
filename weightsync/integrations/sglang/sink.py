"""The sink of an SGLang server: writes weights to files, and makes the server load them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from weightsync.errors import ConfigError
from weightsync.integrations.sglang import files
from weightsync.integrations.sglang.files import (
    Shard,
    Snapshot,
    SnapshotWriter,
    WeightDirectory,
    lay_out,
)
from weightsync.specs import Manifest, ManifestDifference, TensorSpec, refuse_inner
from weightsync.tensors import as_bytes
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.sinks.base import Apply, LoadTarget, NamedTensor, WeightSink

_CASTS = frozenset({"float64", "float32", "float16", "bfloat16"})
"""SGLang casts between these while it copies; a cast to another dtype would be wrong."""


class FilesSink(WeightSink):
    """Writes an update's tensors to `weight_dir`; `load(directory)` makes the server load them.

    `wanted` is the manifest of the server's own checkpoint, None where it is unknown. Names are
    checked against it, and tied tensors are written under those of their names that it has.
    """

    def __init__(
        self, weight_dir: WeightDirectory, wanted: Manifest | None, load: Callable[[Path], None]
    ) -> None:
        self.manifest = wanted
        self._weight_dir = weight_dir
        self._load = load
        self._snapshot: Snapshot | None = None
        self._known: tuple[str, ManifestDifference] = ("", ManifestDifference())

    @property
    def device(self) -> torch.device:
        """The host: its bytes are written to files."""
        return torch.device("cpu")

    def difference(self, offered: Manifest) -> ManifestDifference:
        """How `offered` differs from the server's checkpoint. A tie that it lacks is no difference.

        The last result is cached, because an update needs it more than once.
        """
        digest, known = self._known
        if digest != offered.digest:
            wanted = self.manifest
            known = refuse_inner(offered) if wanted is None else _compare(offered, wanted)
            self._known = (offered.digest, known)
        return known

    def join(self, update_id: str) -> None:
        """Join an update. Called before its first message is handled; idempotent."""
        self._snapshot = self._weight_dir.join(update_id, self)

    def leave(self) -> None:
        """Leave an update that was committed or aborted. Idempotent."""
        if self._snapshot is not None:
            snapshot, self._snapshot = self._snapshot, None
            self._weight_dir.leave(snapshot, self)

    def open_target(self, layout: StreamLayout, apply: Apply) -> LoadTarget:
        """Lay out the files, without creating them. Raises ConfigError for unsupported dtypes."""
        return _FilesTarget(self, layout.manifest)

    def staged_nbytes(self, layout: StreamLayout) -> int:
        """Zero: this process stages nothing."""
        return 0

    def checksums(self, names: Iterable[str] | None = None) -> dict[str, str]:
        """Raise ConfigError: SGLang's checksums are of its own parameters, fused and cut."""
        raise ConfigError(
            "SGLang's weights cannot be compared with a checkpoint: its checksums are of "
            "its own parameters, fused and cut; each update's files are verified when they are "
            "written"
        )

    def names_of(self, spec: TensorSpec, names: Sequence[str]) -> list[str]:
        """Return those of a tensor's tied `names` under which its bytes are written."""
        if self.manifest is None:
            return [spec.name]
        return [name for name in names if name in self.manifest.index] or [spec.name]

    def layout_of(self, manifest: Manifest) -> tuple[list[Shard], Mapping[str, list[str]]]:
        """Return the files of a manifest, and the names of each tensor in them."""
        places = manifest.places()
        names = {spec.name: self.names_of(spec, places[spec.name]) for spec in manifest.specs}
        written = [
            TensorSpec(name, spec.dtype, spec.shape)
            for spec in manifest.specs
            for name in names[spec.name]
        ]
        return lay_out(written, shard_nbytes=files.SHARD_NBYTES), names

    def begin(self, shards: Sequence[Shard]) -> SnapshotWriter | None:
        """Create files, where this sink is the one that writes the update's; else return None."""
        snapshot = self._snapshot
        if snapshot is None:
            raise ConfigError("an update for SGLang needs an id; send it with a sender")
        return snapshot.add(shards) if snapshot.writer is self else None

    def commit_all(self, load_targets: Sequence[LoadTarget]) -> None:
        """Make the server load the files of all messages of an update at once."""
        if self._snapshot is not None:
            self._load(self._snapshot.publish())


class _FilesTarget(LoadTarget):
    def __init__(self, sink: FilesSink, manifest: Manifest) -> None:
        self._sink = sink
        self._writing: SnapshotWriter | None = None
        self._shards, self._names = sink.layout_of(manifest)
        self.peak_extra_nbytes = sum(shard.nbytes for shard in self._shards)

    def begin(self) -> None:
        self._writing = self._sink.begin(self._shards)

    def load(self, pairs: Sequence[NamedTensor]) -> None:
        if self._writing is None:
            return  # the sink of another server writes the files
        for name, tensor in pairs:
            flat = as_bytes(tensor.to("cpu") if tensor.device.type != "cpu" else tensor)
            for written in self._names[name] if flat.numel() else ():
                self._writing.write(written, flat)

    def validate(self) -> None:
        if self._writing is not None:
            self._writing.done()
            self._writing = None

    def commit(self) -> None:
        self._sink.commit_all([self])

    def discard(self) -> None:
        if self._writing is not None:
            self._writing.discard()
            self._writing = None
        self._sink.leave()


def _compare(offered: Manifest, wanted: Manifest) -> ManifestDifference:
    unexpected, mismatched = [], []
    places = offered.places()
    for spec in offered.specs:
        names = [name for name in places[spec.name] if name in wanted.index]
        if not names:
            unexpected.append(spec.name)
        for name in names:
            want = wanted.specs[wanted.index[name]]
            casts = {spec.dtype, want.dtype} <= _CASTS
            if spec.shape != want.shape or (spec.dtype != want.dtype and not casts):
                mismatched.append(f"{name}: offered {spec}, wanted {want}")
    missing = tuple(name for name in wanted.index if name not in offered.index)
    return ManifestDifference(missing, tuple(unexpected), tuple(mismatched))
