"""The names of vLLM that we use, compared with the installed vLLM."""

from __future__ import annotations

import ast
import logging
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import vllm

import weightsync as ws
from weightsync.integrations import vllm as ours
from weightsync.integrations.vllm import names, plugin
from weightsync.integrations.vllm import server as vllm_server

FOLDER = Path(ours.__path__[0])


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    """Each test asks vLLM again, and logs again."""
    caches = (names.missing, names.warn, names.note_version)
    for call in caches:
        call.cache_clear()
    yield
    for call in caches:
        call.cache_clear()


@pytest.mark.parametrize("part", list(names.USED))
def test_the_installed_vllm_has_all_names(part: names.Part) -> None:
    assert names.missing(part) == ()


_IN_OBJECTS = {
    "BaseLinearLayerWithLoRA.base_layer",
    "CompletionOutput.token_ids",
    "EngineCore.scheduler",
    "LinearBase.input_size",
    "LinearBase.output_size",
    "LoRALayerWeights.lora_a",
    "LoRALayerWeights.lora_b",
    "LoRALayerWeights.rank",
    "LoRAModel.loras",
    "LoRAModelManager.model",
    "LoRAModelManager.modules",
    "LoRAModelManager.packed_modules",
    "LoRAModelRunnerMixin.lora_manager",
    "MergedColumnParallelLinear.output_sizes",
    "OpenAIServingModels.lora_requests",
    "QKVParallelLinear.head_size",
    "QKVParallelLinear.output_sizes",
    "QKVParallelLinear.total_num_kv_heads",
    "Request.lora_request",
    "RequestOutput.outputs",
    "Scheduler.requests",
    "VocabParallelEmbedding.embedding_dim",
    "VocabParallelEmbedding.org_vocab_size",
    "WorkerLoRAManager._adapter_manager",
    "WorkerLoRAManager.lora_config",
    "WorkerLoRAManager.max_position_embeddings",
    "WorkerLoRAManager.vocab_size",
    "EngineCore.model_executor",
    "EngineCore.vllm_config",
    "EngineCoreProc.input_queue",
    "HTTPVLLMWeightSyncClient.base_url",
    "LayerReloadingInfo.kernel_non_persistent_buffers",
    "LayerReloadingInfo.loaded_weights",
    "LayerReloadingInfo.restore_device",
    "LayerReloadingInfo.restore_metadata",
    "ModelConfig.hf_config",
    "ModelConfig.hf_text_config",
    "RayVLLMWeightSyncClient.handles",
    "TrainerInitInfo.rank",
    "Worker._weight_update_active",
    "Worker.weight_transfer_engine",
    "make_online_process_loader.online_process_loader",
}
"""Names that the classes do not have, only what is made of them."""


def test_what_the_sources_say_is_what_an_import_finds() -> None:
    """Or a name that is gone would be found in a comment."""
    not_found = {
        name
        for part in names.USED.values()
        for module, used in part.items()
        for name in used
        if not names.is_importable(module, name)
    }
    # A property of the class since 0.31.
    assert not_found - {"Executor.is_sleeping"} == _IN_OBJECTS


def imported(file: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "vllm":
            yield from ((str(node.module), alias.name) for alias in node.names)


def test_all_that_our_modules_import_is_listed() -> None:
    used = {
        (module, name.partition(".")[0])
        for part in names.USED.values()
        for module, listed in part.items()
        for name in listed
    }
    modules = {module for module, _ in used}
    found = {pair for file in FOLDER.glob("*.py") for pair in imported(file)}
    assert len(found) > 15
    left = [(module, name) for module, name in found - used if f"{module}.{name}" not in modules]
    assert left == []


def test_a_name_that_is_gone_is_named_when_the_plugin_is_loaded_and_the_engine_refuses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reload = "vllm.model_executor.model_loader.reload.layerwise"
    used = {reload: ("get_layerwise_info", "gone_a", "LayerReloadingInfo.gone_b")}
    monkeypatch.setitem(names.USED, "updates", used)
    with caplog.at_level(logging.WARNING, "weightsync"):
        plugin.register()
        plugin.register()
    assert [record.getMessage() for record in caplog.records] == [
        f"vLLM {vllm.__version__} has no {reload}.LayerReloadingInfo.gone_b, {reload}.gone_a: a "
        "server with weightsync's engine does not start; weightsync was tested with vLLM 0.29 to "
        "0.33"
    ]
    engine = "weightsync.integrations.vllm.engine"
    monkeypatch.delitem(sys.modules, engine, raising=False)
    with pytest.raises(ws.BackendUnavailableError, match=r"gone_a: weightsync's engine cannot"):
        import_module(engine)


def test_without_trainer_engines_the_trainer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    api = {"vllm.distributed.weight_transfer": ("NoWeightTransferTrainerFactory",)}
    monkeypatch.setitem(names.USED, "trainer", api)
    monkeypatch.delitem(sys.modules, "weightsync.integrations.vllm.trainer", raising=False)
    with pytest.raises(
        ws.BackendUnavailableError,
        match=rf"vLLM {re.escape(vllm.__version__)} has no .*NoWeight\S+: its trainer API cannot",
    ):
        import_module("weightsync.integrations.vllm.trainer")


@pytest.mark.parametrize(
    ("given", "logged"),
    [("0.28.1", True), ("0.3.2", True), ("0.34.0", True), ("0.29.0", False), ("0.32.1+cpu", False)],
)
def test_a_version_that_was_not_tested_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, given: str, logged: bool
) -> None:
    monkeypatch.setattr(vllm, "__version__", given)
    with caplog.at_level(logging.WARNING, "weightsync"):
        plugin.register()
        plugin.register_trainer()
    message = f"weightsync was tested with vLLM 0.29 to 0.33, and this is vLLM {given}"
    assert [record.getMessage() for record in caplog.records] == [message] * logged


def test_this_version_is_one_of_those_in_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    rows = re.findall(r"^\| (0\.\d+)(?:\.\d+)? \|", page, re.MULTILINE)
    assert tuple(rows) == names.TESTED
    assert ".".join(vllm.__version__.split(".")[:2]) in rows


def asked_paths(tree: ast.AST) -> Iterator[str]:
    """Yield the paths that our client of a server's endpoints asks for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "request":
            text = node.args[0]
            first = text.values[0] if isinstance(text, ast.JoinedStr) else text
            assert isinstance(first, ast.Constant)
            yield "/" + str(first.value).partition("?")[0]


def test_the_installed_vllm_has_all_endpoints() -> None:
    asked = set(asked_paths(ast.parse(Path(str(vllm_server.__file__)).read_bytes())))
    assert {"/collective_rpc", "/pause", "/resume", "/is_paused", "/version"} < asked
    text = "".join(
        file.read_text() for file in Path(vllm.__path__[0], "entrypoints").rglob("api_router.py")
    ) + "".join(
        file.read_text() for file in Path(vllm.__path__[0], "entrypoints").rglob("basic.py")
    )
    served = set(re.findall(r"@router\.(?:get|post)\(\s*\"(/\w+)\"", text))
    assert asked - served == set()
