"""The checkpoint that `push` and `verify` name on their command lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path

import torch

from weightsync.errors import ManifestMismatchError, convert_experts, shorten
from weightsync.specs import Manifest
from weightsync.tensors import TORCH_DTYPES
from weightsync.weights.safetensors_source import SafetensorsSource

_DTYPES_DIFFER = re.compile(r"offered (?P<offered>\w+)(?P<shape>\[.*?\]), wanted (?P<wanted>\w+)\[")


class Dtype(StrEnum):
    """What floating-point tensors can be cast to on the way."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def open_checkpoint(path: Path, dtype: Dtype | None) -> SafetensorsSource:
    """Return the checkpoint at `path`. Raises ConfigError for what is none."""
    return SafetensorsSource(path, dtype=TORCH_DTYPES[dtype.value] if dtype else None)


class WatchedSource:
    """A source that tells `heard` how many bytes of it were read so far, in each update."""

    def __init__(self, source: SafetensorsSource, heard: Callable[[int], None]) -> None:
        self._source, self._heard = source, heard

    @property
    def manifest(self) -> Manifest:
        """Of the source."""
        return self._source.manifest

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the source's tensors; one counts as read when the next is asked for."""
        nbytes = 0
        self._heard(nbytes)
        for spec, pair in zip(self.manifest.specs, self._source.tensors(), strict=True):
            yield pair
            nbytes += spec.nbytes
            self._heard(nbytes)

    def stable_tensors(self) -> list[torch.Tensor] | None:
        """Of the source."""
        return self._source.stable_tensors()


def explain(error: ManifestMismatchError, path: Path, targets: Sequence[str]) -> str:
    """Say in words of the command line why a checkpoint does not fit a server, and what to do."""
    server = " and ".join(targets)
    if (wanted := _only_dtypes(error)) is not None:
        return (
            f"{path} is stored in another dtype than {server} holds ({error.mismatched[0]}); "
            f"add --dtype {wanted}"
        )
    groups = (
        ("the server has and the files lack", error.missing),
        ("the files have and the server lacks", error.unexpected),
        ("differ", error.mismatched),
    )
    found = [f"{len(names)} tensors {kind}: {shorten(names)}" for kind, names in groups if names]
    if not found:
        return str(error)
    return (
        f"{path} is a checkpoint of another model than {server} serves: {'; '.join(found)}; "
        f"nothing was changed. {convert_experts(error.missing, error.unexpected)}"
    ).rstrip(" .")


def _only_dtypes(error: ManifestMismatchError) -> str | None:
    """Return the one floating-point dtype that would make everything fit, if there is one."""
    if error.missing or error.unexpected or not error.mismatched:
        return None
    wanted = set()
    for line in error.mismatched:
        found = _DTYPES_DIFFER.search(line)
        if found is None or f"wanted {found['wanted']}{found['shape']}" not in line:
            return None
        wanted.add(found["wanted"])
    return wanted.pop() if len(wanted) == 1 and wanted <= {d.value for d in Dtype} else None
