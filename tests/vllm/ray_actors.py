"""Tests of Ray actors that are vLLM's engines. Run by test_ray_actors.py, in namespaces of its
own."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from vllm import LLM, AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor import Executor

import weightsync as ws
from tests.ray.sandbox import start
from tests.vllm.adapted import adapt, assert_told, base_of, train
from tests.vllm.tiny import (
    LARGEST_DIFFERENCE,
    PROMPT,
    TOKENS,
    change,
    expected,
    largest_difference,
    make_model,
)
from weightsync.integrations.vllm.actors import vllm_targets
from weightsync.integrations.vllm.adapter_names import adapter_request

WAIT_S = 240.0
ENGINE = {
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "weight_transfer_config": {"backend": "weightsync"},
}
PARAMS = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=1, ignore_eos=True)

Said = tuple[list[int], list[float]]


def said(output: Any) -> Said:
    pairs = zip(output.token_ids, output.logprobs, strict=True)
    return list(output.token_ids), [float(told[token].logprob) for token, told in pairs]


class Offline(LLM):  # type: ignore[misc]  # vLLM has no types here
    """An LLM, and a method that returns plain data."""

    def continuation(self, adapter: str = "") -> Said:
        prompt, lora = {"prompt_token_ids": PROMPT}, adapter_request(adapter) if adapter else None
        outputs = self.generate([prompt], PARAMS, use_tqdm=False, lora_request=lora)
        return said(outputs[0].outputs[0])


class Online(AsyncLLM):  # type: ignore[misc]  # same
    """An AsyncLLM, made as vLLM's own examples of actors make it."""

    def __init__(self, model: str, **options: Any) -> None:
        config = AsyncEngineArgs(model=model, **options).create_engine_config()
        super().__init__(
            vllm_config=config, executor_class=Executor.get_class(config), log_stats=False
        )

    async def continuation(self, adapter: str = "") -> Said:
        prompt, lora = {"prompt_token_ids": PROMPT}, adapter_request(adapter) if adapter else None
        last = None
        async for output in self.generate(prompt, PARAMS, request_id="one", lora_request=lora):
            last = output
        await asyncio.sleep(0)
        assert last is not None
        return said(last.outputs[0])


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    start()
    yield
    ray.shutdown()


@pytest.mark.parametrize("kind", [Offline, Online], ids=["LLM", "AsyncLLM"])
def test_actors_compute_what_transformers_does(kind: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), tied=True)
        own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0" if kind is Offline else "1"}
        actor = ray.remote(kind).options(runtime_env={"env_vars": own}).remote(folder, **ENGINE)
        try:
            with ws.connect(model, to=vllm_targets(actor)) as sender:
                for seed in (1, 2):
                    change(model, seed)
                    sender.send_weights()
                    check(actor, model)
                version = ray.get(actor.get_weight_version.remote(), timeout=WAIT_S)
                assert version == str(sender.version)
                if kind is Online:
                    assert ray.get(actor.is_paused.remote(), timeout=WAIT_S) is False
        finally:
            ray.kill(actor)


@pytest.mark.parametrize("kind", [Offline, Online], ids=["LLM", "AsyncLLM"])
def test_actors_take_adapters(kind: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = adapt(make_model(Path(folder), tied=False))
        own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0" if kind is Offline else "1"}
        remote: Any = ray.remote(kind).options(runtime_env={"env_vars": own})
        actor = remote.remote(folder, enable_lora=True, max_loras=2, **ENGINE)
        try:
            source = ws.AdapterSource(model, name="policy")
            with ws.connect(source, to=vllm_targets(actor)) as sender:
                for seed in (1, 2):
                    train(model, seed)
                    sender.send_weights()
                    found = ray.get(actor.continuation.remote("policy"), timeout=WAIT_S)
                    assert_told(found, expected(model))
            assert_told(ray.get(actor.continuation.remote(), timeout=WAIT_S), base_of(model))
        finally:
            ray.kill(actor)


def test_vllms_trainer_api_reaches_every_actor_of_its_client() -> None:
    from vllm.distributed.weight_transfer import (
        RayVLLMWeightSyncClient,
        WeightTransferTrainerFactory,
    )

    from weightsync.integrations.vllm.trainer import WeightsyncTrainerInitInfo

    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), tied=True)
        own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        remote: Any = ray.remote(Offline).options(runtime_env={"env_vars": own})
        actors = [remote.remote(folder, **ENGINE) for _ in range(2)]
        try:
            engine: Any = WeightTransferTrainerFactory.trainer_init(
                WeightsyncTrainerInitInfo(rank=0),
                client=RayVLLMWeightSyncClient(actors),
                source=model,
            )
            for seed in (1, 2):
                change(model, seed)
                engine.send_weights()
                for actor in actors:
                    check(actor, model)
            engine.shutdown()
        finally:
            for actor in actors:
                ray.kill(actor)


@pytest.mark.parametrize("packed", [False, True])
def test_the_known_names_reach_an_actor(*, packed: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), tied=False)
        own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        actor: Any = (
            ray.remote(Offline).options(runtime_env={"env_vars": own}).remote(folder, **ENGINE)
        )
        given = {"send_mode": "ray", "llm_handle": actor, "packed": packed}
        try:
            ray.get(actor.init_weight_transfer_engine.remote({"init_info": {}}), timeout=WAIT_S)
            for seed in (1, 2):
                change(model, seed)
                ray.get(actor.start_weight_update.remote(), timeout=WAIT_S)
                ws.IPCWeightTransferEngine.trainer_send_weights(model.named_parameters(), given)
                ray.get(actor.finish_weight_update.remote(), timeout=WAIT_S)
                check(actor, model)
        finally:
            ray.kill(actor)


def check(actor: Any, model: torch.nn.Module) -> None:
    tokens, logprobs = ray.get(actor.continuation.remote(), timeout=WAIT_S)
    wanted, wanted_logprobs = expected(model)
    assert tokens == wanted
    assert largest_difference(logprobs, wanted_logprobs) < LARGEST_DIFFERENCE


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
