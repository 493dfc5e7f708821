"""What `install` refuses of an OpenRLHF and of its caller, and what reaches Ray's processes."""

from __future__ import annotations

import logging
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import ray.cloudpickle
from openrlhf.trainer.ray import ppo_actor, vllm_engine

from weightsync.errors import BackendUnavailableError, ConfigError
from weightsync.integrations.openrlhf import install

CARRIED = """
import inspect, pickle, sys
from tests.openrlhf.on_cpu import pretend
pretend()
kind = pickle.loads(open(sys.argv[1], "rb").read())
init = inspect.unwrap(kind.init_model_from_pretrained)  # Ray wraps it
trainer = init.__globals__["ActorPPOTrainer"]
print(trainer.__mro__, dict(trainer.connect_options))
"""


@pytest.fixture(autouse=True)
def theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenRLHF's own classes are back after each test."""
    monkeypatch.setattr(ppo_actor, "ActorPPOTrainer", ppo_actor.ActorPPOTrainer)
    monkeypatch.setattr(vllm_engine, "RolloutRayActor", vllm_engine.RolloutRayActor)


@pytest.mark.parametrize("options", [{}, {"timeout_s": 9.0}], ids=["plain", "settings"])
def test_ray_carries_the_trainer_and_its_settings(options: dict[str, Any], tmp_path: Path) -> None:
    install(**options)
    actor = ppo_actor.PolicyModelActor.__ray_metadata__.modified_class
    dumps: Any = ray.cloudpickle.dumps
    (tmp_path / "class").write_bytes(dumps(actor))
    command = [sys.executable, "-c", CARRIED, str(tmp_path / "class")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert "weightsync.integrations.openrlhf.trainer.WeightsyncPPOTrainer" in done.stdout
    assert done.stdout.strip().endswith(str(options))


def test_settings_that_are_none_are_named() -> None:
    trainer = ppo_actor.ActorPPOTrainer
    said = (
        "pakced: no setting of connect(), nor of install(); did you mean packed?; install() takes "
        "no dtype: each tensor is cast to what the engines keep"
    )
    with pytest.raises(ConfigError) as caught:
        install(pakced=True, dtype="float32")
    assert str(caught.value) == said
    assert ppo_actor.ActorPPOTrainer is trainer, "nothing is replaced"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ((ppo_actor, "ActorPPOTrainer"), "ppo_actor.ActorPPOTrainer"),
        ((ppo_actor.ActorPPOTrainer, "broadcast_to_vllm"), "ActorPPOTrainer.broadcast_to_vllm"),
        ((vllm_engine, "RolloutRayActor"), "vllm_engine.RolloutRayActor"),
    ],
)
def test_an_openrlhf_with_other_names_is_refused(
    change: tuple[Any, str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(*change)
    with pytest.raises(BackendUnavailableError) as caught:
        install()
    assert named in str(caught.value)
    assert str(caught.value).endswith("which weightsync replaces; it was tried with OpenRLHF 0.11")
    assert "\n" not in str(caught.value)


def test_a_version_that_was_not_tried_is_one_line_of_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "0.12.1")
    with caplog.at_level(logging.WARNING, "weightsync"):
        install()
    said = [record.getMessage() for record in caplog.records if "OpenRLHF" in record.getMessage()]
    assert said == ["weightsync was tried with OpenRLHF 0.11, and this is OpenRLHF 0.12.1"]
