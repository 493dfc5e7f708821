"""vLLM's contracts with our engines."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

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
