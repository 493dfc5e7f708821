"""vLLM's `WeightSource`: an object that describes its tensors itself.

It has two shapes: up to vLLM 0.32 `metadata()`, an iteration over the object, `groups()` and
`held_names()`; from 0.33 the property `metadata`, `iter_full()` and `owned_names(rank)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from weightsync.arguments import Dtype
from weightsync.errors import ConfigError, ManifestMismatchError, shorten
from weightsync.weights.sinks.module_sink import Rename
from weightsync.weights.sources.base import SplitSource
from weightsync.weights.sources.holdings import Holdings


def described_source(
    given: object, *, dtype: Dtype | None, rename: Rename | None
) -> DescribedSource | None:
    """Return a WeightSource of an object with either shape, None of any other one."""
    metadata = getattr(given, "metadata", None)
    iterates = isinstance(given, Iterable) if callable(metadata) else hasattr(given, "iter_full")
    if metadata is None or not iterates:
        return None
    return DescribedSource(given, dtype=dtype, rename=rename)


class DescribedSource(SplitSource):
    """The tensors of an object that describes them itself, as vLLM's `WeightSource`.

    `metadata` lists all of them, with `name`, `dtype` (torch's) and full `shape`, in the order of
    iteration; it is read once. Each update iterates anew. Ranks may hold different tensors:

    - `owned_names(rank)` has the names that a rank of the default process group iterates over. A
      tensor of several ranks is gathered by them, as they iterate.
    - A rank with `held_names()` iterates over the names of its `groups()` alone, and yields None
      for those that it does not hold.
    """

    def __init__(
        self,
        described: Any,
        *,
        dtype: Dtype | None = None,
        rename: Rename | None = None,
    ) -> None:
        self._all = _all_of(described)
        self._is_given_once = getattr(described, "is_given_once", False)
        self._iterate, self._held_names, self._iterated = _share_of(described, self._all)
        held = None
        if self._held_names is not None:
            _check_held(described, self._held_names, self._iterated, dict(self._all))
            held = [i for i, (name, _) in enumerate(self._all) if name in self._held_names]
        super().__init__(self._whole, self._all, held, dtype=dtype, rename=rename)

    def holdings(self) -> Holdings | None:
        """Return the parts that this rank yields; None where it is given its tensors only once."""
        return None if self._is_given_once else super().holdings()

    def _whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a tensor for every name, on the meta device where this rank does not hold it."""
        given = iter(self._iterate())
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


def _share_of(
    described: Any, known: Sequence[tuple[str, torch.Tensor]]
) -> tuple[Callable[[], Iterable[Any]], frozenset[str] | None, frozenset[str]]:
    """Return how this rank iterates, the names that it holds (None: all), and those it yields."""
    if callable(described.metadata):
        names = described.held_names() if hasattr(described, "held_names") else None
        if names is None:
            return described.__iter__, None, frozenset()
        if not hasattr(described, "groups"):
            raise ConfigError(f"a {type(described).__name__} has held_names() and no groups()")
        yielded = frozenset(name for group in described.groups() for name in group)
        return described.__iter__, frozenset(names), yielded
    if not getattr(described, "implements_iter_full", lambda: True)():
        raise ConfigError(
            f"a {type(described).__name__} implements iter_local() alone, and weightsync sends "
            "full tensors: implement iter_full(), or give the module itself"
        )
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    owned = frozenset(described.owned_names(rank))
    holds_all = owned == {name for name, _ in known}
    return described.iter_full, None if holds_all else owned, owned


def _all_of(described: Any) -> list[tuple[str, torch.Tensor]]:
    """Return all tensors of a source, on the meta device. Raises ConfigError for what is none."""
    found = []
    metadata = described.metadata
    for meta in (metadata() if callable(metadata) else metadata) or ():
        name: Any = getattr(meta, "name", None)
        dtype: Any = getattr(meta, "dtype", None)
        shape: Any = getattr(meta, "shape", None)
        is_sized = isinstance(shape, Sequence) and all(isinstance(n, int) and n >= 0 for n in shape)
        if not (isinstance(name, str) and isinstance(dtype, torch.dtype) and is_sized):
            raise ConfigError(
                f"the metadata of a {type(described).__name__} has {meta!r}, and not name, dtype "
                "(torch's) and shape of a tensor"
            )
        found.append((name, torch.empty(shape, dtype=dtype, device="meta")))
    return found


def _check_held(
    described: Any, held: frozenset[str], iterated: frozenset[str], known: dict[str, torch.Tensor]
) -> None:
    told = "held_names()" if callable(described.metadata) else "owned_names()"
    unknown = sorted(held - known.keys())
    if unknown:
        raise ManifestMismatchError(
            f"{told} of the source has names that its metadata lacks: {shorten(unknown)}",
            unexpected=unknown,
        )
    left_out = sorted(held - iterated)
    if left_out:
        raise ManifestMismatchError(
            f"groups() of the source leaves out names of its {told}: {shorten(left_out)}",
            missing=left_out,
        )
