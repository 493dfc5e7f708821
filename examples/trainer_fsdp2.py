"""A transformers Trainer whose model FSDP2 shards over several processes.

WEIGHTSYNC_TOKEN=secret torchrun --nproc-per-node 2 examples/trainer_fsdp2.py DIR http://HOST:8000

trains the Hugging Face model in the directory DIR and sends it to a server that holds the same;
without a URL, to a receiver in rank 0's own process. Trainers of TRL accept the model and the
callback in the same way.
"""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

import weightsync as ws
from weightsync.integrations.trl import WeightSyncCallback
from weightsync.weights.sources.base import ModuleSource


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Rows of consecutive numbers."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(index, index + 12)
        return {"input_ids": ids, "labels": ids}


def train(directory: str, url: str | None, out: str) -> None:
    # Sharded as it is loaded, on any device. On GPUs, TrainingArguments(fsdp=True) with a plain
    # model does the same through Accelerate, which ignores it on CPUs.
    sharding = DistributedConfig(fsdp_size=dist.get_world_size())
    model = AutoModelForCausalLM.from_pretrained(directory, distributed_config=sharding)
    served = AutoModelForCausalLM.from_pretrained(directory)
    with WeightSyncCallback(url or ws.WeightReceiver(served).handle) as sync:
        trainer = Trainer(
            model=model,
            train_dataset=Counting(),
            args=TrainingArguments(
                output_dir=out,
                max_steps=3,
                per_device_train_batch_size=4,
                learning_rate=1e-2,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=not torch.cuda.is_available(),
            ),
            callbacks=[sync],
        )
        trainer.train()
        print(f"rank {dist.get_rank()}: {sync.last_report}")
        trained = dict(ModuleSource(trainer.model).tensors())  # every rank gathers
    if dist.get_rank() == 0 and url is None:
        held = dict(served.state_dict())
        same = all(torch.equal(held[name], tensor) for name, tensor in trained.items())
        print(f"the receiver holds {len(trained)} tensors of the trainer: {same}")


def main() -> None:
    dist.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
    with tempfile.TemporaryDirectory() as out:
        train(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None, out)
    # Python must not end while a thread of Gloo still holds tensors: torch would abort the process.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
