"""vLLM's `WeightSource`: an iterable object that describes its tensors itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from weightsync.arguments import Dtype
from weightsync.errors import ConfigError, ManifestMismatchError, shorten
from weightsync.weights.sinks.module_sink import Rename
from weightsync.weights.sources.base import SplitSource


def described_source(
    given: object, *, dtype: Dtype | None, rename: Rename | None
) -> DescribedSource | None:
    """Return a WeightSource of an iterable object with `metadata()`, None of any other one."""
    if callable(getattr(given, "metadata", None)) and isinstance(given, Iterable):
        return DescribedSource(given, dtype=dtype, rename=rename)
    return None


class DescribedSource(SplitSource):
    """The tensors of an iterable object that describes them itself, as vLLM's `WeightSource`.

    `metadata()` lists all of them, with `name`, `dtype` (torch's) and full `shape`, in the order of
    iteration; it is read once. Each update iterates anew. Ranks that hold different tensors have
    `held_names()`: such a rank iterates over the names of its `groups()` alone, and yields None for
    those that it does not hold.
    """

    def __init__(
        self,
        described: Any,
        *,
        dtype: Dtype | None = None,
        rename: Rename | None = None,
    ) -> None:
        self._described = described
        self._all = _all_of(described)
        names = described.held_names() if hasattr(described, "held_names") else None
        self._held_names = None if names is None else frozenset(names)
        held = None
        if self._held_names is not None:
            if not hasattr(described, "groups"):
                raise ConfigError(f"a {type(described).__name__} has held_names() and no groups()")
            held = [i for i, (name, _) in enumerate(self._all) if name in self._held_names]
            self._iterated = frozenset(name for group in described.groups() for name in group)
            _check_held(self._held_names, self._iterated, dict(self._all))
        super().__init__(self._whole, self._all, held, dtype=dtype, rename=rename)

    def _whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a tensor for every name, on the meta device where this rank does not hold it."""
        given = iter(self._described)
        if self._held_names is None:
            yield from given
            return
        for name, absent in self._all:
            if name not in self._iterated:
                yield name, absent
                continue
            pair = next(given, None)
            if pair is None:
                return
            seen, tensor = pair
            if tensor is None and name in self._held_names and seen == name:
                raise ManifestMismatchError(
                    f"the source yields None for {name!r}, which its held_names() has",
                    missing=[name],
                )
            yield seen, absent if tensor is None else tensor
        yield from given


def _all_of(described: Any) -> list[tuple[str, torch.Tensor]]:
    """Return all tensors of a source, on the meta device. Raises ConfigError for what is none."""
    found = []
    for meta in described.metadata() or ():
        name: Any = getattr(meta, "name", None)
        dtype: Any = getattr(meta, "dtype", None)
        shape: Any = getattr(meta, "shape", None)
        is_sized = isinstance(shape, Sequence) and all(isinstance(n, int) and n >= 0 for n in shape)
        if not (isinstance(name, str) and isinstance(dtype, torch.dtype) and is_sized):
            raise ConfigError(
                f"metadata() of a {type(described).__name__} has {meta!r}, and not name, dtype "
                "(torch's) and shape of a tensor"
            )
        found.append((name, torch.empty(shape, dtype=dtype, device="meta")))
    return found


def _check_held(
    held: frozenset[str], iterated: frozenset[str], known: dict[str, torch.Tensor]
) -> None:
    unknown = sorted(held - known.keys())
    if unknown:
        raise ManifestMismatchError(
            f"held_names() of the source has names that its metadata() lacks: {shorten(unknown)}",
            unexpected=unknown,
        )
    left_out = sorted(held - iterated)
    if left_out:
        raise ManifestMismatchError(
            f"groups() of the source leaves out names of its held_names(): {shorten(left_out)}",
            missing=left_out,
        )
