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


DEAD = "the server answers 500 to every request from then on"
WAITS = "the trainer waits without an end"

RELOAD: Mapping[str, str] = {
    "test_a_tied_head_follows_its_embedding": "on a CPU the head computes with its former copy",
    "test_part_of_a_fused_layer": "key and value in that layer are arbitrary memory afterwards",
    "test_an_unknown_name_is_refused": DEAD,
    "test_unknown_fields_are_refused": DEAD,
    "test_an_update_that_nobody_finishes_ends_with_the_next_trainer": "no update begins any more",
}
"""What both engines do not keep, by vLLM's reload of a model."""


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
    broken: ClassVar[Mapping[str, str]] = {
        **RELOAD,
        "test_a_wrong_shape_is_refused": DEAD,
        "test_an_empty_tensor_is_refused": DEAD,
    }


class TestVllmsIpcTrainer(Ipc, VllmTrainerContract):
    broken: ClassVar[Mapping[str, str]] = {
        "test_a_source_that_fails_leaves_the_former_weights": DEAD,
        "test_the_update_after_one_that_failed": "the server refuses it: an update is open",
        "test_a_tensor_that_the_source_leaves_out_is_an_error": "the update ends as a success",
        "test_an_error_on_the_second_rank_ends_the_first": "no update begins any more",
        "test_a_trainer_is_killed_at_its_first_tensor": DEAD,
        "test_a_trainer_is_killed_in_the_middle": DEAD,
    }


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
    broken: ClassVar[Mapping[str, str]] = {
        **RELOAD,
        "test_a_wrong_shape_is_refused": WAITS,
        "test_an_empty_tensor_is_refused": WAITS,
    }


class TestVllmsNcclTrainer(Nccl, VllmTrainerContract):
    broken: ClassVar[Mapping[str, str]] = {
        "test_a_source_that_fails_leaves_the_former_weights": DEAD,
        "test_the_update_after_one_that_failed": "the server does not answer: it still receives",
        "test_a_refusal_of_the_server_is_raised": WAITS,
        "test_an_error_on_the_second_rank_ends_the_first": WAITS,
        "test_a_trainer_is_killed_at_its_first_tensor": DEAD,
        "test_a_trainer_is_killed_in_the_middle": DEAD,
        "test_a_server_that_stands_still_is_an_error": WAITS,
    }
