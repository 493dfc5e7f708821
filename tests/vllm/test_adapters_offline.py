"""Adapters in an `LLM` of this process: what its tables and ours hold, and what is refused.

Tests with an engine of their own come last: its end takes what that of the fixture needs.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import weightsync as ws
from tests.vllm.adapted import Unnamed, adapt, assert_told, base_of, train
from tests.vllm.offline import engine_of, generated, offline_llm
from tests.vllm.tiny import expected, make_model
from tests.vllm.victims import connect_set, train_set
from weightsync.integrations.adapter_receivers import MAX_ADAPTERS
from weightsync.integrations.adapters import CONFIG_NAME, encode_config, unload_adapter
from weightsync.integrations.vllm.actors import vllm_targets
from weightsync.integrations.vllm.adapter_names import adapter_request
from weightsync.integrations.vllm.adapter_sink import VllmAdapterSink, WorkerAdapters
from weightsync.wire.messages import StatusRequest

VERSIONS = 40


class Offline:
    """An `LLM` with LoRA on, and the PEFT model of its trainer."""

    def __init__(self, llm: Any, model: Any) -> None:
        self.llm = llm
        self.model = model

    def sender(self, name: str = "policy") -> ws.WeightSender:
        return ws.connect(ws.AdapterSource(self.model, name=name), to=vllm_targets(self.llm))

    def assert_computes(self, name: str, version: int | None = None) -> None:
        assert_told(generated(self.llm, adapter_request(name, version)), expected(self.model))

    @property
    def engine(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def manager(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.lora_manager

    @property
    def adapters(self) -> WorkerAdapters:
        found: WorkerAdapters = engine_of(self.llm)._adapters
        return found


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Offline]:
    folder = tmp_path_factory.mktemp("offline")
    base = make_model(folder, tied=True)
    options: dict[str, Any] = {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 2,
        "max_lora_rank": 8,
    }
    with offline_llm(folder, **options) as llm:
        yield Offline(llm, adapt(base))


def test_versions_in_a_row_fill_no_table(offline: Offline) -> None:
    versions = type(offline.engine).weightsync_versions(offline.engine)
    with offline.sender() as sender:
        for seed in range(VERSIONS):
            train(offline.model, seed)
            sender.send_weights()
            if seed % 4 == 0:
                offline.assert_computes("policy")
            assert len(versions.served["policy"]) <= 3
            assert len(offline.adapters.held()["policy"]) <= 3
            assert len(offline.manager.list_adapters()) <= 2
        assert versions._accepted == {}
        assert_told(generated(offline.llm), base_of(offline.model))


def test_an_llm_generates_on_after_a_version_that_is_gone(offline: Offline) -> None:
    with offline.sender() as sender:
        sender.send_weights()
        first = sender.version
        for seed in (1, 2, 3, 4):
            train(offline.model, seed)
            sender.send_weights()
        with pytest.raises(ws.ConfigError, match=rf"no adapter 'policy@{first}' is held"):
            generated(offline.llm, adapter_request("policy", first))
        with pytest.raises(ws.ConfigError, match="'nobody' was never sent"):
            generated(offline.llm, adapter_request("nobody"))
        offline.assert_computes("policy")
        offline.assert_computes("policy", sender.version)


def test_a_lease_keeps_a_version_until_its_request_ends(offline: Offline) -> None:
    """Requests that wait, too: vLLM has not loaded the adapter of those."""
    from vllm import SamplingParams

    engine, model = offline.llm.llm_engine, offline.model
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=1, ignore_eos=True)
    with offline.sender() as sender:
        train(model, 1)
        sender.send_weights()
        wanted = expected(model)
        prompt = {"prompt_token_ids": [5, 77, 130, 42, 9]}
        engine.add_request("waits", prompt, params, lora_request=adapter_request("policy"))
        for seed in range(2, 8):
            train(model, seed)
            sender.send_weights()
        assert len(offline.adapters.held()["policy"]) == 4
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        (done,) = [output for output in outputs if output.finished]
        assert list(done.outputs[0].token_ids) == wanted[0]
        sender.send_weights()
        assert len(offline.adapters.held()["policy"]) == 3


def test_what_fails_to_be_built_changes_nothing(offline: Offline) -> None:
    """The config tells another rank than the tensors have, which only the staged bytes show."""
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    config = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
    tensors = {f"{name}A.weight": torch.ones(4, 64), f"{name}B.weight": torch.ones(128, 4)}
    with offline.sender() as sender:
        train(offline.model, 9)
        sender.send_weights()
        version = sender.version
    source = Unnamed({**tensors, CONFIG_NAME: as_tensor(config)})
    with (
        ws.connect(source, to=vllm_targets(offline.llm)) as sender,
        pytest.raises(ws.WeightSyncError, match=r"other ranks.*q_proj \(rank 8, tensors of rank 4"),
    ):
        sender.send_weights()
    offline.assert_computes("policy", version)
    for aside in ({"use_qalora": True}, {"arrow_config": {"top_k": 2}}):
        source = Unnamed({**tensors, CONFIG_NAME: as_tensor({**config, "r": 4, **aside})})
        with (
            ws.connect(source, to=vllm_targets(offline.llm)) as sender,
            pytest.raises(ws.WeightSyncError, match=f"does not compute {next(iter(aside))}"),
        ):
            sender.send_weights()
    offline.assert_computes("policy")
    with offline.sender() as sender:
        train(offline.model, 10)
        sender.send_weights()
        offline.assert_computes("policy")


def as_tensor(config: dict[str, Any]) -> torch.Tensor:
    return torch.tensor(list(encode_config(config)), dtype=torch.uint8)


def test_base_and_adapter_of_a_set(offline: Offline) -> None:
    """Through `vllm_targets`, which each part of the set gets a transport of its own from."""
    with connect_set(offline.model, vllm_targets(offline.llm)) as sender:
        for seed in (21, 22):
            train_set(offline.model, seed)
            reports = sender.send_weights()
            assert len({report.version for report in reports}) == 1
            assert_told(generated(offline.llm), base_of(offline.model))
            offline.assert_computes("policy")


def test_unloading_frees_the_versions_and_the_receiver(offline: Offline) -> None:
    with offline.sender("passing") as sender:
        sender.send_weights()
        offline.assert_computes("passing")
    before = len(offline.manager.list_adapters())
    unload_adapter(vllm_targets(offline.llm), "passing")
    unload_adapter(vllm_targets(offline.llm), "never-sent")
    assert "passing" not in offline.adapters.held()
    assert "passing" not in offline.adapters._receivers.names
    assert len(offline.manager.list_adapters()) == before - 1
    with pytest.raises(ws.ConfigError, match="never sent"):
        generated(offline.llm, adapter_request("passing"))


def test_an_adapter_that_is_unloaded_under_a_request_stays_unloaded(offline: Offline) -> None:
    """The request ends with its version, whatever a sender of that name asks meanwhile."""
    from vllm import SamplingParams

    engine, model = offline.llm.llm_engine, offline.model
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=1, ignore_eos=True)
    prompt = {"prompt_token_ids": [5, 77, 130, 42, 9]}
    with offline.sender("passing") as sender:
        train(model, 1)
        sender.send_weights()
        wanted = expected(model)
        engine.add_request("at-work", prompt, params, lora_request=adapter_request("passing"))
        outputs = engine.step()
        unload_adapter(vllm_targets(offline.llm), "passing")
        (transport,) = vllm_targets(offline.llm)
        with closing(transport.below("adapters/passing")) as asked:
            asked.call(StatusRequest(), timeout_s=10)
        for named in (adapter_request("passing"), adapter_request("passing", sender.version)):
            with pytest.raises(ws.ConfigError, match="never sent"):
                generated(offline.llm, named)
        assert len(offline.adapters._held) > 0  # the request has its version
        while engine.has_unfinished_requests():
            outputs += engine.step()
        (done,) = [output for output in outputs if output.finished]
        assert list(done.outputs[0].token_ids) == wanted[0]
        train(model, 2)
        sender.send_weights()
        offline.assert_computes("passing")
    unload_adapter(vllm_targets(offline.llm), "passing")


def test_names_that_hold_nothing_give_their_places_to_others(offline: Offline) -> None:
    with offline.sender() as sender:
        sender.send_weights()
        wrong = Unnamed({"base_model.model.lm_head.bias": torch.ones(2)})
        for i in range(2 * MAX_ADAPTERS):
            wrong.receiver_path = f"adapters/refused-{i}"
            with pytest.raises(ws.WeightSyncError):
                ws.connect(wrong, to=vllm_targets(offline.llm))
        names = offline.adapters._receivers.names
        assert len(names) == MAX_ADAPTERS
        assert "policy" in names
        sender.send_weights()
        offline.assert_computes("policy")


def test_what_is_built_goes_with_an_update_that_is_given_up(offline: Offline) -> None:
    with offline.sender("passing") as sender:
        pairs = dict(ws.AdapterSource(offline.model, name="passing").tensors())
        with suppress(ZeroDivisionError), sender.update() as update:
            update.send(pairs.items())
            raise ZeroDivisionError
        sink = offline.adapters.receiver("passing").sink
        assert isinstance(sink, VllmAdapterSink)
        assert sink.take() is None


def test_an_engine_with_lora_in_its_vision_tower_takes_no_adapter(
    offline: Offline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cache of images is keyed by the adapter's name alone."""
    runner = offline.llm.llm_engine.model_executor.driver_worker.worker.model_runner
    monkeypatch.setattr(offline.manager.lora_config, "enable_tower_connector_lora", True)
    with pytest.raises(ws.ConfigError, match="enable_tower_connector_lora"):
        WorkerAdapters(runner, engine_of(offline.llm).receiver)


def test_a_set_to_an_engine_in_a_process_of_its_own(tmp_path: Path) -> None:
    """Its client has one socket, which the threads of two parts must not use at once."""
    command = [sys.executable, "-m", "tests.vllm.default_llm", str(tmp_path), "40"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "right" in done.stdout.splitlines()


def test_a_number_that_comes_again_is_another_adapter(tmp_path: Path) -> None:
    """Requests of both are in one step: vLLM takes adapters of one name for the same."""
    from vllm import SamplingParams

    model = adapt(make_model(tmp_path, tied=False))
    prompt = {"prompt_token_ids": [5, 77, 130, 42, 9]}
    params = SamplingParams(temperature=0, max_tokens=30, logprobs=1, ignore_eos=True)
    wanted: dict[str, list[int]] = {}
    with (
        offline_llm(tmp_path, enable_lora=True, max_loras=2, max_lora_rank=8) as llm,
        ws.connect(ws.AdapterSource(model, name="policy"), to=vllm_targets(llm)) as sender,
    ):
        engine = llm.llm_engine
        for seed, key in enumerate(("before", "after")):
            train(model, seed)
            sender.send_weights(version=1, rewind=seed > 0)
            wanted[key] = expected(model, count=30)[0]
            engine.add_request(key, prompt, params, lora_request=adapter_request("policy"))
            for _ in range(3):
                engine.step()
        told: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            told |= {
                o.request_id: list(o.outputs[0].token_ids) for o in engine.step() if o.finished
            }
        assert told == wanted
    assert wanted["before"] != wanted["after"]


def test_a_pattern_of_alphas_is_computed_or_refused(tmp_path: Path) -> None:
    """vLLM before 0.32 does not know it, and computes every layer with lora_alpha."""
    pattern = {"layers.0.self_attn.q_proj": 64}
    model = adapt(make_model(tmp_path, tied=False), alpha_pattern=pattern)
    train(model, 1)
    with (
        offline_llm(tmp_path, enable_lora=True, max_lora_rank=8) as llm,
        ws.connect(ws.AdapterSource(model, name="policy"), to=vllm_targets(llm)) as sender,
    ):
        try:
            sender.send_weights()
        except ws.WeightSyncError as refused:
            assert "alpha_pattern" in str(refused)  # noqa: PT017  # one of two right outcomes
            assert_told(generated(llm), base_of(model))
        else:
            assert_told(generated(llm, adapter_request("policy")), expected(model))


@pytest.mark.timeout(300)
def test_an_engine_without_lora_says_how_to_start_it(tmp_path: Path) -> None:
    base = make_model(tmp_path, tied=False)
    model = adapt(base)
    with offline_llm(tmp_path) as llm:
        with pytest.raises(ws.ConfigError, match=r"without LoRA.*--enable-lora"):
            ws.connect(ws.AdapterSource(model, name="policy"), to=vllm_targets(llm))
        assert_told(generated(llm), base_of(model))
