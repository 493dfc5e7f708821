"""Receivers that read the GPUs of several ranks: a stand-in for the driver, see two_gpus.py.

Not run on two GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.crew import Crew, crew
from tests.e2e import ranks_at_work as work
from tests.e2e import shard_servers
from tests.e2e import stream_deltas as at_work
from tests.e2e.processes import Host, host
from tests.e2e.test_ranks import SMALL, check_sent, receivers, start
from tests.gpu import two_gpus
from tests.gpu.two_gpus import GPUS, REFUSED
from weightsync.report import GpuPair

pytestmark = pytest.mark.usefixtures("shm_clean")

ALL = [3, 1, 4, 0, 2]
"""GPUs that the receivers see, in the order of their own numbers; they are on GPU 4."""


@pytest.fixture(scope="module")
def two() -> Iterator[Crew]:
    with crew(2) as made:
        yield made


@pytest.fixture(scope="module")
def engine_process() -> Iterator[Host]:
    with host() as made:
        yield made


@pytest.fixture
def engines(engine_process: Host) -> Iterator[Host]:
    engine_process.run(two_gpus.install_receiver, ALL)
    yield engine_process
    engine_process.forget()


@pytest.fixture
def ranks(two: Crew) -> Iterator[Crew]:
    two.run(two_gpus.install_rank)
    yield two
    two.run(work.close)


def pairs(*ranks: int) -> dict[int, GpuPair]:
    return {rank: GpuPair(trainer=GPUS[rank], receiver=GPUS[4]) for rank in ranks}


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"packed": True, **SMALL}, {"apply": "in_place"}),
    ({}, {"sink": "hook", "apply": "in_place"}),
    ({"packed": True, **SMALL}, {"sink": "hook"}),
]


@pytest.mark.parametrize(("options", "place"), CASES)
def test_each_rank_is_read_on_its_own_gpu(
    ranks: Crew, engines: Host, options: dict[str, Any], place: dict[str, Any]
) -> None:
    to = receivers(engines, 2, **place)
    start(ranks, to, "fsdp", **options)
    for version in (1, 2, 3):
        before = engines.run(two_gpus.crossed)
        sent = ranks.run(work.step_and_send)
        if place.get("sink") == "hook":
            for _, full in sent:
                full.pop("head.weight")
        check_sent(sent, to, version)
        report = sent[0][0].result
        assert (report.path, report.gathered) == ("cuda_ipc", {}), (version, report)
        level = "arrived" if place.get("sink") == "hook" else "held"
        assert report.verified == level
        for receiver in report.receivers:
            assert receiver.gpus == pairs(0, 1)
            assert sum(receiver.sources.values()) == report.nbytes
        read = engines.run(two_gpus.crossed) - before
        if options:  # in buckets, with zeros between tensors
            assert 2 * report.nbytes <= read <= 4 * report.nbytes
        else:
            assert read == 2 * report.nbytes


def test_deltas_of_the_ranks(ranks: Crew, engines: Host) -> None:
    to = receivers(engines, 1)
    start(ranks, to, "fsdp", delta="always")
    for version in (1, 2, 3):
        sent = ranks.run(at_work.change_and_send, version, 1, None)
        check_sent(sent, to, version)
        report = sent[0][0].result
        assert (report.path, report.receivers[0].gpus) == ("cuda_ipc", pairs(0, 1))
        assert report.delta.sent is (version > 1), report.delta


def test_a_rank_whose_gpu_is_hidden_sends_through_the_host(ranks: Crew, engines: Host) -> None:
    engines.run(two_gpus.install_receiver, [4, 0])
    to = receivers(engines, 1)
    start(ranks, to, "fsdp")
    sent = ranks.run(work.step_and_send)
    check_sent(sent, to, 1)
    report = sent[0][0].result
    assert report.gathered == {}
    assert report.receivers[0].gpus == pairs(0)
    why = f"rank 1: the receiver is on {GPUS[4]}, "
    assert report.skipped_paths["cuda_ipc"].startswith(why)


def test_a_driver_that_refuses_costs_the_path_of_all_ranks_and_no_gather(
    ranks: Crew, engines: Host
) -> None:
    to = receivers(engines, 1)
    start(ranks, to, "fsdp", packed=True, **SMALL)
    check_sent(ranks.run(work.step_and_send), to, 1)
    engines.run(two_gpus.fail_soon, 3)
    sent = ranks.run(work.step_and_send)
    check_sent(sent, to, 2)
    report = sent[0][0].result
    assert (report.path, report.gathered) == ("shared_memory", {})
    assert report.receivers[0].gpus == {}
    assert REFUSED in report.skipped_paths["cuda_ipc"]


@pytest.mark.parametrize(
    ("apart", "options", "apply"),
    [(0, {}, "auto"), (2, {"packed": True, **SMALL}, "in_place")],
    ids=["the same two GPUs", "four GPUs"],
)
def test_receivers_of_shards(apart: int, options: dict[str, Any], apply: str) -> None:
    """Each reads its part of each rank's memory: of its own GPU where it lies, of another once."""
    with crew(2) as ranks:
        ranks.run(two_gpus.install_rank, apart)
        urls = ranks.run(shard_servers.serve, "decoder", apply)
        try:
            results = ranks.run(work.start, "fsdp", urls, {"delta": "always", **options})
            assert [result.text for result in results] == [""] * len(urls)
            for version in (1, 2):
                sent = ranks.run(at_work.change_and_send, version)
                assert [outcome.text for outcome, _ in sent] == [""] * len(sent)
                report = sent[0][0].result
                held = ranks.run(shard_servers.held)
                assert all({n: one[n] for n in sent[0][1]} == sent[0][1] for one, _ in held)
                assert report.delta.sent is (version > 1), report.delta
                if apart:
                    assert report.path == "cuda_ipc", report.skipped_paths
                    for i, receiver in enumerate(report.receivers):
                        own = GPUS[apart + i]
                        assert receiver.gpus == {
                            rank: GpuPair(trainer=GPUS[rank], receiver=own) for rank in (0, 1)
                        }
        finally:
            ranks.run(work.close)
            ranks.run(shard_servers.end)
