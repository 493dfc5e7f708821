"""A vLLM worker's model as a sink: checked by a dry run, loaded through vLLM's own reload."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weightsync.errors import BackendUnavailableError, ConfigError
from weightsync.integrations.vllm_held import held_checksums
from weightsync.integrations.vllm_reload import Reload
from weightsync.integrations.vllm_sleep import refuse_asleep
from weightsync.integrations.vllm_trial import Trial, try_out
from weightsync.specs import Manifest, ManifestDifference, TensorSpec, compare
from weightsync.tensors import from_bytes
from weightsync.weights import arena
from weightsync.weights.copy_plan import Memory
from weightsync.weights.layout import StreamLayout
from weightsync.weights.sink import (
    Apply,
    LoadTarget,
    NamedTensor,
    WeightSink,
    own_storage,
    refuse_kept,
    uses,
)

logger = logging.getLogger(__name__)

_KEPT = 8


class VllmSink(WeightSink):
    """Takes weights in checkpoint format, and gives vLLM each of them in its place or shard.

    A manifest is compared with the checkpoint that the server was started from, where that lies
    on this host, and offered to the model's loaders in a dry run before any byte moves.
    `keeps_views`:
    the reload keeps what it is given until a layer is whole.
    """

    verification = "arrived"
    keeps_views = True
    casts = True

    def __init__(self, model: nn.Module, vllm_config: Any, device: torch.device) -> None:
        self.reload = Reload(model, vllm_config)
        self._device = device
        self._config = vllm_config.model_config
        self._pipeline = vllm_config.parallel_config.pipeline_parallel_size > 1
        self._checkpoint = _checkpoint_manifest(self._config)
        self._known: dict[str, ManifestDifference] = {}

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self._device

    @property
    def ties(self) -> Mapping[str, str]:
        """Those of the checkpoint that the server was started from."""
        return self._checkpoint.aliases if self._checkpoint else {}

    def difference(self, offered: Manifest) -> ManifestDifference:
        """How `offered` differs from what this worker's model takes, found out once."""
        if offered.digest not in self._known:
            found = self._find_difference(offered)
            while len(self._known) >= _KEPT:
                self._known.pop(next(iter(self._known)))
            self._known[offered.digest] = found
        return self._known[offered.digest]

    def open_target(self, plan: StreamLayout, apply: Apply) -> LoadTarget:
        """Keep the stream aside until `commit`; a whole model may also go straight in."""
        self.difference(plan.manifest).check(partial=True, more_follows=True)
        if apply == "in_place" and not self.difference(plan.manifest).missing:
            return _InPlaceLanding(self, plan.manifest)
        return _AsideLanding(self, plan)

    def commit_all(self, load_targets: Sequence[LoadTarget]) -> None:
        """Load all of them in one reload: what vLLM fuses may have come in several messages."""
        aside = [
            load_target for load_target in load_targets if isinstance(load_target, _AsideLanding)
        ]
        for load_target in load_targets:
            if load_target not in aside:
                load_target.commit()
        if not aside:
            return
        lent = {name: kept for load_target in aside for name, kept in load_target.lend()}
        counts = [uses(flat) for _, flat in lent.values()]
        self.reload.begin()
        try:
            self.reload.load((name, from_bytes(flat, spec)) for name, (spec, flat) in lent.items())
            self.reload.end()
        except BaseException:
            self.reload.abandon()
            raise
        # What is kept would change with the next update's first bytes.
        refuse_kept([(name, flat) for name, (_, flat) in lent.items()], counts)

    def staged_nbytes(self, plan: StreamLayout) -> int:
        """The whole stream is kept aside, by every worker, before it is cut into shards."""
        return plan.nbytes

    def checksums(self, names: Iterable[str] | None = None) -> dict[str, str]:
        """Return mix64 of what this worker computes with, by vLLM's names, packed or not."""
        refuse_asleep("weight_checker")
        return held_checksums(self.reload.model, names)

    def given_names(self, manifest: Manifest) -> list[str]:
        """Return the names under which tensors are handed over: tied ones in every place.

        A model that ties its head itself is given one.
        """
        tied = getattr(self._config.hf_text_config, "tie_word_embeddings", False)
        names = [spec.name for spec in manifest.specs]
        return names if tied else [*names, *manifest.aliases]

    def _find_difference(self, offered: Manifest) -> ManifestDifference:
        if self.reload.is_open:
            raise ConfigError(
                "an update in place is half loaded, so other tensors cannot be tried out; send "
                "them in the same message"
            )
        wanted = self._checkpoint
        known = compare(offered, wanted, cast=True) if wanted else ManifestDifference()
        if known.unexpected or known.mismatched:
            return known
        if wanted and not known.missing:
            return known  # the model was loaded from the same tensors
        trial = try_out(self.reload, offered, self.given_names(offered))
        unexpected = known.unexpected if wanted else self._unexpected(offered, trial)
        missing = known.missing if wanted else self._untouched(trial)
        return ManifestDifference(
            tuple(missing), tuple(unexpected), tuple(trial.mismatched), tuple(trial.cut)
        )

    def _unexpected(self, offered: Manifest, trial: Trial) -> list[str]:
        """Without a checkpoint to compare with: what no loader took, where all layers are here."""
        if self._pipeline:
            return []
        return [name for name in trial.ignored if name not in offered.aliases]

    def _untouched(self, trial: Trial) -> list[str]:
        tied = getattr(self._config.hf_text_config, "tie_word_embeddings", False)
        return [name for name in trial.untouched if not (tied and "lm_head" in name)]


class _WakefulLanding(LoadTarget):
    """Takes nothing while the model sleeps: looked at with each update's first bytes."""

    def begin(self) -> None:
        refuse_asleep("update_weights")


class _InPlaceLanding(_WakefulLanding):
    """Hands tensors over as they come. Tied ones come once, so aliases are repeated here."""

    in_place = True

    def __init__(self, sink: VllmSink, manifest: Manifest) -> None:
        self._sink = sink
        given = set(sink.given_names(manifest))
        self._aliases: dict[str, list[str]] = {}
        for alias, name in manifest.aliases.items():
            if alias in given:
                self._aliases.setdefault(name, []).append(alias)
        self.peak_extra_nbytes = 2 * max((spec.nbytes for spec in manifest.specs), default=0)

    def load(self, pairs: Sequence[NamedTensor]) -> None:
        reload = self._sink.reload
        reload.begin()
        kept = [(name, tensor.clone()) for name, tensor in pairs]
        tied = [(alias, t) for name, t in kept for alias in self._aliases.get(name, ())]
        reload.load([*kept, *tied])

    def commit(self) -> None:
        self._sink.reload.end()

    def discard(self) -> None:
        self._sink.reload.abandon()


class _AsideLanding(_WakefulLanding):
    """Keeps the stream; the model is touched by `commit` alone, and keeps nothing of the stream."""

    def __init__(self, sink: VllmSink, plan: StreamLayout) -> None:
        self._sink = sink
        self._specs = plan.manifest.specs
        self._names = sink.given_names(plan.manifest)
        self._index = plan.manifest.index
        self.memory: Memory = Memory.of_stream(plan, arena.allocate(plan.nbytes, sink.device))
        self.peak_extra_nbytes = plan.nbytes

    def lend(self) -> Iterator[tuple[str, tuple[TensorSpec, torch.Tensor]]]:
        """Yield what was kept by the names under which the model takes it."""
        for name in self._names:
            i = self._index[name]
            yield name, (self._specs[i], own_storage(self.memory.tensors[i]))

    def commit(self) -> None:
        self._sink.commit_all([self])


def _checkpoint_manifest(model_config: Any) -> Manifest | None:
    """Return what the server's own checkpoint holds; None where it is not on this host.

    Quantized checkpoints are no measure for what a trainer sends.
    """
    if getattr(model_config, "quantization", None):
        return None
    with suppress(ConfigError, BackendUnavailableError, OSError):
        from weightsync.weights.safetensors_source import SafetensorsSource  # noqa: PLC0415

        path = Path(model_config.model)
        if path.is_dir():
            return SafetensorsSource(path).manifest
    logger.info("no checkpoint of %s to compare names with here", model_config.model)
    return None
