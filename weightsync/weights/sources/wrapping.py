"""The base of sources that send the tensors of another source in another form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import ClassVar, final

import torch

from weightsync.arguments import Dtype
from weightsync.errors import ConfigError
from weightsync.specs import Manifest
from weightsync.tensors import TORCH_DTYPES
from weightsync.weights.sources.base import (
    DeclaredSource,
    IterableSource,
    SourceExtras,
    SourceMemory,
    WeightSource,
    as_source,
    checked,
)
from weightsync.weights.sources.holdings import Holdings


class WrappingSource(ABC):
    """Base of a WeightSource that sends the tensors of another source in another form.

    `source` is what `connect` takes: a module, a state dict, a callable or a WeightSource, also
    another WrappingSource. A subclass calls this `__init__`, and defines `manifest` and `convert`.
    Everything else about `source` stays in effect: a change of its tensors while they are sent ends
    the update with VerificationError, and shards are gathered by all ranks as they are without the
    wrapper. For that reason `tensors` is not overridden.

    `convert` is given tensors in the dtypes of the manifest of `source`, whole or gathered.
    `only_moves` is for a subclass that splits, joins and renames tensors, and computes nothing:
    these may come in the dtypes in which `source` has them, and are cast when they are copied.
    """

    only_moves: ClassVar[bool] = False

    def __init__(self, source: object, *, dtype: Dtype | None = None) -> None:
        self.source: WeightSource = as_source(source, dtype=dtype)
        if isinstance(self.source, DeclaredSource):
            raise ConfigError(
                f"a {type(self).__name__} cannot convert declared holdings, of which other ranks "
                "have the rest; declare what is sent, and give the holdings to connect()"
            )

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.tensors is not WrappingSource.tensors:
            raise TypeError(
                f"{cls.__name__} overrides tensors(); define convert(pairs), which is given the "
                "tensors of the source also where several ranks gather them"
            )

    @property
    @abstractmethod
    def manifest(self) -> Manifest:
        """The specs of all tensors as `convert` yields them. Read once, at `connect`."""

    @abstractmethod
    def convert(
        self, pairs: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors to send, made of `pairs`: those of `source`, full and in its order.

        Of each tensor of `pairs` the memory is valid until the next one is requested.
        """

    @final
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the converted tensors of the source."""
        return self.converted(checked(self.source.tensors(), self.source.manifest))

    @final
    def converted(
        self, pairs: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what `convert` makes of `pairs`, and read these to their end."""
        if not self.only_moves:
            pairs = _in_dtypes(pairs, self.source.manifest)
        yield from self.convert(pairs)
        for _ in pairs:  # a source checks for changes, and ranks agree, at the end
            pass

    def stable_tensors(self) -> list[torch.Tensor] | None:
        """Return None: the tensors are made for each update.

        A subclass may return them where their memory stays. Raises where the source has changed.
        """
        self.source.stable_tensors()
        return None

    def made_of(self) -> tuple[Sequence[str], Sequence[torch.Tensor]]:
        """Return the names and tensors of `source` from which those that are sent are made.

        None of a source whose own tensors are new ones every time: that one reports `changed`.
        """
        found = SourceExtras(self.source).made_of()
        if found is not None:
            return found
        stable = self.source.stable_tensors()
        if stable is None:
            return [], []
        return [spec.name for spec in self.source.manifest.specs], stable

    def counting(self) -> Sequence[tuple[str, torch.Tensor]]:
        """Return the tensors of `source` on which torch counts writes to others of its tensors."""
        return SourceMemory(self.source).counting()

    @final
    def holdings(self) -> Holdings | None:
        """Return what this rank holds of the tensors that are sent; None where `hold` is not there.

        None too where some tensors of `source` have to be gathered: `convert` is given all of them.
        """
        if type(self).hold is WrappingSource.hold:
            return None
        held = SourceExtras(self.source).holdings()
        return None if held is None or held.gathered else self.hold(held)

    def hold(self, held: Holdings) -> Holdings | None:
        """Return the holdings of what is sent, made of those of `source`.

        Without it, all ranks make full tensors together. For a subclass that computes nothing:
        `held.renamed(...)` gives its boxes other names, `held` itself is for a cast that the
        manifest names.
        """
        return None

    @property
    def rounded(self) -> Mapping[str, str]:
        """The tensors that `source` rounds, under their names here; a subclass maps the names."""
        rounded = SourceExtras(self.source).rounded
        names = self.manifest.index
        return {name: dtype for name, dtype in rounded.items() if name in names}

    @property
    def changed(self) -> Sequence[str]:
        """The names that `source` reports as changed while they were sent."""
        return SourceExtras(self.source).changed

    def take_merged(self) -> tuple[int, int] | None:
        """Return what `source` counted of the adapters that it merges."""
        return SourceExtras(self.source).take_merged()

    @property
    def belong_together(self) -> Mapping[str, str]:
        """The tensors of `source` that are sent together; a subclass maps the names."""
        return SourceExtras(self.source).belong_together

    @property
    def device_types(self) -> AbstractSet[str]:
        """The types of the devices on which `source` makes its tensors."""
        return SourceExtras(self.source).device_types

    @property
    def receiver_path(self) -> str:
        """The path below a server's URL to which `source` is sent."""
        return SourceExtras(self.source).receiver_path


def _in_dtypes(
    pairs: Iterator[tuple[str, torch.Tensor]], manifest: Manifest
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the pairs cast to the manifest's dtypes, as shards are before they are gathered."""
    for (name, tensor), spec in zip(pairs, manifest.specs, strict=True):
        yield name, tensor.to(TORCH_DTYPES[spec.dtype])


def innermost(source: WeightSource) -> WeightSource:
    """Return the source inside of all WrappingSources; `source` itself where it is none."""
    while isinstance(source, WrappingSource):
        source = source.source
    return source


def converted(
    source: WeightSource, pairs: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Return what a source makes of the tensors of its innermost one."""
    if not isinstance(source, WrappingSource):
        return pairs
    inner = source.source
    return source.converted(checked(converted(inner, pairs), inner.manifest))


def forget_changes(source: WeightSource) -> None:
    """Clear what an IterableSource, wrapped or not, found to have changed in earlier updates."""
    inner = innermost(source)
    if isinstance(inner, IterableSource):
        inner.changed = []
