"""Records which bf16 values of a real model change in steps of reinforcement learning.

    python -m benchmarks.record_steps --out benchmarks/recorded_steps.npz

The demo's GRPO trains SmolLM2-135M (AdamW, float32 master weights) from the start for each learning
rate. After each step the bf16 weights, as a server would hold them, are compared with those before.
The share of changed values is kept of every kind of tensor; of one layer the changed values
themselves: the gaps between their positions (`uint32[n]`), their bits before and after
(`uint16[n]`).
"""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples.demo.trainer import TASKS, Event, Server, Step, train
from weightsync.serve.model import load_model

MODEL = "smollm2"
STEPS = {1e-6: 6, 1e-5: 6, 5e-5: 6}
"""Steps for each learning rate. The first moves every weight by the whole rate, as Adam does."""
KEPT_STEPS = {1e-6: 6, 1e-5: 4, 5e-5: 1}
"""The last steps of which positions are kept: at a higher rate each has more of them."""
KEPT_LAYER = "model.layers.15."
KINDS = {
    "embed_tokens": "embedding",
    "self_attn": "attention",
    "mlp": "MLP",
    "norm": "norms",
}


class Recorder:
    """Compares a model's bf16 weights after each step with those before.

    `shares` has, by step and by kind of tensor, how many values changed and how many there are.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._before = self._words()
        self.counts: list[dict[str, tuple[int, int]]] = []
        self.changes: list[dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]] = []

    def record(self) -> None:
        """Add a step."""
        words, counts, changes = self._words(), dict[str, tuple[int, int]](), {}
        for name, now in words.items():
            before = self._before[name]
            positions = np.flatnonzero(now != before)
            kind = kind_of(name)
            changed, total = counts.get(kind, (0, 0))
            counts[kind] = (changed + positions.size, total + now.size)
            if name.startswith(KEPT_LAYER):
                changes[name] = (positions.astype(np.uint32), before[positions], now[positions])
        self._before = words
        self.counts.append(counts)
        self.changes.append(changes)

    def _words(self) -> dict[str, np.ndarray]:
        """Return the bits of the weights in bf16 (`uint16[n]`), by name."""
        return {
            name: parameter.detach().bfloat16().flatten().view(torch.int16).numpy().view(np.uint16)
            for name, parameter in self._model.named_parameters()
        }


def kind_of(name: str) -> str:
    """Return the kind of layer that a tensor of a Llama belongs to."""
    return next(kind for part, kind in KINDS.items() if part in name)


@contextmanager
def serving(token: str) -> Iterator[str]:
    """Run a server of the model; return its URL."""
    line = [sys.executable, "-m", "weightsync", "serve", MODEL, "--port", "0", "--token", token]
    with subprocess.Popen([*line, "--json"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


def record(server: Server, learning_rate: float, steps: int) -> Recorder:
    """Train for `steps` steps, and return the record of them."""
    torch.manual_seed(0)
    loaded = load_model(MODEL)
    recorder = Recorder(loaded.model)

    def emit(event: Event) -> None:
        if isinstance(event, Step):
            recorder.record()
            changed, total = map(sum, zip(*recorder.counts[-1].values(), strict=True))
            print(
                f"{learning_rate:g}: step {len(recorder.counts)}, reward {event.reward:.3f}, "
                f"{changed / total:.3%} of {total} values changed",
                flush=True,
            )

    task = replace(TASKS[MODEL], learning_rate=learning_rate)
    train(server, loaded, task, steps, emit)
    return recorder


def arrays_of(learning_rate: float, recorder: Recorder) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays to keep."""
    kept = KEPT_STEPS[learning_rate]
    first = len(recorder.changes) - kept
    for number, changes in enumerate(recorder.changes[first:], first + 1):
        for name, (positions, before, now) in changes.items():
            key = f"{learning_rate:g}/{number}/{name}"
            yield f"{key}/gaps", np.diff(positions, prepend=np.uint32(0))
            yield f"{key}/before", before
            yield f"{key}/now", now


def table(recorders: Mapping[float, Recorder]) -> str:
    """Return the shares as a table in Markdown: kinds of layers by learning rate."""
    lines = ["| learning rate | step | " + " | ".join([*KINDS.values(), "all"]) + " |"]
    lines.append("|---|---|" + "---:|" * (len(KINDS) + 1))
    for rate, recorder in recorders.items():
        for number, counts in enumerate(recorder.counts, 1):
            pairs = [*(counts[kind] for kind in KINDS.values())]
            pairs.append((sum(c for c, _ in pairs), sum(t for _, t in pairs)))
            shares = " | ".join(f"{changed / total:.2%}" for changed, total in pairs)
            lines.append(f"| {rate:g} | {number} | {shares} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Record all learning rates; write the arrays, and print the table of shares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    token = secrets.token_hex(16)
    recorders: dict[float, Recorder] = {}
    arrays: dict[str, Any] = {}
    with serving(token) as url:
        server = Server(url, token)
        for rate, steps in STEPS.items():
            recorders[rate] = record(server, rate, steps)
            arrays.update(arrays_of(rate, recorders[rate]))
    np.savez_compressed(options.out, **arrays)
    print(table(recorders))
    print(f"{options.out}: {options.out.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
