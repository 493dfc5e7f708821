"""vLLM's contracts, with our engines and with those of vLLM itself that a CPU can be made to run.

What vLLM's engines do not keep is in `broken`: each was seen with the version of this venv.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from tests.vllm import cuda_on_cpu
from weightsync.integrations.vllm.trainer import WeightsyncTrainerInitInfo
from weightsync.testing.conformance.vllm import VllmTrainerContract, VllmWorkerContract

pytestmark = pytest.mark.timeout(600)


class Ours:
    """Our engine on both sides."""

    engine: ClassVar[str] = "weightsync"

    @classmethod
    def init_info(cls, rank: int) -> Any:
        return WeightsyncTrainerInitInfo(rank=rank, options={"timeout_s": 8.0})


class TestOurWorker(Ours, VllmWorkerContract):
    pass


class TestOurTrainer(Ours, VllmTrainerContract):
    pass


class Packed(Ours):
    """Our engine with tensors packed into buckets, smaller than the embedding."""

    label: ClassVar[str] = "weightsync, packed"

    @classmethod
    def init_info(cls, rank: int) -> Any:
        options = {"timeout_s": 8.0, "packed": True, "bucket_nbytes": 1 << 20}
        return WeightsyncTrainerInitInfo(rank=rank, options=options)


class TestOurPackedWorker(Packed, VllmWorkerContract):
    pass


class OnCpu:
    """What vLLM's own engines need in place of CUDA."""

    probe: ClassVar[str] = "tests.vllm.probe_on_cpu.ProbeOnCpu"
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
