"""OpenRLHF's own command on a CPU, with its actors in Ray. Run by test_command.py, in a sandbox.

Two ranks of DeepSpeed train a tiny model, and a vLLM generates. What OpenRLHF saves at the end is
compared with what the engine holds then.
"""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.vllm.tiny import held, make_model
from weightsync.integrations.openrlhf import __main__ as command
from weightsync.integrations.vllm.actors import vllm_targets
from weightsync.tensors import as_bytes
from weightsync.weights.copying.fingerprint import mix64, to_hex
from weightsync.wire.messages import CheckReply, CheckRequest, Status, StatusRequest

WAIT_S = 600.0
PROMPTS, BATCH = 8, 4
EXAMPLES_PROMPTS = 16
EXAMPLE = Path(__file__).parents[2] / "examples" / "openrlhf_grpo.py"
OPTIONS = {
    "algo.advantage.estimator": "reinforce",
    "algo.kl.init_coef": 0,
    "actor.adam.lr": 1e-2,
    "actor.num_gpus_per_node": 2,
    "data.input_key": "input",
    "data.max_len": 64,
    "ds.attn_implementation": "eager",
    "rollout.batch_size": BATCH,
    "rollout.max_new_tokens": 16,
    "train.batch_size": BATCH,
    "vllm.gpu_memory_utilization": 0.1,
    "vllm.num_engines": 1,
}
OF_A_CPU = (
    "actor.adam.lr",
    "ds.attn_implementation",
    "rollout.max_new_tokens",
    "vllm.gpu_memory_utilization",
    "vllm.num_engines",
)
SPLIT = ["--ds.tensor_parallel_size", "2", "--train.batch_size", "2", "--rollout.batch_size", "2"]
PARTIAL = ["--train.async_enable", "--train.partial_rollout_enable"]
CASES = {
    "zero-2": ["--ds.zero_stage", "2", "--vllm.enable_prefix_caching"],
    "zero-3": ["--ds.zero_stage", "3"],
    "adapters": ["--ds.zero_stage", "2", "--ds.lora.rank", "4"],
    "tensor-parallel": ["--ds.zero_stage", "1", *SPLIT],
    "partial-rollouts": ["--ds.zero_stage", "0", *PARTIAL],
}


@pytest.fixture(scope="module", autouse=True)
def node() -> Iterator[None]:
    """One node of Ray, which says that it has GPUs."""
    ray.init(
        num_cpus=64,
        num_gpus=32,
        object_store_memory=80 << 20,
        include_dashboard=False,
        runtime_env={"worker_process_setup_hook": "tests.openrlhf.on_cpu.pretend"},
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the tokens that OpenRLHF needs, prompts and a reward."""
    made = tmp_path_factory.mktemp("model")
    make_model(made, tied=False)
    tokenizer: Any = AutoTokenizer.from_pretrained(made)
    tokenizer.add_special_tokens({"eos_token": "<eos>", "pad_token": "<pad>"})
    tokenizer.save_pretrained(made)
    prompts = [json.dumps({"input": f"hello {i}"}) for i in range(PROMPTS)]
    (made / "prompts.jsonl").write_text("\n".join(prompts))
    return made


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The engines that OpenRLHF makes, which live on when its command has ended."""
    import openrlhf.trainer.ray as theirs

    found: list[Any] = []
    make = theirs.create_vllm_engines

    def kept(*args: Any, **kwargs: Any) -> list[Any]:
        found[:] = make(*args, **kwargs)
        return found

    monkeypatch.setattr(theirs, "create_vllm_engines", kept)
    yield found
    for engine in found:
        ray.kill(engine)


def run(folder: Path, into: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]) -> None:
    """Run OpenRLHF's command with weightsync, as a shell would."""
    given = OPTIONS | {
        "actor.model_name_or_path": folder,
        "ckpt.output_dir": into / "saved",
        "ckpt.path": into / "checkpoints",
        "data.prompt_dataset": folder / "prompts.jsonl",
        "reward.remote_url": EXAMPLE,
    }
    options = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    module = "openrlhf.cli.train_ppo_ray"
    monkeypatch.setattr(sys, "argv", ["-", module, "--vllm.enforce_eager", *options, *more])
    command.main()


def run_example(folder: Path, into: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the example on the CPU, with its own prompts, reward and batches."""
    given = {name: OPTIONS[name] for name in OF_A_CPU} | {
        "actor.model_name_or_path": folder,
        "ckpt.output_dir": into / "saved",
        "ckpt.path": into / "checkpoints",
    }
    options = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--vllm.enforce_eager", *options])
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def saved(folder: Path, into: Path) -> Any:
    """Return the model that OpenRLHF has saved, in the dtype of its engines."""
    if not (into / "adapter_config.json").exists():
        return AutoModelForCausalLM.from_pretrained(into, dtype=torch.bfloat16)
    from peft import PeftModel

    base: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    adapted: Any = PeftModel.from_pretrained(base.float(), into)
    return adapted.merge_and_unload().to(torch.bfloat16)


def version_of(engine: Any) -> int:
    """Return the version of the engine's weights."""
    (worker,) = vllm_targets(engine)
    status = worker.call(StatusRequest(), timeout_s=WAIT_S)
    worker.close()
    assert isinstance(status, Status)
    return status.version


def differing(engine: Any, model: Any) -> list[str]:
    """Return the names of the engine's weights that are not those of a model."""
    wanted = {
        name: to_hex(mix64(as_bytes(tensor.detach().contiguous())))
        for name, tensor in held(model).items()
    }
    (worker,) = vllm_targets(engine)
    answer = worker.call(CheckRequest(), timeout_s=WAIT_S)
    worker.close()
    assert isinstance(answer, CheckReply)
    return [name for name in wanted if answer.checksums[name] != wanted[name]]


def assert_refuses_openrlhfs_own_calls(engine: Any) -> None:
    for call in ("init_process_group", "update_weight", "update_weight_cuda_ipc"):
        with pytest.raises(ray.exceptions.RayTaskError) as caught:
            ray.get(getattr(engine, call).remote(name="x"), timeout=WAIT_S)
        assert re.search(rf"ConfigError: {call}: this engine takes weights by", str(caught.value))


@pytest.mark.parametrize("case", CASES)
def test_the_engine_holds_what_openrlhf_saves(
    case: str,
    folder: Path,
    tmp_path: Path,
    engines: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run(folder, tmp_path, monkeypatch, CASES[case])
    (engine,) = engines
    model = saved(folder, tmp_path / "saved")
    assert differing(engine, model) == []
    start = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert len(differing(engine, start)) > 5, "nothing was trained"
    assert ray.get(engine.is_paused.remote(), timeout=WAIT_S) is False
    assert version_of(engine) == PROMPTS // (2 if case == "tensor-parallel" else BATCH)
    assert_refuses_openrlhfs_own_calls(engine)


def test_the_example(
    folder: Path, tmp_path: Path, engines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_example(folder, tmp_path, monkeypatch)
    (engine,) = engines
    assert differing(engine, saved(folder, tmp_path / "saved")) == []
    assert version_of(engine) == EXAMPLES_PROMPTS // BATCH


def test_an_error_of_a_rank_is_one_line_of_the_command(
    folder: Path, tmp_path: Path, engines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        run(folder, tmp_path, monkeypatch, ["--ds.zero_stage", "3", "--ds.lora.rank", "4"])
    assert "ConfigError: --ds.lora.rank with DeepSpeed's ZeRO-3: an adapter" in str(caught.value)
