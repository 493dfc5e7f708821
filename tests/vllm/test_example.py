"""examples/vllm_trainer.py, run as it stands beside a server as it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm.served import vllm_server
from tests.vllm.tiny import make_model

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_the_example_of_vllms_trainer_api(tmp_path: Path) -> None:
    make_model(tmp_path / "model", tied=True)
    with vllm_server(tmp_path / "model", tmp_path / "server.log") as served:
        ended = subprocess.run(
            [sys.executable, ROOT / "examples/vllm_trainer.py", tmp_path / "model", served.url],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert ended.returncode == 0, ended.stderr[-4000:]
    told = [
        line for line in ended.stdout.splitlines() if "trainer's" in line
    ]  # vLLM logs there, too
    assert told == ["the server's answer is the trainer's: True"] * 3
