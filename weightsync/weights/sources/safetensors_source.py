"""Checkpoints in safetensors files as a source: read one tensor at a time, no pickle.

Nothing of a user's file is mapped: a program that cuts a mapped file short ends its readers with
SIGBUS. Reads of a file that was cut short are short, and raise an error that names it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from weightsync.arguments import Dtype, as_dtype
from weightsync.errors import (
    ConfigError,
    ManifestMismatchError,
    MissingExtraError,
    TransferError,
    VerificationError,
    install_hint,
    shorten,
)
from weightsync.specs import Manifest, TensorSpec, rounds
from weightsync.tensors import TORCH_DTYPES, dtype_name, from_bytes, sent_dtype
from weightsync.weights.sinks.base import uses
from weightsync.weights.sinks.module_sink import Rename, rename_with

_DTYPES: Mapping[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Names of dtypes by their names in the file format."""

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth")
_HEAD = "lm_head.weight"
_EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
    "tok_embeddings.weight",
)
_READ_NBYTES = 1 << 30
"""Bytes of one read, at most: Linux reads no more than 2 GiB at a time."""
_MAX_HEADER_NBYTES = 100_000_000
"""As in the safetensors library."""
_WANTED = f"give a directory with {_SINGLE} or {_INDEX}, or one .safetensors file"


@dataclass(frozen=True, slots=True)
class _Stored:
    """One tensor of a file, with the name, dtype and shape that it has there.

    `begin` is the place of its first byte in the file.
    """

    name: str
    file: Path
    spec: TensorSpec
    begin: int


@dataclass(frozen=True, slots=True)
class _Stamp:
    """Identity, size and time of the last write of a file: another stamp means other contents."""

    device: int
    inode: int
    nbytes: int
    mtime_ns: int

    @classmethod
    def of(cls, info: os.stat_result) -> _Stamp:
        return cls(info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)


class SafetensorsSource:
    """The tensors of a checkpoint: a directory with one or several files, or a `.safetensors` file.

    A tensor is read when it is requested. `dtype` casts floating-point tensors on the way;
    `rename` maps names. A head is an alias of the embeddings where `config.json` ties them, or
    where both have the same bytes. Files that were replaced are read again for the next update, and
    must describe the same tensors. An update during which a file is written to or cut short fails
    with VerificationError, which names the file; one that is replaced by another file meanwhile is
    sent as it was. Raises ConfigError for a path that is not such a checkpoint, and
    MissingExtraError without safetensors.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        dtype: Dtype | None = None,
        rename: Rename | None = None,
    ) -> None:
        self.path = Path(path).expanduser()
        self.device_types = {"cpu"}
        self._dtype = as_dtype("dtype", dtype)
        self._rename = rename_with(rename)
        self._seen, self._sent, self._manifest = self._read()

    @property
    def manifest(self) -> Manifest:
        """Names, dtypes as sent, and shapes, in the order of the files."""
        return self._manifest

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors as stored, without a cast.

        Raises ManifestMismatchError when the files were replaced by those of another model, and
        VerificationError when one is changed before the last tensor was read.
        """
        self._look_again()
        buffers = _Buffers(max((stored.spec.nbytes for stored in self._sent), default=0))
        last = len(self._sent) - 1
        with ExitStack() as stack:
            # All of them at once: one that is replaced meanwhile is read as it was, to its end.
            opened = {
                file: stack.enter_context(_opened(file, stamp))
                for file, stamp in self._seen.items()
            }
            for i, stored in enumerate(self._sent):
                flat = buffers.take(stored.spec.nbytes)
                opened[stored.file].read(flat, stored.begin)
                if i == last:  # before it is sent: nobody commits what is not complete
                    for file in opened.values():
                        file.check_unchanged()
                yield self._rename(stored.name), from_bytes(flat, stored.spec)

    @property
    def rounded(self) -> dict[str, str]:
        """The dtypes in the files of tensors that are rounded before they are sent."""
        pairs = zip(self._manifest.specs, self._sent, strict=True)
        return {
            spec.name: stored.spec.dtype
            for spec, stored in pairs
            if rounds(stored.spec.dtype, spec.dtype)
        }

    def stable_tensors(self) -> list[torch.Tensor] | None:
        """Return None: the tensors are read for each update."""
        return None

    def _read(self) -> tuple[dict[Path, _Stamp], list[_Stored], Manifest]:
        """Return the stamps of the files, their tensors without aliases, and the manifest."""
        seen = _stamps(_find_files(self.path))
        stored = [tensor for file, stamp in seen.items() for tensor in _list_tensors(file, stamp)]
        _check_index(self.path, stored)
        aliases = _find_aliases(self.path, stored, seen)
        sent = [tensor for tensor in stored if tensor.name not in aliases]
        manifest = Manifest(
            tuple(self._describe(tensor.spec) for tensor in sent),
            {self._rename(alias): self._rename(name) for alias, name in aliases.items()},
        )
        return seen, sent, manifest

    def _describe(self, spec: TensorSpec) -> TensorSpec:
        dtype = dtype_name(sent_dtype(TORCH_DTYPES[spec.dtype], self._dtype))
        return TensorSpec(self._rename(spec.name), dtype, spec.shape)

    def _look_again(self) -> None:
        if _stamps(_find_files(self.path)) == self._seen:
            return
        seen, sent, now = self._read()
        if now.digest != self._manifest.digest:
            changed = set(self._manifest.specs) ^ set(now.specs)
            names = shorten(sorted({spec.name for spec in changed}))
            raise ManifestMismatchError(
                f"the files of {self.path} no longer describe the tensors of connect(): "
                f"{names or 'their order or their ties changed'}; connect again"
            )
        self._seen, self._sent = seen, sent


def _find_files(path: Path) -> list[Path]:
    """Return the files of a checkpoint, in order. Raises ConfigError where there are none."""
    if path.is_file():
        if path.suffix != ".safetensors":
            raise ConfigError(f"{path} is not a .safetensors file; {_WANTED}")
        return [path]
    if not path.is_dir():
        raise ConfigError(f"{path} does not exist; {_WANTED}")
    if (path / _INDEX).is_file():
        return sorted({path / name for name in _read_index(path).values()})
    if (path / _SINGLE).is_file():
        return [path / _SINGLE]
    found = sorted(path.glob("*.safetensors"))
    if len(found) == 1:
        return found
    raise ConfigError(f"{path} holds {_what_else(path, found)}; {_WANTED}")


def _what_else(path: Path, found: list[Path]) -> str:
    """Describe a directory that is not a checkpoint, for an error."""
    if found:
        return f"{len(found)} .safetensors files and no {_INDEX}"
    pickles = [file.name for pattern in _PICKLES for file in path.glob(pattern)]
    if pickles:
        return (
            f"no safetensors file, but {shorten(sorted(pickles))}, which may be pickles and are "
            "never read (save_pretrained writes safetensors)"
        )
    return "no safetensors file"


def _read_index(path: Path) -> dict[str, str]:
    """Return the file of each tensor, from the index of a checkpoint of several files."""
    index = path / _INDEX
    table = _read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise ConfigError(f"{index} has no weight_map; write the checkpoint again")
    # A name with a directory in it could point outside of the checkpoint.
    strange = [str(v) for v in table.values() if not isinstance(v, str) or Path(v).name != v]
    if strange:
        raise ConfigError(f"{index} names files outside its directory: {shorten(strange)}")
    return table


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path} cannot be read as JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, not an object")
    return content


def _check_index(path: Path, stored: list[_Stored]) -> None:
    """Raise ConfigError unless every tensor is in the file that the index names, and only there."""
    found = {(tensor.name, tensor.file.name) for tensor in stored}
    names = [tensor.name for tensor in stored]
    if not (path / _INDEX).is_file():
        return
    wanted = set(_read_index(path).items())
    lacking = sorted({name for name, _ in wanted - found})
    surplus = sorted({name for name, _ in found - wanted})
    if lacking or surplus or len(names) != len(set(names)):
        raise ConfigError(
            f"{path / _INDEX} and its files disagree (in the index alone: "
            f"{shorten(lacking) or 'none'}; in the files alone: {shorten(surplus) or 'none'}); "
            "the checkpoint is not complete, or a file is of another one"
        )


def _list_tensors(file: Path, stamp: _Stamp) -> list[_Stored]:
    """Return the tensors in the header of a file, in the order of their bytes."""
    with _opened(file, stamp) as opened:
        header = _read_header(opened)
    with _described(file, header, stamp.nbytes) as described:
        entries = json.loads(header[8:])
        return [
            _describe_stored(
                file,
                name,
                described.get_slice(name),
                len(header) + int(entries[name]["data_offsets"][0]),
            )
            for name in described.offset_keys()
        ]


def _describe_stored(file: Path, name: str, header: Any, begin: int) -> _Stored:
    dtype = _DTYPES.get(header.get_dtype())
    if dtype is None:
        raise ConfigError(
            f"{file}: {name} has dtype {header.get_dtype()}, which cannot be sent; known: "
            f"{', '.join(_DTYPES)}"
        )
    return _Stored(name, file, TensorSpec(name, dtype, tuple(header.get_shape())), begin)


class _OpenFile:
    """An open file of a checkpoint, which has to stay as `stamp` says while it is read."""

    def __init__(self, path: Path, descriptor: int, stamp: _Stamp) -> None:
        self._path, self._descriptor, self._stamp = path, descriptor, stamp
        self.check_unchanged()

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return self._stamp.nbytes

    def read(self, into: torch.Tensor, begin: int) -> None:
        """Fill `uint8[nbytes]` with the bytes from `begin` on. Raises where the file is shorter."""
        view, at = into.numpy().data, 0
        while at < len(view):
            try:
                count = os.preadv(self._descriptor, [view[at : at + _READ_NBYTES]], begin + at)
            except OSError as exc:
                raise TransferError(f"{self._path} cannot be read: {exc}") from exc
            if not count:
                self._raise_changed()
            at += count

    def check_unchanged(self) -> None:
        """Raise VerificationError where the file was written to, or cut short."""
        if _Stamp.of(os.fstat(self._descriptor)) != self._stamp:
            self._raise_changed()

    def _raise_changed(self) -> NoReturn:
        now = os.fstat(self._descriptor).st_size
        how = f"cut to {now} bytes" if now < self._stamp.nbytes else "written to"
        raise VerificationError(
            f"the source changed while it was read: {self._path} ({self._stamp.nbytes} bytes) was "
            f"{how}, or replaced; the update is aborted. Send again when the file is complete, and "
            "replace files of a checkpoint by renaming new ones",
            names=[self._path.name],
        )


@contextmanager
def _opened(file: Path, stamp: _Stamp) -> Iterator[_OpenFile]:
    """Open a file to be read. Raises VerificationError where it is not that of `stamp` any more."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as exc:
        raise TransferError(f"{file} cannot be opened: {exc}") from exc
    try:
        yield _OpenFile(file, descriptor, stamp)
    finally:
        os.close(descriptor)


def _read_header(file: _OpenFile) -> bytes:
    """Return the first bytes of a file: the size of its header, and the header."""
    size = torch.zeros(min(8, file.nbytes), dtype=torch.uint8)
    file.read(size, 0)
    nbytes = int.from_bytes(size.numpy().tobytes(), "little")
    header = torch.zeros(min(8 + min(nbytes, _MAX_HEADER_NBYTES), file.nbytes), dtype=torch.uint8)
    file.read(header, 0)
    return header.numpy().tobytes()


@contextmanager
def _described(file: Path, header: bytes, nbytes: int) -> Iterator[Any]:
    """Yield safetensors' view of a file with this header: it is checked by the library.

    The library maps a file, so it is given one of our own, with the header and no other bytes.
    """
    try:
        import safetensors  # noqa: PLC0415  # not needed by a program that names the class alone
    except ImportError as exc:
        raise MissingExtraError(
            f"reading a checkpoint needs safetensors ({exc}); {install_hint('safetensors')}"
        ) from exc
    descriptor = os.memfd_create("weightsync-header", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, header)
        os.ftruncate(descriptor, nbytes)
        with safetensors.safe_open(f"/proc/self/fd/{descriptor}", framework="numpy") as described:
            yield described
    except (OSError, safetensors.SafetensorError) as exc:
        raise ConfigError(f"{file} cannot be read as a safetensors file: {exc}") from exc
    finally:
        os.close(descriptor)


class _Buffers:
    """Memory of `uint8[nbytes]` for one tensor after another, used again once nobody has it.

    Memory that is touched for the first time takes longer than the read.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._known: list[tuple[torch.Tensor, int]] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """Return `uint8[nbytes]` that no tensor of an earlier call uses any more."""
        for buffer, unused in self._known:
            if uses(buffer) == unused:
                return buffer[:nbytes]
        buffer = torch.empty(self._nbytes, dtype=torch.uint8)
        self._known = [(buffer, uses(buffer)), *self._known[:1]]
        return buffer[:nbytes]


def _stamps(files: Sequence[Path]) -> dict[Path, _Stamp]:
    """Return the stamp of each file; others mean that files were replaced or written to."""
    stamps = {}
    for file in files:
        try:
            stamps[file] = _Stamp.of(file.stat())
        except OSError as exc:
            raise ConfigError(f"{file} is part of the checkpoint and is not there: {exc}") from exc
    return stamps


def _find_aliases(path: Path, stored: list[_Stored], seen: Mapping[Path, _Stamp]) -> dict[str, str]:
    """Return `{head: embeddings}` where they are tied, an empty dict where they are not."""
    by_name = {tensor.name: tensor for tensor in stored}
    embeddings = [name for name in by_name if name.endswith(_EMBEDDINGS)]
    if len(embeddings) != 1:
        return {}
    tied, (name,) = _says_tied(path), embeddings
    heads = [held for held in by_name if held == _HEAD or held.endswith(f".{_HEAD}")]
    if not heads:
        return {_HEAD: name} if tied else {}
    if tied is False or len(heads) > 1 or not _same(by_name[heads[0]], by_name[name], seen):
        return {}
    return {heads[0]: name}


def _says_tied(path: Path) -> bool | None:
    """Return `tie_word_embeddings` of config.json; None where it has no such field."""
    config = (path if path.is_dir() else path.parent) / "config.json"
    if not config.is_file():
        return None
    content = _read_json(config)
    inner = content.get("text_config")
    places = (content, inner if isinstance(inner, dict) else {})
    said = [place["tie_word_embeddings"] for place in places if "tie_word_embeddings" in place]
    return bool(said[0]) if said else None


def _same(one: _Stored, other: _Stored, seen: Mapping[Path, _Stamp]) -> bool:
    """Whether two tensors have the same dtype, shape and bytes."""
    if (one.spec.dtype, one.spec.shape) != (other.spec.dtype, other.spec.shape):
        return False
    first, second = (_bytes(stored, seen[stored.file]) for stored in (one, other))
    return torch.equal(first, second)


def _bytes(stored: _Stored, stamp: _Stamp) -> torch.Tensor:
    flat = torch.empty(stored.spec.nbytes, dtype=torch.uint8)
    with _opened(stored.file, stamp) as opened:
        opened.read(flat, stored.begin)
    return flat
