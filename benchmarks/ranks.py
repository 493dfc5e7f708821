"""What several ranks cost a steady update: its time, and the collectives of the ranks' own group.

Run with `python -m benchmarks.ranks`. Every rank holds a plain model of 64 tensors; the receiver is
in rank 0's process, so that an update needs no other rank: what is measured is their commands.
Figures are medians on rank 0, after two updates to warm up.
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
from weightsync.ranks.comm import RankComm

RANKS = (1, 2, 4)
_WARM = 2


def model() -> nn.Module:
    """Return 64 tensors of 64 KiB, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(64)))


class Counted:
    """Counts the collectives of this process's rank groups."""

    def __init__(self) -> None:
        self.count = 0
        run = RankComm._run

        def counted(comm: RankComm, *starts: Any, **options: Any) -> None:
            self.count += 1
            run(comm, *starts, **options)

        RankComm._run = counted  # type: ignore[method-assign]  # for the life of the process


def measure(rank: int, ranks: int, folder: str, rounds: int, results: Any) -> None:
    """Measure on one rank; rank 0 puts the median seconds and the collectives into `results`."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store{ranks}", rank=rank, world_size=ranks
    )
    counted = Counted()
    receiver = ws.WeightReceiver(model()) if rank == 0 else None
    to = receiver.handle if receiver is not None else ()
    seconds, counts = [], []
    with ws.connect(model(), to=to) as sender:
        for _ in range(_WARM + rounds):
            dist.barrier()
            started, before = time.perf_counter(), counted.count
            sender.send_weights()
            seconds.append(time.perf_counter() - started)
            counts.append(counted.count - before)
    if rank == 0:
        results.put((statistics.median(seconds[_WARM:]), statistics.median(counts[_WARM:])))
    if receiver is not None:
        receiver.close()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Print a row for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS)
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    print("| ranks | steady update | collectives |")
    print("|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for count in given.ranks:
            results = context.Queue()
            multiprocessing.start_processes(
                measure, (count, folder, given.rounds, results), count, start_method="spawn"
            )
            seconds, collectives = results.get()
            print(f"| {count} | {seconds * 1e3:.1f} ms | {collectives:.0f} |", flush=True)


if __name__ == "__main__":
    main()
