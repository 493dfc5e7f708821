"""Updates by trainers of several ranks on one host, beside a plain copy of the whole model.

Run with `OMP_NUM_THREADS=1 python -m benchmarks.shards [--only NAME ...]`. The model has 96 bf16
tensors. FSDP2 shards it over the ranks of a trainer, which are processes with Gloo; the receivers
are processes with an HTTP server each: one that holds the model, or two that hold a half of each
tensor, rows of one and columns of the next. Before each update rank 0 copies the whole model in its
own process while all others wait. Figures are medians of ratios to that copy, after two updates
that do not count; the first update and `connect` have columns of their own. At the end the weights
are doubled and sent once more, and each receiver compares all of its own.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import fastapi
import torch
import torch.distributed as dist
import uvicorn
from torch import multiprocessing, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import weightsync as ws
from benchmarks import megatron
from benchmarks.ranks import Counted
from benchmarks.results import machine, today
from weightsync.server.listening import listen

TENSORS = 96
WIDTH = 1024
WARM = 2
SENT = torch.bfloat16
WAIT_S = 300.0
CPU = torch.device("cpu")
MOST_READ = 1.02
"""Of a model of some size: units of copies have the bytes of others at their ends."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A trainer and its receivers. `gathers`: its source makes full tensors alone. `flat`: FSDP1.

    `megatron`: a model of megatron-core, which `make test-megatron` installs in .venv-megatron.
    """

    trainer: str
    ranks: int
    dtype: torch.dtype = SENT
    gathers: bool = False
    receivers: int = 1
    megatron: bool = False
    flat: bool = False

    @property
    def receiver(self) -> str:
        """The receivers in words."""
        return "the module" if self.receivers == 1 else f"{self.receivers} workers, half a tensor"


SETUPS = {
    "plain": Setup(trainer="1 rank, a plain module", ranks=1),
    "fsdp2": Setup(trainer="2 ranks", ranks=2),
    "fsdp4": Setup(trainer="4 ranks", ranks=4),
    "cast": Setup(trainer="2 ranks, float32 cast to bf16", ranks=2, dtype=torch.float32),
    "tp2": Setup(trainer="2 ranks", ranks=2, receivers=2),
    "fsdp1": Setup(trainer="2 ranks, FSDP1", ranks=2, flat=True),
    "gather": Setup(trainer="2 ranks that gather", ranks=2, gathers=True),
    "megatron": Setup(trainer="Megatron, TP 2 x PP 2", ranks=4, megatron=True),
    "megatron-gather": Setup(
        trainer="Megatron, TP 2 x PP 2, exported by a gather", ranks=4, gathers=True, megatron=True
    ),
}


@dataclass
class Seconds:
    """Seconds of the plain copy and of the update after it, round by round."""

    copies: list[float]
    updates: list[float]

    @property
    def ratio(self) -> float:
        """The median of updates as multiples of the copy before each."""
        rounds = zip(self.updates, self.copies, strict=True)
        return statistics.median(update / copy for update, copy in rounds)


@dataclass
class Found:
    """What rank 0 measured. `read` are the bytes that each receiver read, by its target."""

    connect_s: float
    first_s: float
    verified: Seconds
    unverified: Seconds
    nbytes: int
    level: str
    collectives: int
    read: dict[str, int]
    extra_nbytes: int


class Gathered(ws.WrappingSource):
    """The tensors of a model as they are. It does not say which rank holds what."""

    @property
    def manifest(self) -> ws.Manifest:
        """The model's."""
        return self.source.manifest

    def convert(
        self, pairs: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the model's tensors."""
        return pairs


class Block(nn.Module):
    """A projection, and one back."""

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, rows, bias=False, dtype=dtype)
        self.down = nn.Linear(rows, WIDTH, bias=False, dtype=dtype)


def build(mib: int, dtype: torch.dtype) -> nn.Module:
    """Return the model, which has the same values in every process and dtype."""
    rows = max((mib << 20) // (TENSORS * WIDTH * SENT.itemsize) // 8 * 8, 8)
    with torch.device("meta"):
        model = nn.Sequential(*(Block(rows, dtype) for _ in range(TENSORS // 2)))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            numbers = torch.arange(parameter.numel(), dtype=torch.int32) % 251 + i % 5
            parameter.copy_(numbers.view(parameter.shape))
    return model


def split(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Return the model with this process's part of each tensor, as tensor parallelism has it."""
    for block in model.children():
        for name, projection in block.named_children():
            placed = [Shard(0 if name == "up" else 1)]
            weight = projection.weight.detach()
            shard = distribute_tensor(weight, mesh, placed, src_data_rank=None)
            projection.weight = nn.Parameter(shard)
    return model


def join(folder: str, name: str, rank: int, count: int) -> None:
    """Join a process group of Gloo."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=count
    )


def locals_of(model: nn.Module) -> list[torch.Tensor]:
    """Return what this process holds of each tensor."""
    held = (parameter.detach() for parameter in model.parameters())
    return [t.to_local() if isinstance(t, DTensor) else t for t in held]


def serve(number: int, setup: Setup, mib: int, folder: str, told: Any, end: Any) -> None:
    """Serve a receiver until `end`; then say whether it holds the doubled weights."""
    torch.set_num_threads(1)

    def build_own() -> nn.Module:
        model = (megatron.build_receiver if setup.megatron else build)(mib, SENT)
        return model if mesh is None else split(model, mesh)

    mesh = None
    if setup.receivers > 1:
        join(folder, "receivers", number, setup.receivers)
        mesh = init_device_mesh("cpu", (setup.receivers,))
    model = build_own()
    with torch.no_grad():
        for tensor in locals_of(model):
            tensor.zero_()
    receiver = ws.WeightReceiver(model)
    app = fastapi.FastAPI()
    app.include_router(ws.server.weight_router(receiver, token=None))
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    gc.collect()
    gc.freeze()
    nbytes = sum(tensor.nbytes for tensor in locals_of(model))
    told.put((number, f"http://127.0.0.1:{listener.getsockname()[1]}", nbytes))
    end.wait()
    wanted = [2 * tensor for tensor in locals_of(build_own())]
    right = all(map(torch.equal, locals_of(model), wanted))
    server.should_exit = True
    thread.join()
    receiver.close()
    told.put(right)
    if mesh is not None:
        dist.barrier()
        dist.destroy_process_group()


def sharded(setup: Setup, model: nn.Module) -> tuple[nn.Module, object]:
    """Return the model of this rank, and what it gives to connect."""
    if setup.megatron:
        model, own = megatron.build_trainer(model.state_dict())
        return model, Gathered(megatron.export_of(own)) if setup.gathers else own
    if setup.flat:
        for name, block in model.named_children():
            setattr(model, name, FullyShardedDataParallel(block, device_id=CPU))
        model = FullyShardedDataParallel(model, device_id=CPU)
    elif setup.ranks > 1:
        for block in model.children():
            fully_shard(block)
        fully_shard(model)
    return model, Gathered(model, dtype=SENT) if setup.gathers else model


def train(
    rank: int, setup: Setup, mib: int, rounds: int, folder: str, urls: list[str], told: Any
) -> None:
    """Send from one rank; rank 0 puts what it measured."""
    torch.set_num_threads(1)
    counted = Counted()
    join(folder, "ranks", rank, setup.ranks)
    model = (megatron.build_receiver if setup.megatron else build)(mib, setup.dtype)
    whole = [p.detach().to(SENT, copy=True) for p in model.parameters()] if rank == 0 else []
    other = [torch.empty_like(tensor) for tensor in whole]
    dtype = None if setup.gathers or setup.megatron else SENT
    model, source = sharded(setup, model)
    to: list[str] = urls if rank == 0 else []
    dist.barrier()
    started = time.perf_counter()
    with ws.connect(source, to=to, dtype=dtype, delta="off") as sender:
        connect_s = time.perf_counter() - started

        def update() -> tuple[float, float, ws.SyncReport]:
            dist.barrier()
            begun = time.perf_counter()
            for into, tensor in zip(other, whole, strict=True):
                into.copy_(tensor)
            copied = time.perf_counter()
            dist.barrier()
            sending = time.perf_counter()
            report = sender.send_weights()
            return copied - begun, time.perf_counter() - sending, report

        _, first_s, report = update()
        seconds = {}
        for verify in (True, False):
            sender.verify = verify
            steady = [update()[:2] for _ in range(WARM + rounds)][WARM:]
            seconds[verify] = Seconds([copy for copy, _ in steady], [sent for _, sent in steady])
        before = counted.count
        sender.send_weights()
        collectives = counted.count - before
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        sender.verify = True
        report = sender.send_weights()
    if rank == 0:
        if bool(report.gathered) is not setup.gathers:
            raise SystemExit(f"{setup.trainer}: gathered {report.gathered}")
        told.put(
            Found(
                connect_s=connect_s,
                first_s=first_s,
                verified=seconds[True],
                unverified=seconds[False],
                nbytes=report.nbytes,
                level=report.verified,
                collectives=collectives,
                read={one.target: sum(one.sources.values()) for one in report.receivers},
                extra_nbytes=report.peak_extra_nbytes,
            )
        )
    dist.barrier()
    dist.destroy_process_group()


def measure(setup: Setup, mib: int, rounds: int) -> tuple[Found, dict[str, int]]:
    """Return what was measured, and the bytes that each receiver holds, by its URL."""
    context = multiprocessing.get_context("spawn")
    told, served, end = context.Queue(), context.Queue(), context.Event()
    with tempfile.TemporaryDirectory() as folder:
        receivers = multiprocessing.start_processes(
            serve, (setup, mib, folder, served, end), setup.receivers, join=False, daemon=True
        )
        listed = sorted(served.get(timeout=WAIT_S) for _ in range(setup.receivers))
        urls = [url for _, url, _ in listed]
        multiprocessing.start_processes(
            train, (setup, mib, rounds, folder, urls, told), setup.ranks, daemon=True
        )
        found = told.get(timeout=WAIT_S)
        end.set()
        right = [served.get(timeout=WAIT_S) for _ in range(setup.receivers)]
        if not all(right):
            raise SystemExit(f"{setup.trainer}: a receiver holds other weights than were sent")
        while not receivers.join():
            pass
    return found, {url: nbytes for _, url, nbytes in listed}


def rows_of(setup: Setup, found: Found, held: Mapping[str, int]) -> Iterator[str]:
    """Yield the rows of a setup, verified and not verified."""
    sums = [(read, nbytes) for url, nbytes in held.items() if (read := found.read.get(url))]
    most = max((read / nbytes for read, nbytes in sums), default=0.0)
    if most > MOST_READ and min(nbytes for _, nbytes in sums) >= 64 << 20:
        raise SystemExit(f"{setup.trainer}: a receiver read {most:.3f} times what it holds")
    share = f"{most:.3f}" if sums else ""
    for level, seconds in ((found.level, found.verified), ("none", found.unverified)):
        cells = (
            setup.trainer,
            setup.receiver,
            level,
            f"{statistics.median(seconds.copies) * 1e3:.1f}",
            f"{statistics.median(seconds.updates) * 1e3:.1f}",
            f"**{seconds.ratio:.2f}**",
            f"{found.first_s * 1e3:.0f}",
            f"{found.connect_s * 1e3:.0f}",
            share,
            str(found.collectives) if setup.ranks > 1 else "",
            f"{found.extra_nbytes / 1e6:.1f}",
        )
        yield f"| {' | '.join(cells)} |"


HEAD = (
    "trainer",
    "receiver",
    "verified",
    "copy, ms",
    "update, ms",
    "x copy",
    "first, ms",
    "connect, ms",
    "read / held",
    "collectives",
    "extra of a rank, MB",
)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--only",
        choices=SETUPS,
        nargs="+",
        default=[name for name, setup in SETUPS.items() if not setup.megatron],
    )
    given = parser.parse_args()
    about = machine()
    print(
        f"{today()}: {about['cpu']}, {about['cores']} cores, {about['system']}, {given.mib} MiB, "
    )
    print(f"{given.rounds} rounds. The load before: {os.getloadavg()[0]:.1f}\n")
    print(f"| {' | '.join(HEAD)} |")
    print("|---|---|---" + "|---:" * (len(HEAD) - 3) + "|", flush=True)
    everything = {}
    for name in given.only:
        found, held = measure(SETUPS[name], given.mib, given.rounds)
        everything[name] = found
        for row in rows_of(SETUPS[name], found, held):
            print(row, flush=True)
    if {"fsdp2", "tp2"} <= set(everything):
        halves, whole = (everything[name].verified.ratio for name in ("tp2", "fsdp2"))
        print(f"\nTwo workers take {halves / whole:.2f} times as long as one module, verified.")


if __name__ == "__main__":
    main()
