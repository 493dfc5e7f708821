"""MegatronSource with the real megatron-core, to a real vLLM in an environment of its own.

`WEIGHTSYNC_TEST_VLLM_PYTHON` is its interpreter; `make test-megatron` sets it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # torch's

from tests.crew import Died, crew
from tests.megatron import models, ranks
from tests.megatron.ranks import Case
from tests.vllm.served import Served, vllm_server
from tests.vllm.tiny import held, save
from tests.vllm.variables import ON_A_CPU
from weightsync.tensors import as_bytes
from weightsync.transports.factory import TransportFactory
from weightsync.weights.copying.fingerprint import mix64, to_hex
from weightsync.wire.messages import CheckReply, CheckRequest

CASES = {
    "qwen3, tied, TP 2, PP 2": Case("qwen3", tp=2, pp=2, tied=True, fused=False),
    "qwen3_moe, TP 2, PP 2, EP 2": Case("qwen3_moe", tp=2, pp=2, ep=2, fused=False),
}
PROMPT = [5, 77, 30, 42, 9]
DIES = 2


def padded(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the rows of zeros that vLLM adds to a vocabulary."""
    if len(tensor) != models.VOCAB:
        return tensor
    return F.pad(tensor, (0, 0, 0, -models.VOCAB % 64))


def differing(url: str, model: object) -> list[str]:
    """Return the names of vLLM's own tensors that are not those of a model of transformers."""
    (worker,) = TransportFactory(None).every(url)
    answer = worker.call(CheckRequest(), timeout_s=60)
    worker.close()
    assert isinstance(answer, CheckReply)
    wanted = {name: to_hex(mix64(as_bytes(padded(t.detach())))) for name, t in held(model).items()}
    return [name for name in wanted if answer.checksums[name] != wanted[name]]


def check(served: Served, case: Case, step: int) -> None:
    model = models.checkpoint_model(case.family, step, tied=case.tied)
    if case.family not in models.MIXTURES:  # whose experts vLLM pads
        assert differing(served.url, model) == []
    served.assert_computes(model, PROMPT)
    assert not served.is_paused


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_step_is_what_vllm_computes_with(case: Case, tmp_path: Path) -> None:
    """Also after a rank was killed in the middle of an update, and with the trainer after it."""
    save(models.checkpoint_model(case.family, 0, tied=case.tied), tmp_path)
    python = os.environ["WEIGHTSYNC_TEST_VLLM_PYTHON"]
    log, options = tmp_path / "server.log", {"--max-model-len": "64"}
    with vllm_server(tmp_path, log, options=options, variables=ON_A_CPU, python=python) as served:
        with crew(4) as trainers:
            trainers.run(ranks.connect, case, [served.url])
            for step in (1, 2, 3):
                said = trainers.run(ranks.update, step)
                assert [(version, gathered) for version, gathered, _ in said] == [(step, {})] * 4
                check(served, case, step)
            left = trainers.run(ranks.update_and_die, DIES, 4)
            assert isinstance(left[DIES], Died)
            survivors = [text for rank, text in enumerate(left) if rank != DIES]
            assert all(f"rank {DIES}" in text for text in survivors), survivors
            check(served, case, 3)
        with crew(4) as trainers:
            trainers.run(ranks.connect, case, [served.url])
            trainers.run(ranks.update, 5)
            check(served, case, 5)
            trainers.run(ranks.close)
