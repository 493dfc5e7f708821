"""The adapters of one vLLM worker: each a receiver, whose commits vLLM's LoRA manager loads from.

vLLM loads an adapter from the path of its LoRARequest, when a step first needs it and again after
it was evicted. For our paths that is the memory of this process: an adapter is built while its
update is staged, and a commit only makes it available. It needs no pause, because no request uses a
version before the engine has heard from all workers that they hold it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name

from weightsync.errors import ConfigError, shorten
from weightsync.integrations.adapter_receivers import AdapterReceivers
from weightsync.integrations.adapter_sink import AdapterSink, LoraPair, LoraPairs, other_base
from weightsync.integrations.vllm.adapter_names import AdapterPath
from weightsync.integrations.vllm.adapter_versions import is_ours
from weightsync.receiver import WeightReceiver
from weightsync.specs import Manifest

_START = "start it with --enable-lora (enable_lora=True), and --max-lora-rank of the adapter's rank"


class WorkerAdapters:
    """The adapters of one worker, by name, and the versions that it holds of each.

    They can be sets with `base`, the receiver of the worker's model. Raises ConfigError for an
    engine without LoRA, or with LoRA in the vision tower, whose cached images do not tell versions
    apart.
    """

    def __init__(self, runner: Any, base: WeightReceiver) -> None:
        manager = getattr(runner, "lora_manager", None)
        if manager is None:
            raise ConfigError(f"this vLLM was started without LoRA and takes no adapter; {_START}")
        if getattr(manager.lora_config, "enable_tower_connector_lora", False):
            raise ConfigError(
                "this vLLM was started with enable_tower_connector_lora: it caches images by the "
                "name of an adapter alone, so that a new version would use those of the one before"
            )
        self._manager = manager
        self._base = base
        self._receivers = AdapterReceivers(self._make)
        self._held: dict[str, Held] = {}
        self._current: dict[str, str] = {}
        self._loaded: dict[str, set[int]] = {}
        load = manager._load_adapter

        @functools.wraps(load)
        def load_adapter(request: Any) -> Any:
            return self._load(request) if is_ours(request) else load(request)

        manager._load_adapter = load_adapter
        self.receiver = self._receivers.get

    def unload(self, name: str) -> None:
        """Forget an adapter; the versions that requests use go with the next `prune`."""
        self._receivers.remove(name)
        self._current.pop(name, None)
        for path, held in self._held.items():
            if held.path.name == name:
                self._held[path] = replace(held, retired=True)

    def prune(self, kept: Collection[str]) -> None:
        """Drop all versions but these, and the one that each receiver holds."""
        stay = {*kept, *self._current.values()}
        for path in [path for path in self._held if path not in stay]:
            del self._held[path]
            for number in self._loaded.pop(path, ()):
                self._manager.remove_adapter(number)

    def held(self) -> dict[str, list[str]]:
        """Return the versions that requests may use, by adapter: their paths, the newest last.

        Those that an adapter had when it was unloaded are not among them.
        """
        found: dict[str, list[str]] = {}
        for path, one in self._held.items():
            if not one.retired:
                found.setdefault(one.path.name, []).append(path)
        return found

    def close(self) -> None:
        """End the updates of all receivers, and close what they opened."""
        self._receivers.close(for_good=False)

    def _make(self, name: str) -> WeightReceiver:
        sink = VllmAdapterSink(self._manager)

        def commit(version: int) -> None:
            built = sink.take()
            if built is not None:
                self._commit(name, version, built)

        return WeightReceiver(sink, apply="staged", on_commit=commit, beside=self._base)

    def _commit(self, name: str, version: int, built: Built) -> None:
        path = AdapterPath(name, version, built.digest)
        self._held.pop(str(path), None)  # the newest is the last
        self._held[str(path)] = Held(path, built.model)
        self._current[name] = str(path)

    def _load(self, request: Any) -> LoRAModel:
        """Return the adapter of a request, in tensors of its own: vLLM multiplies its scale in."""
        held = self._held.get(request.lora_path)
        if held is None:
            raise ConfigError(
                f"{request.lora_path!r:.120} is not held by this worker; it holds "
                f"{shorten(list(self._held)) or 'no adapter'}"
            )
        self._loaded.setdefault(request.lora_path, set()).add(request.lora_int_id)
        return cloned(held.model, request.lora_int_id)


@dataclass(frozen=True, slots=True)
class Built:
    """An adapter as vLLM wants it, whose scale is not multiplied in, and a digest of its bytes."""

    model: LoRAModel
    digest: str


@dataclass(frozen=True, slots=True)
class Held:
    """One version of an adapter. `model` is never given to vLLM itself.

    A `retired` one was unloaded: it is there for the requests that use it already.
    """

    path: AdapterPath
    model: LoRAModel
    retired: bool = False


def cloned(model: LoRAModel, adapter_id: int) -> LoRAModel:
    """Return a copy of an adapter with tensors of its own."""
    made = model.clone(adapter_id)
    for name, layer in made.loras.items():
        made.loras[name] = own = copy.copy(layer)
        own.lora_a, own.lora_b = layer.lora_a.clone(), layer.lora_b.clone()
    return made


class VllmAdapterSink(AdapterSink[Built]):
    """Builds vLLM's LoRAModel of an adapter that is sent."""

    server = "this vLLM"

    def __init__(self, manager: Any) -> None:
        super().__init__()
        self._manager = manager

    def check(self, offered: Manifest) -> None:
        """Raise ManifestMismatchError for what this vLLM does not take."""
        _Check(self._manager).check(offered)

    def build(
        self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, object], digest: str
    ) -> Built:
        """Return the adapter of an update. Raises ConfigError for a config that vLLM refuses."""
        manager = self._manager
        model = manager._adapter_manager.model
        positions = {"vllm_max_position_embeddings": manager.max_position_embeddings}
        try:
            helper = PEFTHelper.from_dict({**config, **positions})
            if config.get("alpha_pattern") and not hasattr(helper, "alpha_pattern"):
                # Those before 0.32 compute all layers with lora_alpha.
                raise ValueError("it does not know alpha_pattern, and would scale layers wrongly")
            helper.validate_legal(manager.lora_config)
            built = LoRAModel.from_lora_tensors(
                1,
                dict(tensors),
                helper,
                device="cpu",
                dtype=manager.lora_config.lora_dtype,
                model_vocab_size=manager.vocab_size,
                weights_mapper=renames_of(model),
                skip_prefixes=getattr(model, "lora_skip_prefixes", None),
            )
        except (ValueError, RuntimeError, TypeError) as exc:
            raise ConfigError(f"vLLM refuses this adapter: {exc}") from exc
        other = [
            f"{name} (rank {layer.rank}, tensors of rank {layer.lora_a.shape[0]})"
            for name, layer in built.loras.items()
            if layer.rank != layer.lora_a.shape[0]
        ]
        if other:
            raise ConfigError(f"the config has other ranks than the tensors: {shorten(other)}")
        return Built(built, digest)


def renames_of(model: Any) -> Any:
    """Return how a model of vLLM renames the layers of a checkpoint; None where it does not."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    only_renames = getattr(mapper, "get_rename_mapper", None)
    return mapper if only_renames is None else only_renames()


class _Check:
    """Compares the tensors of an adapter with the layers to which this worker's vLLM adds LoRA."""

    def __init__(self, manager: Any) -> None:
        self._adapters = manager._adapter_manager
        self._max_rank = int(manager.lora_config.max_lora_rank)
        model = self._adapters.model
        self._mapper = renames_of(model)
        self._skipped = tuple(getattr(model, "lora_skip_prefixes", None) or ())
        self._needed: dict[str, str] = {}
        self._places = dict(self._layers())

    def _layers(self) -> Iterator[tuple[str, Callable[[], tuple[int, int] | None]]]:
        """Yield each name by which an adapter may address a layer, and how to get its sizes."""
        for path, layer in self._adapters.modules.items():
            parts = self._adapters.packed_modules.get(path, [])
            for i, part in enumerate(parts):
                yield part, functools.partial(_sizes, layer, i, len(parts))
            if _has_wide_part(layer, len(parts)):
                self._needed |= dict.fromkeys(parts[1:], parts[0])
            yield path, functools.partial(_sizes, layer, None)

    def check(self, offered: Manifest) -> None:
        """Raise ManifestMismatchError, which names every tensor that is not taken, and why."""
        found = LoraPairs.of(offered, lambda name: any(f".{p}" in name for p in self._skipped))
        given = {self._module(pair) for pair in found}
        for pair in found:
            why = self._refusal(pair, given)
            if why:
                found.refuse(why, pair.prefix.removeprefix("base_model.model."))
        found.check("this vLLM")

    def _module(self, pair: LoraPair) -> str:
        """Return vLLM's name of a layer; empty for a name that it cannot read."""
        try:
            return str(parse_fine_tuned_lora_name(pair.name, self._mapper)[0])
        except ValueError:
            return ""

    def _refusal(self, pair: LoraPair, given: Collection[str]) -> str:
        """Return why the tensors of one layer are not taken; empty where they are.

        `given` are the layers of the adapter.
        """
        try:
            module, _ = parse_fine_tuned_lora_name(pair.name, self._mapper)
        except ValueError as exc:
            return str(exc)
        sizes = self._places.get(module)
        if sizes is None:
            return "modules to which this vLLM adds no LoRA"
        needed = self._needed.get(module)
        if needed is not None and needed not in given:
            return f"layers that vLLM takes with {needed.rpartition('.')[2]} alone"
        known = sizes()
        if known is None or len(pair.a.shape) != 2 or len(pair.b.shape) != 2:
            # vLLM copies what fits, in the step of the first request, or ends there.
            return "layers of which this vLLM does not tell the sizes, as experts in one tensor"
        rank = pair.a.shape[0]
        if rank > self._max_rank:
            return f"rank {rank}, and --max-lora-rank is {self._max_rank}"
        return other_base(pair, *known)


def _has_wide_part(layer: Any, count: int) -> bool:
    """Whether the first of `count` parts of a fused layer is several of vLLM's.

    So it is with the `in_proj_qkv` of Qwen3.5, beside `in_proj_z`.
    """
    return 1 < count < len(getattr(layer.base_layer, "output_sizes", ()))


def _sizes(layer: Any, part: int | None, count: int = 0) -> tuple[int, int] | None:
    """Return the full sizes of a layer, or of one of `count` parts of a fused one.

    None where it tells none.
    """
    base: Any = layer.base_layer
    inputs = getattr(base, "input_size", None)
    if hasattr(base, "org_vocab_size"):
        # The embeddings, or the processor of logits, which has the LoRA of the head.
        width = getattr(base, "embedding_dim", None)
        vocabulary = int(base.org_vocab_size)
        return (vocabulary, int(width)) if width else (int(layer.hidden_size), vocabulary)
    if part is not None and hasattr(base, "moe_config"):
        return _sizes_of_expert(layer, part)
    if inputs is None:
        return None
    if part is None:
        return int(inputs), int(base.output_size)
    outputs = getattr(base, "output_sizes", None)
    if outputs is None or part >= len(outputs):
        return None
    if hasattr(base, "total_num_kv_heads") and part > 0:
        # With more workers than heads of k and v, vLLM counts copies of them.
        size = base.head_size if part == 1 else getattr(base, "v_head_size", base.head_size)
        return int(inputs), int(base.total_num_kv_heads * size)
    if _has_wide_part(layer, count):
        wide = len(outputs) - count + 1
        outputs = [sum(outputs[:wide]), *outputs[wide:]]
    return int(inputs), int(outputs[part])


def _sizes_of_expert(layer: Any, part: int) -> tuple[int, int] | None:
    """Return the sizes of a layer of one expert: gate, down and up in turn, or up and down.

    None for experts that are one tensor.
    """
    config = layer.base_layer.moe_config
    each = 3 if config.is_act_and_mul else 2
    if layer._w13_slices != each - 1:
        return None
    width = int(config.hidden_dim_unpadded)
    inner = int(config.intermediate_size_per_partition_unpadded) * int(layer.tp_size)
    return (inner, width) if part % each == 1 else (width, inner)
