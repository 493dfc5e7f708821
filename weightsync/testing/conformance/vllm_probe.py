"""Methods that the contracts of vLLM call in a worker, by `vllm serve --worker-extension-cls`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vllm.config import set_current_vllm_config
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.model_loader import get_model

from weightsync.cuda import devices
from weightsync.integrations.vllm.checksums import held_checksums
from weightsync.testing.held import Held


class Probe:
    """Methods that vLLM adds to its worker. `collective_rpc` calls them."""

    model_runner: Any
    vllm_config: Any

    def conformance_held(self) -> dict[str, str]:
        """Return a fingerprint of each parameter and buffer, in every place where it is used."""
        return held_checksums(self.model_runner.model)

    def conformance_wanted(self, folder: str) -> dict[str, str]:
        """Return those of a second model that vLLM loads from a checkpoint, in this process."""
        config = copy.copy(self.vllm_config)
        config.model_config = copy.copy(config.model_config)
        config.model_config.model = folder
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.static_forward_context = {}  # names of layers are unique in it
        # Rotary caches are shared by all models of a process; this one computes its own.
        with set_current_vllm_config(config), patch.dict(rotary_embedding._ROPE_DICT, clear=True):
            return held_checksums(get_model(vllm_config=config))

    def conformance_resources(self) -> dict[str, int]:
        """Return how much this process has: memory without that of files, GPU memory included."""
        held = Held.now()
        mapped = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        nbytes = held.rss_nbytes
        if devices.is_available():
            free, total = devices.memory()
            nbytes += total - free
        return {
            "descriptors": held.fds,
            "threads": held.threads,
            "segments": sum("/dev/shm/" in line for line in mapped),
            "nbytes": nbytes,
        }
