"""vLLM's contracts with its own engines, on a CPU. `make conformance` runs it.

What they do not keep is in `broken`: each was seen with the version of this venv.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from tests.vllm import cuda_on_cpu
from weightsync.testing.conformance.vllm import VllmTrainerContract, VllmWorkerContract

pytestmark = pytest.mark.timeout(600)


class OnCpu:
    """What vLLM's own engines need in place of CUDA."""

    probe: ClassVar[str] = "tests.vllm.probe_on_cpu.ProbeOnCpu"
    caller_pauses: ClassVar[bool] = True
    environment: ClassVar[Mapping[str, str]] = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}


class Ipc(OnCpu):
    """vLLM's `ipc`, which sends pickled handles over HTTP."""

    engine: ClassVar[str] = "ipc"

    @classmethod
    def init_info(cls, rank: int) -> Any:
        cuda_on_cpu.install()
        return IPCTrainerInitInfo(rank=rank)


class TestVllmsIpcWorker(Ipc, VllmWorkerContract):
    broken: ClassVar[Mapping[str, str]] = {}


class TestVllmsIpcTrainer(Ipc, VllmTrainerContract):
    broken: ClassVar[Mapping[str, str]] = {}


class Nccl(OnCpu):
    """vLLM's `nccl`, a tensor at a time."""

    engine: ClassVar[str] = "nccl"

    @classmethod
    def init_info(cls, rank: int) -> Any:
        cuda_on_cpu.install()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        return NCCLTrainerInitInfo(
            rank=rank,
            master_address="127.0.0.1",
            master_port=port,
            world_size=2,
            packed=False,
        )


class TestVllmsNcclWorker(Nccl, VllmWorkerContract):
    broken: ClassVar[Mapping[str, str]] = {}


class TestVllmsNcclTrainer(Nccl, VllmTrainerContract):
    broken: ClassVar[Mapping[str, str]] = {}
