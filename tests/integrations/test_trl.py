"""TRL's trainers with a tiny model: what they train is what receivers hold."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import TrainerCallback

import weightsync as ws
from tests.integrations.tiny_trl import COMMON, GROUPS, LORA, lower, prompts, sft_trainer, trl
from tests.segments import opened_since
from weightsync.integrations import trl as callback
from weightsync.integrations.trl import WeightSyncCallback
from weightsync.serve.model import make_tiny_model
from weightsync.shm.segment import live_segments

pytestmark = [
    # TRL and peft ask transformers for names that transformers gives up.
    pytest.mark.filterwarnings(
        "ignore::FutureWarning",
        "ignore:You are using 'rollout_func':UserWarning",
    ),
    pytest.mark.usefixtures("shm_clean"),
]


def same(found: nn.Module, wanted: nn.Module) -> None:
    held, sent = found.state_dict(), wanted.state_dict()
    assert held.keys() == sent.keys()
    for name, tensor in sent.items():
        assert torch.equal(held[name], tensor), name


@pytest.mark.parametrize(("every", "at_start", "updates"), [(1, True, 4), (2, False, 2)])
def test_sft_sends_every_so_many_steps_and_the_last(
    every: int, at_start: bool, updates: int, tmp_path: Path
) -> None:
    served = make_tiny_model(seed=1).model
    sync = WeightSyncCallback(ws.WeightReceiver(served).handle, every=every, at_start=at_start)
    trainer = sft_trainer(tmp_path, callbacks=[sync])
    trainer.train()
    assert sync.version == updates
    same(served, trainer.model)


def test_rloo(tmp_path: Path) -> None:
    served, tiny = make_tiny_model(seed=1).model, make_tiny_model()
    sync = WeightSyncCallback(ws.WeightReceiver(served).handle)
    args = trl.RLOOConfig(str(tmp_path), max_steps=1, beta=0.0, **COMMON, **GROUPS)
    given = {"train_dataset": prompts(), "processing_class": tiny.tokenizer, "callbacks": [sync]}
    trl.RLOOTrainer(tiny.model, lower, args, **given).train()
    assert sync.version == 2
    same(served, tiny.model)


def test_a_cast_on_the_way_and_a_second_training(tmp_path: Path) -> None:
    served = make_tiny_model(seed=1, dtype=torch.bfloat16).model
    sync = WeightSyncCallback(ws.WeightReceiver(served).handle, dtype=torch.bfloat16)
    trainer = sft_trainer(tmp_path, callbacks=[sync], steps=1)
    trainer.train()
    trainer.train()
    assert sync.version == 4
    same(served, copy.deepcopy(trainer.model).to(torch.bfloat16))


def test_adapters_are_merged_on_the_way(tmp_path: Path) -> None:
    served = make_tiny_model(seed=1).model
    sync = WeightSyncCallback(ws.WeightReceiver(served).handle)
    trainer = sft_trainer(tmp_path, callbacks=[sync], peft_config=LORA)
    trainer.train()
    assert sync.version == 4
    same(served, copy.deepcopy(trainer.model).merge_and_unload())


def test_the_adapter_alone_goes_after_the_whole(tmp_path: Path) -> None:
    served = peft.get_peft_model(make_tiny_model(seed=1).model, LORA)
    sync = WeightSyncCallback(ws.WeightReceiver(served).handle, adapter_only=True, packed=True)
    trainer = sft_trainer(tmp_path, callbacks=[sync], peft_config=LORA)
    trainer.train()
    assert sync.last_report is not None
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    assert sync.last_report.nbytes == sum(p.nbytes for p in trained)
    same(served, trainer.model)


def test_a_source_of_ones_own(tmp_path: Path) -> None:
    received: dict[str, torch.Tensor] = {}

    def load(weights: Any) -> None:
        received.update({name: tensor.clone() for name, tensor in weights})

    def only_norms(model: nn.Module) -> object:
        return lambda: ((n, p) for n, p in model.named_parameters() if "norm" in n)

    sync = WeightSyncCallback(ws.WeightReceiver(load).handle, source=only_norms)
    trainer = sft_trainer(tmp_path, callbacks=[sync], steps=1)
    trainer.train()
    wanted = {n: p for n, p in trainer.model.named_parameters() if "norm" in n}
    assert received.keys() == wanted.keys()
    assert all(torch.equal(received[name], wanted[name]) for name in wanted)


VALUES = {"sync/version", "sync/seconds", "sync/gbps", "sync/stall_s"}


class Reporter(TrainerCallback):
    """Stands where wandb's callback does."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.seen.append(dict(logs))


def test_add_to_puts_the_values_before_the_reporters(tmp_path: Path) -> None:
    reporter = Reporter()
    sync = WeightSyncCallback(ws.WeightReceiver(make_tiny_model().model).handle)
    trainer = sft_trainer(tmp_path, callbacks=[reporter], steps=1)
    sync.add_to(trainer)
    trainer.train()
    assert reporter.seen[0].keys() >= VALUES


@pytest.mark.parametrize("adds", [False, True])
def test_the_update_at_the_end_is_logged(tmp_path: Path, adds: bool) -> None:
    reporter = Reporter()
    sync = WeightSyncCallback(ws.WeightReceiver(make_tiny_model().model).handle, every=9)
    callbacks = [reporter] if adds else [reporter, sync]
    trainer = sft_trainer(tmp_path, callbacks=callbacks, steps=1)
    if adds:
        sync.add_to(trainer)
    trainer.train()
    assert sync.version == 2  # at the start and at the end
    last = trainer.state.log_history[-1]
    assert last["sync/version"] == 2
    assert last["step"] == 1
    assert last.keys() >= VALUES
    assert (reporter.seen[-1].get("sync/version") == 2) == adds


def test_the_rate_of_several_updates_is_bytes_over_their_time() -> None:
    receiver = ws.WeightReceiver(make_tiny_model().model)
    with ws.connect(make_tiny_model().model, to=receiver.handle) as sender:
        made = sender.send_weights()
    fast = replace(made, nbytes=2_000_000_000, seconds={"total": 1.0}, stall_s=0.1)
    slow = replace(made, nbytes=2_000_000_000, seconds={"total": 3.0}, stall_s=0.2)
    assert callback._values([fast, slow]) == {
        "sync/version": 1,
        "sync/seconds": 2.0,
        "sync/gbps": 1.0,
        "sync/stall_s": 0.2,
    }


def test_a_send_that_fails_ends_the_training_and_the_connection(tmp_path: Path) -> None:
    before = live_segments()
    served = make_tiny_model(seed=1).model
    sync = WeightSyncCallback(ws.WeightReceiver(served).handle)
    trainer = sft_trainer(tmp_path, callbacks=[sync])
    trainer.add_callback(Breaking(trainer.model))
    with pytest.raises(ws.ManifestMismatchError, match="connect again"):
        trainer.train()
    assert sync.version == 1
    assert not opened_since(before)


class Breaking(Reporter):
    """Gives the model another shape in its first step; or fails, where no model is given."""

    def __init__(self, model: Any = None) -> None:
        super().__init__()
        self.model = model

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.model is None:
            assert live_segments()
            raise RuntimeError("the training failed")
        self.model.register_parameter("extra", nn.Parameter(torch.zeros(3)))


def test_leaving_the_block_closes_where_training_failed(tmp_path: Path) -> None:
    before = live_segments()
    sync = WeightSyncCallback(ws.WeightReceiver(make_tiny_model().model).handle)
    trainer = sft_trainer(tmp_path, callbacks=[sync, Breaking()])
    with pytest.raises(RuntimeError, match="the training failed"), sync:
        trainer.train()
    assert not opened_since(before)


def test_a_server_that_is_down_ends_the_training_before_its_first_step(tmp_path: Path) -> None:
    trainer = sft_trainer(tmp_path, callbacks=[WeightSyncCallback("http://127.0.0.1:9")])
    with pytest.raises(ws.ConnectError, match="is the server running"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"every": 0}, "at least 1, not 0"),
        ({"adapter_only": True, "source": len}, "both say what is sent"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ws.ConfigError, match=words):
        WeightSyncCallback("http://127.0.0.1:9", **settings)


def test_models_that_cannot_be_sent_so(tmp_path: Path) -> None:
    to = ws.WeightReceiver(make_tiny_model().model).handle
    with pytest.raises(ws.ConfigError, match="a LlamaForCausalLM is trained; leave it out"):
        sft_trainer(tmp_path, callbacks=[WeightSyncCallback(to, adapter_only=True)]).train()
    renaming = WeightSyncCallback(to, rename={"a": "b"})
    with pytest.raises(ws.ConfigError, match="rename= is not applied to a model with adapters"):
        sft_trainer(tmp_path, callbacks=[renaming], peft_config=LORA).train()
