"""The sink of a vLLM worker's model: a dry run checks it, vLLM's own reload loads it."""

from __future__ import annotations

import inspect
import logging
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
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import (
    SKIP_LOAD_TENSORS,
    SKIP_MODULES,
    to_meta_tensor,
)
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

from weightsync.errors import (
    BackendUnavailableError,
    ConfigError,
    TransferError,
    WeightSyncError,
    shorten,
)
from weightsync.integrations.vllm.checksums import held_checksums
from weightsync.integrations.vllm.direct_writes import DirectWrites
from weightsync.integrations.vllm.sleeping import refuse_asleep
from weightsync.integrations.vllm.slices import (
    ReadRecorder,
    Reads,
    Sliced,
    SlicedTensor,
    UnreadError,
    boxes_of,
    nothing_of,
    prove,
)
from weightsync.integrations.vllm.writes import (
    Place,
    TensorKey,
    WriteCounter,
    loaded_numel,
    places_of,
)
from weightsync.specs import (
    Manifest,
    ManifestDifference,
    TensorSpec,
    compare,
    refuse_inner,
    union,
)
from weightsync.tensors import TORCH_DTYPES, dtype_name, from_bytes
from weightsync.weights.copying import arena
from weightsync.weights.copying.copy_plan import Memory
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.copying.shards import Slice
from weightsync.weights.sinks.base import (
    Apply,
    ArenaTarget,
    LoadTarget,
    NamedTensor,
    WeightSink,
    own_storage,
    refuse_kept,
    uses,
    write_counts,
)

_VLLM_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"


class Reload:
    """vLLM's reload of one worker's `model`. One thread calls it at a time, between steps."""

    def __init__(self, model: nn.Module, vllm_config: Any) -> None:
        self.model = model
        self.vllm_config = vllm_config
        self.is_open = False
        self._once_only: list[Any] = []
        self._before: list[_Held] = []
        self._shared: list[list[nn.Module]] = []
        self._sinks: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._writes: DirectWrites | None = None

    def begin(self) -> None:
        """Prepare the layers for loading; does nothing where they are prepared.

        Raises ConfigError while the model sleeps.
        """
        refuse_asleep("loading weights")
        if not self.is_open:
            self._before = [_Held(layer) for layer in self.model.modules()]
            self._shared = shared_layers(self.model)
            self._sinks = sinks_in_other_dtypes(self.model)
            self.is_open = True
            self._once_only = once_only_methods(self.model)
            with self._configured():
                initialize_layerwise_reload(self.model)

    def load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Give weights to the model. It may keep a tensor until its layer is complete.

        Raises TransferError where the model writes weights in a way that the reload would lose.
        """
        if self._writes is None:
            self._writes = DirectWrites(self.model)
        with self._configured(), self._writes.carried():
            cast(Any, self.model).load_weights(self._writes.between(pairs))

    def try_load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Give tensors without memory to the model, in a dry run that counts what it writes."""
        with self._configured():
            cast(Any, self.model).load_weights(pairs)

    def end(self, *, whole: bool = False) -> None:
        """Complete every layer; a layer without new weights keeps the old ones.

        Raises TransferError where a `whole` model was loaded, and a layer would keep the old ones.
        """
        if not self.is_open:
            return
        with self._configured():
            if self._writes is not None:
                self._writes.complete()
                if whole:
                    self._refuse_old_weights(self._writes)
            self._finalize()
            for head in tied_layers(self.model):
                _process(head)
            with torch.inference_mode():  # a kernel made them in it
                for sinks, parameter in self._sinks:
                    sinks.copy_(parameter)

    def abandon(self) -> None:
        """Put incomplete layers back as they were; complete layers keep the new weights.

        After a dry run nothing has changed. Else the model can compute afterwards, with a mixture
        of weights. A reload that stays open ends the process at the next step, and mixes the next
        weights with the tensors that it kept.
        """
        if not self.is_open:
            return
        for held in self._before:
            if get_layerwise_info(held.layer).can_load():
                held.restore()
        if self._writes is None:
            with self._configured():
                self._finalize()
        else:
            self._writes.restore_buffers()
            self._writes = None
            self.end()

    def shares(self, layer: nn.Module) -> list[nn.Module]:
        """Return the layers that have a weight of this one, itself included, while it is open."""
        return next((group for group in self._shared if layer in group), [layer])

    def _finalize(self) -> None:
        """Run vLLM's end, and put back what it drops: the attributes that were None."""
        with quiet_about_layers():
            finalize_layerwise_reload(self.model, self.vllm_config.model_config)
        self.is_open = False
        if self._writes is not None:
            self._writes.restore_buffers()
        for held in self._before:
            held.restore_absent()
        self._before, self._shared, self._writes = [], [], None

    def _refuse_old_weights(self, writes: DirectWrites) -> None:
        """Raise TransferError naming the layers that got nothing of a whole model."""
        names = [
            f"{path}.{name}"
            for path, layer in self.model.named_modules()
            if not any(map(writes.has_weights, self.shares(layer)))
            for name in loaded_parameters(layer)
        ]
        if names:
            raise TransferError(old_weights(self.model, names))

    @contextmanager
    def _configured(self) -> Iterator[None]:
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            set_current_vllm_config(self.vllm_config),
            _processing_as_at_first(self._once_only),
        ):
            yield


class _Held:
    """The tensors of one layer before a reload, in which some attributes may be None."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self._parameters = dict(layer._parameters)
        self._buffers = dict(layer._buffers)
        self._transient = set(layer._non_persistent_buffers_set)
        self._loaders = [
            (tensor, getattr(tensor, "weight_loader", None))
            for tensor in get_layer_tensors(layer).values()
        ]

    def restore(self) -> None:
        """Put the layer back as it was, and end vLLM's reload of it."""
        layer = self.layer
        for held, before in (
            (layer._parameters, self._parameters),
            (layer._buffers, self._buffers),
        ):
            held.clear()
            held.update(cast(Any, before))
        layer._non_persistent_buffers_set.clear()
        layer._non_persistent_buffers_set.update(self._transient)
        for tensor, loader in self._loaders:
            if loader is not None:
                tensor.weight_loader = loader
            elif getattr(tensor, "weight_loader", None) is not None:
                del tensor.weight_loader
        get_layerwise_info(layer).reset()

    def restore_absent(self) -> None:
        """Declare the tensors that were None, which a kernel looks up and vLLM's end deletes."""
        for name, tensor in self._parameters.items():
            if tensor is None and not hasattr(self.layer, name):
                self.layer.register_parameter(name, None)
        for name, buffer in self._buffers.items():
            if buffer is None and not hasattr(self.layer, name):
                self.layer.register_buffer(name, None)


_FROM_CONFIG = ("input_scale_ub",)
"""Parameters that vLLM makes from the quantization's configuration; no checkpoint has them."""


def loaded_parameters(layer: nn.Module) -> list[str]:
    """Return the names of a layer's parameters that weights are loaded into.

    Not those that vLLM makes itself: scales and zero points of attention, whose defaults stand
    where a checkpoint has none, and the modules that its reload leaves alone.
    """
    if is_deferred_attention_layer(layer) or type(layer).__name__ in SKIP_MODULES:
        return []
    return [
        name
        for name, parameter in layer._parameters.items()
        if parameter is not None
        and loaded_numel(parameter)
        and name not in SKIP_LOAD_TENSORS
        and name not in _FROM_CONFIG
    ]


def old_weights(model: nn.Module, names: Sequence[str]) -> str:
    """Return the message about parameters that would keep their old weights."""
    return (
        f"{shorten(names)}: {type(model).__name__} loads nothing into them in a reload, though it "
        "is given a whole model; they would keep their old weights. Its load_weights writes them "
        "in a way that vLLM's reload does not see: restart this server from a checkpoint in place "
        "of an update"
    )


def refuse_fixed_kernels(model: nn.Module) -> None:
    """Raise ConfigError for layers whose kernels compute with tensors that a reload frees.

    vLLM's int8 kernel of oneDNN is made with the address of a layer's scales. vLLM's reload makes
    it anew with scales that it frees afterwards, so that the layer computes NaN.
    """
    names = [
        path
        for path, layer in model.named_modules()
        if hasattr(getattr(getattr(layer, "scheme", None), "kernel", None), "dnnl_handler")
    ]
    if names:
        raise ConfigError(
            f"{shorten(names)}: computed in int8 by a oneDNN kernel of vLLM, which after a reload, "
            "vLLM's own too, reads scales whose memory is freed, and computes NaN. This server "
            "keeps the weights that it was started with; serve the model unquantized, or in fp8 "
            "with a scale for each channel, to update it"
        )


def refuse_scaled_once(model: nn.Module) -> None:
    """Raise ConfigError for weights that a model scales at its first load alone.

    LongCat-Flash of vLLM 0.29 to 0.31 folds a scale into two norms, and notes that it has: new
    weights would stay unscaled, by vLLM's own reload too.
    """
    flags = ("_mla_q_lora_scaled", "_mla_kv_lora_scaled")
    names = [
        path
        for path, layer in model.named_modules()
        if any(getattr(layer, flag, False) for flag in flags)
    ]
    if names:
        raise ConfigError(
            f"{shorten(names)}: {type(model).__name__} scales the norms of its latent attention at "
            "its first load alone, and would compute with unscaled ones after an update; vLLM 0.32 "
            "and later scale them at each load"
        )


def refuse_made_by_loading(model: nn.Module, trial: Trial) -> None:
    """Raise ConfigError for layers that a model made while it loaded its first weights.

    vLLM's reload puts each layer back to what it recorded before that load, and has recorded
    nothing of these. Kernels add such layers too, and vLLM keeps their tensors: called where a dry
    run has failed.
    """
    names = [
        f"{path}.{name}"
        for path, layer in model.named_modules()
        if not any(get_layerwise_info(layer).restore_metadata)
        for name in loaded_parameters(layer)
    ]
    if names:
        raise ConfigError(
            f"{shorten(names)}: {type(model).__name__} made them while it loaded its first "
            f"weights, and vLLM's reload loses them ({shorten(trial.mismatched[-1:])}); restart "
            "this server from a checkpoint in place of an update"
        )


def shared_layers(model: nn.Module) -> list[list[nn.Module]]:
    """Return the groups of layers that share a weight."""
    groups: defaultdict[int, list[nn.Module]] = defaultdict(list)
    for layer in model.modules():
        for parameter in layer._parameters.values():
            if parameter is not None and not parameter.is_meta and parameter.numel():
                groups[parameter.data_ptr()].append(layer)
    return [group for group in groups.values() if len(group) > 1]


def sinks_in_other_dtypes(model: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the copies that attention kernels made of a parameter, each with that parameter.

    A kernel that computes with attention sinks in float32 casts them at its first step, and does
    not look at the parameter again. Called while both have the same values.
    """
    found = []
    layers = dict(model.named_modules())
    for path, layer in layers.items():
        sinks = getattr(getattr(layer, "impl", None), "sinks", None)
        if not isinstance(sinks, torch.Tensor) or not is_deferred_attention_layer(layer):
            continue
        above = layers[path.rpartition(".")[0]]
        held = [
            p for p in (*above._parameters.values(), *layer._parameters.values()) if p is not None
        ]
        if any(parameter.data_ptr() == sinks.data_ptr() for parameter in held):
            continue
        found += [
            (sinks, parameter)
            for parameter in held
            if parameter.shape == sinks.shape and torch.equal(parameter.to(sinks.dtype), sinks)
        ][:1]
    return found


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
    """Silence vLLM's warning for each layer without weights.

    It also comes for tied layers and for buffers. After a whole model `Reload.end` raises in its
    place, and a part of a model is compared with what its layers need before it is loaded.
    """
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


@dataclass(slots=True)
class Trial:
    """The result of a dry run of a manifest.

    `mismatched` are the tensors that do not fit, `cut` the layers that would be loaded in part,
    `ignored` the names of which nothing was written, `untouched` the parameters that got nothing,
    `left` those of layers that got nothing at all. `ended`: load_weights returned. `reads` has what
    it read of each tensor, `kept` the dtype of the parameter that it is written to.
    """

    mismatched: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    untouched: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    ended: bool = False
    reads: dict[str, Reads] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)


def try_out(reload: Reload, manifest: Manifest, names: list[str]) -> Trial:
    """Run the model's own loaders on the tensors `names` of `manifest`, without any change.

    Called between decode steps, while no reload is open.
    """
    reload.begin()
    try:
        recorder = _LoadRecorder(reload, manifest, names)
        with recorder.recording():
            try:
                reload.try_load(recorder.pairs())
                recorder.trial.ended = True
            except Exception as exc:  # noqa: BLE001  # a model's code may raise anything
                recorder.note(f"load_weights raised {type(exc).__name__}: {exc}")
        return recorder.result()
    finally:
        reload.abandon()


class _LoadRecorder:
    """Records which parameters a model's load_weights would load, and from which tensors."""

    def __init__(self, reload: Reload, manifest: Manifest, names: list[str]) -> None:
        self._reload = reload
        self._manifest = manifest
        self._names = names
        self._current = ""
        self.trial = Trial()
        self._places = places_of(reload.model)
        self._counter = WriteCounter(dict(self._places), self._refused)
        self._counter.on_write = self._written
        self._reader = ReadRecorder(self._counter.places)
        self.trial.reads = self._reader.reads
        self._wanted: dict[TensorKey, int] = {}
        self._sources: defaultdict[TensorKey, list[str]] = defaultdict(list)
        self._taken: set[str] = set()

    def pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield meta tensors in place of the tensors, and record the current one."""
        index = self._manifest.index
        for name in self._names:
            spec = self._manifest.specs[index[name]]
            self._current = name
            yield name, self._reader.follow(spec)

    def note(self, what: str) -> None:
        """Record that the current tensor does not fit."""
        index = self._manifest.index.get(self._current)
        offered = f"offered {self._manifest.specs[index]}" if index is not None else "offered"
        self.trial.mismatched.append(f"{self._current}: {offered}, {what}")

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Replace the loaders of all parameters by ones that record, and count all writes."""
        replaced: list[tuple[torch.Tensor, Any]] = []
        try:
            for path, layer in self._reload.model.named_modules():
                self._wanted.update(
                    ((path, name), loaded_numel(layer._parameters[name]))
                    for name in loaded_parameters(layer)
                )
                for name, tensor in get_layer_tensors(layer).items():
                    loader = getattr(tensor, "weight_loader", None)
                    if loader is not None:
                        place = Place(path, layer, name, tensor)
                        replaced.append((tensor, loader))
                        tensor.weight_loader = self._recorder(place, _unwrapped(loader))
            with self._counter, self._reader:
                yield
        finally:
            for tensor, loader in reversed(replaced):
                tensor.weight_loader = loader

    def _recorder(self, place: Place, loader: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(loader)

        def online_process_loader(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            param = bound.arguments.get("param")
            if isinstance(param, torch.Tensor) and not param.is_meta:
                bound.arguments["param"] = without_memory = to_meta_tensor(param)
                self._counter.stand_in(place, without_memory)
            return self._load(place, loader, bound)

        online_process_loader.__wrapped__ = loader  # type: ignore[attr-defined]  # as vLLM marks its own
        return online_process_loader

    def _load(self, place: Place, loader: Callable[..., Any], args: inspect.BoundArguments) -> Any:
        """Run a loader on a meta tensor."""
        self._written(place.key)
        self._counter.in_loader = True
        try:
            return loader(*args.args, **args.kwargs)
        except (AssertionError, RuntimeError, ValueError, IndexError) as exc:
            self._refused(place, str(exc))
            return None
        finally:
            self._counter.in_loader = False

    def _written(self, key: TensorKey) -> None:
        """Record that the current tensor is written to a parameter."""
        self._taken.add(self._current)
        sources = self._sources[key]
        if self._current not in sources[-1:]:
            sources.append(self._current)

    def _refused(self, place: Place, reason: str) -> None:
        """Record that the current tensor does not fit where it is written to."""
        self.note(f"which does not fit {place}{f' ({reason})' if reason else ''}")
        self._counter.touched.add(place.key)
        self._counter.counts[place.key] = place.numel

    def result(self) -> Trial:
        """Compare the written elements with those that each layer needs."""
        trial, touched = self.trial, self._counter.touched
        layers = dict(self._reload.model.named_modules())
        loaded = {path for path, _ in touched}
        given = {layers[path] for path in loaded}
        for (path, name), numel in self._wanted.items():
            written, whole = self._counter.counts[path, name], f"{path}.{name}"
            if (path, name) in touched:
                if 0 < written < numel:
                    trial.cut.append(
                        f"{shorten(self._sources[path, name])}: offered alone, wanted together "
                        f"with all that vLLM fuses into {whole} ({written} of its {numel} "
                        "elements); send them in one message"
                    )
                continue
            if not given.isdisjoint(self._reload.shares(layers[path])) and path not in loaded:
                continue  # the weight is that of a layer that gets it
            trial.untouched.append(whole)
            if path not in loaded:
                trial.left.append(whole)
            elif layers[path]._parameters[name].is_meta:  # vLLM gives it memory of any content
                sources = [
                    s for key, names in self._sources.items() if key[0] == path for s in names
                ]
                trial.cut.append(
                    f"{shorten(sources)}: offered without what is loaded into {whole}, wanted "
                    "together; send them in one message"
                )
        trial.ignored = [name for name in self._names if name not in self._taken]
        for (path, name), sources in self._sources.items():
            tensor = layers[path]._parameters.get(name)
            if tensor is not None:
                trial.kept.update(dict.fromkeys(sources, dtype_name(tensor.dtype)))
        return trial


def prove_reads(reload: Reload, given: Sequence[tuple[str, Reads]]) -> None:
    """Prove what was read of each tensor, without any change; see `slices.prove`.

    Called like `try_out`. A tensor whose box is not proved is refused, with the reason.
    """
    reload.begin()
    try:
        with _bare_loaders(reload.model):
            prove(reload.model, reload.try_load, given)
    finally:
        reload.abandon()


@contextmanager
def _bare_loaders(model: nn.Module) -> Iterator[None]:
    """Replace the loaders of all parameters by those below vLLM's own wrappers."""
    replaced: list[tuple[Any, Any]] = []
    try:
        for layer in model.modules():
            for tensor in get_layer_tensors(layer).values():
                loader = getattr(tensor, "weight_loader", None)
                if loader is not None:
                    replaced.append((tensor, loader))
                    cast(Any, tensor).weight_loader = _unwrapped(loader)
        yield
    finally:
        for tensor, loader in reversed(replaced):
            tensor.weight_loader = loader


def _unwrapped(loader: Callable[..., Any]) -> Callable[..., Any]:
    """Return the loader below vLLM's own wrappers, which would process a complete layer."""
    while getattr(loader, "__name__", "") == "online_process_loader":
        loader = loader.__wrapped__  # type: ignore[attr-defined]  # vLLM's wrappers have it
    return loader


logger = logging.getLogger(__name__)

_KEPT = 8

Shaped = Callable[[str, torch.Tensor], torch.Tensor]
"""Makes a tensor of this name of `uint8[nbytes]`."""


class VllmSink(WeightSink):
    """Takes weights in checkpoint format; vLLM's loaders put them into the worker's shards.

    Before any byte moves, a manifest is compared with the checkpoint that the server was started
    from, where that is on this host, and the model's loaders run on it without data. `keeps_views`
    is True because the reload keeps tensors until their layer is complete. `fetchable` is False
    because a worker makes no step while it waits for a message.

    With `slices` a worker of several stages the boxes of tensors that its loaders read, where these
    can be recorded and proved, and these loaders get tensors of which nothing else is held.
    """

    verification = "arrived"
    keeps_views = True
    casts = True
    fetchable = False

    def __init__(
        self, model: nn.Module, vllm_config: Any, device: torch.device, *, slices: bool = True
    ) -> None:
        self.reload = Reload(model, vllm_config)
        self._device = device
        config = vllm_config.model_config
        self._ties_head = getattr(config.hf_text_config, "tie_word_embeddings", False)
        self._pipeline = vllm_config.parallel_config.pipeline_parallel_size > 1
        self._checkpoint = _checkpoint_manifest(config)
        self.quantization = _quantization_config(config)
        self._known: dict[str, tuple[ManifestDifference, dict[str, Reads]]] = {}
        self._dtypes: dict[str, str] | None = None
        self._sliced: dict[str, Sliced | None] = {}
        self._generation = 0
        self._takes_boxes: set[str] = set()
        # Experts that move between workers are in other boxes afterwards.
        moves_experts = getattr(vllm_config.parallel_config, "enable_eplb", False)
        self._slices = slices and not moves_experts and not getattr(config, "quantization", None)

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
        return self._known[offered.digest][0]

    def kept(self) -> Mapping[str, str] | None:
        """Return the dtypes of the parameters that the tensors of the checkpoint are loaded into.

        None where that checkpoint is not on this host, and while the model cannot be tried out.
        """
        if self._checkpoint is not None and self._dtypes is None:
            with suppress(WeightSyncError):
                self.difference(self._checkpoint)
        return self._dtypes

    def boxes(self, offered: Manifest) -> list[tuple[int, Slice]] | None:
        """Return the boxes that this worker's loaders read; None where they read whole tensors."""
        sliced = self._staged(offered)
        return None if sliced is None else sliced.boxes

    def whole(self, offered: Manifest) -> Mapping[str, str]:
        """Return the tensors that are loaded whole, with the reasons, where others are not."""
        sliced = self._staged(offered)
        return {} if sliced is None else sliced.whole

    def _staged(self, offered: Manifest) -> Sliced | None:
        """Return what is read of tensors whose last load target takes boxes.

        Another one takes whole tensors: another host must not leave out what no box has.
        """
        return self.sliced(offered) if offered.digest in self._takes_boxes else None

    def refresh(self) -> int:
        """Return a number that grows where a recording of what is read turned out not to fit."""
        return self._generation

    def sliced(self, offered: Manifest) -> Sliced | None:
        """Return what this worker reads of the tensors of a whole model; None: all of them, whole.

        Recorded and proved once for a manifest.
        """
        digest = offered.digest
        if digest not in self._sliced:
            if len(self._sliced) >= _KEPT:
                self._sliced.clear()
            self._sliced[digest] = self._find_sliced(offered)
        return self._sliced[digest]

    def _find_sliced(self, offered: Manifest) -> Sliced | None:
        found = self.difference(offered)
        if not self._slices or found.missing or found.unexpected or found.mismatched or found.cut:
            return None
        reads = self._known[offered.digest][1]
        specs = offered.specs
        if any(spec.name not in reads for spec in specs):
            return None
        boxes = boxes_of(offered, reads)
        if not boxes.saves(offered):
            return None
        prove_reads(
            self.reload,
            [(name, reads[specs[offered.index[name]].name]) for name in self.given_names(offered)],
        )
        boxes = boxes_of(offered, reads)
        if boxes.whole:
            logger.info("loaded whole: %s", boxes.whole)
        return boxes if boxes.saves(offered) else None

    def open_target(self, layout: StreamLayout, apply: Apply) -> LoadTarget:
        """Stage the stream until `commit`; a whole model may also be loaded in place."""
        self.difference(layout.manifest).check(partial=True, more_follows=True)
        self._takes_boxes.discard(layout.manifest.digest)
        if apply == "in_place" and not self.difference(layout.manifest).missing:
            return _InPlaceLoadTarget(self, layout.manifest)
        whole = not self.difference(layout.manifest).missing
        sliced = self.sliced(layout.manifest) if whole else None
        if sliced is not None:
            self._takes_boxes.add(layout.manifest.digest)
        return _StagedLoadTarget(self, layout, sliced)

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
        with torch.inference_mode(False):  # or writes to them are not counted
            tensors = {
                name: kept for load_target in staged for name, kept in load_target.staged_tensors()
            }
        before = write_counts(flat for flat, _ in tensors.values())
        counts = [uses(flat) for flat, _ in tensors.values()]
        manifests = [load_target.manifest for load_target in staged]
        sent = manifests[0] if len(manifests) == 1 else union(manifests, self.ties)
        whole = not self.difference(sent).missing
        for load_target in staged:
            load_target.holds_commit(whole=False)
        self.reload.begin()
        try:
            self.reload.load((name, shaped(name, flat)) for name, (flat, shaped) in tensors.items())
            self.reload.end(whole=whole)
        except BaseException as exc:
            if isinstance(exc, UnreadError):
                self._load_whole(sent)
            self.reload.abandon()
            raise
        # The next update would overwrite a tensor that vLLM kept.
        refuse_kept([(name, flat) for name, (flat, _) in tensors.items()], counts)
        # A model may clear what it is given, as GPT-OSS does with a bias that another worker adds.
        unchanged = before is not None and before == write_counts(f for f, _ in tensors.values())
        for load_target in staged:
            load_target.holds_commit(unchanged)

    def staged_nbytes(self, layout: StreamLayout) -> int:
        """The boxes that this worker reads, where that is known; else the whole stream."""
        if self.difference(layout.manifest).missing:
            return layout.nbytes
        sliced = self.sliced(layout.manifest)
        return layout.nbytes if sliced is None else sliced.nbytes(layout.manifest)

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

    def _load_whole(self, manifest: Manifest) -> None:
        """Load whole tensors from now on: the loaders read others than was recorded."""
        logger.warning("load_weights reads other parts than was recorded: tensors are sent whole")
        self._sliced[manifest.digest] = None
        self._generation += 1

    def _find_difference(self, offered: Manifest) -> tuple[ManifestDifference, dict[str, Reads]]:
        if self.reload.is_open:
            raise ConfigError(
                "an update in place is half loaded, so other tensors cannot be tried out; send "
                "them in the same message"
            )
        refuse_fixed_kernels(self.reload.model)
        refuse_scaled_once(self.reload.model)
        wanted = self._checkpoint
        known = compare(offered, wanted, cast=True) if wanted else refuse_inner(offered)
        if known.unexpected or known.mismatched:
            return known, {}
        trial = try_out(self.reload, offered, self.given_names(offered))
        if wanted and offered.index.keys() == wanted.index.keys() and trial.ended:
            self._dtypes = trial.kept
        if wanted and not known.missing:
            # The model was loaded from the same tensors: all fit, but a reload may lose some. Where
            # the dry run did not get to its end, the commit looks at the same layers.
            if trial.ended and trial.left:
                raise ConfigError(old_weights(self.reload.model, trial.left))
            if not trial.ended:
                refuse_made_by_loading(self.reload.model, trial)
            return known, trial.reads if trial.ended and not trial.mismatched else {}
        missing, unexpected = known.missing, known.unexpected
        if not wanted:
            tied = self._ties_head
            missing = tuple(n for n in trial.untouched if not (tied and "lm_head" in n))
            # With pipeline stages, this worker has not all layers.
            ignored = [] if self._pipeline else trial.ignored
            unexpected = tuple(n for n in ignored if n not in offered.aliases)
        found = ManifestDifference(missing, unexpected, tuple(trial.mismatched), tuple(trial.cut))
        return found, trial.reads if trial.ended else {}


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
        self._sink.reload.end(whole=True)

    def discard(self) -> None:
        self._sink.reload.abandon()


class _StagedLoadTarget(_AwakeLoadTarget, ArenaTarget):
    """Stages the stream. Only `commit` changes the model, which keeps no tensor of the stream.

    After a delta the whole model is loaded from the stream, since vLLM reloads whole layers.
    """

    takes_deltas = True

    def __init__(self, sink: VllmSink, layout: StreamLayout, sliced: Sliced | None) -> None:
        self._sink = sink
        self.manifest = layout.manifest
        self._specs = layout.manifest.specs
        self._names = sink.given_names(layout.manifest)
        self._index = layout.manifest.index
        nbytes = layout.nbytes if sliced is None else sliced.nbytes(layout.manifest)
        buffer = arena.allocate(nbytes, sink.device)
        if sliced is None:
            self.memory: Memory = Memory.of_stream(layout, buffer)
        else:
            self.memory = sliced.in_arena(layout.manifest, buffer)
        self._sliced = sliced
        self.peak_extra_nbytes = nbytes

    def staged_tensors(self) -> Iterator[tuple[str, tuple[torch.Tensor, Shaped]]]:
        """Yield (name, (bytes, what makes the tensor of them)), by the names that the model takes.

        Of a tensor of which a box is staged that makes a sliced one.
        """
        for name in self._names:
            index = self._index[name]
            yield name, self._staged(index)

    def _staged(self, index: int) -> tuple[torch.Tensor, Shaped]:
        spec = self._specs[index]
        if self._sliced is None:
            return own_storage(self.memory.tensors[index]), lambda _, flat: from_bytes(flat, spec)
        place = self._sliced.places.get(index)
        if place is None:
            dtype, device = TORCH_DTYPES[spec.dtype], self._sink.device
            empty = torch.empty(0, dtype=torch.uint8, device=device)
            return empty, lambda name, _: nothing_of(name, spec.shape, dtype, device)
        box = self._sliced.boxes[place][1]
        local = TensorSpec(spec.name, spec.dtype, box.local_shape)

        def sliced(name: str, flat: torch.Tensor) -> torch.Tensor:
            held = from_bytes(flat, local)
            return held if box.is_whole else SlicedTensor.of(name, held, box)

        return own_storage(self.memory.tensors[place]), sliced

    def commit(self) -> None:
        self._sink.commit_all([self])


def _quantization_config(model_config: Any) -> Mapping[str, object] | None:
    """Return the `quantization_config` of the server's checkpoint; None without one.

    None for an engine that quantizes its weights itself, too: it takes them unquantized.
    """
    for config in (model_config.hf_config, model_config.hf_text_config):
        found: Any = getattr(config, "quantization_config", None)
        plain = found.to_dict() if hasattr(found, "to_dict") else found
        if isinstance(plain, Mapping):
            return cast("Mapping[str, object]", plain)
    return None


def _checkpoint_manifest(model_config: Any) -> Manifest | None:
    """Return the manifest of the server's own checkpoint; None where it is not on this host.

    None for a quantized checkpoint as well: a trainer sends other tensors.
    """
    if getattr(model_config, "quantization", None):
        return None
    with suppress(ConfigError, BackendUnavailableError, OSError):
        from weightsync.weights.sources.safetensors_source import SafetensorsSource  # noqa: PLC0415

        path = Path(model_config.model)
        if path.is_dir():
            return SafetensorsSource(path).manifest
    logger.info("no checkpoint of %s on this host: names are not compared", model_config.model)
    return None
