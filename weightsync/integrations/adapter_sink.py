"""The sink of an adapter: stages what an AdapterSource sends, and has an adapter built of it."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
import xxhash

from weightsync.errors import ConfigError, ManifestMismatchError, shorten
from weightsync.integrations.adapters import CONFIG_NAME, config_spec, decode_config, unsupported
from weightsync.specs import Manifest, ManifestDifference, TensorSpec
from weightsync.tensors import from_bytes
from weightsync.weights.copying import arena
from weightsync.weights.copying.copy_plan import Memory
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.sinks.base import Apply, LoadTarget, WeightSink

_ON_CPU = torch.device("cpu")
Built = TypeVar("Built")


class AdapterSink(WeightSink, Generic[Built]):
    """Takes the tensors of a PEFT checkpoint and its config; a subclass builds an adapter of them.

    Before any byte moves, `check` compares names and shapes with the layers of the model. What only
    the config tells is refused when the update is staged. `server` is its name in errors.
    """

    verification = "arrived"
    casts = True
    fetchable = False
    takes_parts = False
    swaps = False
    server = "this server"

    def __init__(self) -> None:
        self._fitting = ""
        self._built: Built | None = None

    @property
    def device(self) -> torch.device:
        """The host: an adapter is small, and is copied to its device once it is built."""
        return _ON_CPU

    @abstractmethod
    def check(self, offered: Manifest) -> None:
        """Raise ManifestMismatchError for tensors that are not taken, with their names."""

    @abstractmethod
    def build(
        self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, object], digest: str
    ) -> Built:
        """Return the adapter of an update, made of tensors that are its own.

        `digest` is that of the names and the bytes. Raises ConfigError for a config that is not
        taken.
        """

    def stage(self, built: Built | None) -> None:
        """Keep an adapter for the next commit; None: none, since the update was given up."""
        self._built = built

    def take(self) -> Built | None:
        """Return the adapter that is staged, once.

        None where there is none: another part of a set failed, and the former version is in use
        again.
        """
        built, self._built = self._built, None
        return built

    def undo(self) -> Callable[[], None] | None:
        """Return what takes the next commit back; None where that cannot be."""
        return None

    def difference(self, offered: Manifest) -> ManifestDifference:
        """Return no difference. Raises ManifestMismatchError for what is not taken."""
        if offered.digest != self._fitting:  # an update asks more than once
            config_spec(offered)
            self.check(offered)
            self._fitting = offered.digest
        return ManifestDifference()

    def open_target(self, layout: StreamLayout, apply: Apply) -> LoadTarget:
        """Stage the stream until `commit`."""
        self.difference(layout.manifest)
        return _AdapterTarget(self, layout)

    def staged_nbytes(self, layout: StreamLayout) -> int:
        """The stream, and the adapter that is built of it."""
        return 2 * layout.nbytes


class _AdapterTarget(LoadTarget, Generic[Built]):
    """Stages the stream of an adapter; what is built of it has its own memory."""

    users_own = False

    def __init__(self, sink: AdapterSink[Built], layout: StreamLayout) -> None:
        self._sink = sink
        self._specs = layout.manifest.specs
        self._digest = layout.manifest.digest
        self._flat = arena.allocate(layout.nbytes, _ON_CPU)
        memory = Memory.of_stream(layout, self._flat)
        self.memory: Memory = memory
        self.peak_extra_nbytes = sink.staged_nbytes(layout)

    def validate(self) -> None:
        """Build the adapter: what is refused ends the update before its commit."""
        digest = xxhash.xxh3_64(self._digest.encode())
        tensors = {}
        for spec, flat in zip(self._specs, self.memory.tensors, strict=True):
            digest.update(flat.numpy().data)
            tensors[spec.name] = from_bytes(flat.clone(), spec)
        config = decode_config(bytes(tensors.pop(CONFIG_NAME).tolist()))
        if refused := unsupported(config):
            raise ConfigError(f"{self._sink.server} does not compute {', '.join(refused)}")
        self._sink.stage(self._sink.build(tensors, config, digest.hexdigest()))

    def discard(self) -> None:
        """Forget what was built, too."""
        super().discard()
        self._sink.stage(None)

    def undo(self) -> Callable[[], None] | None:
        """Return what takes the next commit back."""
        return self._sink.undo()

    def commit(self) -> None:
        """Do nothing: the receiver's `on_commit` takes what was built."""


_OF_ADAPTER = re.compile(r"\.lora_([AB])\.weight|\.lora_embedding_([AB])")


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The two matrices of one layer: A is [rank, inputs] and B [outputs, rank].

    Of an embedding, A is [rank, entries] and B [size, rank]. `prefix` is the checkpoint's name of
    the layer, `suffix` what follows it in the name of a matrix.
    """

    prefix: str
    suffix: str
    a: TensorSpec
    b: TensorSpec

    @property
    def name(self) -> str:
        """The name of one of the matrices."""
        return self.prefix + self.suffix

    @property
    def is_embedding(self) -> bool:
        """Whether the layer is an embedding."""
        return self.suffix.startswith(".lora_embedding")


@dataclass(slots=True)
class LoraPairs:
    """The tensors of an adapter by layer, and those that belong to no LoRA, by the reason why."""

    pairs: list[LoraPair] = field(default_factory=list)
    wrong: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, offered: Manifest, skips: Callable[[str], bool] = lambda _: False) -> LoraPairs:
        """Sort the tensors of a manifest, without those whose name `skips` is true for."""
        found, parts = cls(), dict[str, dict[str, TensorSpec]]()
        for spec in offered.specs:
            if spec.name == CONFIG_NAME or skips(spec.name):
                continue
            match = _OF_ADAPTER.search(spec.name)
            if match is None or match.end() != len(spec.name) or len(spec.shape) not in (2, 3):
                found.refuse(_kind_of(spec.name), spec.name)
                continue
            parts.setdefault(spec.name[: match.start()], {})[match[1] or match[2]] = spec
        for prefix, pair in parts.items():
            if len(pair) < 2:
                found.refuse("A without B, or B without A", prefix)
                continue
            suffix = pair["A"].name.removeprefix(prefix)
            found.pairs.append(LoraPair(prefix, suffix, pair["A"], pair["B"]))
        return found

    def __iter__(self) -> Iterator[LoraPair]:
        return iter(self.pairs)

    def refuse(self, why: str, name: str) -> None:
        """Note that a tensor or a layer is not taken."""
        self.wrong.setdefault(why, []).append(name)

    def check(self, server: str) -> None:
        """Raise ManifestMismatchError, which names all that is not taken, and why."""
        if self.wrong:
            reasons = "; ".join(f"{why}: {shorten(names)}" for why, names in self.wrong.items())
            raise ManifestMismatchError(
                f"{server} does not take the adapter: {reasons}",
                unexpected=[name for each in self.wrong.values() for name in each],
            )


def other_base(pair: LoraPair, inputs: int, outputs: int) -> str:
    """Return the reason why a pair is not one of a layer of these sizes; empty where it is."""
    rank = pair.a.shape[0]
    if pair.b.shape[1] != rank:
        return f"A of rank {rank} with B of rank {pair.b.shape[1]}"
    if (pair.a.shape[1], pair.b.shape[0]) == (inputs, outputs):
        return ""
    return (
        f"made for another base model, with layers of {pair.a.shape[1]} to {pair.b.shape[0]} "
        f"(here {inputs} to {outputs})"
    )


def _kind_of(name: str) -> str:
    """Return what a tensor is that is no part of a LoRA."""
    if "lora_magnitude_vector" in name:
        return "DoRA"
    if name.endswith(".bias"):
        return "bias"
    return "modules_to_save, or what else is trained whole"
