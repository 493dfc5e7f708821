"""Checkpoints in safetensors files as a source: mapped, read one tensor at a time, no pickle."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from weightsync.arguments import Dtype, as_dtype
from weightsync.errors import (
    ConfigError,
    ManifestMismatchError,
    MissingExtraError,
    shorten,
)
from weightsync.specs import Manifest, TensorSpec
from weightsync.tensors import TORCH_DTYPES, contiguous_bytes, dtype_name, sent_dtype
from weightsync.weights.module_sink import Rename, rename_with

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
_WANTED = f"give a directory with {_SINGLE} or {_INDEX}, or one .safetensors file"


@dataclass(frozen=True, slots=True)
class _Stored:
    """One tensor of a file, with the name, dtype and shape that it has there."""

    name: str
    file: Path
    spec: TensorSpec


class SafetensorsSource:
    """The tensors of a checkpoint: a directory with one or several files, or a `.safetensors` file.

    Files are mapped, and a tensor is read when it is requested. `dtype` casts floating-point
    tensors on the way; `rename` maps names. A head is an alias of the embeddings where
    `config.json` ties them, or where both have the same bytes. Files that were replaced are read
    again for the next update, and must describe the same tensors. Raises ConfigError for a path
    that is not such a checkpoint, and MissingExtraError without safetensors.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        dtype: Dtype | None = None,
        rename: Rename | None = None,
    ) -> None:
        self.path = Path(path).expanduser()
        self._dtype = as_dtype("dtype", dtype)
        self._rename = rename_with(rename)
        self._seen, self._sent, self._manifest = self._read()

    @property
    def manifest(self) -> Manifest:
        """Names, dtypes as sent, and shapes, in the order of the files."""
        return self._manifest

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors as stored, without a cast: views of mapped files.

        Raises ManifestMismatchError when the files were replaced by those of another model.
        """
        self._look_again()
        for file, group in groupby(self._sent, key=lambda stored: stored.file):
            with _open(file) as opened:
                for stored in group:
                    yield self._rename(stored.name), opened.get_tensor(stored.name)

    def stable_tensors(self) -> list[torch.Tensor] | None:
        """Return None: the tensors are read for each update."""
        return None

    def _read(self) -> tuple[object, list[_Stored], Manifest]:
        """Return the stamps of the files, their tensors without aliases, and the manifest."""
        files = _find_files(self.path)
        seen = _stamps(files)
        stored = [tensor for file in files for tensor in _list_tensors(file)]
        _check_index(self.path, stored)
        aliases = _find_aliases(self.path, stored)
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


def _list_tensors(file: Path) -> list[_Stored]:
    """Return the tensors in the header of a file, in the order of their bytes."""
    with _open(file) as opened:
        return [
            _describe_stored(file, name, opened.get_slice(name)) for name in opened.offset_keys()
        ]


def _describe_stored(file: Path, name: str, header: Any) -> _Stored:
    dtype = _DTYPES.get(header.get_dtype())
    if dtype is None:
        raise ConfigError(
            f"{file}: {name} has dtype {header.get_dtype()}, which cannot be sent; known: "
            f"{', '.join(_DTYPES)}"
        )
    return _Stored(name, file, TensorSpec(name, dtype, tuple(header.get_shape())))


def _open(file: Path) -> Any:
    try:
        import safetensors  # noqa: PLC0415  # not needed by a program that names the class alone
    except ImportError as exc:
        raise MissingExtraError(
            f"reading a checkpoint needs safetensors ({exc}); pip install 'weightsync[safetensors]'"
        ) from exc
    try:
        return safetensors.safe_open(file, framework="pt", device="cpu")
    except (OSError, safetensors.SafetensorError) as exc:
        raise ConfigError(f"{file} cannot be read as a safetensors file: {exc}") from exc


def _stamps(files: list[Path]) -> list[tuple[str, int, int, int]]:
    """Return name, inode, size and mtime of each file: another list means replaced files."""
    stamps = []
    for file in files:
        try:
            info = file.stat()
        except OSError as exc:
            raise ConfigError(f"{file} is part of the checkpoint and is not there: {exc}") from exc
        stamps.append((file.name, info.st_ino, info.st_size, info.st_mtime_ns))
    return stamps


def _find_aliases(path: Path, stored: list[_Stored]) -> dict[str, str]:
    """Return `{head: embeddings}` where they are tied, an empty dict where they are not."""
    by_name = {tensor.name: tensor for tensor in stored}
    embeddings = [name for name in by_name if name.endswith(_EMBEDDINGS)]
    if len(embeddings) != 1:
        return {}
    tied, (name,) = _says_tied(path), embeddings
    heads = [held for held in by_name if held == _HEAD or held.endswith(f".{_HEAD}")]
    if not heads:
        return {_HEAD: name} if tied else {}
    if tied is False or len(heads) > 1 or not _same(by_name[heads[0]], by_name[name]):
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


def _same(one: _Stored, other: _Stored) -> bool:
    """Whether two tensors have the same dtype, shape and bytes."""
    if (one.spec.dtype, one.spec.shape) != (other.spec.dtype, other.spec.shape):
        return False
    first, second = (_bytes(stored) for stored in (one, other))
    return torch.equal(first, second)


def _bytes(stored: _Stored) -> torch.Tensor:
    with _open(stored.file) as opened:
        tensor: torch.Tensor = opened.get_tensor(stored.name)
    return contiguous_bytes(tensor)
