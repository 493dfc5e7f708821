"""The trainers' callback on a GPU: transformers' Trainer sends a Llama after each of its steps.

    python -m benchmarks.gpu_trl [--device cuda] [--steps 4]

The receiver is in the same process and on the same device, and has to hold the trainer's weights
bit for bit after each step. It was never run on a GPU. TRL's trainers are transformers' in this.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import weightsync as ws
from benchmarks.tables import table
from weightsync.integrations.trl import WeightSyncCallback

WORDS = 512
LENGTH = 32
HEAD = ("step", "path", "verified", "ms", "stall, ms")


def llama(hidden: int) -> LlamaForCausalLM:
    """Return a small Llama with random weights."""
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


class Compared(TrainerCallback):
    """Compares the server's weights with the trainer's after each update, and keeps its figures."""

    def __init__(self, sync: WeightSyncCallback, served: LlamaForCausalLM) -> None:
        self.rows: list[list[str]] = []
        self._sync = sync
        self._served = served

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Raise SystemExit where the two differ."""
        pairs = zip(known["model"].parameters(), self._served.parameters(), strict=True)
        if not all(torch.equal(ours, theirs.to(ours.device)) for ours, theirs in pairs):
            raise SystemExit(f"step {state.global_step}: the receiver does not hold what was sent")
        report = self._sync.last_report
        if report is None:
            raise SystemExit("the callback has sent nothing")
        self.rows.append(
            [
                str(state.global_step),
                report.path,
                report.verified,
                f"{report.seconds['total'] * 1e3:.1f}",
                f"{report.stall_s * 1e3:.2f}",
            ]
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Train for some steps, and print a table of the updates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1024)
    options = parser.parse_args(arguments)
    torch.manual_seed(1)
    model, served = llama(options.hidden), llama(options.hidden).to(options.device)
    receiver = ws.WeightReceiver(served)
    words = torch.randint(WORDS, (8 * options.steps, LENGTH))
    examples = [{"input_ids": row, "labels": row} for row in words]
    sync = WeightSyncCallback(receiver.handle)
    compared = Compared(sync, served)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            use_cpu=options.device == "cpu",
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=model, args=settings, train_dataset=examples, callbacks=[sync, compared]
        )
        trainer.train()
    receiver.close()
    if len(compared.rows) != options.steps:
        raise SystemExit(f"{len(compared.rows)} of {options.steps} steps were sent")
    print(f"The trainers' callback on {options.device}, one process")
    print(table(HEAD, compared.rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
