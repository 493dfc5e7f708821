"""The backend between hosts that read each other's memory: one-sided READs of NIXL over UCX.

Everything but the bytes is the backend `tcp`: who reads from whom, and who takes over from whom.
Host memory, and on demand that of GPUs. It has run over UCX's tcp and shared memory, never by RDMA.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from weightsync.backends.base import Endpoint, Reach, Trial
from weightsync.backends.tcp.backend import TcpBackend
from weightsync.cuda import devices
from weightsync.errors import BackendUnavailableError, install_hint

if TYPE_CHECKING:
    from weightsync.backends.tcp.carrier import Carrier

RDMA_COST, TCP_COST = 2.0, 10.0
"""Beside the 5 of plain TCP: UCX's TCP is slower (measured, docs/scaling.md), RDMA is not."""
CUDA = "cuda_copy"
"""The transport without which NIXL's UCX does not start where there is a GPU (seen on an H200)."""
_RDMA = Path("/sys/class/infiniband")


class NixlBackend(TcpBackend):
    """Path `nixl`: the first host reads from rank 0, and each host from the one before it."""

    name: ClassVar[str] = "nixl"

    def endpoint(self, device: torch.device) -> Any:
        """Return NIXL's version, whether there is an RDMA device, and that streams are read."""
        if importlib.util.find_spec("nixl") is None:
            raise BackendUnavailableError(
                f"the package nixl is not installed: {install_hint('nixl')}"
            )
        return {
            "version": importlib.metadata.version("nixl"),
            "rdma": bool(_rdma_devices()),
            **super().endpoint(device),
        }

    def reach(self, trainer: Endpoint, receiver: Endpoint) -> Sequence[Reach]:
        """Return the path: cheap where both hosts have RDMA, else dearer than that of `tcp`."""
        ours, theirs = _facts(trainer), _facts(receiver)
        if ours.get("version") != theirs.get("version"):
            why_not = (
                f"the trainer has NIXL {ours.get('version')} and the receiver "
                f"{theirs.get('version')}; install the same version"
            )
            return [Reach("nixl", why_not=why_not)]
        has_rdma = ours.get("rdma") is True and theirs.get("rdma") is True
        if has_rdma:
            return [Reach("nixl", RDMA_COST, why="both hosts have RDMA devices")]
        why = "without RDMA, UCX is slower than plain TCP"
        return [Reach("nixl", TCP_COST, why=why)]

    def make_carrier(self) -> Carrier:
        """Return a carrier that reads by NIXL. Raises BackendUnavailableError."""
        from weightsync.backends.nixl.carrier import NixlCarrier  # noqa: PLC0415  # imports NIXL

        return NixlCarrier()

    def trials(self) -> Sequence[Trial]:
        """Return trials of UCX's own choice of transports, and of sets that work on some hosts."""
        try:
            self.endpoint(torch.device("cpu"))
        except BackendUnavailableError as exc:
            return [Trial(path="nixl", why_not=str(exc))]
        return _ucx_trials(os.environ.get("UCX_TLS"))

    @contextmanager
    def offer_trial(self, path: str) -> Iterator[Any]:
        """Serve chunks that NIXL reads."""
        from weightsync.backends.nixl.ucx_log import ucx_log  # noqa: PLC0415  # of trials only

        with ucx_log(), super().offer_trial(path) as offer:
            yield offer

    def read_trial(self, path: str, offer: Any) -> str:
        """Read the chunks, and add the transport that UCX took."""
        from weightsync.backends.nixl.ucx_log import ucx_log  # noqa: PLC0415  # as above

        with ucx_log() as log:
            done = super().read_trial(path, offer)
            return f"{done}{log.taken()}"


def _rdma_devices() -> list[str]:
    try:
        return sorted(device.name for device in _RDMA.iterdir())
    except OSError:
        return []


def _ucx_trials(chosen: str | None) -> list[Trial]:
    """Return the trial of `chosen`, the value of UCX_TLS, and those of sets that should work."""
    remedy = "unset UCX_TLS and UCX_NET_DEVICES, so that UCX chooses from all that it finds"
    own = "on this host (UCX_TLS unset)" if chosen is None else f"as it is set (UCX_TLS={chosen})"
    trials = [Trial(path="nixl", title=own, remedy=remedy)]
    gpu = f",{CUDA}" if devices.is_available() else ""
    remedies = {f"tcp,self{gpu}": "check the network interfaces (ip link) and UCX_NET_DEVICES"}
    if links := _rdma_devices():
        rdma = (
            f"check the links of {', '.join(links)} (ibv_devinfo), /dev/infiniband in the "
            "container, and the limit of locked memory (ulimit -l)"
        )
        remedies = {"^sm": rdma, f"rc,self{gpu}": rdma, **remedies}
    to_others = next(iter(remedies)) if chosen is None else None
    if chosen is not None:  # else UCX's choice has them all
        remedies[f"tcp,sm,self{gpu}"] = "check that /dev/shm is mounted and not full"
        remedies.pop(chosen, None)
    for transports, remedy in remedies.items():
        title = f"UCX_TLS={transports}"
        if transports == to_others:
            title = f"to another host ({title})"
        environment = {"UCX_TLS": transports}
        trials.append(Trial(path="nixl", title=title, environment=environment, remedy=remedy))
    return trials


def _facts(endpoint: Endpoint) -> Mapping[str, Any]:
    return endpoint.facts if isinstance(endpoint.facts, Mapping) else {}
