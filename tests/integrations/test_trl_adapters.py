"""TRL's trainers of PEFT models that send their adapter alone, and completions from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import peft
import pytest
import torch
from fastapi import FastAPI

import weightsync as ws
from tests.integrations.test_adapter_source import Held, same, saved
from tests.integrations.test_trl_rollouts import completion
from tests.integrations.tiny_trl import LORA, PROMPTS, grpo_trainer, sft_trainer
from tests.server.live import serving
from weightsync.integrations.adapters import CONFIG_NAME
from weightsync.integrations.trl import ServedRollouts, WeightSyncCallback
from weightsync.serve.model import make_tiny_model
from weightsync.server import weight_router

pytestmark = [
    # TRL and peft ask transformers for names that transformers gives up.
    pytest.mark.filterwarnings(
        "ignore::FutureWarning",
        "ignore:You are using 'rollout_func':UserWarning",
        "ignore::UserWarning:peft",
    ),
    pytest.mark.usefixtures("shm_clean"),
]


@contextmanager
def adapters_alone(held: Held, name: str = "policy") -> Iterator[str]:
    """Run a server that takes one adapter, and no other weights; yield its URL."""
    app = FastAPI()
    app.include_router(
        weight_router(ws.WeightReceiver(held), token=None), prefix=f"/adapters/{name}"
    )
    with serving(app) as url:
        yield url


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_adapter_is_all_that_moves(dtype: str | None, tmp_path: Path) -> None:
    held = Held()
    with adapters_alone(held) as url:
        with WeightSyncCallback(url, adapter="policy", dtype=dtype) as sync:
            trainer = sft_trainer(tmp_path / "out", callbacks=[sync], peft_config=LORA)
            trainer.train()
        assert sync.version == 4
    wanted, _ = saved(trainer.model, tmp_path / "saved")
    wanted = {name: t.to(torch.bfloat16) if dtype else t for name, t in wanted.items()}
    same(held.tensors, wanted)
    assert held.config["r"] == LORA.r
    report = sync.last_report
    assert report is not None
    assert report.label == "step-3"
    in_tensors = sum(tensor.nbytes for tensor in wanted.values())
    assert report.nbytes == in_tensors + held.tensors[CONFIG_NAME].nbytes


def test_the_adapter_that_is_trained_is_sent_by_another_name(tmp_path: Path) -> None:
    """A model of several adapters: TRL trains the active one, and `judge` names it."""
    held = Held()
    model = peft.get_peft_model(make_tiny_model().model, LORA, adapter_name="trained")
    model.add_adapter("frozen", LORA)
    with adapters_alone(held, "judge") as url, WeightSyncCallback(url, adapter="judge") as sync:
        trainer = sft_trainer(tmp_path / "out", model, callbacks=[sync])
        trainer.train()
    same(held.tensors, saved(trainer.model, tmp_path / "saved", "trained")[0])


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ws.ConfigError, match="adapter and adapter_only both say what is sent"):
        WeightSyncCallback("http://127.0.0.1:9", adapter="policy", adapter_only=True)
    with pytest.raises(ws.ConfigError, match="adapter and source both say what is sent"):
        WeightSyncCallback("http://127.0.0.1:9", adapter="policy", source=lambda model: model)
    with pytest.raises(ws.ConfigError, match="rename= is not applied to an adapter"):
        WeightSyncCallback("http://127.0.0.1:9", adapter="policy", rename=str)
    for name in ("", "a/b", "policy@1"):
        with pytest.raises(ws.ConfigError, match="an adapter's name is"):
            WeightSyncCallback("http://127.0.0.1:9", adapter=name)
        with pytest.raises(ws.ConfigError, match="an adapter's name is"):
            ServedRollouts("http://127.0.0.1:9", adapter=name)
    sync = WeightSyncCallback("http://127.0.0.1:9", adapter="policy")
    with pytest.raises(ws.ConfigError, match="adapter= sends a PEFT model's adapter, and a Llama"):
        sft_trainer(tmp_path, callbacks=[sync]).train()


def test_a_server_that_takes_no_adapter_ends_the_training_before_it_begins(tmp_path: Path) -> None:
    app = FastAPI()
    app.include_router(weight_router(ws.WeightReceiver(make_tiny_model().model), token=None))
    with serving(app) as url, WeightSyncCallback(url, adapter="policy") as sync:
        trainer = sft_trainer(tmp_path, callbacks=[sync], peft_config=LORA)
        with pytest.raises(ws.WeightSyncError, match="adapters/policy"):
            trainer.train()
        assert trainer.state.global_step == 0


def test_rollouts_name_the_adapter(tmp_path: Path) -> None:
    """What `weightsync serve` is asked: a model by the adapter's name, and versions of tokens."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            spans = [{"version": 7, "start": 0, "stop": 1, "base_version": 2}]
            raw = json.dumps({"completions": [completion(weight_versions=spans)]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as listening:
        Thread(target=listening.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{listening.server_port}"
        with ServedRollouts(url, adapter="policy", token="") as rollouts:
            found = rollouts([PROMPTS[0]], grpo_trainer(tmp_path, rollouts))
        with ServedRollouts(url, token="") as plain:
            plain([PROMPTS[0]], grpo_trainer(tmp_path, plain))
        listening.shutdown()
    assert asked[0]["model"] == "policy"
    assert "model" not in asked[1]
    assert found["weight_versions"] == [[7]]
    assert dict(rollouts.made_by) == {7: 1}
