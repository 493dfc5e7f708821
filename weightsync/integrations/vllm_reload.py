"""vLLM's layerwise reload: how a worker's model takes weights in checkpoint format again.

Between `begin` and `end` the layers that wait for weights have none, and must not compute.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from weightsync.integrations.vllm_sleep import refuse_asleep

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
