"""`weightsync certify` on real vLLM servers of several architectures, and what it finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.architectures import ARCHITECTURES, make_checkpoints
from tests.vllm.served import vllm_server
from tests.vllm.versions import CONVOLUTION
from weightsync.integrations.certificate import PROMPTS, Server, Snapshot, differences

pytestmark = pytest.mark.timeout(600)


def certify(url: str, to: Path) -> tuple[int, Any]:
    """Run the verb as a user does; return its exit code and its JSON."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-m", "weightsync", "certify", url, "--to", str(to), "--json"],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.stdout, done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        *(
            pytest.param(name, 1, marks=CONVOLUTION if "LFM2" in name else ())
            for name in ARCHITECTURES
        ),
        ("Llama, untied", 2),
    ],
)
def test_a_server_is_equal_to_a_cold_one_after_each_update(
    name: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if workers > 1:  # the cold server inherits it
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    first, second = make_checkpoints(name, tmp_path)
    with vllm_server(first, tmp_path / "server.log", workers=workers) as served:
        began = time.monotonic()
        code, found = certify(served.url, second)
        took = time.monotonic() - began
    assert "steps" in found, found
    assert [step["differences"] for step in found["steps"]] == [[]] * 4
    assert code == 0
    assert found["equal"] is True
    assert [step["checkpoint"] for step in found["steps"]] == ["B", "A", "B", "A"]
    assert all(step["checked"] > 10 for step in found["steps"])
    checked = found["steps"][0]["checked"]
    print(f"{name}, {workers}: {checked} tensors, {len(PROMPTS)} prompts, {took:.0f} s")


def test_what_differs_is_named(tmp_path: Path) -> None:
    first, second = make_checkpoints("Qwen3, tied", tmp_path)
    with vllm_server(first, tmp_path / "server.log") as served:
        server = Server(served.url)
        held = server.look()
        assert differences(held, held) == []
        changed = server.look()
        name = "model.layers.1.mlp.down_proj.weight"
        cold = Snapshot(
            0,
            {**held.checksums, name: "0" * 16},
            [["x", *held.tokens[0][1:]], *held.tokens[1:]],
            held.logprobs,
        )
        told = differences(changed, cold)
        assert told[0].startswith(f"{name}: ")
        assert told[1].startswith("prompt 0, token 0: ")
        assert len(told) == 2
        code, found = certify(served.url, tmp_path / "nothing")
        assert code == 2
        assert "nothing does not exist" in found["error"]["message"]
        assert server.look() == held
        server.send(_source(second), timeout_s=30)
        code, found = certify(served.url, second)
        assert code == 2
        assert "holds version 1" in found["error"]["message"]


def _source(path: Path) -> Any:
    from weightsync.weights.sources.safetensors_source import SafetensorsSource

    return SafetensorsSource(path)
