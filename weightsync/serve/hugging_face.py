"""transformers for this package, and what to install without it.

What it brings loads torch only when it needs it; hugging_face_cache has what does at once.
"""

from __future__ import annotations

from typing import Any

from weightsync.errors import BackendUnavailableError

try:
    import transformers
    from transformers.utils import logging as transformers_logging
except ImportError as exc:
    raise BackendUnavailableError(
        f"running a model needs transformers ({exc}); pip install 'weightsync[hf]'"
    ) from exc

__all__ = ["hf", "hf_logging"]

hf: Any = transformers  # its annotations are partial, and wrong for what is used here
hf_logging: Any = transformers_logging
