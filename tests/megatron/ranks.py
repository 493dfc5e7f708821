"""What each rank of a trainer of megatron-core does, in a process of its own."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import weightsync as ws
from tests.children import load_beforehand
from tests.megatron import models
from weightsync.shm.segment import live_segments

load_beforehand("megatron.core.models.gpt.gpt_layer_specs", "transformers")


class Case(NamedTuple):
    """A family and how its model is split; `fused` as receivers of transformers have experts."""

    family: str
    tp: int = 1
    pp: int = 1
    ep: int = 1
    vp: int | None = None
    tied: bool = False
    fused: bool = True


class Trainer(NamedTuple):
    case: Case
    chunks: list[torch.nn.Module]
    sender: ws.WeightSender


AT_WORK: list[Trainer] = []


def state_of_step(case: Case, step: int) -> models.Tensors:
    return models.state_of(models.checkpoint_model(case.family, step, tied=case.tied), case.family)


def build(case: Case, step: int = 0) -> list[torch.nn.Module]:
    logging.disable(logging.WARNING)  # that GPTModel is to be replaced
    models.start(case.tp, case.pp, case.ep, case.vp)
    chunks = models.trainer_model(case.family, tied=case.tied, vp=case.vp)
    models.load(chunks, state_of_step(case, step), case.family)
    return chunks


def source_of(case: Case, chunks: list[torch.nn.Module], **how: Any) -> ws.MegatronSource:
    fused = case.fused and case.family in models.MIXTURES
    config = models.checkpoint_config(case.family, tied=case.tied)
    given = chunks if case.vp else chunks[0]
    return ws.MegatronSource(given, config, fused_experts=fused, **how)


def connect(rank: int, case: Case, urls: list[str], **how: Any) -> None:
    """Connect a trainer with the weights of step 0."""
    chunks = build(case)
    sender = ws.connect(source_of(case, chunks), to=urls if rank == 0 else (), **how)
    AT_WORK.append(Trainer(case, chunks, sender))


def update(rank: int, step: int) -> tuple[int, dict[str, str], int]:
    """Write and send the weights of a step; return version, what was gathered, collectives."""
    case, chunks, sender = AT_WORK[-1]
    models.load(chunks, state_of_step(case, step), case.family)
    report = sender.send_weights()
    return report.version, dict(report.gathered), report.nbytes


def in_place(rank: int) -> bool:
    """Whether the linear layers of this rank lie in memory that receivers read."""
    segments = [(one.address, one.address + one.nbytes) for one in live_segments() if one.owner]
    (chunk,) = AT_WORK[-1].chunks
    addresses = [p.data_ptr() for name, p in chunk.named_parameters() if "linear" in name]
    return bool(addresses) and all(
        any(a <= address < b for a, b in segments) for address in addresses
    )


def close(rank: int) -> None:
    while AT_WORK:
        AT_WORK.pop().sender.close()


def threads(rank: int) -> int:
    """Count the threads of this process: each group of ranks has some."""
    return len(list(Path("/proc/self/task").iterdir()))


def logits(rank: int, case: Case, tokens: torch.Tensor) -> torch.Tensor:
    return models.logits(build(case, 1)[0], tokens)


def update_and_die(rank: int, victim: int, step: int) -> str:
    """Send; the rank `victim` is killed when its parameters are read. Return the error."""
    case, chunks, sender = AT_WORK[-1]
    models.load(chunks, state_of_step(case, step), case.family)
    if rank == victim:
        ws.MegatronSource._parts = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment, return-value]
    try:
        sender.send_weights()
    except ws.WeightSyncError as exc:
        return f"{type(exc).__name__}: {exc}"
    return "sent"


def refused(rank: int, case: Case, spoil: str, urls: list[str]) -> str:
    """Return the error of `connect` where rank 1 spoils its model or configuration."""
    chunks = build(case)
    config: Any = models.checkpoint_config(case.family, tied=case.tied).to_dict()
    if rank == 1:
        if spoil == "vocabulary":
            chunks = models.trainer_model(case.family, vocab=models.PADDED + 32)
        if spoil == "dtype":
            chunks[0].to(torch.bfloat16)
    try:
        ws.connect(ws.MegatronSource(chunks, config), to=urls if rank == 0 else ())
    except ws.WeightSyncError as exc:
        return f"{type(exc).__name__}: {exc}"
    finally:
        dist.barrier()
    return "connected"
