"""OpenRLHF's command, with Ray in a network and a process tree of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ray import sandbox


@pytest.mark.timeout(3600)
def test_with_openrlhfs_own_command() -> None:
    path = Path(__file__).with_name("command.py")
    options = ("-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default", "-o", "timeout=1200")
    said = sandbox.run("-m", "pytest", *options, path, timeout_s=3500)
    assert "7 passed" in said, said[-5000:]


@pytest.mark.parametrize(
    "reason",
    [
        "--vllm.enable_sleep: vLLM's engine on a CPU does not sleep",
        "--vllm.tensor_parallel_size 2: vLLM's workers over Ray want a GPU each",
        "--ds.packing_samples, --ds.ring_attn_size 2: flash-attn wants CUDA",
        "--ds.load_in_4bit: bitsandbytes wants CUDA",
    ],
)
def test_what_needs_a_gpu(reason: str) -> None:
    pytest.skip(reason)
