"""The checkpoint argument of `push`, `verify` and `certify`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from weightsync.cli.dtypes import Dtype
from weightsync.errors import ManifestMismatchError, convert_experts, shorten
from weightsync.tensors import TORCH_DTYPES
from weightsync.weights.sources.safetensors_source import SafetensorsSource

_DTYPES_DIFFER = re.compile(r"offered (?P<offered>\w+)(?P<shape>\[.*?\]), wanted (?P<wanted>\w+)\[")


def open_checkpoint(path: Path, dtype: Dtype | None) -> SafetensorsSource:
    """Return the checkpoint at `path`. Raises ConfigError for a path that is not a checkpoint."""
    return SafetensorsSource(path, dtype=TORCH_DTYPES[dtype] if dtype else None)


def explain(error: ManifestMismatchError, path: Path, targets: Sequence[str]) -> str:
    """Return why a checkpoint does not fit a server, and what to do, in terms of the verb."""
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
    """Return the one dtype to which a cast makes all tensors fit, None if there is none."""
    if error.missing or error.unexpected or not error.mismatched:
        return None
    wanted = set()
    for line in error.mismatched:
        found = _DTYPES_DIFFER.search(line)
        if found is None or f"wanted {found['wanted']}{found['shape']}" not in line:
            return None
        wanted.add(found["wanted"])
    return wanted.pop() if len(wanted) == 1 and wanted <= {*get_args(Dtype)} else None
