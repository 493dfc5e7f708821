"""An `LLM` in this process, the cheapest real vLLM there is."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.vllm.tiny import LARGEST_DIFFERENCE, PROMPT, TOKENS, expected, largest_difference

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


@contextmanager
def offline_llm(folder: Path, dtype: str = "float32", **options: Any) -> Iterator[Any]:
    """Start vLLM on the model in `folder`, with our engine."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    _hide_llvmlite()
    llm = LLM(
        str(folder),
        enforce_eager=True,
        dtype=dtype,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        weight_transfer_config={"backend": "weightsync"},
        **options,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def _hide_llvmlite() -> None:
    """Let vLLM's search for Triton kernels pass over llvmlite, which our deltas import.

    Where Triton is installed, vLLM 0.32 on a CPU calls `.get` of the `__dict__` of every attribute
    of every module. llvmlite's library answers for any attribute, and a function has no `.get`.
    """
    ffi = sys.modules.get("llvmlite.binding.ffi")
    if ffi is not None:
        ffi.lib._fntab["__dict__"] = {}


def generated(llm: Any, adapter: Any = None) -> tuple[list[int], list[float]]:
    """Return vLLM's greedy continuation of PROMPT, and each token's log-probability."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=1, ignore_eos=True)
    prompt = {"prompt_token_ids": PROMPT}
    output = llm.generate([prompt], params, use_tqdm=False, lora_request=adapter)[0].outputs[0]
    pairs = zip(output.token_ids, output.logprobs, strict=True)
    return list(output.token_ids), [float(told[token].logprob) for token, told in pairs]


def assert_computes(llm: Any, model: torch.nn.Module) -> None:
    """Assert that vLLM generates as transformers does with these weights."""
    tokens, logprobs = generated(llm)
    wanted, wanted_logprobs = expected(model)
    assert tokens == wanted
    difference = largest_difference(logprobs, wanted_logprobs)
    assert difference < LARGEST_DIFFERENCE
    print(f"largest difference of log-probabilities: {difference:.1e}")


def engine_of(llm: Any) -> Any:
    """Return our engine inside the worker of this process."""
    executor = llm.llm_engine.model_executor
    return executor.driver_worker.worker.weight_transfer_engine
