"""The trainers' callback on several ranks: DDP, and the modules that Accelerate's FSDP2 makes."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import weightsync as ws
from tests.crew import Died, crew
from weightsync.integrations.trl import WeightSyncCallback
from weightsync.serve.model import make_tiny_model
from weightsync.shm.segment import live_segments, remove_leftovers


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(index, index + 8)
        return {"input_ids": ids, "labels": ids}


def as_launched(rank: int) -> None:
    """Say what torchrun would; the group is there already."""
    warnings.simplefilter("default")  # transformers' own
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")


def trainer(model: Any, out: str, *callbacks: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        out,
        max_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    return Trainer(model=model, args=args, train_dataset=Rows(), callbacks=list(callbacks))


def under_ddp(rank: int) -> int:
    as_launched(rank)
    served = make_tiny_model(seed=1).model
    sync = WeightSyncCallback(ws.WeightReceiver(served).handle)
    with tempfile.TemporaryDirectory() as out:
        made = trainer(make_tiny_model().model, out, sync)
        made.train()
    assert isinstance(made.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    assert sync.last_report is not None
    if rank == 0:
        for name, tensor in made.model.state_dict().items():
            assert torch.equal(served.state_dict()[name], tensor), name
    return sync.version


def fails_on_one(rank: int) -> str:
    from transformers import TrainerCallback

    class Failing(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("only here")

    sync = WeightSyncCallback(ws.WeightReceiver(make_tiny_model().model).handle)
    with tempfile.TemporaryDirectory() as out:
        try:
            with sync:
                trainer(make_tiny_model().model, out, *([Failing()] if rank else []), sync).train()
        except Exception as exc:  # noqa: BLE001 - the other rank's depends on the backend
            if rank:
                os._exit(0)
            return str(exc)
    return "nothing was raised"


def accelerates_fsdp2(rank: int) -> None:
    """Shard as Accelerate does on GPUs: its own function, which its state asks for only there."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    as_launched(rank)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True)
    accelerator.state.fsdp_plugin = plugin
    served, model = make_tiny_model(seed=1).model, make_tiny_model().model
    sharded = fsdp2_prepare_model(accelerator, model)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    with ws.connect(
        accelerator.unwrap_model(sharded), to=ws.WeightReceiver(served).handle
    ) as sender:
        for _ in range(2):
            ids = torch.arange(8)[None] + rank
            sharded(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report = sender.send_weights()
        assert report.gathered == {}
    for part in sharded.modules():
        getattr(part, "reshard", lambda: None)()
    for name, tensor in sharded.named_parameters():
        full: Callable[[], torch.Tensor] = tensor.full_tensor
        whole = full()
        if rank == 0:
            assert torch.equal(served.state_dict()[name], whole), name
    assert not live_segments()


@contextmanager
def closing_what_the_dead_left() -> Iterator[None]:
    """Ranks of a crew are killed, and unlink nothing as processes do that end."""
    try:
        yield
    finally:
        remove_leftovers()


@pytest.mark.usefixtures("shm_clean")
def test_all_ranks_send_and_one_that_fails_waits_for_nobody() -> None:
    with closing_what_the_dead_left(), crew(2) as ranks:
        assert ranks.run(under_ddp) == [3, 3]
        ranks.run(accelerates_fsdp2)
        told = ranks.run(fails_on_one)
        assert isinstance(told[1], Died)
        # The training's own collective ended with that rank, not with its timeout.
        assert "Connection" in told[0]
        assert "imed out" not in told[0]


def test_the_page_says_where_the_sharded_trainer_is() -> None:
    root = Path(__file__).parents[2]
    assert "examples/trainer_fsdp2.py" in (root / "docs" / "trl.md").read_text()
    assert (root / "examples" / "trainer_fsdp2.py").is_file()
