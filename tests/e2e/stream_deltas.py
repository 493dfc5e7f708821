"""Deltas of ranks that each send a stream of their own: what the ranks do in the tests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import weightsync as ws
from tests.e2e import ranks_at_work as work
from tests.e2e import shard_servers, stream_faults
from tests.e2e.ranks_at_work import Digests, Seen, kept, seen
from tests.e2e.stream_faults import Act, Step
from weightsync.report import DeltaReport
from weightsync.update import deltas
from weightsync.weights.copying import shards
from weightsync.weights.copying.shards import local_of
from weightsync.weights.deltas.change_log import ChangeLog
from weightsync.weights.sinks.module_sink import strip_wrappers


def change(model: nn.Module, seed: int, count: int = 1) -> None:
    """Change a few values of each tensor of this rank, the same ones in equal shards."""
    with torch.no_grad():
        for i, tensor in enumerate(model.parameters()):
            flat = local_of(tensor.detach()).view(-1)
            if flat.numel():
                generator = torch.Generator().manual_seed(100 * seed + i)
                flat[torch.randint(flat.numel(), (count,), generator=generator)] += 0.5


def change_and_send(
    rank: int, seed: int, count: int = 1, dtype: torch.dtype | None = None
) -> tuple[Seen, Digests]:
    """Change a few values, and send; return the outcome, and the model as all ranks have it."""
    change(kept().model, seed, count)
    return seen(kept().sender.send_weights), kept().full(dtype)


def change_and_send_alone(rank: int, seed: int) -> Seen:
    """Change a few values, and send, where not all ranks live to gather the model."""
    change(kept().model, seed)
    return seen(kept().sender.send_weights)


def full(rank: int) -> dict[str, torch.Tensor]:
    """Return the model of the trainer that is kept, which all ranks gather. Collective."""
    pairs = kept().model.state_dict().items()
    return {strip_wrappers(name): shards.gather(tensor).clone() for name, tensor in pairs}


@contextmanager
def connected(kind: str, *sinks: Any, apply: Any = "auto", **options: Any) -> Iterator[list[Any]]:
    """A trainer that sends to receivers in the processes of the ranks; those of rank 0 count.

    Yields the receivers. `kept()` is the trainer.
    """
    made = [ws.WeightReceiver(sink, apply=apply) for sink in sinks]
    with connected_to(made, kind, **options):
        yield made


@contextmanager
def connected_to(made: list[ws.WeightReceiver], kind: str, **options: Any) -> Iterator[None]:
    """A trainer that sends to these receivers, which end with it. `kept()` is the trainer."""
    trainer = work.Trainer(0, kind, [one.handle for one in made], **{**ALWAYS, **options})
    work.KEPT[:] = [trainer]
    try:
        yield
    finally:
        work.close(0)
        for one in made:
            one.close()


ALWAYS: dict[str, Any] = {"delta": "always"}


def equal(module: nn.Module) -> bool:
    """Whether a receiver's module of rank 0 has the bits of the trainer's model. Collective."""
    sent = full(0)
    held = module.state_dict()
    return dist.get_rank() > 0 or all(
        torch.equal(held[name].view(torch.uint8), tensor.to(held[name].dtype).view(torch.uint8))
        for name, tensor in sent.items()
        if tensor.dim()
    )


def patched(rank: int, kind: str) -> list[tuple[bool, bool]]:
    """Send to a hook that takes index and value.

    Return for each update whether it was a delta, and whether the hook was given exactly the
    elements that changed.
    """
    held: dict[str, torch.Tensor] = {}
    given: dict[str, tuple[list[int], torch.Tensor]] = {}

    def load(pairs: Any) -> None:
        held.update((name, tensor.clone()) for name, tensor in pairs)

    def load_patches(patches: Any) -> None:
        given.clear()
        given.update((one.name, (one.indices.tolist(), one.values)) for one in patches)

    found = []
    sink = ws.HookSink(load, load_patches=load_patches)
    with connected(kind, sink, apply="staged"):
        before: dict[str, torch.Tensor] = {}
        for step in range(4):
            given.clear()
            report = kept().sender.send_weights()
            now = full(rank)
            exact = True
            for name in held if rank == 0 else ():
                was, new = before.get(name, held[name]).view(-1), now[name].view(-1)
                changed = (was != new).nonzero().view(-1).tolist()
                at, values = given.get(name, ([], new[:0]))
                exact &= at == changed and torch.equal(values, new[changed])
            found.append((delta_of(report).sent, exact))
            before = now
            change(kept().model, step, count=2)
    return found


def named(rank: int, kind: str) -> list[set[str]]:
    """Send to a hook that takes the tensors that changed; return which it was given, by update."""
    given: list[set[str]] = []
    held: dict[str, torch.Tensor] = {}

    def load(pairs: Any) -> None:
        got = {name: tensor.clone() for name, tensor in pairs}
        held.update(got)
        given.append(set(got))

    with connected(kind, ws.HookSink(load, changed_only=True), apply="staged"):
        kept().sender.send_weights()
        with torch.no_grad():
            local_of(kept().model.layers[1].up.weight.detach()).view(-1)[:1] += 1  # type: ignore[union-attr,index]
        kept().sender.send_weights()
        now = full(rank)
    assert all(torch.equal(now[name], tensor) for name, tensor in held.items())
    return given


def delta_of(report: ws.SyncReport) -> DeltaReport:
    assert report.delta is not None
    return report.delta


def joined(rank: int, kind: str, apply: str) -> list[tuple[bool, list[bool]]]:
    """Send to one receiver, add another, and go on with both, with a resync of each in between.

    Return for each update whether it was a delta, and whether each receiver has the bits.
    """
    one, two = shard_servers.build(kind), shard_servers.build(kind)
    found = []

    def note(report: ws.SyncReport) -> None:
        found.append((delta_of(report).sent, [equal(one), equal(two)]))

    second = ws.WeightReceiver(two, apply=apply)  # type: ignore[arg-type]
    with connected(TRAINED[kind], one, apply=apply):
        sender = kept().sender
        for step in range(2):
            note(sender.send_weights())
            change(kept().model, step)
        note(sender.send_weights())
        report = sender.add(second.handle)
        assert report is not None
        change(kept().model, 2)
        note(sender.send_weights())
        targets = [list(sender.targets)]
        dist.broadcast_object_list(targets)
        for target in targets[0]:
            note(sender.resync(target))
        change(kept().model, 3)
        note(sender.send_weights())
    second.close()
    return found


def joined_shard(rank: int, kind: str, urls: list[str]) -> list[tuple[bool, str, bool]]:
    """Send to receivers of shards and one of the whole module, which serves a shard that joins.

    Returns as `unlike` does.
    """
    server = shard_servers.build(kind)
    found = []
    with closing(ws.WeightReceiver(server)) as receiver:
        trainer = work.Trainer(rank, TRAINED[kind], [*urls, receiver.handle], **ALWAYS)
        work.KEPT[:] = [trainer]
        for step in range(5):
            if step == 2:
                trainer.sender.remove(urls[-1])
            change(trainer.model, step)
            delta = delta_of(trainer.sender.send_weights())
            found.append((delta.sent, delta.reason, equal(server)))
            if step == 2:
                assert trainer.sender.add(urls[-1]) is not None
        work.close(rank)
    return found


TRAINED = {"decoder": "fsdp", "wide": "wide", "plain": "plain"}


def copied(rank: int, kind: str) -> list[tuple[bool, bool, int, int]]:
    """Send copies of the trainer's model, one after another.

    Return for each whether it was a delta, whether the receiver has the bits, the bytes of this
    rank's copy, and those of the delta.
    """
    server = shard_servers.build(kind)
    found = []
    with connected(TRAINED[kind], server):
        for step in range(4):
            future = kept().sender.send_async()
            report = future.result(work.TIMEOUT_S)
            same = equal(server)
            snapshot = kept().sender._group.worker._snapshot
            assert snapshot is not None
            delta = delta_of(report)
            found.append((delta.sent, same, snapshot.nbytes, delta.nbytes))
            change(kept().model, step)
    return found


Way = Literal["forgets", "misjudges", "changes more"]


def unlike(rank: int, at: int, way: Way) -> list[tuple[bool, str, bool]]:
    """Send four times; at the third one rank `at` cannot send the delta that others would.

    Return for each update whether it was a delta, the reason, and whether the receiver has the
    bits.
    """
    server = shard_servers.build("wide")
    found = []
    options: dict[str, Any] = {"delta": "auto"} if way == "changes more" else {}
    with mock.patch.object(deltas, "MIN_NBYTES", 0), connected("wide", server, **options):
        worker = kept().sender._group.worker
        for step in range(4):
            change(kept().model, step)
            patch: Any = nullcontext()
            if step == 2 and rank == at:
                if way == "forgets":
                    worker._changes.forget()  # type: ignore[union-attr]
                else:
                    with torch.no_grad():
                        for parameter in kept().model.parameters():
                            local_of(parameter.detach()).add_(1.0)
                if way == "misjudges":
                    share = mock.Mock(return_value=0.001)
                    patch = mock.patch.object(ChangeLog, "changed_share", share)
            with patch:
                report = kept().sender.send_weights()
            found.append((delta_of(report).sent, delta_of(report).reason, equal(server)))
    return found


def overwritten(rank: int, kind: str, apply: str) -> list[tuple[bool, str, bool]]:
    """Send four times; before the third the receiver's tensors are zeroed, unseen by torch.

    Returns as `unlike` does.
    """
    server = shard_servers.build(kind)
    found = []
    with connected(TRAINED[kind], server, apply=apply):
        for step in range(4):
            if step == 2:
                for tensor in server.state_dict().values():
                    tensor.data.zero_()
            report = kept().sender.send_weights()
            found.append((delta_of(report).sent, delta_of(report).reason, equal(server)))
            change(kept().model, step)
    return found


def dropped(rank: int) -> list[tuple[bool, list[str], bool]]:
    """Send to two receivers, of which one fails in the middle of a delta, and is dropped.

    Return for each update whether it was a delta, who was dropped, and whether the other has the
    bits.
    """
    one, two = shard_servers.build("wide"), shard_servers.build("wide")
    first, second = ws.WeightReceiver(one), ws.WeightReceiver(two)
    dies = False

    def fails(message: Any) -> Any:
        if dies and message["call"] != "weight_info":
            raise ConnectionError("it is gone")
        return second.handle(message)

    found = []
    trainer = work.Trainer(
        rank,
        "wide",
        [first.handle, fails],
        on_failure="drop",
        **ALWAYS,
    )
    work.KEPT[:] = [trainer]
    try:
        for step in range(4):
            dies = step == 2
            report = trainer.sender.send_weights()
            found.append((delta_of(report).sent, list(report.dropped), equal(one)))
            change(trainer.model, step)
    finally:
        work.close(rank)
        first.close()
        second.close()
    return found


def change_and_fail(rank: int, seed: int, at: int, step: Step, act: Act) -> tuple[Seen, Digests]:
    """Change a few values, and send; rank `at` fails at a step of it."""
    change(kept().model, seed)
    if rank == at:
        stream_faults.fail_at(step, act)
    return seen(kept().sender.send_weights), kept().full() if act == "raise" else {}


def walk(rank: int, kind: str, seed: int, steps: int) -> list[tuple[bool, int, list[bool]]]:
    """Send after random changes of random tensors on random ranks, to two receivers.

    One is staged, the other in place. Return for each update whether it was a delta, how many lines
    it had, and whether each receiver has the bits.
    """
    modules = [shard_servers.build(kind) for _ in range(2)]
    choose = random.Random(1000 * seed + rank)
    found = []
    with connected_to(both_ways(modules), TRAINED[kind]):
        for _ in range(steps):
            report = kept().sender.send_weights()
            found.append(
                (delta_of(report).sent, delta_of(report).lines, [equal(m) for m in modules])
            )
            with torch.no_grad():
                for tensor in kept().model.parameters():
                    flat = local_of(tensor.detach()).view(-1)
                    for _ in range(choose.choice([0, 0, 1, 7, 300]) if flat.numel() else 0):
                        flat[choose.randrange(flat.numel())] = choose.random()
    return found


def both_ways(modules: list[nn.Module]) -> list[ws.WeightReceiver]:
    """Receivers of two modules: one is staged, the other in place."""
    staged, in_place = modules
    return [
        ws.WeightReceiver(staged, apply="staged"),
        ws.WeightReceiver(in_place, apply="in_place"),
    ]


def change_and_cancel(rank: int, seed: int, at: int) -> tuple[Seen, Digests]:
    """Change a few values, and send; rank `at` is cancelled when it begins to transfer."""
    change(kept().model, seed)
    worker = kept().sender._group.worker
    engine: Any = next(iter(worker.engines.values()))
    genuine = engine.transfer

    def cancelled(*args: Any) -> None:
        del engine.transfer
        worker.stop.set()
        genuine(*args)

    if rank == at:
        engine.transfer = cancelled
    return seen(kept().sender.send_weights), kept().full()


def send_old(rank: int) -> Seen:
    """Send under the first version, which is refused."""
    return seen(lambda: kept().sender.send_weights(version=1))


def cast(rank: int) -> list[tuple[bool, int, bool]]:
    """Send casts of a model to bfloat16; before the second time it changes by less than they show.

    Return for each update whether it was a delta, how many lines it had, and whether the receiver
    has the bits.
    """
    server = shard_servers.build("wide").bfloat16()
    found = []
    with connected("wide", server, dtype=torch.bfloat16):
        with torch.no_grad():
            for parameter in kept().model.parameters():
                local_of(parameter.detach()).fill_(1.0)
        for step in range(4):
            report = kept().sender.send_weights()
            found.append((delta_of(report).sent, delta_of(report).lines, equal(server)))
            if step:
                change(kept().model, step)
            else:
                with torch.no_grad():
                    for parameter in kept().model.parameters():
                        local_of(parameter.detach()).mul_(1 + 1e-4)
    return found


def summed(rank: int) -> list[tuple[bool, str, list[float]]]:
    """Send four times; in between all of a tensor changes that the ranks gather.

    Return for each update whether it was a delta, the reason, and the values that the receiver has.
    """
    model, received = stream_faults.Sums(4_000), stream_faults.Sums(4_000, whole=True)
    found = []
    with (
        closing(ws.WeightReceiver(received)) as receiver,
        ws.connect(model, to=receiver.handle, timeout_s=work.TIMEOUT_S, **ALWAYS) as sender,
    ):
        for _ in range(4):
            delta = delta_of(sender.send_weights())
            found.append((delta.sent, delta.reason, received.sums.unique().tolist()))
            with torch.no_grad():
                model.sums.to_local().add_(1)
    return found


Move = Literal["to", "data", "assign"]


def move(model: nn.Module, way: Move) -> None:
    """Give all parameters other memory with the same bytes."""
    if way == "to":
        model._apply(torch.clone)  # type: ignore[no-untyped-call]  # as `model.to()` does
    elif way == "data":
        for parameter in model.parameters():
            local = local_of(parameter)
            local.data = local.data.clone()
    else:
        copies = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict(copies, assign=True)


def moved(
    rank: int, kind: str, way: Move, at: list[int], packed: bool | None
) -> list[tuple[bool, list[bool]]]:
    """Send five times; before the third and the fourth the memory of some ranks is moved.

    The fourth is no delta: rank 0 has forgotten what the receivers hold. Return for each update
    whether it was a delta, and whether each receiver has the bits.
    """
    modules = [shard_servers.build(kind) for _ in range(2)]
    found = []
    with connected_to(both_ways(modules), TRAINED[kind], packed=packed):
        for step in range(5):
            if step in (2, 3) and rank in at:
                move(kept().model, way)
            if step == 3 and rank == 0:
                kept().sender._group.worker._changes.forget()  # type: ignore[union-attr]
            report = kept().sender.send_weights()
            found.append((delta_of(report).sent, [equal(module) for module in modules]))
            change(kept().model, step)
    return found
