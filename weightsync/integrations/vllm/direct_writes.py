"""Carries what a model's `load_weights` writes past its weight loaders through vLLM's reload.

The reload knows of a tensor only what its weight loader was given. A model that calls
`param.copy_(…)` itself writes to a tensor without memory, and vLLM puts the old one back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes, _pop_mode, _push_mode
from torch.utils._pytree import tree_map_only
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor

from weightsync.errors import ConfigError, TransferError
from weightsync.integrations.vllm.writes import (
    FROM_FORMER,
    Place,
    TensorKey,
    WriteWatch,
    computes_from,
    copied_numel,
    places_of,
    storage_of,
)


class DirectWrites(WriteWatch):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Applies what is written to tensors without memory, between `begin` and `end` of a reload.

    The first write to a tensor gives it memory, in which its layer then finds it. A layer is
    processed, as vLLM does after its weight loaders, when all of it was written and the model asks
    for the next weight; the others in `complete`.
    """

    def __init__(self, model: nn.Module) -> None:
        places = {s: p for s, p in places_of(model).items() if p.tensor.is_meta}
        super().__init__(places)
        self._model = type(model).__name__
        self._memory: dict[int, torch.Tensor] = {}
        self._counts: defaultdict[TensorKey, int] = defaultdict(int)
        self._open: dict[nn.Module, list[int]] = {}
        self._persistent: list[Place] = []
        self.layers: set[nn.Module] = set()

    @contextmanager
    def carried(self) -> Iterator[None]:
        """Carry the writes of the block, other than those of vLLM's own weight loaders."""
        names = ("get_numel_loaded", "_layerwise_process")
        kept = {name: getattr(layerwise, name) for name in names}
        layerwise.get_numel_loaded = _aside(kept["get_numel_loaded"])
        layerwise._layerwise_process = _unwatched(kept["_layerwise_process"])
        try:
            with self:
                yield
        finally:
            for name, call in kept.items():
                setattr(layerwise, name, call)

    def between(
        self, pairs: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the pairs, and process the layers that were completed by the last one."""
        for pair in pairs:
            yield pair
            if self._open:
                self._process_whole_layers()

    def complete(self) -> None:
        """Process the layers that have writes which vLLM would leave out.

        vLLM goes by its count of copied elements: of a layer that has none it keeps the old
        weights, and it takes one that has all of them for processed.
        """
        for layer in self._layers_with_weights():
            info = get_layerwise_info(layer)
            if is_deferred_attention_layer(layer):
                info.load_numel = max(1, info.load_numel)
            elif not 0 < info.load_numel < (info.load_numel_total or 0):
                _process(layer)
        self._open.clear()
        self._memory.clear()

    def restore_buffers(self) -> None:
        """Mark the buffers that were written as not persistent again. Called after vLLM's end."""
        for place in self._persistent:
            place.layer._non_persistent_buffers_set.add(place.name)
        self._persistent.clear()

    def has_weights(self, layer: nn.Module) -> bool:
        """Whether the layer got weights in this reload, by a loader or by a write."""
        info = get_layerwise_info(layer)
        return not info.can_load() or bool(info.loaded_weights) or layer in self.layers

    def _layers_with_weights(self) -> Iterator[nn.Module]:
        layers = {place.layer: None for place in self.places.values()}
        for layer in layers:
            if get_layerwise_info(layer).can_load() and self.has_weights(layer):
                yield layer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        written = self.written(func, args, kwargs)
        if not written and not (self._memory and self._reads(func, args)):
            return func(*args, **kwargs)
        if func.overloadpacket is torch.ops.aten.set_:
            raise ConfigError(f"{written[0][0]}: {self._model} replaces it while it loads weights")
        if computes_from(func):
            self._refuse_former(written)
        for place, _ in written:
            self._give_memory(place)
        held_args, held_kwargs = tree_map_only(torch.Tensor, self._with_memory, (args, kwargs))
        if written and any(t.is_meta for t in held_args if isinstance(t, torch.Tensor)):
            raise TransferError(
                f"{written[0][0]}: {self._model} computes it from weights that vLLM's reload does "
                "not have in memory"
            )
        result = func(*held_args, **held_kwargs)
        for place, target in written:
            self._note(place, copied_numel(func, args, target))
        return written[0][1] if written else result

    def _refuse_former(self, written: Sequence[tuple[Place, torch.Tensor]]) -> None:
        """Raise TransferError for tensors of which nothing was written yet in this reload."""
        for place, _ in written:
            if storage_of(place.tensor) not in self._memory:
                raise TransferError(f"{place}: {self._model} changes it, and {FROM_FORMER}")

    def _reads(self, func: Any, args: Sequence[Any]) -> bool:
        """Whether an operation computes with what was written before; a view is none."""
        if any(argument.alias_info is not None for argument in func._schema.arguments):
            return False
        return any(
            isinstance(t, torch.Tensor) and t.is_meta and storage_of(t) in self._memory
            for t in args
        )

    def _give_memory(self, place: Place) -> None:
        """Put a tensor with memory in the layer's place, where it has none yet."""
        storage = storage_of(place.tensor)
        layer, info = place.layer, get_layerwise_info(place.layer)
        if storage is None or (storage in self._memory and info.can_load()):
            return
        loaded = any(name == place.name for name, _ in info.loaded_weights)
        if not info.can_load() or loaded or is_deferred_attention_layer(layer):
            raise TransferError(
                f"{place}: {self._model} writes to it past its weight loader, "
                f"{'beside' if loaded else 'after'} the weights that vLLM's reload has taken for "
                "it; such a write would be lost"
            )
        with info.restore_device, _disable_current_modes():
            memory = materialize_meta_tensor(place.tensor)
            memory.data.zero_()  # a loader leaves padding alone
            setattr(layer, place.name, memory)
        if place.name in info.kernel_non_persistent_buffers:  # vLLM would keep the old one
            info.kernel_non_persistent_buffers.discard(place.name)
            self._persistent.append(place)
        self._memory[storage] = memory
        self.layers.add(layer)
        self._open.setdefault(layer, []).append(storage)

    def _with_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same view of the memory that stands in for a tensor's storage."""
        storage = storage_of(tensor) if tensor.is_meta else None
        memory = None if storage is None else self._memory.get(storage)
        if memory is None:
            return tensor
        view = torch.empty(0, dtype=tensor.dtype, device=memory.device)
        return view.set_(
            memory.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
        )

    def _note(self, place: Place, numel: int) -> None:
        """Add written elements to vLLM's count of the layer, at most the whole tensor."""
        before = self._counts[place.key]
        now = min(place.numel, before + numel)
        self._counts[place.key] = now
        get_layerwise_info(place.layer).load_numel += now - before

    def _process_whole_layers(self) -> None:
        for layer in list(self._open):
            info = get_layerwise_info(layer)
            if info.can_load() and info.load_numel >= (info.load_numel_total or 0):
                _process(layer)
            if not info.can_load():  # vLLM has copied it to where the kernels read it
                for storage in self._open.pop(layer):
                    del self._memory[storage]


def _aside(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call that runs without the only watch there is; made for each tensor, so cheap."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch._C._len_torch_dispatch_stack() != 1:
            with _disable_current_modes():
                return call(*args, **kwargs)
        mode = _pop_mode()
        try:
            return call(*args, **kwargs)
        finally:
            _push_mode(mode)

    return run


def _unwatched(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return call(*args, **kwargs)

    return run


def _process(layer: nn.Module) -> None:
    """Put a layer's new weights to use, as vLLM does when its count is full."""
    with _disable_current_modes():
        layerwise._layerwise_process(layer, get_layerwise_info(layer))
