"""Real vLLM servers that read the shards of two ranks under torchrun, which gather nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.served import vllm_server
from tests.vllm.shard_trainer import STEPS
from tests.vllm.tiny import LARGEST_DIFFERENCE, make_model

pytestmark = pytest.mark.timeout(900)
WAIT_S = 400.0
LARGER = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "vocab_size": 4096,
}
"""A model of many copy units: half of it, of which a worker reads a unit more at each end."""
RANKS = 2


def trained(url: str, folder: Path) -> list[dict[str, Any]]:
    """Run the trainer to its end; return a record of each update. No process outlives this."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
        *("-m", "tests.vllm.shard_trainer", url, str(folder)),
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
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


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
    assert [update["version"] for update in updates] == list(range(1, STEPS + 1))
    assert len({tuple(update["weights"]) for update in updates}) == STEPS
    for update in updates:
        assert update["gathered"] == {}
        assert update["verified"] == "arrived"
        assert len(update["sources"]) == workers
        for sources in update["sources"]:
            assert set(sources) == {str(rank) for rank in range(RANKS)}
            read = sum(sources.values())
            if workers == 1:
                assert read == update["nbytes"]
            else:
                share = read / update["nbytes"]
                print(f"a worker of {workers} read {share:.3f} of the model")
                assert share <= 1.1 / workers
        assert update["tokens"] == update["wanted_tokens"]
        assert update["apart"] < LARGEST_DIFFERENCE * (20 if workers > 1 else 1)  # of longer sums
        if workers == 1:  # two hold slices of the tensors
            assert update["compared"] > 10
            assert update["different"] == [[]]
