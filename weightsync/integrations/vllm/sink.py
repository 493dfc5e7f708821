"""The sink of a vLLM worker's model: a dry run checks it, vLLM's own reload loads it."""

from __future__ import annotations

import inspect
import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import (
    SKIP_LOAD_TENSORS,
    get_numel_loaded,
    to_meta_tensor,
)
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors, get_tensor_load_numel

from weightsync.errors import BackendUnavailableError, ConfigError, shorten
from weightsync.integrations.vllm.checksums import held_checksums
from weightsync.specs import Manifest, ManifestDifference, TensorSpec, compare
from weightsync.tensors import TORCH_DTYPES, from_bytes
from weightsync.weights import arena
from weightsync.weights.copy_plan import Memory
from weightsync.weights.layout import StreamLayout
from weightsync.weights.sink import (
    Apply,
    ArenaTarget,
    LoadTarget,
    NamedTensor,
    WeightSink,
    own_storage,
    refuse_kept,
    uses,
)

_ALLOCATORS = {
    "vllm.device_allocator.cumem": "CuMemAllocator",
    "vllm.device_allocator.xpumem": "XpuMemAllocator",
}


def refuse_asleep(step: str) -> None:
    """Raise ConfigError while weights of this process are asleep: an access ends the process.

    Reads the allocator of vLLM's sleep mode, which a worker without that mode does not have.
    """
    if _weights_asleep():
        raise ConfigError(
            f"{step}: this vLLM sleeps, and its weights have no memory; wake it with "
            'wake_up(tags=["weights"]), or POST /wake_up?tags=weights, and send again'
        )


def _weights_asleep() -> bool:
    for module, name in _ALLOCATORS.items():
        made = getattr(getattr(sys.modules.get(module), name, None), "instance", None)
        allocations = getattr(made, "pointer_to_data", {}).values()
        if any(data.tag == "weights" and data.is_asleep for data in list(allocations)):
            return True
    return False


_VLLM_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"


class Reload:
    """vLLM's reload of one worker's `model`. One thread calls it at a time, between steps."""

    def __init__(self, model: nn.Module, vllm_config: Any) -> None:
        self.model = model
        self.vllm_config = vllm_config
        self.is_open = False
        self._once_only: list[Any] = []

    def begin(self) -> None:
        """Prepare the layers for loading; does nothing where they are prepared.

        Raises ConfigError while the model sleeps.
        """
        refuse_asleep("loading weights")
        if not self.is_open:
            self.is_open = True
            self._once_only = once_only_methods(self.model)
            with self._configured():
                initialize_layerwise_reload(self.model)

    def load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Give weights to the model. It may keep a tensor until its layer is complete."""
        with self._configured():
            cast(Any, self.model).load_weights(pairs)

    def end(self) -> None:
        """Complete every layer; a layer without new weights keeps the old ones."""
        if not self.is_open:
            return
        with self._configured(), quiet_about_layers():
            finalize_layerwise_reload(self.model, self.vllm_config.model_config)
            self.is_open = False
            for head in tied_layers(self.model):
                _process(head)

    def abandon(self) -> None:
        """Drop the tensors of incomplete layers; complete layers keep the new weights.

        The model can compute afterwards, with a mixture of weights. A reload that stays open ends
        the process at the next step, and mixes the next weights with the tensors that it kept.
        """
        if not self.is_open:
            return
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0
        self.end()

    @contextmanager
    def _configured(self) -> Iterator[None]:
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            set_current_vllm_config(self.vllm_config),
            _processing_as_at_first(self._once_only),
        ):
            yield


def once_only_methods(model: nn.Module) -> list[Any]:
    """Return the layers' methods that derive kernel weights at the first load only.

    A fused mixture of experts packs its weights when it makes its `moe_kernel`, and vLLM keeps that
    kernel. Weights that are loaded later stay in checkpoint format, and the kernel computes with
    them as if they were packed. On a GPU the kernel's tensors may be part of a captured graph:
    vLLM's own behaviour is not changed there.
    """
    methods = [
        layer.quant_method
        for layer in model.modules()
        if getattr(getattr(layer, "quant_method", None), "moe_kernel", None) is not None
        and all(parameter.device.type == "cpu" for parameter in layer.parameters(recurse=False))
    ]
    return list({id(method): method for method in methods}.values())


@contextmanager
def _processing_as_at_first(methods: list[Any]) -> Iterator[None]:
    """Make `methods` process loaded weights as if they had no kernel yet."""

    def process(method: Any, layer: nn.Module) -> None:
        kernel, method.moe_kernel = method.moe_kernel, None
        try:
            type(method).process_weights_after_loading(method, layer)
        finally:
            if method.moe_kernel is None:
                method.moe_kernel = kernel

    for method in methods:
        method.process_weights_after_loading = partial(process, method)
    try:
        yield
    finally:
        for method in methods:
            del method.process_weights_after_loading


@contextmanager
def quiet_about_layers() -> Iterator[None]:
    """Silence vLLM's warning for each layer without weights: our sink checks for missing ones."""
    logger = logging.getLogger(_VLLM_LOGGER)
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def tied_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose weight is that of an earlier module."""
    seen: set[int] = set()
    tied = []
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is None or not weight.numel():
            continue
        if id(weight) in seen or weight.data_ptr() in seen:
            tied.append(layer)
        seen.update((id(weight), weight.data_ptr()))
    return tied


def _process(layer: nn.Module) -> None:
    """Make a layer derive its kernel weights again: on CPU a packed copy of its weight.

    The reload does so for the layer that was loaded, but not for the layers that share its weight.
    """
    method = getattr(layer, "quant_method", None)
    process = getattr(method, "process_weights_after_loading", None)
    if callable(process):
        process(layer)


ParameterKey = tuple[str, str]
"""A layer of the model, and the name of its tensor."""


@dataclass(slots=True)
class Trial:
    """The result of a dry run of a manifest.

    `mismatched` are the tensors that do not fit, `cut` the layers that would be loaded in part,
    `ignored` the names that no loader took, `untouched` the layers that got no weights.
    """

    mismatched: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    untouched: list[str] = field(default_factory=list)


def try_out(reload: Reload, manifest: Manifest, names: list[str]) -> Trial:
    """Run the model's own loaders on the tensors `names` of `manifest`, without any change.

    Called between decode steps, while no reload is open.
    """
    recorder = _LoadRecorder(manifest, names)
    reload.begin()
    try:
        with recorder.recording(reload.model):
            try:
                reload.load(recorder.pairs())
            except Exception as exc:  # noqa: BLE001  # a model's code may raise anything
                recorder.note(f"load_weights raised {type(exc).__name__}: {exc}")
        return recorder.result()
    finally:
        reload.abandon()


class _LoadRecorder:
    """Records which parameters a model's load_weights would load, and from which tensors."""

    def __init__(self, manifest: Manifest, names: list[str]) -> None:
        self._manifest = manifest
        self._names = names
        self._current = ""
        self._trial = Trial()
        self._wanted: dict[ParameterKey, int] = {}
        self._loaded: defaultdict[ParameterKey, int] = defaultdict(int)
        self._sources: defaultdict[ParameterKey, list[str]] = defaultdict(list)
        self._taken: set[str] = set()

    def pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield meta tensors in place of the tensors, and record the current one."""
        index = self._manifest.index
        for name in self._names:
            spec = self._manifest.specs[index[name]]
            self._current = name
            yield name, torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta")

    def note(self, what: str) -> None:
        """Record that the current tensor does not fit."""
        index = self._manifest.index.get(self._current)
        offered = f"offered {self._manifest.specs[index]}" if index is not None else "offered"
        self._trial.mismatched.append(f"{self._current}: {offered}, {what}")

    @contextmanager
    def recording(self, model: nn.Module) -> Iterator[None]:
        """Replace the loaders of all parameters by ones that record."""
        replaced: list[tuple[torch.Tensor, Any]] = []
        try:
            for path, layer in model.named_modules():
                for name, tensor in get_layer_tensors(layer).items():
                    loader = getattr(tensor, "weight_loader", None)
                    if name in SKIP_LOAD_TENSORS or loader is None:
                        continue
                    if name in layer._parameters:
                        self._wanted[path, name] = get_tensor_load_numel(tensor)
                    replaced.append((tensor, loader))
                    tensor.weight_loader = self._recorder((path, name), _unwrapped(loader))
            yield
        finally:
            for tensor, loader in reversed(replaced):
                tensor.weight_loader = loader

    def _recorder(self, key: ParameterKey, loader: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(loader)

        def online_process_loader(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            param = bound.arguments.get("param")
            if isinstance(param, torch.Tensor) and not param.is_meta:
                bound.arguments["param"] = to_meta_tensor(param)
            return self._load(key, loader, bound)

        online_process_loader.__wrapped__ = loader  # type: ignore[attr-defined]  # as vLLM marks its own
        return online_process_loader

    def _load(
        self, key: ParameterKey, loader: Callable[..., Any], args: inspect.BoundArguments
    ) -> Any:
        """Run a loader on a meta tensor, and count the elements that it would write."""
        self._taken.add(self._current)
        self._sources[key].append(self._current)
        try:
            numel, result = get_numel_loaded(loader, args)
        except (AssertionError, RuntimeError, ValueError, IndexError) as exc:
            reason = f" ({exc})" if str(exc) else ""
            self.note(f"which does not fit {'.'.join(key)}{reason}")
            self._loaded[key] = self._wanted.get(key, 0)
            return None
        self._loaded[key] += numel
        return result

    def result(self) -> Trial:
        """Compare the loaded elements with those that each layer needs."""
        for key, numel in self._wanted.items():
            loaded = self._loaded[key]
            if not loaded:
                if numel:
                    self._trial.untouched.append(".".join(key))
            elif loaded < numel:
                self._trial.cut.append(
                    f"{shorten(self._sources[key])}: offered alone, wanted together with all "
                    f"that vLLM fuses into {'.'.join(key)} ({loaded} of its {numel} elements); "
                    "send them in one message"
                )
        self._trial.ignored = [name for name in self._names if name not in self._taken]
        return self._trial


def _unwrapped(loader: Callable[..., Any]) -> Callable[..., Any]:
    """Return the loader below vLLM's own wrappers, which would process a complete layer."""
    while getattr(loader, "__name__", "") == "online_process_loader":
        loader = loader.__wrapped__  # type: ignore[attr-defined]  # vLLM's wrappers have it
    return loader


logger = logging.getLogger(__name__)

_KEPT = 8


class VllmSink(WeightSink):
    """Takes weights in checkpoint format; vLLM's loaders put them into the worker's shards.

    Before any byte moves, a manifest is compared with the checkpoint that the server was started
    from, where that is on this host, and the model's loaders run on it without data. `keeps_views`
    is True because the reload keeps tensors until their layer is complete. `fetchable` is False
    because a worker makes no step while it waits for a message.
    """

    verification = "arrived"
    keeps_views = True
    casts = True
    fetchable = False

    def __init__(self, model: nn.Module, vllm_config: Any, device: torch.device) -> None:
        self.reload = Reload(model, vllm_config)
        self._device = device
        config = vllm_config.model_config
        self._ties_head = getattr(config.hf_text_config, "tie_word_embeddings", False)
        self._pipeline = vllm_config.parallel_config.pipeline_parallel_size > 1
        self._checkpoint = _checkpoint_manifest(config)
        self._known: dict[str, ManifestDifference] = {}

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self._device

    @property
    def ties(self) -> Mapping[str, str]:
        """The ties of the checkpoint that the server was started from."""
        return self._checkpoint.aliases if self._checkpoint else {}

    def difference(self, offered: Manifest) -> ManifestDifference:
        """How `offered` differs from the tensors that this worker's model takes; cached."""
        if offered.digest not in self._known:
            found = self._find_difference(offered)
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[offered.digest] = found
        return self._known[offered.digest]

    def open_target(self, layout: StreamLayout, apply: Apply) -> LoadTarget:
        """Stage the stream until `commit`; a whole model may also be loaded in place."""
        self.difference(layout.manifest).check(partial=True, more_follows=True)
        if apply == "in_place" and not self.difference(layout.manifest).missing:
            return _InPlaceLoadTarget(self, layout.manifest)
        return _StagedLoadTarget(self, layout)

    def commit_all(self, load_targets: Sequence[LoadTarget]) -> None:
        """Load all targets in one reload: tensors that vLLM fuses may be in several messages."""
        staged: list[_StagedLoadTarget] = []
        for load_target in load_targets:
            if isinstance(load_target, _StagedLoadTarget):
                staged.append(load_target)
            else:
                load_target.commit()
        if not staged:
            return
        tensors = {
            name: kept for load_target in staged for name, kept in load_target.staged_tensors()
        }
        counts = [uses(flat) for _, flat in tensors.values()]
        for load_target in staged:
            load_target.holds_commit(whole=False)
        self.reload.begin()
        try:
            self.reload.load(
                (name, from_bytes(flat, spec)) for name, (spec, flat) in tensors.items()
            )
            self.reload.end()
        except BaseException:
            self.reload.abandon()
            raise
        # The next update would overwrite a tensor that vLLM kept.
        refuse_kept([(name, flat) for name, (_, flat) in tensors.items()], counts)
        for load_target in staged:
            load_target.holds_commit()

    def staged_nbytes(self, layout: StreamLayout) -> int:
        """The whole stream: every worker stages it before it is cut into shards."""
        return layout.nbytes

    def checksums(self, names: Iterable[str] | None = None) -> dict[str, str]:
        """Return mix64 of the worker's weights by vLLM's names, packed or not."""
        refuse_asleep("weight_checker")
        return held_checksums(self.reload.model, names)

    def given_names(self, manifest: Manifest) -> list[str]:
        """Return the names under which tensors are given to the model: tied ones in every place.

        A model that ties its head itself gets a tied tensor once.
        """
        names = [spec.name for spec in manifest.specs]
        return names if self._ties_head else [*names, *manifest.aliases]

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
        missing, unexpected = known.missing, known.unexpected
        if not wanted:
            tied = self._ties_head
            missing = tuple(n for n in trial.untouched if not (tied and "lm_head" in n))
            # With pipeline stages, this worker has not all layers.
            ignored = [] if self._pipeline else trial.ignored
            unexpected = tuple(n for n in ignored if n not in offered.aliases)
        return ManifestDifference(missing, unexpected, tuple(trial.mismatched), tuple(trial.cut))


class _AwakeLoadTarget(LoadTarget):
    """Refuses an update while the model sleeps; checked at its first bytes."""

    def begin(self) -> None:
        super().begin()
        refuse_asleep("update_weights")


class _InPlaceLoadTarget(_AwakeLoadTarget):
    """Loads tensors as they arrive. Tied ones arrive once, and are given under each alias."""

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


class _StagedLoadTarget(_AwakeLoadTarget, ArenaTarget):
    """Stages the stream. Only `commit` changes the model, which keeps no tensor of the stream.

    After a delta the whole model is loaded from the stream, since vLLM reloads whole layers.
    """

    takes_deltas = True

    def __init__(self, sink: VllmSink, layout: StreamLayout) -> None:
        self._sink = sink
        self._specs = layout.manifest.specs
        self._names = sink.given_names(layout.manifest)
        self._index = layout.manifest.index
        self.memory: Memory = Memory.of_stream(layout, arena.allocate(layout.nbytes, sink.device))
        self.peak_extra_nbytes = layout.nbytes

    def staged_tensors(self) -> Iterator[tuple[str, tuple[TensorSpec, torch.Tensor]]]:
        """Yield the staged tensors by the names under which the model takes them."""
        for name in self._names:
            i = self._index[name]
            yield name, (self._specs[i], own_storage(self.memory.tensors[i]))

    def commit(self) -> None:
        self._sink.commit_all([self])


def _checkpoint_manifest(model_config: Any) -> Manifest | None:
    """Return the manifest of the server's own checkpoint; None where it is not on this host.

    None for a quantized checkpoint as well: a trainer sends other tensors.
    """
    if getattr(model_config, "quantization", None):
        return None
    with suppress(ConfigError, BackendUnavailableError, OSError):
        from weightsync.weights.safetensors_source import SafetensorsSource  # noqa: PLC0415

        path = Path(model_config.model)
        if path.is_dir():
            return SafetensorsSource(path).manifest
    logger.info("no checkpoint of %s on this host: names are not compared", model_config.model)
    return None
