"""Real vLLM servers that read the shards of two ranks under torchrun, which gather nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.fixtures import MakeNetwork, make_network
from tests.hosts.namespaces import Host
from tests.vllm.served import vllm_server
from tests.vllm.shard_trainer import STEPS
from tests.vllm.tiny import LARGEST_DIFFERENCE, make_model

__all__ = ["make_network"]

pytestmark = pytest.mark.timeout(900)
WAIT_S = 400.0
LARGER = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "vocab_size": 4096,
}
"""A model of many copy units: half of it, of which a worker reads a unit more at each end."""
RANKS = 2
TRAINER = ("-m", "tests.vllm.shard_trainer")


def records(said: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def trained(url: str, folder: Path) -> list[dict[str, Any]]:
    """Run the trainer to its end; return a record of each update. No process outlives this."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
        *(*TRAINER, url, str(folder), "auto"),
    ]
    process = subprocess.Popen(
        command,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    try:
        said, errors = process.communicate(timeout=WAIT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
    assert process.returncode == 0, errors
    return records(said)


def trained_on(hosts: Sequence[Host], url: str, folder: Path, delta: str) -> list[dict[str, Any]]:
    """Run a trainer with a rank on each of these hosts; return a record of each update."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": "29400",
        "WORLD_SIZE": str(len(hosts)),
    }

    def rank(number: int) -> subprocess.CompletedProcess[str]:
        return hosts[number].run(
            [sys.executable, *TRAINER, url, str(folder), delta],
            env={**environment, "RANK": str(number)},
            timeout_s=WAIT_S,
        )

    with ThreadPoolExecutor(len(hosts)) as pool:
        first, *_ = pool.map(rank, range(len(hosts)))
    return records(first.stdout)


def assert_each_step(updates: list[dict[str, Any]], workers: int) -> None:
    """Assert that nothing was gathered, and that tokens are transformers' with these weights."""
    assert [update["version"] for update in updates] == list(range(1, STEPS + 1))
    assert len({tuple(update["weights"]) for update in updates}) == STEPS
    for update in updates:
        assert update["gathered"] == {}
        assert update["verified"] == "arrived"
        assert len(update["sources"]) == workers
        for sources in update["sources"]:
            assert set(sources) == {str(rank) for rank in range(RANKS)}
            share = sum(sources.values()) / update["nbytes"]
            if workers == 1:
                assert share == 1
            else:
                print(f"a worker of {workers} read {share:.3f} of the model")
                assert share <= 1.1 / workers
        assert update["tokens"] == update["wanted_tokens"]
        assert update["apart"] < LARGEST_DIFFERENCE * (20 if workers > 1 else 1)  # of longer sums


@pytest.mark.parametrize(
    ("workers", "tied", "apply"),
    [(1, True, None), (1, False, "in_place"), (2, False, "staged")],
    ids=["tied", "in place", "two workers"],
)
def test_each_step_of_a_sharded_trainer(
    tmp_path: Path, workers: int, tied: bool, apply: str | None
) -> None:
    """Every bit of every weight is that of full_tensor(), and the tokens are transformers'."""
    make_model(tmp_path, tied=tied, **(LARGER if workers > 1 else {}))
    with vllm_server(tmp_path, tmp_path / "server.log", workers=workers, apply=apply) as served:
        updates = trained(served.url, tmp_path)
    assert_each_step(updates, workers)
    for update in updates:
        if workers == 1:  # two hold slices of the tensors
            assert update["compared"] > 10
            assert update["different"] == [[]]


@pytest.mark.parametrize(
    ("places", "delta"),
    [((0, 0), "off"), ((0, 1), "off"), ((0, 1), "auto")],
    ids=["one host", "two hosts", "deltas"],
)
def test_a_server_on_another_host(
    make_network: MakeNetwork, tmp_path: Path, places: tuple[int, int], delta: str
) -> None:
    """Two workers of one server, and a rank on each of `places`: over their links goes one model.

    A delta that turns out to be larger than was estimated is given up in the middle, in both
    workers, and the whole model follows: its bytes are not counted here.
    """
    make_model(tmp_path, tied=False, **LARGER)
    *trainers, there = make_network(3).hosts
    on = [trainers[place] for place in places]
    with vllm_server(tmp_path, tmp_path / "server.log", workers=2, host=there) as served:
        updates = trained_on(on, served.url, tmp_path, delta)
    assert_each_step(updates, workers=2)
    for update in updates if delta == "off" else ():
        part = update["nbytes"] / len({*places})
        for rank, left in enumerate(update["left"]):
            print(f"of its part {left / part:.4f} left the host of rank {rank}")
            assert part < left <= 1.03 * part
