"""Faults of ranks that each send a stream of their own, one at each step of an update."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import weightsync as ws
from tests.e2e import ranks_at_work as work
from tests.e2e.processes import stop
from tests.e2e.ranks_at_work import Digests, Seen, seen
from weightsync.report import SyncReport
from weightsync.transports.http import HttpTransport
from weightsync.wire.messages import FinishRequest, UpdateRequest

Step = Literal["before", "begin", "between", "begun", "transfer", "transferred", "end"]
Act = Literal["raise", "die", "stop"]


def fail_at(step: Step, act: Act) -> None:
    """Make this rank fail once, at a step of its next update."""
    group: Any = work.kept().sender._group
    worker = group.worker
    engine = next(iter(worker.engines.values()))
    owner, name = {
        "before": (worker, "_before_begin"),
        "begin": (engine, "begin"),
        "between": (group, "transfer_apart"),  # rank 0 alone: the others go on by themselves
        "begun": (engine, "transfer"),
        "transfer": (engine, "transfer"),
        "transferred": (worker, "_transfer"),
        "end": (worker, "_end_of_all"),
    }[step]
    genuine = getattr(owner, name)

    def fail(*args: object, **named: object) -> object:
        vars(owner).pop(name)
        after = step in ("begin", "transfer", "transferred")
        result = genuine(*args, **named) if after else None
        if act == "die":
            work.die()
        if act == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            return result if after else genuine(*args, **named)
        if step in ("between", "end"):  # what frees an engine, raises errors of weightsync alone
            raise ws.TransferError(f"in {step}")
        raise ZeroDivisionError(f"in {step}")

    setattr(owner, name, fail)


def send_failing(rank: int, at: int, step: Step, act: Act) -> tuple[Seen, Digests]:
    """Take a step of the optimizer, and send; rank `at` fails."""
    work.kept().step()
    if rank == at:
        fail_at(step, act)
    return seen(work.kept().sender.send_weights), work.kept().full() if act == "raise" else {}


Stage = Literal["load", "transfer", "finish"]
_MESSAGES: dict[Stage, type] = {"load": UpdateRequest, "finish": FinishRequest}


def stop_at(rank: int, at: int, stage: Stage, pid: int, url: str) -> None:
    """Stop the process of a receiver once, at a stage of the next update.

    Before a message of rank 0 to the receiver, or before rank `at` begins to transfer: then the
    other ranks begin later, so that rank `at` waits longest.
    """
    owner: Any = HttpTransport
    name = "call"
    if stage == "transfer":
        owner = next(iter(work.kept().sender._group.worker.engines.values()))
        name = "transfer"
    elif rank:
        return
    own = name in vars(owner)
    genuine = getattr(owner, name)

    def stopping(*args: Any, **named: Any) -> Any:
        if stage != "transfer":
            transport, request = args[:2]
            if transport.target != url or not isinstance(request, _MESSAGES[stage]):
                return genuine(*args, **named)
        if own:
            setattr(owner, name, genuine)
        else:
            delattr(owner, name)
        if rank == at or stage != "transfer":
            stop(pid)
        else:
            time.sleep(LATER_S)
        return genuine(*args, **named)

    setattr(owner, name, stopping)


LATER_S = 3.0


class Sums(nn.Module):
    """A parameter in shards, and one in partial sums, which no rank can tell its part of."""

    def __init__(self, *, whole: bool = False) -> None:
        super().__init__()
        self.shards: Any
        self.sums: Any
        if whole:
            self.shards = nn.Parameter(torch.zeros(8, 3))
            self.sums = nn.Parameter(torch.zeros(4, 3))
            return
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        own = torch.full((4, 3), dist.get_rank() + 1.0)
        self.shards = nn.Parameter(distribute_tensor(torch.randn(8, 3), mesh, [Shard(0)]))
        sums = DTensor.from_local(own, mesh, [Partial()], run_check=False)
        self.sums = nn.Parameter(sums, requires_grad=False)


def copies_of_sums(rank: int) -> list[tuple[SyncReport, list[float]]]:
    """Send a copy twice; return the reports, and what rank 0 received of the sums."""
    model = Sums()
    received = Sums(whole=True)
    found = []
    with (
        closing(ws.WeightReceiver(received)) as receiver,
        ws.connect(model, to=receiver.handle, timeout_s=work.TIMEOUT_S) as sender,
    ):
        for _ in range(2):
            with torch.no_grad():
                model.sums.to_local().add_(1)
            report = sender.send_async().result(work.TIMEOUT_S)
            found.append((report, received.sums.unique().tolist()))
    return found


def join_with_no_group(rank: int, kind: str) -> tuple[Digests, Digests]:
    """Join the ranks' copies while nothing may be broadcast in the trainer's own group."""
    with mock.patch.object(dist, "broadcast", side_effect=AssertionError("the trainer's group")):
        return work.join_copies(rank, kind)
