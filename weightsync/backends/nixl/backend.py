"""The backend between hosts that read each other's memory: one-sided READs of NIXL over UCX.

Everything but the bytes is the backend `tcp`: who reads from whom, and who takes over from whom.
Host memory only. It has run over UCX's tcp and shared memory, never over RDMA.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from weightsync.backends.base import Endpoint, Reach
from weightsync.backends.tcp.backend import TcpBackend
from weightsync.errors import BackendUnavailableError

if TYPE_CHECKING:
    from weightsync.backends.tcp.carrier import Carrier

RDMA_COST, TCP_COST = 2.0, 10.0
"""Beside the 5 of plain TCP: UCX's TCP is slower (measured, docs/scaling.md), RDMA is not."""
_RDMA = Path("/sys/class/infiniband")


class NixlBackend(TcpBackend):
    """Path `nixl`: the first host reads from rank 0, and each host from the one before it."""

    name: ClassVar[str] = "nixl"

    def endpoint(self, device: torch.device) -> Any:
        """Return NIXL's version, and whether there is an RDMA device."""
        if importlib.util.find_spec("nixl") is None:
            raise BackendUnavailableError(
                "the package nixl is not installed: pip install 'weightsync[nixl]'"
            )
        try:
            has_rdma = any(_RDMA.iterdir())
        except OSError:
            has_rdma = False
        return {"version": importlib.metadata.version("nixl"), "rdma": has_rdma}

    def reach(self, trainer: Endpoint, receiver: Endpoint) -> Sequence[Reach]:
        """Return the path: cheap where both hosts have RDMA, else dearer than that of `tcp`."""
        if trainer.rank != 0:
            return [Reach("nixl", why_not="rank 0 sends to other hosts")]
        ours, theirs = _facts(trainer), _facts(receiver)
        if ours.get("version") != theirs.get("version"):
            why_not = (
                f"the trainer has NIXL {ours.get('version')} and the receiver "
                f"{theirs.get('version')}; install the same version"
            )
            return [Reach("nixl", why_not=why_not)]
        has_rdma = ours.get("rdma") is True and theirs.get("rdma") is True
        return [Reach("nixl", RDMA_COST if has_rdma else TCP_COST)]

    def make_carrier(self) -> Carrier:
        """Return a carrier that reads by NIXL. Raises BackendUnavailableError."""
        from weightsync.backends.nixl.carrier import NixlCarrier  # noqa: PLC0415  # imports NIXL

        return NixlCarrier()


def _facts(endpoint: Endpoint) -> Mapping[str, Any]:
    return endpoint.facts if isinstance(endpoint.facts, Mapping) else {}
