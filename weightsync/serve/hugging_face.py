"""The import of transformers, which loads torch only when a model needs it."""

from __future__ import annotations

from typing import Any

from weightsync.errors import MissingExtraError, install_hint

try:
    import transformers
    from transformers.utils import logging as transformers_logging
except ImportError as exc:
    raise MissingExtraError(
        f"running a model needs transformers ({exc}); {install_hint('hf')}"
    ) from exc

__all__ = ["hf", "hf_logging"]

hf: Any = transformers  # its annotations are incomplete, and wrong for some calls here
hf_logging: Any = transformers_logging
