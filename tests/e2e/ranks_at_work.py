"""The work of a trainer's ranks in the tests, each in a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import weightsync as ws
from tests.e2e import shard_servers
from tests.e2e.models import digests
from tests.weights import trainer_models
from weightsync.cuda.handles import device_keys
from weightsync.ranks import comm, worker
from weightsync.ranks.sources import join_snapshots
from weightsync.ranks.streams import StreamSource, encode_held, plan_streams
from weightsync.specs import Manifest
from weightsync.transports.factory import TransportFactory
from weightsync.weights.copying import shards
from weightsync.weights.sinks.module_sink import strip_wrappers
from weightsync.weights.sources.base import Snapshot
from weightsync.wire.messages import FinishRequest

TOKENS = torch.arange(6).view(2, 3)
TIMEOUT_S = 30.0
Digests = dict[str, str]


@dataclass
class Seen:
    """How a call ended on one rank."""

    kind: str = ""
    text: str = ""
    cause: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)
    took_s: float = 0.0
    result: Any = None


def seen(act: Callable[[], Any]) -> Seen:
    started = time.monotonic()
    try:
        result = act()
    except (Exception, KeyboardInterrupt) as exc:  # noqa: BLE001  # the error is the result
        return Seen(
            kind=type(exc).__name__,
            text=str(exc),
            cause=type(exc.__cause__).__name__,
            attributes=dict(vars(exc)),
            took_s=time.monotonic() - started,
        )
    return Seen(result=result, took_s=time.monotonic() - started)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "fsdp": trainer_models.fsdp,
    "ddp": trainer_models.replicated,
    "plain": trainer_models.plain,
    **trainer_models.MODELS,
    **trainer_models.FLAT_MODELS,
    "wide": lambda: sharded(shard_servers.build("wide")),
}


def sharded(module: nn.Module) -> nn.Module:
    fully_shard(module)
    return module


class Trainer:
    """One rank: its model and its sender. `ends` are faults of its source."""

    def __init__(self, rank: int, kind: str, to: list[Any], **options: Any) -> None:
        self.rank = rank
        self.kind = kind
        self.model = MODELS[kind]()
        self.source: Any = self.model
        if options.pop("gathers", False):
            self.source = Gathered(self.model)
        if options.pop("iterates", False):
            self.source = self.iterate
        scheme = options.pop("scheme", None)
        if scheme is not None:
            self.source = ws.QuantizedSource(self.model, scheme)
        fault = options.pop("fault", None)
        if fault is not None:
            self.source = Faulty(rank, self.model, fault)
        if "host" in options:
            move(rank, options.pop("host"))
        group = options.pop("members", None)
        if group is not None:
            options["process_group"] = dist.new_group(group, use_local_synchronization=True)
        options.setdefault("timeout_s", TIMEOUT_S)
        self.sender = ws.connect(self.source, to=to, **options)

    def iterate(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full tensors, each of which all ranks gather when it is requested."""
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            yield strip_wrappers(name), shards.gather(tensor.detach())

    def step(self) -> None:
        """One step of an optimizer, or a change of each weight of a model that computes nothing."""
        if self.kind in ("tensor_parallel", "wide"):
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(1.25).add_(0.5)
            return
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.model(TOKENS).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def full(self, dtype: torch.dtype | None = None) -> Digests:
        """Digests of the unsharded model, tied names included."""
        pairs = (
            (strip_wrappers(name), shards.gather(tensor))
            for name, tensor in self.model.state_dict().items()
        )
        cast_to = (
            (name, tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor)
            for name, tensor in pairs
        )
        source = self.source
        if isinstance(source, ws.QuantizedSource):
            kept = (pair for pair in cast_to if pair[0] not in source.manifest.aliases)
            return digests(source.convert(kept))
        return digests(cast_to)


def move(rank: int, moved: int) -> None:
    """Give one rank the host key of another host."""
    if rank == moved:
        vars(worker)["device_keys"] = lambda _: ["HOST-elsewhere"]


class Faulty:
    """A model's tensors, shards as they are, with a fault at a given tensor and iteration."""

    def __init__(self, rank: int, model: nn.Module, fault: dict[str, Any]) -> None:
        self.model = model
        self.at_work = threading.Event()
        self.rank = rank
        self.fault = fault

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        pairs = [(n, t) for n, t in self.model.state_dict().items() if n != "head.weight"]
        fault = self.fault if self.rank == self.fault.get("rank") else {}
        kind = fault.get("kind", "")
        if kind == "order":
            pairs[4:6] = reversed(pairs[4:6])
        if kind == "missing":
            del pairs[4]
        if kind == "surplus":
            pairs.append(("extra", torch.ones(2)))
        if kind == "shape":
            pairs[4] = (pairs[4][0], torch.ones(3))
        for i, pair in enumerate(pairs):
            self.fail(kind, fault.get("at") == i)
            if i == 3:  # in the middle of a layer
                self.at_work.set()
            yield pair
        self.fail(kind, fault.get("at") == len(pairs))

    def fail(self, kind: str, here: bool) -> None:
        if here and kind == "raises":
            raise ZeroDivisionError("in the source")
        if here and kind == "dies":
            time.sleep(0.5)
            die()


class Gathered(ws.WrappingSource):
    """A model's tensors as they are, of which no rank says what it holds."""

    @property
    def manifest(self) -> Manifest:
        return self.source.manifest

    def convert(
        self, pairs: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        yield from pairs


KEPT: list[Trainer] = []


def kept() -> Trainer:
    return KEPT[-1]


def start(rank: int, kind: str, to: list[str], options: dict[str, Any]) -> Seen:
    def make() -> None:
        KEPT[:] = [Trainer(rank, kind, to, **options)]

    return seen(make)


def step_and_send(rank: int, dtype: torch.dtype | None = None) -> tuple[Seen, Digests]:
    kept().step()
    return seen(kept().sender.send_weights), kept().full(dtype)


def generate_and_send(rank: int) -> tuple[Seen, Digests]:
    """Send after a step and a forward pass, which leaves the parameters gathered."""
    kept().step()
    with torch.no_grad():
        kept().model(TOKENS)
    return seen(kept().sender.send_weights), kept().full()


def train_alone(rank: int, kind: str, steps: int) -> Digests:
    """Return the model after some steps that nobody watches."""
    trainer = Trainer.__new__(Trainer)
    trainer.kind = kind
    trainer.source = trainer.model = MODELS[kind]()
    for _ in range(steps):
        trainer.step()
    return trainer.full()


def full_of_kept(rank: int) -> Digests:
    return kept().full()


def send_nan_in_columns(rank: int) -> Seen:
    """Send a matrix that lies column by column, with NaN in it, of which a cast is sent."""
    weight = kept().model.layers[0].down.weight  # type: ignore[union-attr, index]  # a Decoder's
    with torch.no_grad():
        weight.data = weight.t().contiguous().t()
        weight[2:5] = float("nan")
    return seen(kept().sender.send_weights)


def send_without_sums(rank: int, failing: int) -> Seen:
    """Send, and have one rank fail while it adds up its boxes."""
    if rank != failing:
        return seen(kept().sender.send_weights)
    with mock.patch.object(worker, "parts_of", side_effect=MemoryError("no room for a cast")):
        return seen(kept().sender.send_weights)


def redirect(rank: int, url: str) -> None:
    """Have another process answer for the last receiver, as after a restart of it."""
    if rank == 0:
        coordinator = kept().sender._coordinator
        assert coordinator is not None
        coordinator.fleet.members[-1].transport = TransportFactory(None).one(url)


def restart_before_finish(rank: int, url: str) -> None:
    """Have another process answer for the last receiver from its next finish request on."""
    if rank:
        return
    coordinator = kept().sender._coordinator
    assert coordinator is not None
    member = coordinator.fleet.members[-1]
    former: Any = member.transport
    successor: Any = TransportFactory(None).one(url)
    genuine = former.call

    def call(request: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(request, FinishRequest):
            return genuine(request, *args, **options)
        member.transport = successor
        return successor.call(request, *args, **options)

    former.call = call


def resync(rank: int, url: str) -> Seen:
    """Send the present version to one receiver again."""
    return seen(lambda: kept().sender.resync(url))


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """The bytes of the largest tensor that is made while this is entered, views apart."""

    nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        if isinstance(result, torch.Tensor):
            made = result.untyped_storage()
            if made.data_ptr() not in given:
                self.nbytes = max(self.nbytes, made.nbytes())
        return result


def send_columns_and_measure_sums(rank: int, most: int) -> tuple[Seen, int]:
    """Send a matrix that lies column by column; return the largest tensor that sums made.

    No more than `most` bytes of a box are to be cast at a time.
    """
    weight = kept().model.layers[0].down.weight  # type: ignore[union-attr, index]  # a Decoder's
    with torch.no_grad():
        weight.data = weight.t().contiguous().t()
    genuine = worker.RankWorker._sum_up
    largest = LargestTensor()  # type: ignore[no-untyped-call]  # torch's

    def sum_up(self: worker.RankWorker) -> Any:
        with largest:
            return genuine(self)

    with (
        mock.patch.object(worker, "_CAST_NBYTES", most),
        mock.patch.object(worker.RankWorker, "_sum_up", sum_up),
    ):
        return seen(kept().sender.send_weights), largest.nbytes


def set_verify(rank: int, verify: bool) -> None:
    kept().sender.verify = verify


def gathers_of_an_update(rank: int) -> int:
    """Send once more, and return how many tensors were gathered for it."""
    counts: Counter[str] = Counter()
    full_tensor = DTensor.full_tensor

    def counted(self: DTensor, **options: Any) -> torch.Tensor:
        counts["gathers"] += 1
        return full_tensor(self, **options)

    with mock.patch.object(DTensor, "full_tensor", counted):
        kept().sender.send_weights()
    return counts["gathers"]


def send_copy_and_step(rank: int) -> tuple[Seen, Digests, int]:
    """Train while a copy is sent; return the model as it was, and the bytes of this rank's copy."""
    kept().step()
    full = kept().full()
    future = kept().sender.send_async()
    kept().step()
    copied = kept().sender._group.worker._snapshot
    assert copied is not None
    return seen(lambda: future.result(TIMEOUT_S)), full, copied.nbytes


def join_copies(rank: int, kind: str) -> tuple[Digests, Digests]:
    """Return the model, and what the ranks make together of the copies of their boxes."""
    model = MODELS[kind]()
    source = ws.ModuleSource(model)
    ranks = comm.join_ranks(None, timeout_s=TIMEOUT_S)
    holdings = source.holdings()
    assert holdings is not None
    told = encode_held(holdings, source.manifest, "HOST-1")
    plan = plan_streams(source.manifest, ranks.exchange(told))
    own = StreamSource(source, plan, rank, holdings)
    copy = Snapshot(own.manifest)
    copy.take(own, lambda: None)
    joined = digests(join_snapshots(copy, plan.streams, ranks).tensors())
    full = digests((name, tensor.clone()) for name, tensor in source.tensors())
    ranks.close()
    return full, joined


def set_fault(rank: int, fault: dict[str, Any]) -> None:
    cast(Faulty, kept().source).fault = fault


def connect_without(rank: int, absent: int, to: str) -> Seen | None:
    if rank == absent:
        return None
    return seen(lambda: ws.connect(trainer_models.plain(), to=to, timeout_s=1))


def die_on(rank: int, at: int) -> None:
    """End the process of one rank."""
    if rank == at:
        die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def send_with(rank: int, fault: dict[str, Any]) -> Seen:
    set_fault(rank, fault)
    if fault == {"rank": rank, "kind": "dies later"}:
        threading.Timer(0.5, die).start()
    return seen(kept().sender.send_weights)


def release(rank: int) -> None:
    kept().sender.release()


def release_and_send(rank: int) -> tuple[Seen, Digests]:
    kept().sender.release()
    return step_and_send(rank)


def send_part(rank: int, fault: str = "") -> Seen:
    """A partial update in two calls of `send`: a shard, and a plain tensor."""

    def send() -> Any:
        with kept().sender.update(partial=True) as update:
            name, tensor = next(iter(kept().model.state_dict().items()))
            if not (fault == "name" and rank == 1):
                update.send([(strip_wrappers(name), tensor)])
            else:
                update.send([("layers.0.up.weight", tensor)])
            if fault == "block" and rank == 1:
                raise KeyError("in the block")
            if fault == "leading block" and rank == 0:
                raise KeyError("in the block")
            if not (fault == "fewer" and rank == 1):
                update.send([("norm.bias", torch.full((10,), 4.0))])
            if fault == "more" and rank == 1:
                update.send([("norm.bias", torch.full((10,), 5.0))])
        return update.last_report

    return seen(send)


def send_nan(rank: int, at: int) -> Seen:
    """A partial update of a shard of each rank; that of rank `at` holds NaN."""
    weight = kept().model.layers[0].up.weight.detach().clone()  # type: ignore[union-attr,index]
    if rank == at:
        weight.to_local().fill_(torch.nan)

    def send() -> None:
        with kept().sender.update(partial=True) as update:
            update.send([("layers.0.up.weight", weight)])

    return seen(send)


def exchange_memory_and_send(rank: int, at: int) -> tuple[Seen, Digests]:
    """Send after two parameters of rank `at` have exchanged their memory, and not their values."""
    if rank == at:
        one, other = kept().model.layers[0].up.weight, kept().model.layers[1].up.weight  # type: ignore[union-attr,index]
        values = one.detach().clone(), other.detach().clone()
        one.data, other.data = other.data, one.data
        one.data.copy_(values[0])
        other.data.copy_(values[1])
    return step_and_send(rank)


def close(rank: int) -> Seen:
    outcome = seen(KEPT.pop().sender.close) if KEPT else Seen()
    vars(worker)["device_keys"] = device_keys
    return outcome


def part_ways(rank: int) -> list[Seen]:
    """Rank 1 closes, the others send."""
    sender = kept().sender
    first = seen(sender.close if rank == 1 else sender.send_weights)
    return [first, close(rank)]


def cancelled(rank: int, canceller: int) -> tuple[Seen, bool]:
    """Cancel one rank's send in the middle; the flag is set when it gets CancelledError."""
    trainer = kept()
    at_work = cast(Faulty, trainer.source).at_work
    at_work.clear()

    async def send() -> bool:
        task = asyncio.create_task(trainer.sender.asend_weights())
        if rank == canceller:
            assert await asyncio.to_thread(at_work.wait, TIMEOUT_S)
            task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return True
        return False

    outcome = seen(lambda: asyncio.run(send()))
    return outcome, outcome.result is True


def cancelled_in_finish(rank: int) -> tuple[bool, bool, int]:
    """Cancel this rank's send while receivers commit it.

    Return whether it raised CancelledError, whether the update was over then, and its version.
    """
    sender = kept().sender
    worker = sender._group.worker

    async def send() -> tuple[bool, bool]:
        task = asyncio.create_task(sender.asend_weights())
        deadline = time.monotonic() + TIMEOUT_S
        begun = False
        while not begun or worker._used is not None:
            assert time.monotonic() < deadline
            begun = begun or worker._used is not None
            await asyncio.sleep(0)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            assert sender.last_send is not None
            return True, sender.last_send.done()
        return False, True

    was_cancelled, over = asyncio.run(send())
    assert sender.last_send is not None
    return was_cancelled, over, sender.last_send.result(TIMEOUT_S).version


def count_calls(rank: int, to: list[str], bucket_nbytes: int) -> tuple[int, int]:
    """Return the private group's collectives of one update, and its status words."""
    source = Gathered(trainer_models.fsdp())
    sender = ws.connect(source, to=to, bucket_nbytes=bucket_nbytes, timeout_s=TIMEOUT_S)
    with sender:
        counts = counted_update(sender)
    return counts["run"], counts["agree"]


def count_steady_calls(rank: int) -> Counter[str]:
    """Return the private group's calls of one more update of the sender that is kept."""
    return counted_update(kept().sender)


def counted_update(sender: ws.WeightSender) -> Counter[str]:
    """Count the calls of the private group in one update, and as `run` its collectives."""
    counts: Counter[str] = Counter()
    run, meet = comm.RankComm._run, comm.RankComm._meet

    def counted_run(self: Any, *starts: Any, **options: Any) -> None:
        counts["run"] += 1
        run(self, *starts, **options)

    def counted_call(self: Any, call: str, *args: Any, **options: Any) -> Any:
        counts[call] += 1
        return meet(self, call, *args, **options)

    counting = (
        mock.patch.object(comm.RankComm, "_run", counted_run),
        mock.patch.object(comm.RankComm, "_meet", counted_call),
    )
    with counting[0], counting[1]:
        sender.send_weights()
    return counts


EQUAL_LAYERS = 24
EQUAL_WIDTH = 64


class Equal(nn.Module):
    """Many layers of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(*(nn.Linear(EQUAL_WIDTH, EQUAL_WIDTH, bias=False) for _ in range(4)))
            for _ in range(EQUAL_LAYERS)
        )


def watch_memory(rank: int, to: list[str], bucket_nbytes: int) -> tuple[int, int, int, int]:
    """Send equal layers; return gathered bytes: at the peak, in all, and of one layer; the ring."""
    model = Equal()
    for layer in model.layers:
        fully_shard(layer)
    live = peak = total = 0
    gather = shards.gather

    def freed(nbytes: int) -> None:
        nonlocal live
        live -= nbytes

    def watched(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        nonlocal live, peak, total
        full = gather(tensor, dtype)
        weakref.finalize(full, freed, full.nbytes)
        live += full.nbytes
        total += full.nbytes
        peak = max(peak, live)
        return full

    with ws.connect(
        Gathered(model), to=to, timeout_s=TIMEOUT_S, bucket_nbytes=bucket_nbytes, num_buckets=2
    ) as sender:
        shards.gather = watched
        try:
            report = sender.send_weights()
        finally:
            shards.gather = gather
    return peak, total, 4 * 4 * EQUAL_WIDTH**2, report.peak_extra_nbytes


def remove(rank: int, target: str) -> None:
    """Let one receiver go."""
    kept().sender.remove(target)


def cast_and_send(rank: int, dtype: torch.dtype) -> tuple[Seen, Digests]:
    """Cast the module, change it, and send it; it was connected with the dtype float32."""
    model = kept().model.to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25).add_(0.5)
    return seen(kept().sender.send_weights), kept().full(torch.float32)
