"""A dry run of vLLM's loaders, on tensors without memory: does this manifest fit the model?

vLLM itself answers 200 to half of a fused layer, and computes with what lay in its memory.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from vllm.model_executor.model_loader.reload.meta import (
    SKIP_LOAD_TENSORS,
    get_numel_loaded,
    to_meta_tensor,
)
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors, get_tensor_load_numel

from weightsync.errors import shorten
from weightsync.integrations.vllm_reload import Reload
from weightsync.specs import Manifest
from weightsync.tensors import TORCH_DTYPES

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
