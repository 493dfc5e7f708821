"""A model as safetensors files: shards laid out before a byte is there, headers read back.

The format is eight bytes with the length of a JSON header, the header, then the bytes of all
tensors without holes. Nothing here needs more than the standard library.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from weightsync.errors import ConfigError, TransferError, shorten
from weightsync.specs import DTYPE_NBYTES, Manifest, TensorSpec

DTYPE_CODES: Mapping[str, str] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""What SGLang's reader calls our dtypes; those that it does not know cannot be sent."""

INDEX = "model.safetensors.index.json"
_MAX_HEADER_NBYTES = 100_000_000
_ALIGNMENT = 8
_NAMES = {code: name for name, code in DTYPE_CODES.items()}


@dataclass(frozen=True, slots=True)
class Place:
    """Where the bytes of one name lie: shard `shard`, from byte `offset` of its file."""

    shard: int
    offset: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One file to be: its `header`, the names in it, and its size with both."""

    header: bytes
    names: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Shards, and the place of every name in them."""

    shards: tuple[Shard, ...]
    places: Mapping[str, Place]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(shard.nbytes for shard in self.shards)


def lay_out(specs: Iterable[TensorSpec], *, shard_nbytes: int) -> Layout:
    """Cut tensors, in their order, into shards of about `shard_nbytes`. ConfigError for a dtype."""
    listed = list(specs)
    _check_dtypes(listed)
    groups: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in listed:
        if groups[-1] and filled + spec.nbytes > shard_nbytes:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += spec.nbytes
    shards: list[Shard] = []
    places: dict[str, Place] = {}
    for index, group in enumerate(groups):
        shard, offsets = _make_shard(group)
        shards.append(shard)
        places.update({name: Place(index, offset) for name, offset in offsets.items()})
    return Layout(tuple(shards), places)


def index_of(files: Mapping[str, Sequence[str]]) -> bytes:
    """Return the index of a sharded checkpoint: `{file: names in it}` the other way round."""
    table = {name: file for file, names in files.items() for name in names}
    return json.dumps({"metadata": {}, "weight_map": table}).encode()


def read_manifest(directory: Path) -> Manifest | None:
    """Return what the safetensors files of a checkpoint hold; None where they cannot be read."""
    try:
        specs = [spec for file in _files_of(directory) for spec in _read_header(file)]
        return Manifest(tuple(specs)) if specs else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # a foreign directory: it may hold anything


def _make_shard(group: list[TensorSpec]) -> tuple[Shard, dict[str, int]]:
    # Large elements first: every tensor is then aligned to its own, without holes.
    ordered = sorted(group, key=lambda spec: -DTYPE_NBYTES[spec.dtype])
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    at = 0
    for spec in ordered:
        begins[spec.name] = at
        entries[spec.name] = {
            "dtype": DTYPE_CODES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [at, at + spec.nbytes],
        }
        at += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    offsets = {name: len(header) + begin for name, begin in begins.items()}
    return Shard(header, tuple(begins), len(header) + at), offsets


def _check_dtypes(specs: list[TensorSpec]) -> None:
    unknown = [str(spec.name) for spec in specs if spec.dtype not in DTYPE_CODES]
    if unknown:
        raise ConfigError(
            f"{shorten(unknown)}: of a dtype that safetensors files for SGLang cannot hold; "
            f"known: {', '.join(DTYPE_CODES)}; cast with dtype="
        )


def _files_of(directory: Path) -> list[Path]:
    index = directory / INDEX
    if index.is_file():
        table = json.loads(index.read_bytes())["weight_map"]
        return [directory / Path(name).name for name in sorted(set(table.values()))]
    return sorted(directory.glob("*.safetensors"))


def _read_header(file: Path) -> list[TensorSpec]:
    with file.open("rb") as opened:
        nbytes = int.from_bytes(opened.read(8), "little")
        if nbytes > _MAX_HEADER_NBYTES:
            raise ValueError(f"{file} begins with no header")
        entries = json.loads(opened.read(nbytes))
    entries.pop("__metadata__", None)
    return [
        TensorSpec(name, _NAMES[entry["dtype"]], tuple(entry["shape"]))
        for name, entry in entries.items()
    ]


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`. Raises TransferError saying why it could not."""
    try:
        while data.nbytes:
            written = os.pwrite(fd, data, offset)
            data, offset = data[written:], offset + written
    except OSError as exc:
        raise TransferError(f"a file for SGLang cannot be written: {exc}; send again") from exc
