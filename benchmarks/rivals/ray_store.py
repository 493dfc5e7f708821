"""Ray's object store: the trainer is the driver, readers are actors.

A dict of NumPy arrays, which `ray.put` writes to shared memory and actors get without a copy
(bfloat16 has no NumPy type, so arrays are the tensors' bytes); then each actor copies.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import Any

import ray
import torch
from torch import nn

from benchmarks.rivals.contract import WAIT_S, Job, Rival
from benchmarks.rivals.parameters import as_bytes, digests, make_module, parameters_of

STORE_MODELS = 2.5
LEAST_STORE_NBYTES = 96 << 20


class Trainer(Rival):
    """The driver, with a node of its own."""

    def setup(self, job: Job, module: nn.Module) -> None:
        store = max(LEAST_STORE_NBYTES, int(STORE_MODELS * job.nbytes))
        ray.init(
            num_cpus=2,
            object_store_memory=store,
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
        self._arrays = {
            name: as_bytes(tensor).numpy() for name, tensor in parameters_of(module).items()
        }
        actor: Any = ray.remote(num_cpus=0)(Taker)
        self._takers: list[Any] = [actor.remote(job.tensors) for _ in range(job.readers)]
        ray.get([taker.held.remote() for taker in self._takers], timeout=WAIT_S)

    def update(self, way: str) -> None:
        put = ray.put(self._arrays)
        ray.get([taker.load.remote(put) for taker in self._takers], timeout=WAIT_S)

    def held(self) -> list[Mapping[str, str]]:
        return list(ray.get([taker.held.remote() for taker in self._takers], timeout=WAIT_S))

    def close(self) -> None:
        ray.shutdown()


class Taker:
    """A reading actor."""

    def __init__(self, tensors: Any) -> None:
        torch.set_num_threads(1)
        self._parameters = parameters_of(make_module(tensors))
        # Arrays from the store are read-only, and torch warns for each.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

    def load(self, arrays: Mapping[str, Any]) -> int:
        """Copy the arrays of the store."""
        for name, array in arrays.items():
            as_bytes(self._parameters[name]).copy_(torch.from_numpy(array))
        return len(arrays)

    def held(self) -> Mapping[str, str]:
        """Return `digests` of the parameters."""
        return digests(self._parameters)
