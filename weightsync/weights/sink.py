"""Where weights go on a receiver.

A sink is asked once per manifest for a *landing*: the memory that the bytes of an update are
copied into, or, without memory of its own, a hook that takes whole tensors. Landings are kept and
reused; the receiver calls `begin`, then `commit` or `discard`, for every update.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal, cast

import torch

from weightsync.errors import ConfigError
from weightsync.specs import Manifest, ManifestDifference, compare
from weightsync.weights.buckets import StreamLayout
from weightsync.weights.copier import Memory
from weightsync.wire.messages import TensorPart

Apply = Literal["staged", "in_place"]
Verification = Literal["none", "arrived", "held"]
_KEPT_DIFFERENCES = 8
NamedTensor = tuple[str, torch.Tensor]
LoadWeights = Callable[[Iterable[NamedTensor]], object]
"""vLLM's signature: takes `(name, tensor)` pairs, may return the set of names it loaded."""


class LoadTarget(ABC):
    """The place of one manifest's updates in one sink.

    `memory` holds `uint8[nbytes]` per tensor of the manifest, or is None where the sink takes whole
    tensors (`load`). `in_place` says that bytes change weights in use,
    `peak_extra_nbytes` is what the landing keeps beside the model.
    """

    memory: Memory | None = None
    in_place: bool = False
    peak_extra_nbytes: int = 0

    def begin(self) -> None:
        """An update starts; nothing in use has changed yet."""

    def load(self, pairs: Sequence[NamedTensor]) -> None:
        """Take whole tensors, valid until this returns. Called where `memory` is None."""
        raise NotImplementedError

    def validate(self) -> None:
        """Every byte has arrived. Raises what proves that the weights are not all there."""

    @abstractmethod
    def commit(self) -> None:
        """Put the weights to use; no decode step runs meanwhile. Once begun it must not be cut."""

    def discard(self) -> None:
        """The update is given up; staged memory may be overwritten by the next."""


class WeightSink(ABC):
    """Receives weights. `manifest` declares what it wants, None when only a hook knows.

    `verification` is what can be proved: `held`, read back from the destination, or `arrived`.
    """

    manifest: Manifest | None = None
    verification: Verification = "arrived"
    casts: bool = False

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the weights live."""

    @property
    def gpus(self) -> Collection[torch.device]:
        """The GPUs that hold weights, whose streams generation and updates share."""
        return (self.device,) if self.device.type == "cuda" else ()

    @abstractmethod
    def open_target(self, plan: StreamLayout, apply: Apply) -> LoadTarget:
        """Make room for the tensors of `plan.manifest`, once per manifest, before bytes move.

        Raises ManifestMismatchError for tensors that have no place here.
        """

    @abstractmethod
    def staged_nbytes(self, plan: StreamLayout) -> int:
        """Bytes that a staged landing allocates."""

    @property
    def ties(self) -> Mapping[str, str]:
        """The names whose tensor is that of another name, and that name.

        A sender that cannot say what is tied offers one of them, or both with equal bytes.
        """
        return self.manifest.aliases if self.manifest else {}

    def difference(self, offered: Manifest) -> ManifestDifference:
        """How `offered` differs from what this sink declares; nothing where it declares nothing.

        Remembered for the last few manifests, since an update asks more than once.
        """
        if self.manifest is None:
            return ManifestDifference()
        known = self.__dict__.setdefault("_differences", {})
        if offered.digest not in known:
            if len(known) >= _KEPT_DIFFERENCES:
                known.clear()
            known[offered.digest] = compare(offered, self.manifest, cast=self.casts)
        return cast(ManifestDifference, known[offered.digest])

    def commit_all(self, load_targets: Sequence[LoadTarget]) -> None:
        """Put the weights of one update to use, in this order; see Landing.commit."""
        for load_target in load_targets:
            load_target.commit()

    def refresh(self) -> int:
        """Look at the destination again; landings made under another answer are of no use any more.

        Raises ManifestMismatchError when it is not what it was.
        """
        return 0

    def checksums(self, names: Iterable[str] | None = None) -> dict[str, str]:
        """Return mix64 of the weights in use, aliases included. Raises ConfigError if unknown."""
        raise ConfigError(
            f"{type(self).__name__} cannot read its weights back; pass the nn.Module itself to "
            "WeightReceiver, or a sink that implements checksums()"
        )

    def checksum_parts(
        self, names: Iterable[str] | None = None
    ) -> tuple[dict[str, str], dict[str, TensorPart]]:
        """Return mix64 of tensors that are whole here, and what is held of those that are cut."""
        return self.checksums(names), {}


def check_manifest(
    sink: WeightSink, offered: Manifest, *, partial: bool, more_follows: bool = False
) -> None:
    """Raise ManifestMismatchError unless `offered` fits what the sink declares."""
    sink.difference(offered).check(partial=partial, more_follows=more_follows)
