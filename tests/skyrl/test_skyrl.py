"""SkyRL 0.4 with weightsync: its configuration, workers, sources, client and server, on a CPU."""

from __future__ import annotations

import importlib
import logging
import pickle
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import skyrl.backends.skyrl_train.weight_sync as sync
import skyrl.train.entrypoints.main_base as base
import torch
from skyrl.backends.skyrl_train.weight_sync import control_plane, weight_senders
from skyrl.train.config import SkyRLTrainConfig, get_config_as_yaml_str

import weightsync as ws
from tests import crew as crews
from tests.crew import Crew, crew
from tests.skyrl import trainer
from tests.skyrl.configs import ENGINES, arguments, configuration
from tests.vllm.served import Served, vllm_server
from tests.vllm.tiny import change, make_model
from weightsync.integrations import skyrl
from weightsync.integrations.skyrl import BACKEND
from weightsync.integrations.skyrl.trainer import init_info, targets_of

pytestmark = pytest.mark.timeout(1200)
"""The server, its engine and each of their processes import vLLM and SkyRL."""

NOWHERE = "http://127.0.0.1:9"
FAR_S = 300.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("model")
    return folder, make_model(folder, tied=False)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Crew]:
    """Two ranks that have imported SkyRL, which takes longer than other tests wait."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(crews, "WAIT_S", FAR_S)
        with crew(2) as made:
            made.run(trainer.load)
            yield made


@pytest.fixture(scope="module")
def served(model: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with vllm_server(model[0], log, module="tests.skyrl.server") as made:
        yield made


@pytest.mark.parametrize("iterated", [False, True], ids=["FsdpWeightSource", "a subclass of it"])
def test_skyrl_s_workers_update_skyrl_s_server(
    served: Served, ranks: Crew, model: tuple[Path, Any], iterated: bool
) -> None:
    folder, whole = model
    ranks.run(trainer.start, configuration(folder), served.url, iterated)
    try:
        versions = []
        for seed in (1, 2, 3):
            ranks.run(trainer.train, seed + 10 * iterated)
            change(whole, seed + 10 * iterated)
            (version, verified, gathered), other = ranks.run(trainer.sync)
            assert other == (version, verified, gathered)
            assert (verified, gathered) == ("arrived", iterated)
            versions.append(version)
            served.assert_computes(whole)
            assert not served.is_paused
            assert served.get("weight_info")["weight_version"] == str(version)
        assert versions == list(range(versions[0], versions[0] + 3))
    finally:
        ranks.run(trainer.stop)


@pytest.mark.parametrize("prefix", ["", "language_model."])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_sent_is_what_skyrl_s_source_yields(
    ranks: Crew, model: tuple[Path, Any], dtype: torch.dtype, prefix: str
) -> None:
    assert ranks.run(trainer.sent_and_yielded, model[0], dtype, prefix) == [True, True]


def test_a_tied_model_is_sent_as_skyrl_s_source_yields_it(ranks: Crew, tmp_path: Path) -> None:
    make_model(tmp_path, tied=True)
    sent = ranks.run(trainer.sent_and_yielded, tmp_path, torch.float32, "")
    assert sent == [True, True]


@pytest.mark.parametrize(
    ("options", "called", "words"),
    [
        (["{}", "{}"], [0, 0], "rank 0, and this process is rank 1 of 2"),
        (["{}", '{"verify": false}'], [0, 1], "verify"),
    ],
)
def test_ranks_that_disagree_are_refused_on_both(
    ranks: Crew, model: tuple[Path, Any], options: list[str], called: list[int], words: str
) -> None:
    errors = ranks.run(trainer.refused, configuration(model[0]), NOWHERE, options, called)
    for error in errors:
        assert error.startswith("ConfigError: ")
        assert words in error
        assert "\n" not in error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ('{"pakced": true}', r"SKYRL_WEIGHTSYNC_OPTIONS; did you mean packed\?"),
        ('{"dtype": "bf16"}', "takes no dtype: generator.inference_engine.model_dtype says it"),
        ("packed", "SKYRL_WEIGHTSYNC_OPTIONS is no JSON"),
        ("[1]", "SKYRL_WEIGHTSYNC_OPTIONS is an object"),
    ],
)
def test_options_that_cannot_be(
    model: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, options: str, words: str
) -> None:
    monkeypatch.setenv("SKYRL_WEIGHTSYNC_OPTIONS", options)
    with pytest.raises(ws.ConfigError, match=words) as caught:
        init_info(configuration(model[0]).generator.inference_engine, 0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        (f"{ENGINES}.weight_sync_backend", "delta", "weight_sync_backend is 'delta'"),
        ("trainer.strategy", "megatron", "trainer.strategy='megatron' was not tried"),
        ("trainer.placement.colocate_all", "true", "does not go with .*colocate_all"),
        (f"{ENGINES}.offload_kv_for_weight_sync", "true", "does not go with offload_kv_for"),
        (f"{ENGINES}.speculative_config", "{method: mtp}", "does not go with speculative_config"),
    ],
)
def test_configurations_that_cannot_be(
    model: tuple[Path, Any], setting: str, value: str, words: str
) -> None:
    with pytest.raises(ws.ConfigError, match=words) as caught:
        configuration(model[0], **{setting: value})
    assert "\n" not in str(caught.value)


def test_the_setting_registers_weightsync_in_the_process_that_receives_it(
    model: tuple[Path, Any],
) -> None:
    cfg = SkyRLTrainConfig.from_cli_overrides(arguments(model[0]))
    cfg.generator.inference_engine.weight_sync_backend = BACKEND
    code = (
        "import pickle, sys\n"
        "cfg = pickle.load(sys.stdin.buffer)\n"
        "import skyrl.backends.skyrl_train.weight_sync as sync\n"
        "from vllm.distributed.weight_transfer import WeightTransferEngineFactory as workers\n"
        "from vllm.distributed.weight_transfer import WeightTransferTrainerFactory as trainers\n"
        "chosen = cfg.generator.inference_engine.weight_sync_backend\n"
        "assert sync.get_vllm_receive_backend(chosen, False) == 'weightsync' == chosen\n"
        "assert 'weightsync' in workers._registry\n"
        "assert 'skyrl_weightsync' in trainers._registry\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(cfg), check=False, timeout=FAR_S
    )
    assert done.returncode == 0
    assert "weight_sync_backend: weightsync\n" in get_config_as_yaml_str(cfg)


def test_other_backends_of_skyrl_stay_as_they_are() -> None:
    skyrl.register()
    skyrl.register()
    assert sync.get_transfer_strategy("weightsync", False) == "weightsync"
    with pytest.raises(ws.ConfigError, match="colocate_all"):
        sync.get_transfer_strategy("weightsync", True)
    others = {("nccl", True): "ipc", ("nccl", False): "nccl", ("rdt", False): "sharded_rdt"}
    for given, wanted in others.items():
        assert sync.get_transfer_strategy(*given) == wanted
    with pytest.raises(ValueError, match="Unknown weight sync backend 'x'"):
        weight_senders._build_sender_init_info(
            backend="x",
            ie_cfg=None,
            rank=0,
            inference_world_size=1,
            dtype=torch.float32,
            server_urls=[],
            data_parallel_size=1,
            base_model_path=None,
        )


def test_the_engine_has_the_flags_of_skyrl() -> None:
    from weightsync.integrations.skyrl.trainer import SkyrlTrainerEngine

    flags = [name for name in vars(weight_senders.SkyrlTrainerCapabilities) if name[0] != "_"]
    assert len(flags) >= 4
    assert all(hasattr(SkyrlTrainerEngine, name) for name in flags)


def test_skyrl_s_entry_point_trains_with_weightsync(
    model: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []
    entry = SimpleNamespace(remote=ran.append)
    override = "trainer.override_entrypoint=weightsync.integrations.skyrl"
    monkeypatch.setattr(sys, "argv", ["main_base", *arguments(model[0]), override])
    monkeypatch.setattr(base, "skyrl_entrypoint", entry)
    monkeypatch.setattr(base, "initialize_ray", ran.append)
    monkeypatch.setattr(base.ray, "get", lambda _: None)
    base.main()
    initialized, trained = ran
    assert initialized is trained
    assert trained.generator.inference_engine.weight_sync_backend is BACKEND


def test_the_example_trains_with_weightsync(
    model: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    example: Any = importlib.import_module("examples.skyrl_trainer")
    ran: list[Any] = []
    monkeypatch.setattr(example, "initialize_ray", ran.append)
    monkeypatch.setattr(example, "train", SimpleNamespace(remote=ran.append))
    monkeypatch.setattr(example.ray, "get", lambda _: None)
    example.main(arguments(model[0]))
    initialized, trained = ran
    assert initialized is trained
    assert trained.generator.inference_engine.weight_sync_backend is BACKEND


def test_all_servers_of_skyrl_s_client_are_targets() -> None:
    client = control_plane.SkyrlWeightSyncClient(["http://a:1", "http://b:2/"])
    try:
        assert targets_of(client) == ["vllm+http://a:1", "vllm+http://b:2"]
    finally:
        client.close()


def test_a_client_that_is_not_skyrl_s_is_refused() -> None:
    class FanOut(control_plane.SkyrlWeightSyncClient):  # type: ignore[misc]  # SkyRL has no types
        """One that may talk to more servers."""

    made = FanOut(["http://a:1"])
    try:
        for client, name in ((object(), "object"), (made, "FanOut")):
            with pytest.raises(ws.ConfigError, match=f"a {name} does not show its servers") as said:
                targets_of(client)
            assert "\n" not in str(said.value)
    finally:
        made.close()


def test_a_version_that_was_not_tried_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sync._VLLM_RECEIVE_BACKENDS, "weightsync", "weightsync")
    del sync._VLLM_RECEIVE_BACKENDS["weightsync"]
    for module, name in (
        (sync, "get_transfer_strategy"),
        (weight_senders, "_build_sender_init_info"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))  # back to this one afterwards
    monkeypatch.setattr(metadata, "version", lambda _: "0.5.1")
    with caplog.at_level(logging.WARNING, "weightsync"):
        skyrl.register()
    assert "SkyRL is 0.5.1, and weightsync was tried with 0.4; compare" in caplog.text


def test_a_version_without_what_is_used_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(weight_senders, "_build_sender_init_info")
    said = r"SkyRL 0\.4\.0 lacks weight_senders\._build_sender_init_info: use 0\.4$"
    with pytest.raises(ws.BackendUnavailableError, match=said):
        skyrl.register()
