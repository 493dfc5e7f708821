"""Casts of single tensors: each to the dtype in which the receivers keep it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from weightsync.errors import ConfigError
from weightsync.specs import FLOATING, Manifest, TensorSpec, count_casts
from weightsync.tensors import TORCH_DTYPES, spec_of
from weightsync.weights.sinks.module_sink import Rename
from weightsync.weights.sources.base import (
    DeclaredSource,
    ModuleSource,
    SourceExtras,
    WeightSource,
    as_source,
    rounded_by,
)
from weightsync.weights.sources.holdings import Holdings
from weightsync.weights.sources.wrapping import WrappingSource


class CastSource(WrappingSource):
    """The tensors of `source`, each in its own dtype.

    `dtypes` has the dtype of a tensor by one of its names; the others, and those that are no
    floating-point tensors on both sides, are sent as they are. A cast is part of the copy into a
    bucket, and of the send of shards: it gathers nothing.
    """

    only_moves = True

    def __init__(self, source: WeightSource, dtypes: Mapping[str, str]) -> None:
        super().__init__(source)
        before = self.source.manifest
        places = before.places()
        specs = tuple(_cast(spec, places[spec.name], dtypes) for spec in before.specs)
        self._manifest = Manifest(specs, before.aliases)

    @property
    def manifest(self) -> Manifest:
        """That of `source`, with the dtypes of the casts."""
        return self._manifest

    @property
    def casts(self) -> bool:
        """Whether any tensor is cast."""
        return self._manifest.specs != self.source.manifest.specs

    def convert(
        self, pairs: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of the source: they are cast where they are copied."""
        yield from pairs

    def hold(self, held: Holdings) -> Holdings:
        """Return the boxes of the source: they are cast where they are sent."""
        return held

    @property
    def rounded(self) -> Mapping[str, str]:
        """The dtypes before of tensors that are rounded here, or by the source."""
        before = self.source.manifest.specs
        own = rounded_by(self._manifest.specs, [TORCH_DTYPES[spec.dtype] for spec in before])
        return {**own, **SourceExtras(self.source).rounded}

    def cast_tensors(self) -> Sequence[torch.Tensor] | None:
        """Return the tensors of which those that are sent are casts; None where they are made."""
        source = self.source
        return source.cast_tensors() if type(source) is ModuleSource else source.stable_tensors()


def _cast(spec: TensorSpec, names: Sequence[str], dtypes: Mapping[str, str]) -> TensorSpec:
    wanted = next((dtypes[name] for name in names if name in dtypes), spec.dtype)
    if wanted == spec.dtype or not {wanted, spec.dtype} <= FLOATING:
        return spec
    return TensorSpec(spec.name, wanted, spec.shape)


def cast_source(
    source: object,
    dtypes: Mapping[str, str],
    *,
    only: str | None = None,
    rename: Rename | None = None,
) -> WeightSource:
    """Return the source whose tensors are cast to these dtypes, by name; see CastSource.

    `only` is the dtype of all of them, if there is one.

    Raises ConfigError for holdings that ranks declare, if they are cast to several dtypes.
    """
    if only is not None and isinstance(source, nn.Module):
        return ModuleSource(source, dtype=only, rename=rename)
    made = as_source(source, rename=rename)
    if isinstance(made, DeclaredSource):
        if only is None:
            raise ConfigError(
                'dtype="receiver": the receivers keep tensors in several dtypes, and holdings that '
                "ranks declare are cast to one; cast the tensors of the holdings themselves"
            )
        return as_source(source, dtype=only, rename=rename)
    cast = CastSource(made, dtypes)
    return cast if cast.casts else made


def casts_of(source: WeightSource) -> dict[str, int]:
    """Return how many tensors `cast_source` casts, as `{"float32 to bfloat16": 290}`."""
    if isinstance(source, CastSource):
        return count_casts(source.source.manifest, source.manifest)
    if type(source) is ModuleSource:
        before = (spec_of(name, tensor) for name, tensor in zip(*source.made_of(), strict=True))
        return count_casts(Manifest(tuple(before)), source.manifest)
    counts = Counter(
        f"{dtype} to {source.manifest.specs[source.manifest.index[name]].dtype}"
        for name, dtype in SourceExtras(source).rounded.items()
    )
    return dict(counts)
