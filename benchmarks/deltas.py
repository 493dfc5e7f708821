"""How long an update takes that carries only what changed, beside a plain copy and a full update.

    python -m benchmarks.deltas [--readers 1,4] [--rounds 7]

One trainer process and one receiving process for each reader, as in `weightsync bench`, one thread
each. Changes are random (1 % of the values, by one unit in the last place), or those of a recorded
step of reinforcement learning: the layer that was recorded is used for every layer, rotated, and
the embedding changes at random by its recorded share.
"""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn

import weightsync as ws
from weightsync.cli.bench import _CATCH_UP_S, _receiver
from weightsync.cli.bench_receiver import BenchSetup, ShapesName, make_model, shapes_of
from weightsync.tensors import as_bytes

RECORDED = Path(__file__).with_name("recorded_steps.npz")
PREFIX = "model.layers.15."
TENSORS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "input_layernorm",
    "post_attention_layernorm",
)
EMBEDDING_SHARES = {"1e-06": 0.0125, "1e-05": 0.028, "5e-05": 0.079}
"""Share of the embedding's values that changed in a step, by learning rate (docs/deltas.md)."""
WARMUP = 3
Change = Callable[[nn.Module, int], None]


@dataclass(slots=True)
class Figures:
    """Seconds of the copies, the full updates and the deltas; the last delta's report."""

    copies: list[float] = field(default_factory=list)
    full: list[float] = field(default_factory=list)
    deltas: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    report: ws.DeltaReport | None = None

    def row(self, name: str, readers: int) -> str:
        """Return the figures as a row of the table."""
        copy, full, delta = map(statistics.median, (self.copies, self.full, self.deltas))
        report = self.report or ws.DeltaReport()
        return (
            f"| {name} | {readers} | {copy * 1e3:.1f} | {full / copy:.2f} | {delta / copy:.2f} | "
            f"{delta / full:.2f} | {report.share:.1%} | {report.nbytes / 1e6:.1f} | "
            f"{max(self.stalls) * 1e3:.2f} |"
        )


HEAD = (
    "| changes | receivers | copy, ms | full update, x copy | delta, x copy | delta, x full | "
    "lines changed | MB sent | longest pause, ms |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|"
)


def at_random(share: float) -> Change:
    """Return a function that changes a share of all values by one unit in the last place."""

    def change(model: nn.Module, step: int) -> None:
        random = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            _shift(parameter, _random(parameter.numel(), share, random))

    return change


def as_recorded(rate: str, step: int) -> Change:
    """Return a function that changes what a recorded step changed, in every layer."""
    with np.load(RECORDED) as arrays:
        positions = {
            name: np.cumsum(arrays[f"{rate}/{step}/{PREFIX}{name}.weight/gaps"], dtype=np.int64)
            for name in TENSORS
            if f"{rate}/{step}/{PREFIX}{name}.weight/gaps" in arrays
        }

    def change(model: nn.Module, number: int) -> None:
        embedding, *rest = model.parameters()
        random = torch.Generator().manual_seed(number)
        _shift(embedding, _random(embedding.numel(), EMBEDDING_SHARES[rate], random))
        for i, parameter in enumerate(rest[: len(rest) // len(TENSORS) * len(TENSORS)]):
            found = positions.get(TENSORS[i % len(TENSORS)])
            if found is not None and len(found):
                turned = (found + 977 * (i + number)) % parameter.numel()
                _shift(parameter, torch.from_numpy(turned))

    return change


def _random(count: int, share: float, random: torch.Generator) -> torch.Tensor:
    return torch.randint(count, (round(share * count),), generator=random)


def _shift(parameter: torch.Tensor, places: torch.Tensor) -> None:
    as_bytes(parameter).view(torch.int16)[places] += 1


def measure(
    shapes: ShapesName | None, change: Change, readers: int, rounds: int, delta: str
) -> Iterator[tuple[float, float, ws.SyncReport]]:
    """Yield the seconds of a copy and of an update for each round, and the report."""
    setup = BenchSetup(
        nbytes=512 << 20,
        tensors=300,
        dtype="bfloat16",
        shapes=shapes,
        packed=False,
        backend="auto",
        transport="http",
        readers=readers,
        sink="module",
        apply="auto",
        rounds=rounds,
    )
    token = secrets.token_urlsafe(16)
    with ExitStack() as stack:
        to = [stack.enter_context(_receiver(setup, token)) for _ in range(readers)]
        model = make_model(shapes_of(setup), torch.bfloat16, value=1)
        copied = [torch.ones_like(parameter) for parameter in model.parameters()]
        sender = stack.enter_context(ws.connect(model, to=to, token=token, delta=delta))  # type: ignore[arg-type]
        for number in range(WARMUP + rounds):
            time.sleep(_CATCH_UP_S)
            started = time.perf_counter()
            for target, source in zip(copied, model.parameters(), strict=True):
                target.copy_(source)
            copy_s = time.perf_counter() - started
            change(model, number)
            started = time.perf_counter()
            report = sender.send_weights()
            update_s = time.perf_counter() - started
            if number >= WARMUP:
                yield copy_s, update_s, report


def figures_of(shapes: ShapesName | None, change: Change, readers: int, rounds: int) -> Figures:
    """Return the figures of one kind of changes: full updates first, then deltas."""
    found = Figures()
    for copy_s, update_s, _ in measure(shapes, change, readers, rounds, "off"):
        found.copies.append(copy_s)
        found.full.append(update_s)
    for copy_s, update_s, report in measure(shapes, change, readers, rounds, "auto"):
        found.copies.append(copy_s)
        found.deltas.append(update_s)
        found.stalls.append(report.stall_s)
        found.report = report.delta
    return found


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--readers", default="1,4", help="numbers of receivers, by commas")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    cases: list[tuple[str, ShapesName | None, Change]] = [
        ("512 MiB, 1 % at random", None, at_random(0.01)),
        ("512 MiB, 0.1 % at random", None, at_random(0.001)),
        ("512 MiB, 20 % at random", None, at_random(0.2)),
        ("SmolLM2, 1 % at random", "smollm2", at_random(0.01)),
        *(
            (f"SmolLM2, as recorded at {rate}", "smollm2", as_recorded(rate, 6))
            for rate in EMBEDDING_SHARES
        ),
    ]
    print(HEAD)
    for name, shapes, change in cases:
        for readers in map(int, options.readers.split(",")):
            found = figures_of(shapes, change, readers, options.rounds)
            print(found.row(name, readers), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
