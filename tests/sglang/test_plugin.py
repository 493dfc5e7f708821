"""Our plug-in with SGLang's own registry of hooks, weight updater and Qwen3 model, on a CPU.

The scheduler and the HTTP server are stand-ins: the real ones need a GPU.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
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
from weightsync.integrations.sglang.memory import ROUND


class Server(Served):
    """The routes of SGLang that a sender calls, over one scheduler's own weight manager."""

    def __init__(self, manager: Any, state: Any) -> None:
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        self.version = "default"
        self.manager = manager

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
        assert not request.torch_empty_cache
        self.log.append("continue")
        self._engine_paused = False

    def flush_cache(self, *, empty_cache: bool = True) -> bool:
        assert not empty_cache, "the allocator's cache is what the next update uses"
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
    assert targets == set(plugin.NAMES[:4]) | {f"{plugin._SCHEDULER}.continue_generation"}
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


def set_parallel(patch: pytest.MonkeyPatch, **settings: object) -> None:
    """Change what SGLang's runtime context says of the ranks."""
    from sglang.srt import runtime_context

    known = runtime_context.get_parallel()
    names = {"pp_size": known.pp_size, "num_dp_ranks": known.num_dp_ranks} | settings
    patch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(**names))


def set_facts(patch: pytest.MonkeyPatch, getter: str, **settings: object) -> None:
    from sglang.srt import runtime_context

    patch.setattr(runtime_context, getter, lambda: SimpleNamespace(**settings))


REFUSED: dict[str, Callable[[pytest.MonkeyPatch, Any], object]] = {
    "pipeline parallelism": lambda patch, _: set_parallel(patch, pp_size=2),
    "data parallel replicas": lambda patch, _: set_parallel(patch, num_dp_ranks=2),
    "a draft model": lambda patch, made: patch.setattr(made.manager, "draft_worker", object()),
    "separate servers for prefill and decode": lambda patch, _: set_facts(
        patch, "get_disagg", disaggregation_mode="prefill"
    ),
    "a weight cache shared with other engines": lambda patch, _: set_facts(
        patch, "get_model", weight_cache_mode="shared"
    ),
    "quantized weights": lambda patch, made: patch.setattr(
        made.model, "quant_config", object(), raising=False
    ),
    "weights that are packed for AMX": lambda patch, made: patch.setattr(
        made.model.model.norm, "use_intel_amx_backend", True, raising=False
    ),
    "weights that are derived": lambda patch, made: patch.setattr(
        f"{plugin._UPDATER}._unsupported_derived_weight_cache_error",
        lambda model: "weights that are derived" if model is made.model else None,
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_server_that_must_not_be_updated_says_why(
    what: str,
    server: tuple[Server, Any],
    model: torch.nn.Module,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = [parameter.clone() for parameter in model.parameters()]
    REFUSED[what](monkeypatch, SimpleNamespace(manager=server[0].manager, model=model))
    with pytest.raises(ConfigError, match=f"this SGLang server has {what}.*read files") as caught:
        ws.connect(trained(1), to=f"sglang+{server[0].url}")
    assert "\n" not in str(caught.value)
    assert all(map(torch.equal, before, model.parameters()))


def test_a_load_that_fails_is_said(
    server: tuple[Server, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until a full update the server stays paused, also where a user continues it."""
    served, scheduler = server
    updater = type(served.manager.tp_worker.model_runner.weight_updater)  # its instances are frozen
    ended: list[object] = []
    with monkeypatch.context() as patch, ws.connect(trained(1), to=f"sglang+{served.url}") as to:
        patch.setattr(updater, "load_weights_from_distributed", lambda *_: (False, "no memory"))
        patch.setattr(updater, "end_weight_update", lambda *_, **how: ended.append(how))
        with pytest.raises(ws.WeightSyncError, match="SGLang did not load the weights: no memory"):
            to.send_weights()
    assert ended == []
    assert scheduler.log == ["retract", "flush"]
    assert plugin.continue_if_whole(lambda *_: "continued", scheduler, "request") is None
    with ws.connect(trained(2), to=f"sglang+{served.url}", takeover=True) as to:
        to.send_weights()
    assert plugin.continue_if_whole(lambda *_: "continued", scheduler, "request") == "continued"


def test_a_load_is_begun_and_ended_by_sglang_s_own_updater(
    server: tuple[Server, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without what it does after a load from another checkpoint."""
    updater = type(server[0].manager.tp_worker.model_runner.weight_updater)
    called: list[tuple[str, dict[str, object]]] = []

    def noted(name: str) -> Callable[..., object]:
        theirs = getattr(updater, name)

        def call(*given: object, **how: object) -> object:
            called.append((name, how))
            return theirs(*given, **how)

        return call

    names = ("begin_weight_update", "load_weights_from_distributed", "end_weight_update")
    for name in names:
        monkeypatch.setattr(updater, name, noted(name))
    with ws.connect(trained(1), to=f"sglang+{server[0].url}") as sender:
        sender.send_weights()
    assert called == list(zip(names, ({}, {}, {"run_post_load": False}), strict=True))


def test_a_loader_that_leaves_former_weights_is_said(
    server: tuple[Server, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    updater = type(server[0].manager.tp_worker.model_runner.weight_updater)
    theirs = updater.load_weights_from_distributed

    def without_the_norm(self: Any, pairs: list[tuple[str, torch.Tensor]]) -> object:
        return theirs(self, [pair for pair in pairs if pair[0] != "model.norm.weight"])

    monkeypatch.setattr(updater, "load_weights_from_distributed", without_the_norm)
    with (
        ws.connect(trained(1), to=f"sglang+{server[0].url}") as sender,
        pytest.raises(ws.WeightSyncError, match=r"did not write all of model\.norm\.weight"),
    ):
        sender.send_weights()


class Saver:
    """SGLang's torch-memory-saver, which wants CUDA: notes what it is told, and frees nothing."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.log: list[tuple[str, str]] = []

    def pause(self, tag: str) -> None:
        self.log.append(("pause", tag))

    def resume(self, tag: str) -> None:
        self.log.append(("resume", tag))


def test_released_weights_are_sent_whole_again(
    server: tuple[Server, Any], model: torch.nn.Module
) -> None:
    """By SGLang's own manager: its release of the weights, a refused update, its resume."""
    from sglang.srt.managers.io_struct import (
        ReleaseMemoryOccupationReqInput,
        ResumeMemoryOccupationReqInput,
    )

    served, scheduler = server
    served.manager.memory_saver_adapter = saver = Saver(enabled=True)
    source = trained(1)
    with ws.connect(source, to=f"sglang+{served.url}") as sender:
        sender.send_weights()
        served.manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=["weights"]))
        assert scheduler._engine_paused
        with pytest.raises(ws.UpdateConflictError, match="sleep"):
            sender.send_weights()
        served.manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=["weights"]))
        assert saver.log == [("pause", "weights"), ("resume", "weights")]
        assert scheduler._engine_paused  # it has memory, and no weights
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()  # as torch-memory-saver's new pages
        sender.send_weights()
    assert held(model, source)
    assert not scheduler._engine_paused


def test_without_the_memory_saver_a_release_changes_nothing(
    server: tuple[Server, Any], model: torch.nn.Module
) -> None:
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

    served, scheduler = server
    served.manager.memory_saver_adapter = Saver(enabled=False)
    source = trained(2)
    with ws.connect(source, to=f"sglang+{served.url}") as sender:
        sender.send_weights()
        served.manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=["weights"]))
        assert not scheduler._engine_paused
        sender.send_weights()
    assert held(model, source)


@pytest.mark.parametrize(("stage", "device"), [("host", "cpu"), ("device", "meta")])
def test_where_weights_wait(
    stage: str, device: str, hooks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`device` stages beside the model, wherever that is."""
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    seen: list[Any] = []
    engine = SimpleNamespace(device=torch.device("meta"))
    monkeypatch.setenv(plugin.VARIABLE, stage)
    monkeypatch.setattr(plugin, "SglangEngine", lambda _: engine)
    monkeypatch.setattr(plugin, "_receiver", None)

    def receiver(*given: object) -> object:
        seen.append(given)
        return SimpleNamespace(answer=lambda text: f"answer to {text}")

    monkeypatch.setattr(plugin, "SchedulerReceiver", receiver)
    manager = SimpleNamespace(memory_saver_adapter=SimpleNamespace(enabled=False))
    asked = CheckWeightsReqInput(action=f"{ROUND}a round")
    found = plugin.answer_check(lambda *_: None, manager, asked)
    assert (found.success, found.message) == (True, "answer to a round")
    assert [(of, torch.device(where)) for of, where in seen] == [(engine, torch.device(device))]


def test_without_the_variable_nothing_is_registered(
    hooks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "register", lambda *_: pytest.fail("registered"))
    monkeypatch.delenv(plugin.VARIABLE, raising=False)
    plugin.register()


def test_a_version_that_was_not_tried_is_a_warning(
    hooks: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registered: list[tuple[object, ...]] = []
    monkeypatch.setattr(hooks, "register", lambda *given: registered.append(given))
    monkeypatch.setenv(plugin.VARIABLE, "device")
    for seen, warnings in (("0.5.23", []), ("0.5.99", ["weightsync's plug-in was tried with SGLang "
                                                       "0.5.23, not with 0.5.99"])):  # fmt: skip
        caplog.clear()
        monkeypatch.setattr(plugin, "version", lambda _, seen=seen: seen)
        with caplog.at_level(logging.WARNING, "weightsync"):
            plugin.register()
        assert caplog.messages == warnings
    assert len({name for name, *_ in registered}) == 5
    assert len(registered) == 2 * 5


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
