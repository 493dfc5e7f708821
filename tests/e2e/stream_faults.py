"""Faults of ranks that each send a stream of their own, one at each step of an update."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import weightsync as ws
from tests.e2e import ranks_at_work as work
from tests.e2e.models import digests
from tests.e2e.processes import stop
from tests.e2e.ranks_at_work import Digests, Seen, seen
from tests.interrupts import Interrupt
from weightsync.ranks import comm
from weightsync.report import SyncReport
from weightsync.transports.http import HttpTransport
from weightsync.weights.copying import shards
from weightsync.weights.sources.base import Snapshot
from weightsync.wire.messages import FinishRequest, UpdateRequest

Step = Literal["before", "begin", "between", "begun", "transfer", "transferred", "end"]
Act = Literal["raise", "die", "stop", "interrupt"]


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
        if act == "interrupt":
            raise KeyboardInterrupt
        if step in ("between", "end"):  # what frees an engine, raises errors of weightsync alone
            raise ws.TransferError(f"in {step}")
        raise ZeroDivisionError(f"in {step}")

    setattr(owner, name, fail)


def send_failing(rank: int, at: int, step: Step, act: Act) -> tuple[Seen, Digests]:
    """Take a step of the optimizer, and send; rank `at` fails."""
    work.kept().step()
    if rank == at:
        fail_at(step, act)
    outcome = seen(work.kept().sender.send_weights)
    return outcome, work.kept().full() if act in ("raise", "interrupt") else {}


def send_written_to(rank: int, at: int, copies: bool) -> Seen:
    """Take a step, and send, or send a copy; rank `at` writes to its DTensors meanwhile."""
    work.kept().step()
    sender = work.kept().sender
    owner: Any = Snapshot if copies else next(iter(sender._group.worker.engines.values()))
    name = "take" if copies else "transfer"
    genuine = getattr(owner, name)

    def written_to(*args: Any) -> None:
        genuine(*args)
        with torch.no_grad():
            for parameter in work.kept().model.parameters():
                parameter.add_(1.0)

    def send() -> SyncReport:
        return sender.send_async().result(work.TIMEOUT_S) if copies else sender.send_weights()

    with mock.patch.object(owner, name, written_to) if rank == at else nullcontext():
        return seen(send)


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

    def __init__(self, rows: int = 4, *, whole: bool = False) -> None:
        super().__init__()
        self.shards: Any
        self.sums: Any
        if whole:
            self.shards = nn.Parameter(torch.zeros(2 * rows, 3))
            self.sums = nn.Parameter(torch.zeros(rows, 3))
            return
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        own = torch.full((rows, 3), dist.get_rank() + 1.0)
        self.shards = nn.Parameter(distribute_tensor(torch.randn(2 * rows, 3), mesh, [Shard(0)]))
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


def copy_failing(rank: int, at: int) -> tuple[Seen, list[int], SyncReport, int, int]:
    """Make a first copy, which raises at its end on rank `at`, and then another one.

    Return how the first ended, the bytes that this rank holds of its copies then, and when it had
    them; the report of the second, and its bytes.
    """
    made: list[Snapshot] = []
    nbytes: list[int] = []
    take = Snapshot.take

    def failing(self: Snapshot, *args: Any) -> None:
        take(self, *args)
        made.append(self)
        nbytes.append(self.nbytes)
        if rank == at:
            raise ZeroDivisionError("in the copy")

    sender = work.kept().sender
    with mock.patch.object(Snapshot, "take", failing):
        failed = seen(sender.send_async)
    left = sum(copy.nbytes for copy in made)
    report = sender.send_async().result(work.TIMEOUT_S)
    copied = sender._group.worker._snapshot
    assert copied is not None
    return failed, nbytes, report, left, copied.nbytes


def join_with_no_group(rank: int, kind: str) -> tuple[Digests, Digests]:
    """Join the ranks' copies while nothing may be broadcast in the trainer's own group."""
    with mock.patch.object(dist, "broadcast", side_effect=AssertionError("the trainer's group")):
        return work.join_copies(rank, kind)


def join_interrupted(rank: int, at: int, wait: int) -> Seen:
    """Join the ranks' copies; Ctrl-C comes before broadcast number `wait` of rank `at`."""
    calls = iter(range(1_000))
    genuine = comm.RankComm.spread

    def spread(self: comm.RankComm, flat: torch.Tensor, owner: int) -> None:
        if rank == at and next(calls) == wait:
            raise KeyboardInterrupt
        genuine(self, flat, owner)

    with mock.patch.object(comm.RankComm, "spread", spread):
        return seen(lambda: work.join_copies(rank, "fsdp"))


class Rows(nn.Module):
    """A weight whose rows are sharded, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.rows = nn.Linear(6, 8, bias=False)
        self.norm = nn.LayerNorm(6)

    def shard(self) -> DeviceMesh:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        weight = distribute_tensor(self.rows.weight.detach().clone(), mesh, [Shard(0)])
        self.rows.weight = nn.Parameter(weight)
        return mesh

    def full(self) -> Digests:
        return digests((n, shards.gather(t)) for n, t in self.state_dict().items())

    def change(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(1.0)


Placed = Literal["replicated", "columns", "plain", "sums"]
Outcome = tuple[Seen, Seen, tuple[Seen, Digests]]


def send_placed_otherwise(rank: int, to: str, what: Placed, everywhere: bool) -> Outcome:
    """Send; then with another placement of a weight on some ranks; then as it was."""
    model = Rows()
    mesh = model.shard()
    own = model.rows.weight
    with torch.no_grad():
        full = shards.gather(own).clone()
    placed: dict[str, Any] = {
        "replicated": lambda: DTensor.from_local(full, mesh, [Replicate()], run_check=False),
        "columns": lambda: distribute_tensor(full, mesh, [Shard(1)]),
        "plain": lambda: full,
        "sums": lambda: DTensor.from_local(full, mesh, [Partial()], run_check=False),
    }
    other = nn.Parameter(placed[what](), requires_grad=False)
    with ws.connect(model, to=to, timeout_s=work.TIMEOUT_S) as sender:
        first = seen(sender.send_weights)
        if everywhere or rank == 1:
            model.rows.weight = other
        refused = seen(sender.send_weights)
        model.rows.weight = own
        model.change()
        return first, refused, (seen(sender.send_weights), model.full())


def send_with_another_plan(rank: int, to: str) -> Outcome:
    """Connect again with a plan of rank 1 that is not that of the others; then with its own."""
    model = Rows()
    model.shard()
    with ws.connect(model, to=to, timeout_s=work.TIMEOUT_S) as sender:
        first = seen(sender.send_weights)
        worker = sender._group.worker
        plan = worker.plan
        sender.release()
        if rank == 1:
            worker.plan = replace(plan, digest="another")
        refused = seen(sender.send_weights)
        worker.plan = plan
        model.change()
        return first, refused, (seen(sender.send_weights), model.full())


def replace_a_rank(rank: int, to: str) -> Outcome:
    """Rank 1 leaves and calls `connect` anew, while rank 0 sends; then all connect again."""
    model = Rows()
    model.shard()
    sender = ws.connect(model, to=to, timeout_s=work.TIMEOUT_S)
    first = seen(sender.send_weights)
    if rank == 1:
        sender._group.close()
        refused = seen(lambda: ws.connect(model, to=to, timeout_s=1.0))
    else:
        refused = seen(sender.send_weights)
    with suppress(ws.WeightSyncError):
        sender.close()
    dist.barrier()
    with ws.connect(model, to=to, timeout_s=work.TIMEOUT_S) as sender:
        model.change()
        return first, refused, (seen(sender.send_weights), model.full())


def send_interrupted(
    rank: int, at: int, wait: int, in_block: bool = False
) -> tuple[str, Seen, Digests]:
    """Send, change the model, and send; Ctrl-C ends a wait for others on rank `at`, from 0 on.

    The first call ends for the others where rank `at` makes its next one, with other weights.
    `in_block`: it is a block that sends a tensor.
    """

    def send_block() -> None:
        with work.kept().sender.update(partial=True) as update:
            update.send([("norm.bias", torch.full((10,), 4.0))])

    model = work.kept().model
    comm: Any = work.kept().sender._group.comm
    waits = iter(range(1_000))
    genuine = comm._outcome

    def outcome(*args: object) -> object:
        if next(waits) == wait:
            raise KeyboardInterrupt
        return genuine(*args)

    if rank == at:
        comm._outcome = outcome
    try:
        send = send_block if in_block else work.kept().sender.send_weights
        ended = seen(send).kind or "sent"
    finally:
        vars(comm).pop("_outcome", None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return ended, seen(work.kept().sender.send_weights), work.kept().full()


def send_interrupted_in(
    rank: int, at: int, where: str, point: int, inline_nbytes: int
) -> tuple[str, Seen, Seen, Digests]:
    """Send, change the model, and send; an Interrupt ends the first call of rank `at`.

    It counts from where that rank has begun the call. Return where it was raised, how the calls
    ended, and the model. Payloads of the ranks that are longer than `inline_nbytes` take a
    collective more.
    """
    interrupt = Interrupt(where, point)
    sender, model = work.kept().sender, work.kept().model

    def begin(*args: Any) -> bytes:
        digest = comm.digest_of_call(*args)
        if rank == at:
            sys.settrace(interrupt)
        return digest

    with mock.patch.object(comm, "_INLINE_NBYTES", inline_nbytes):
        try:
            with mock.patch("weightsync.ranks.group.digest_of_call", begin):
                ended = seen(sender.send_weights)
        finally:
            sys.settrace(None)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        return interrupt.raised, ended, seen(sender.send_weights), work.kept().full()
