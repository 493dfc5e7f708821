"""Tensors on a GPU that two ranks hold, compared between them. Written without a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.crew import crew
from weightsync.ranks.comm import join_ranks
from weightsync.ranks.replicas import ReplicaCheck
from weightsync.weights.copying.fingerprint import mix64, mixed_total

pytestmark = pytest.mark.gpu

COUNT = 300


def compare(rank: int) -> tuple[str, ...]:
    """Compare tensors of several sizes, of which two differ on rank 1."""
    comm = join_ranks(None, timeout_s=20.0)
    check = ReplicaCheck(comm, "first")
    tensors = [torch.full((i % 50 + 1,), float(i), device="cuda") for i in range(COUNT)]
    tensors.append(torch.zeros(0, device="cuda"))
    if rank:
        tensors[7][0] += 1
        tensors[COUNT - 1][-1] += 1
    check.note_all(tensors)
    check.compare([f"t{i}" for i in range(len(tensors))])
    comm.close()
    return check.take_differing()


def test_what_differs_on_two_ranks_of_a_gpu_is_named() -> None:
    with crew(2) as made:
        assert made.run(compare) == [("t7", f"t{COUNT - 1}")] * 2


def test_large_tensors_have_the_fingerprint_of_the_host() -> None:
    torch.manual_seed(0)
    host = torch.randint(0, 256, (50_000_003,), dtype=torch.uint8)
    assert mix64(host.cuda()) == mix64(host)
    assert mixed_total(host.cuda()).device.type == "cuda"
