"""Our plug-in with SGLang's own registry of hooks, weight updater and Qwen3 model, on a CPU.

The scheduler and the HTTP server are stand-ins: the real ones need a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weightsync as ws
from tests.integrations.vllm_workers import Served
from tests.sglang.without_gpu import start, trained
from weightsync.errors import ConfigError, ManifestMismatchError
from weightsync.integrations.sglang import plugin


class Server(Served):
    """The routes of SGLang that a sender calls, over one scheduler's own weight manager."""

    def __init__(self, manager: Any, state: Any) -> None:
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        self.version = "default"

        def answer(call: str, body: dict[str, Any]) -> dict[str, Any]:
            if call == "model_info":
                known = {"model_path": "/nowhere", "tokenizer_path": "", "is_generation": True}
                return {**known, "weight_version": self.version}
            if call == "server_info":
                return {"version": "0.5.23", "internal_states": [state().internal_state]}
            if call == "weights_checker":
                found = manager.check_weights(CheckWeightsReqInput(action=body["action"]))
                return {"success": found.success, "message": found.message}
            assert call == "update_weight_version"
            self.version = body["new_version"]
            return {"success": True}

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(length) or b"{}")
                sent = json.dumps(answer(self.path.strip("/"), body)).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(sent)))
                self.end_headers()
                self.wfile.write(sent)

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(Handler)


class Scheduler:
    """A scheduler that notes what it is told to do."""

    def __init__(self) -> None:
        self._engine_paused = False
        self.log: list[str] = []

    def pause_generation(self, request: Any) -> None:
        self.log.append(request.mode)
        self._engine_paused = True

    def continue_generation(self, request: Any) -> None:
        self.log.append("continue")
        self._engine_paused = False

    def flush_cache(self, **_: object) -> bool:
        self.log.append("flush")
        return True


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    return start(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def hooks() -> Iterator[Any]:
    """SGLang's registry after it has loaded the plug-ins that are installed."""
    from sglang.srt import plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(plugin.VARIABLE, "host")
        plugins.load_plugins()
        yield HookRegistry


@pytest.fixture
def server(model: torch.nn.Module, hooks: Any) -> Iterator[tuple[Server, Any]]:
    from sglang.srt.managers.scheduler_components import internal_state, weight_updater
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    runner: Any = SimpleNamespace(model=model)
    runner.weight_updater = WeightUpdater(
        tp_rank=0,
        device="cpu",
        gpu_id=0,
        model_config=None,
        custom_weight_loaders={},
        get_model=lambda: model,
        update_model_fields=lambda *_, **__: None,
        recapture_cuda_graph=lambda: None,
        get_model_runner=lambda: runner,
    )
    scheduler = Scheduler()
    manager = weight_updater.SchedulerWeightUpdaterManager(
        tp_worker=SimpleNamespace(model_runner=runner),
        draft_worker=None,
        memory_saver_adapter=None,
        flush_cache=scheduler.flush_cache,
        is_fully_idle=lambda **_: True,
        scheduler=scheduler,
    )
    announced = internal_state.SchedulerInternalStateController.get_internal_state

    def state() -> Any:
        return plugin.announce(SimpleNamespace(internal_state={}))

    assert announced.__wrapped__ is not None  # the hook's
    served = Server(manager, state)
    yield served, scheduler
    served.close()
    if plugin._receiver is not None:
        plugin._receiver.receiver.close()
    plugin._receiver = None


def held(model: torch.nn.Module, source: torch.nn.Module) -> bool:
    """Whether SGLang's fused parameters have the values of these weights."""
    have, want = dict(model.named_parameters()), dict(source.named_parameters())
    fused = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }

    def wanted(name: str) -> torch.Tensor:
        for whole, parts in fused.items():
            if whole in name:
                return torch.cat([want[name.replace(whole, part)] for part in parts])
        return want[name]

    return all(torch.equal(tensor, wanted(name)) for name, tensor in have.items())


def test_sglang_loads_the_plug_in(hooks: Any) -> None:
    targets = {name for name, found in hooks._hooks.items() if found}
    assert targets == set(plugin.NAMES[:2]) | {f"{plugin._SCHEDULER}.continue_generation"}
    assert targets <= hooks._patched


def test_its_own_updater_and_model_hold_each_version(
    server: tuple[Server, Any], model: torch.nn.Module
) -> None:
    served, scheduler = server
    for seed in range(1, 4):
        source = trained(seed)
        with ws.connect(source, to=f"sglang+{served.url}", takeover=True) as sender:
            report = sender.send_weights()
        assert "by shared_memory" in str(report)
        assert "staged, verified: arrived" in str(report)
        assert held(model, source)
        assert served.version == str(report.version)
    assert scheduler.log == ["retract", "flush", "continue"] * 3


def test_names_are_refused_before_any_byte(
    server: tuple[Server, Any], model: torch.nn.Module
) -> None:
    source = trained(5)
    del source.get_submodule("model.norm").weight
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(ManifestMismatchError, match=r"norm\.weight"):
        ws.connect(source, to=f"sglang+{server[0].url}").send_weights()
    assert all(map(torch.equal, before, model.parameters()))


def test_other_checks_are_sglang_s_own(server: tuple[Server, Any], model: torch.nn.Module) -> None:
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    asked = CheckWeightsReqInput(action="checksum")
    found = plugin.answer_check(lambda manager, request: (manager, request), "own", asked)
    assert found == ("own", asked)


def test_an_unknown_family_is_refused(
    server: tuple[Server, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "FAMILIES", frozenset({"OtherForCausalLM"}))
    with pytest.raises(ConfigError, match=r"family Qwen3ForCausalLM.*OtherForCausalLM"):
        ws.connect(trained(0), to=f"sglang+{server[0].url}")


def test_a_version_without_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.VARIABLE, "device")
    monkeypatch.setattr(plugin, "NAMES", ("sglang.srt.managers.scheduler.Scheduler.gone",))
    with pytest.raises(ws.BackendUnavailableError, match=r"SGLang 0.5.23 lacks .*Scheduler.gone"):
        plugin.register()


def test_a_value_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.VARIABLE, "gpu")
    with pytest.raises(ConfigError, match="device or host, not 'gpu'"):
        plugin.register()


def test_all_names_of_sglang_exist() -> None:
    assert all(plugin._exists(name) for name in plugin.NAMES)
