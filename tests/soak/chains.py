"""A trainer and a fleet of each kind of receiver, in one process: each update builds on the last.

The functions are run in a process of its own, since its memory is measured.
"""

from __future__ import annotations

import ctypes
import gc
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import weightsync as ws
from benchmarks.changes import Change, as_recorded, recorded_steps
from benchmarks.shapes import smollm2
from tests.e2e import models
from weightsync.update import deltas
from weightsync.weights.lines.memory import warm_up

SCRUB = 0.02
SHARES = (0.0, 1e-4, 1e-3, 1e-2, 1e-2, 0.3)


class Model(nn.Module):
    """Tensors of several sizes, of which most end inside of a line."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for i, shape in enumerate([(300, 64), (64,), (7, 33), (513, 65), (1,)]):
            dtype = torch.float32 if i == 2 else torch.bfloat16
            weight = torch.randn(shape, generator=generator).to(dtype)
            self.register_parameter(f"p{i}", nn.Parameter(weight, requires_grad=False))
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))


class Layer(nn.Module):
    """One layer of SmolLM2-135M, of which steps of training were recorded."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for spec in smollm2():
            if spec.name.startswith("model.layers.0."):
                weight = torch.randn(spec.shape, generator=generator).to(torch.bfloat16)
                owner: nn.Module = self
                *parents, name = spec.name.split(".")
                for parent in parents:
                    if parent not in owner._modules:
                        owner.add_module(parent, nn.Module())
                    owner = owner.get_submodule(parent)
                owner.register_parameter(name, nn.Parameter(weight, requires_grad=False))


@dataclass
class Chain:
    trainer: nn.Module
    held: Sequence[nn.Module]
    hooked: dict[str, torch.Tensor]
    sender: ws.WeightSender
    recorded: Sequence[Change] = ()
    steps: int = 0
    chance: random.Random = field(default_factory=lambda: random.Random(5))

    def step(self) -> None:
        """Change what a recorded step did, if there are any, else a random share of each tensor."""
        self.steps += 1
        if self.recorded:
            change = self.recorded[self.steps % len(self.recorded)]
            change(dict(self.trainer.named_parameters()), self.steps)
            return
        generator = torch.Generator().manual_seed(self.chance.getrandbits(60))
        share = self.chance.choice(SHARES)
        with torch.no_grad():
            for tensor in self.trainer.state_dict().values():
                flat = tensor.view(-1)
                count = int(share * flat.numel() + self.chance.random())
                at = torch.randint(flat.numel(), (count,), generator=generator)
                flat[at] = torch.randn(count, generator=generator).mul_(100).to(flat.dtype)

    def differing(self) -> list[str]:
        """Return the receivers whose weights are not the trainer's, bit by bit."""
        sent = models.digests(self.trainer)
        found = [models.digests(model) for model in self.held]
        found.append(models.digests(self.hooked.items()))
        return [kind for kind, got in zip(KINDS, found, strict=True) if got != sent]


KINDS = ("pointer", "copy", "in place", "hook")
_here: list[Chain] = []


def begin(kind: Mapping[str, bool]) -> None:
    """Connect; `by_value` has deltas coded as on slow paths, `recorded` changes as recorded."""
    warm_up()  # else a thread compiles the loops beside the first updates, and takes memory
    if kind["by_value"]:
        deltas._MEMORY_COST = 0.0
    made = Layer if kind["recorded"] else Model
    trainer, held = made(0), [made(i) for i in (1, 2, 3)]
    recorded = list(map(as_recorded, recorded_steps())) if kind["recorded"] else []
    hooked: dict[str, torch.Tensor] = {}

    def load(pairs: Any) -> None:
        for name, tensor in pairs:
            hooked.setdefault(name, torch.empty_like(tensor)).copy_(tensor)

    receivers = [
        ws.WeightReceiver(ws.ModuleSink(held[0], swap="pointer"), apply="staged"),
        ws.WeightReceiver(ws.ModuleSink(held[1], swap="copy"), apply="staged"),
        ws.WeightReceiver(held[2], apply="in_place"),
        ws.WeightReceiver(load, apply="staged"),
    ]
    sender = ws.connect(trainer, to=receivers, delta="always", scrub=SCRUB)
    _here.append(Chain(trainer, held, hooked, sender, recorded))


def send(count: int) -> dict[str, Any]:
    """Send so many updates of random changes; return what the receivers and the reports say.

    `whole` are the reasons of updates that were no deltas. `coded` says that values were sent: a
    delta of lines has 68 bytes for each, and 64 for each packet.
    """
    (chain,) = _here
    whole: list[str] = []
    extra, coded = 0, False
    for _ in range(count):
        chain.step()
        report = chain.sender.send_weights()
        extra = max(extra, report.peak_extra_nbytes)
        assert report.delta is not None
        if report.delta.sent:
            coded |= (report.delta.nbytes - 68 * report.delta.lines) % 64 != 0
        else:
            whole.append(report.delta.reason)
    return {
        "differing": chain.differing(),
        "whole": whole,
        "extra_nbytes": extra,
        "coded": coded,
    }


_MALLINFO = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks"),
    *("uordblks", "fordblks", "keepcost"),
)


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`, of all its arenas (mallinfo(3))."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLINFO)


def memory(_: object) -> dict[str, int]:
    """Return what is in use: bytes of malloc, bytes of shared memory, blocks of Python's heap.

    Resident memory has also what is freed and what is between, which differs by 3 % from run to
    run; these three are exact.
    """
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo
    malloc = libc.mallinfo2()
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return {
        "malloc": malloc.uordblks + malloc.hblkhd,
        "shared": int(status.split("RssShmem:")[1].split()[0]) << 10,
        "python": sys.getallocatedblocks(),
    }


def end(_: object) -> None:
    """Close the sender."""
    _here.pop().sender.close()
