"""What a contract of vLLM looks at inside a worker, by `vllm serve --worker-extension-cls`."""

from __future__ import annotations

import copy
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader import get_model

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
        with set_current_vllm_config(config):
            return held_checksums(get_model(vllm_config=config))

    def conformance_resources(self) -> dict[str, int]:
        """Return how many descriptors and threads this process has."""
        held = Held.now()
        return {"descriptors": held.fds, "threads": held.threads}
