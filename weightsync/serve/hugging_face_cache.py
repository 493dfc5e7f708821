"""The attention caches of transformers, which load torch."""

from __future__ import annotations

from weightsync.errors import BackendUnavailableError

try:
    from transformers.cache_utils import Cache, DynamicLayer, get_layer_types_and_kwargs
except ImportError as exc:
    raise BackendUnavailableError(
        f"running a model needs transformers ({exc}); pip install 'weightsync[hf]'"
    ) from exc

__all__ = ["Cache", "DynamicLayer", "get_layer_types_and_kwargs"]
