"""Which rank feeds which receiver, and how: the order of the ways, and why others are not there."""

from __future__ import annotations

from typing import cast

import pytest

from weightsync.errors import ConfigError
from weightsync.ranks.worker import RankInfo
from weightsync.transports.base import Transport
from weightsync.transports.callback import CallbackTransport
from weightsync.update.fleet import Member
from weightsync.update.paths import Candidate, assign, candidates, check_backend

HERE, THERE = "HOST-here", "HOST-there"


def card(*keys: str, no_cuda_ipc: str | None = None) -> RankInfo:
    on_gpu = len(keys) > 1
    return RankInfo(keys=list(keys), stable=True, on_gpu=on_gpu, no_cuda_ipc=no_cuda_ipc)


def member(*keys: str) -> Member:
    return Member(cast(Transport, CallbackTransport(lambda _: None)), keys=list(keys))


CPU = [card(HERE)]
GPUS = [card("GPU-0", HERE), card("GPU-1", HERE), card("GPU-2", THERE)]


class TestWays:
    @pytest.mark.parametrize(
        ("keys", "wanted"),
        [
            ((HERE,), [Candidate(0, "shared_memory"), Candidate(0, "distributed")]),
            (("GPU-9", HERE), [Candidate(0, "shared_memory"), Candidate(0, "distributed")]),
            ((THERE,), [Candidate(0, "distributed")]),
            ((), [Candidate(0, "distributed")]),
        ],
    )
    def test_from_a_cpu(self, keys: tuple[str, ...], wanted: list[Candidate]) -> None:
        assert candidates(member(*keys), CPU, "auto") == wanted

    @pytest.mark.parametrize(
        ("keys", "wanted"),
        [
            (("GPU-1", HERE), [Candidate(1, "cuda_ipc"), Candidate(1, "shared_memory")]),
            (("GPU-2", THERE), [Candidate(2, "cuda_ipc"), Candidate(2, "shared_memory")]),
            (("GPU-7", THERE), [Candidate(2, "shared_memory")]),
            ((HERE,), [Candidate(0, "shared_memory")]),
        ],
    )
    def test_the_rank_beside_the_receiver_feeds_it(
        self, keys: tuple[str, ...], wanted: list[Candidate]
    ) -> None:
        assert candidates(member(*keys), GPUS, "ipc") == wanted

    def test_why_not_faster_is_said(self) -> None:
        far = member("GPU-9", "HOST-far")
        assert candidates(far, GPUS, "ipc") == []
        assert "GPU-9, HOST-far" in far.skipped["cuda_ipc"]
        assert "HOST-far" in far.skipped["shared_memory"]
        refused = member("GPU-0", HERE)
        found = candidates(refused, [card("GPU-0", HERE, no_cuda_ipc="no ptrace")], "auto")
        assert found[0] == Candidate(0, "shared_memory")
        assert refused.skipped == {"cuda_ipc": "no ptrace"}

    def test_a_backend_is_taken_at_its_word(self) -> None:
        assert candidates(member(HERE), CPU, "distributed") == [Candidate(0, "distributed")]
        with pytest.raises(ConfigError, match="carrier pigeon"):
            check_backend("carrier pigeon")


class TestSettling:
    def test_everyone_has_the_first_of_its_ways(self) -> None:
        near, far = member(HERE), member(THERE)
        wishes = {m: candidates(m, CPU, "auto") for m in (near, far)}
        assert assign(wishes) == {
            near: Candidate(0, "shared_memory"),
            far: Candidate(0, "distributed"),
        }

    def test_one_rank_has_one_ring(self) -> None:
        on_gpu, on_host = member("GPU-0", HERE), member(HERE)
        wishes = {m: candidates(m, GPUS, "ipc") for m in (on_gpu, on_host)}
        chosen = assign(wishes)
        assert chosen == {
            on_gpu: Candidate(0, "shared_memory"),
            on_host: Candidate(0, "shared_memory"),
        }
        assert "one ring serves all" in on_gpu.skipped["cuda_ipc"]

    def test_rings_of_other_ranks_do_not_matter(self) -> None:
        on_gpu, on_host = member("GPU-1", HERE), member(HERE)
        wishes = {m: candidates(m, GPUS, "ipc") for m in (on_gpu, on_host)}
        assert assign(wishes)[on_gpu] == Candidate(1, "cuda_ipc")
