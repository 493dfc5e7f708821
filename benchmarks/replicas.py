"""The cost of comparing the ranks' replicas: updates with it, and without it.

Run with `python -m benchmarks.replicas`. Two ranks hold a plain model each; the receiver is in
rank 0's process. Every update compares (`check_replicas="always"`), or none does. CPU time is that
of rank 1, which has no receiver: besides the comparison it only follows the commands of rank 0.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing, nn

import weightsync as ws

MODELS = {"300": (300, 512 << 20), "37,000": (37_000, 512 << 20)}
RANKS = 2


class Flat(nn.Module):
    """`count` bf16 parameters of `nbytes` in all, the same on every rank."""

    def __init__(self, count: int, nbytes: int) -> None:
        super().__init__()
        for i in range(count):
            values = torch.full((nbytes // count // 2,), float(i % 251), dtype=torch.bfloat16)
            self.register_parameter(f"p{i}", nn.Parameter(values))


def timed(sender: ws.WeightSender, rounds: int) -> tuple[float, float]:
    """Return the median seconds of an update, and of CPU; the first, a warm-up, is not counted."""
    walls, cpus = [], []
    for _ in range(rounds + 1):
        dist.barrier()
        started, worked = time.perf_counter(), time.process_time()
        sender.send_weights()
        walls.append(time.perf_counter() - started)
        cpus.append(time.process_time() - worked)
    return statistics.median(walls[1:]), statistics.median(cpus[1:])


def run(rank: int, folder: str, rounds: int, mib: int, results: Any) -> None:
    """Measure on one rank; rank 0 puts the table's rows into `results`."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    for name, (count, nbytes) in MODELS.items():
        size = min(nbytes, mib << 20)
        model = Flat(count, size)
        receiver = ws.WeightReceiver(Flat(count, size)) if rank == 0 else None
        to = receiver.handle if receiver is not None else ()
        for when in ("off", "always"):
            with ws.connect(model, to=to, check_replicas=when, delta="off") as sender:
                wall, cpu = timed(sender, rounds)
            if rank:
                figures = f"{wall * 1e3:.0f} ms | {cpu * 1e3:.1f} ms"
                results.put(f"| {name} | {size / 1e6:.0f} MB | {when} | {figures} |")
        if receiver is not None:
            receiver.close()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mib", type=int, default=512)
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    print("| tensors | bytes | compared | update | CPU of rank 1 |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        ranks = multiprocessing.start_processes(
            run, (folder, given.rounds, given.mib, results), RANKS, join=False
        )
        for _ in range(2 * len(MODELS)):
            print(results.get())
        ranks.join()


if __name__ == "__main__":
    main()
