"""A vLLM worker's model as a sink: checked by a dry run, loaded through vLLM's own reload."""

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
    """Raise ConfigError while weights of this process are asleep: to touch them ends the process.

    Asks the allocator of vLLM's own sleep mode, which a worker without that mode never makes.
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
    """The reload of one worker's `model`. Called by one thread at a time, between decode steps."""

    def __init__(self, model: nn.Module, vllm_config: Any) -> None:
        self.model = model
        self.vllm_config = vllm_config
        self.is_open = False
        self._once_only: list[Any] = []

    def begin(self) -> None:
        """Take the layers apart, so that they can be loaded. Nothing happens when they are.

        Raises ConfigError while the model sleeps.
        """
        refuse_asleep("loading weights")
        if not self.is_open:
            self.is_open = True
            self._once_only = once_only_methods(self.model)
            with self._configured():
                initialize_layerwise_reload(self.model)

    def load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Hand weights to the model. It may keep a tensor until its layer is whole."""
        with self._configured():
            cast(Any, self.model).load_weights(pairs)

    def end(self) -> None:
        """Put every layer together, the ones left out with what they had."""
        if not self.is_open:
            return
        with self._configured(), quiet_about_layers():
            finalize_layerwise_reload(self.model, self.vllm_config.model_config)
            self.is_open = False
            for head in tied_layers(self.model):
                _process(head)

    def abandon(self) -> None:
        """Forget what waits for the rest of its layer; layers that are whole keep the new weights.

        The model computes again afterwards, with a mixture, where a reload that is left open kills
        the process that computes, and mixes the next weights with those that it has kept.
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
    """Return the layers' methods that derive kernel weights at the first load alone.

    A fused mixture of experts has its weights packed while its `moe_kernel` is made, and vLLM keeps
    that kernel: weights that are loaded later stay in checkpoint format, and the kernel computes
    with them as if they were packed. On a GPU the kernel's tensors may be part of a captured graph,
    and what vLLM does itself there is left alone.
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
    """Have `methods` process loaded weights as if no kernel had been made yet."""

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
    """Silence vLLM's warning for each layer that gets no weights: what is missing, we check."""
    logger = logging.getLogger(_VLLM_LOGGER)
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def tied_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose weight belongs to another module that comes before them."""
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
    """Have a layer derive again what it computes with: on CPU a packed copy of its weight.

    The reload does so for the layer that was loaded, and not for those that share its weight.
    """
    method = getattr(layer, "quant_method", None)
    process = getattr(method, "process_weights_after_loading", None)
    if callable(process):
        process(layer)


Place = tuple[str, str]
"""A layer of the model, and the name of its tensor."""


@dataclass(slots=True)
class Trial:
    """What the loaders did with a manifest.

    `mismatched` says which tensors do not fit, `cut` which layers would be loaded in part;
    `ignored` are the names that no loader took, `untouched` the layers that nothing came for.
    """

    mismatched: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    untouched: list[str] = field(default_factory=list)


def try_out(reload: Reload, manifest: Manifest, names: list[str]) -> Trial:
    """Offer the tensors of `manifest` by `names` to the model's own loaders; change nothing.

    Called between decode steps, while no reload is open.
    """
    watch = _Watch(manifest, names)
    reload.begin()
    try:
        with watch.watching(reload.model):
            try:
                reload.load(watch.pairs())
            except Exception as exc:  # noqa: BLE001  # whatever a model's own code raises
                watch.note(f"load_weights raised {type(exc).__name__}: {exc}")
        return watch.result()
    finally:
        reload.abandon()


class _Watch:
    """Stands between a model's load_weights and the loaders of its parameters."""

    def __init__(self, manifest: Manifest, names: list[str]) -> None:
        self._manifest = manifest
        self._names = names
        self._current = ""
        self._trial = Trial()
        self._wanted: dict[Place, int] = {}
        self._loaded: defaultdict[Place, int] = defaultdict(int)
        self._sources: defaultdict[Place, list[str]] = defaultdict(list)
        self._taken: set[str] = set()

    def pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield stand-ins for the tensors, and remember which one the model looks at."""
        index = self._manifest.index
        for name in self._names:
            spec = self._manifest.specs[index[name]]
            self._current = name
            yield name, torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta")

    def note(self, what: str) -> None:
        """Remember what does not fit the tensor that is looked at."""
        index = self._manifest.index.get(self._current)
        offered = f"offered {self._manifest.specs[index]}" if index is not None else "offered"
        self._trial.mismatched.append(f"{self._current}: {offered}, {what}")

    def watching(self, model: nn.Module) -> _Standins:
        """Replace the loaders for the time of a `with`."""
        return _Standins(model, self)

    def expect(self, place: Place, numel: int) -> None:
        """A parameter that weights may come for."""
        self._wanted[place] = numel

    def load(self, place: Place, loader: Callable[..., Any], args: inspect.BoundArguments) -> Any:
        """Run a loader on memory that is none, and count what it would have written."""
        self._taken.add(self._current)
        self._sources[place].append(self._current)
        try:
            numel, result = get_numel_loaded(loader, args)
        except (AssertionError, RuntimeError, ValueError, IndexError) as exc:
            reason = f" ({exc})" if str(exc) else ""
            self.note(f"which does not fit {'.'.join(place)}{reason}")
            self._loaded[place] = self._wanted.get(place, 0)
            return None
        self._loaded[place] += numel
        return result

    def result(self) -> Trial:
        """Compare what came with what each layer needs to be whole."""
        for place, numel in self._wanted.items():
            loaded = self._loaded[place]
            if not loaded:
                if numel:
                    self._trial.untouched.append(".".join(place))
            elif loaded < numel:
                self._trial.cut.append(
                    f"{shorten(self._sources[place])}: offered alone, wanted together with all "
                    f"that vLLM fuses into {'.'.join(place)} ({loaded} of its {numel} elements); "
                    "send them in one message"
                )
        self._trial.ignored = [name for name in self._names if name not in self._taken]
        return self._trial


class _Standins:
    """The loaders of all parameters, replaced while this is entered."""

    def __init__(self, model: nn.Module, watch: _Watch) -> None:
        self._model = model
        self._watch = watch
        self._replaced: list[tuple[torch.Tensor, Any]] = []

    def __enter__(self) -> None:
        for path, layer in self._model.named_modules():
            for name, tensor in get_layer_tensors(layer).items():
                loader = getattr(tensor, "weight_loader", None)
                if name in SKIP_LOAD_TENSORS or loader is None:
                    continue
                if name in layer._parameters:
                    self._watch.expect((path, name), get_tensor_load_numel(tensor))
                self._replaced.append((tensor, loader))
                tensor.weight_loader = self._standin((path, name), _unwrapped(loader))

    def __exit__(self, *_: object) -> None:
        for tensor, loader in reversed(self._replaced):
            tensor.weight_loader = loader

    def _standin(self, place: Place, loader: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(loader)

        def online_process_loader(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            param = bound.arguments.get("param")
            if isinstance(param, torch.Tensor) and not param.is_meta:
                bound.arguments["param"] = to_meta_tensor(param)
            return self._watch.load(place, loader, bound)

        online_process_loader.__wrapped__ = loader  # type: ignore[attr-defined]  # as vLLM marks its own
        return online_process_loader


def _unwrapped(loader: Callable[..., Any]) -> Callable[..., Any]:
    """Return the loader below vLLM's own wrappers, which would process a layer that is whole."""
    while getattr(loader, "__name__", "") == "online_process_loader":
        loader = loader.__wrapped__  # type: ignore[attr-defined]  # vLLM's wrappers have it
    return loader


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
