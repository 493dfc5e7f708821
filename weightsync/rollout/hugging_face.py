"""The one place that imports transformers for this package, and says what to install without it."""

from __future__ import annotations

from typing import Any

from weightsync.errors import BackendUnavailableError

try:
    import transformers
    from transformers.cache_utils import Cache, DynamicLayer, get_layer_types_and_kwargs
    from transformers.utils import logging as transformers_logging
except ImportError as exc:
    raise BackendUnavailableError(
        f"running a model needs transformers ({exc}); pip install 'weightsync[hf]'"
    ) from exc

__all__ = ["Cache", "DynamicLayer", "get_layer_types_and_kwargs", "hf", "hf_logging"]

hf: Any = transformers  # its annotations are partial, and wrong for what is used here
hf_logging: Any = transformers_logging
