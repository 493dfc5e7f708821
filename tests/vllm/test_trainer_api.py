"""vLLM's own trainer API with our engine, and a real vLLM in this process behind its client."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import vllm.distributed.weight_transfer as api
from vllm.distributed.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ModuleSource,
    ParamMeta,
    WeightSource,
    WeightTransferTrainerFactory,
)

import weightsync as ws
from tests.vllm.offline import assert_computes, generated, offline_llm
from tests.vllm.test_migrating import block
from tests.vllm.tiny import change, make_model
from weightsync.integrations.vllm.actors import vllm_targets
from weightsync.integrations.vllm.trainer import (
    WeightsyncTrainerEngine,
    WeightsyncTrainerInitInfo,
    targets_of,
)
from weightsync.testing.conformance.vllm_server import as_metadata
from weightsync.wire.messages import CheckReply, CheckRequest


class InProcess:
    """A client of vLLM's protocol for an `LLM` in this process, as users write it."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self.llm.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.llm.finish_weight_update(weight_version)


class Streamed(WeightSource):  # type: ignore[misc]  # vLLM has no types here
    """A source of a user's own: a new copy of each tensor, and a count of its iterations."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.passes = 0
        self.fails_at = ""

    @as_metadata
    def metadata(self) -> list[Any]:
        return [ParamMeta(n, p.dtype, tuple(p.shape)) for n, p in self.model.named_parameters()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.iter_full()

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.passes += 1
        for name, parameter in self.model.named_parameters():
            if name == self.fails_at:
                raise RuntimeError("the trainer has lost its weights")
            yield name, parameter.detach().clone()


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, Any]]:
    folder = tmp_path_factory.mktemp("model")
    model = make_model(folder, tied=request.param)
    with offline_llm(folder) as llm:
        yield llm, model


def started(source: Any, client: Any, rank: int = 0, **fields: Any) -> WeightsyncTrainerEngine:
    info = WeightsyncTrainerInitInfo(rank=rank, **fields)
    engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
    assert isinstance(engine, WeightsyncTrainerEngine)
    return engine


def checksums(llm: Any) -> dict[str, str]:
    answer = vllm_targets(llm)[0].call(CheckRequest(), timeout_s=30)
    assert isinstance(answer, CheckReply)
    assert answer.checksums
    return dict(answer.checksums)


@pytest.mark.parametrize("packed", [None, True])
@pytest.mark.parametrize("kind", [lambda model: model, ModuleSource, Streamed])
def test_it_computes_what_connect_makes_it_compute(
    pair: tuple[Any, Any], kind: Any, packed: bool | None
) -> None:
    llm, model = pair
    engine = started(kind(model), InProcess(llm), options={"packed": packed})
    sent = []
    for seed in (1, 2, 3):
        change(model, seed)
        report = engine.send_weights()
        assert report is engine.report
        assert (report.apply, report.verified) == ("staged", "arrived")
        assert llm.get_weight_version() == str(report.version)
        assert_computes(llm, model)
        sent.append((checksums(llm), generated(llm)))
    engine.shutdown()
    engine.shutdown()
    with ws.connect(model, to=vllm_targets(llm)) as sender:
        for seed, held in zip((1, 2, 3), sent, strict=True):
            change(model, seed)
            sender.send_weights()
            assert (checksums(llm), generated(llm)) == held


def test_a_source_is_iterated_anew_and_its_error_is_raised(pair: tuple[Any, Any]) -> None:
    llm, model = pair
    source = Streamed(model)
    engine = started(source, InProcess(llm))
    try:
        for passes in (1, 2):
            engine.send_weights()
            assert source.passes == passes
        held = checksums(llm)
        change(model, 5)
        source.fails_at = "model.layers.1.mlp.up_proj.weight"
        with pytest.raises(RuntimeError, match="lost its weights"):
            engine.send_weights()
        assert checksums(llm) == held
        source.fails_at = ""
        engine.send_weights()
        assert_computes(llm, model)
    finally:
        engine.shutdown()


@pytest.mark.parametrize(
    ("change_it", "message"),
    [
        ({"rank": 1}, r"rank 1, and this process is rank 0 of 1 in the process group"),
        ({"options": {"to": "http://x"}}, r"options has to; trainer_init\(\) has its own"),
        (
            {"options": {"pakced": True}},
            r"pakced: no setting of .*WeightsyncTrainerInitInfo\.options; did you mean packed\?",
        ),
        (
            {"options": {"backend": "typo"}},
            "there is no backend 'typo'; known: auto, ipc, nixl, tcp",
        ),
        ({"source": None}, r"trainer_init\(\) needs source="),
        ({"source": 7}, "cannot send from an object of int"),
        ({"client": object()}, r"a object does not show its servers: .*InitInfo\(to="),
        ({"source": {"a": torch.zeros(2)}}, "tensors"),
    ],
)
def test_what_does_not_fit_is_one_clear_line(
    pair: tuple[Any, Any], change_it: dict[str, Any], message: str
) -> None:
    llm, model = pair
    held = checksums(llm)
    given = {"source": model, "client": InProcess(llm), **change_it}
    with pytest.raises((ws.ConfigError, ws.ManifestMismatchError), match=message) as caught:
        started(**given)
    if "source" not in change_it or change_it["source"] is None:
        assert "\n" not in str(caught.value)
    assert checksums(llm) == held


def test_a_server_that_is_not_there_is_named() -> None:
    client = HTTPVLLMWeightSyncClient("http://127.0.0.1:9/")
    with pytest.raises(ws.ConnectError, match=r"127\.0\.0\.1:9"):
        started(torch.nn.Linear(2, 2), client)


def test_the_clients_of_vllm_show_their_servers() -> None:
    assert targets_of(HTTPVLLMWeightSyncClient("http://host:8000/")) == "vllm+http://host:8000"


def test_a_client_that_may_talk_to_more_servers_has_to_name_them() -> None:
    class FanOut(HTTPVLLMWeightSyncClient):  # type: ignore[misc]  # vLLM has no types here
        """Sends every call to several servers; its base class knows the first."""

    with pytest.raises(ws.ConfigError, match=r"FanOut does not show its servers.*the URLs of all"):
        targets_of(FanOut("http://host:8000"))


def test_the_report_is_that_of_the_last_call(pair: tuple[Any, Any]) -> None:
    llm, model = pair
    source = Streamed(model)
    engine = started(source, InProcess(llm))
    try:
        report = engine.send_weights()
        assert engine.report is report
        source.fails_at = "model.norm.weight"
        with pytest.raises(RuntimeError, match="lost its weights"):
            engine.send_weights()
        assert engine.report is None
    finally:
        engine.shutdown()


def test_the_plugin_registers_both_engines() -> None:
    code = (
        "import sys\n"
        "from vllm.plugins import load_general_plugins\n"
        "from vllm.distributed.weight_transfer import WeightTransferEngineFactory as Worker\n"
        "from vllm.distributed.weight_transfer import WeightTransferTrainerFactory as Trainer\n"
        "load_general_plugins()\n"
        "assert 'weightsync' in Worker._registry\n"
        "assert 'weightsync' in Trainer._registry\n"
        "assert 'weightsync.integrations.vllm.trainer' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_page_s_loop(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    llm, model = pair
    code = block("vllm.md", "WeightTransferTrainerFactory.trainer_init")
    monkeypatch.setattr(api, "HTTPVLLMWeightSyncClient", lambda _: InProcess(llm))
    batches = iter(range(30, 33))
    space = {
        "model": model,
        "rank": 0,
        "batches": batches,
        "train": change,
    }
    exec(compile(code, "docs/vllm.md", "exec"), space)
    assert_computes(llm, model)
