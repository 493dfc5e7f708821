"""The tensor queue beside a torch.multiprocessing queue: fresh tensors from one process to another.

    python -m benchmarks.tensor_queue [--rounds 5] [--kinds 1K,1M,8M,16M]

The producer makes every tensor anew and the consumer reads each of its cache lines, as in real use.
Both queues run in the same two processes, in turns; medians, and their ratio.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.multiprocessing

from weightsync.queues.tensor_packets import TensorQueueHandle
from weightsync.queues.tensor_queue import TensorIpcReceiver, TensorIpcSender

KINDS = {"1K": 1 << 10, "64K": 64 << 10, "1M": 1 << 20, "8M": 8 << 20, "16M": 16 << 20}
BUDGET_NBYTES = 1 << 29
MAX_TENSORS = 2000
WAIT_S = 120.0
LINE = 64


@dataclass(frozen=True)
class Result:
    """Median seconds per tensor of each queue, for tensors of `nbytes`."""

    nbytes: int
    ours_s: float
    torch_s: float

    @property
    def ratio(self) -> float:
        """The throughput as a multiple of torch's queue."""
        return self.torch_s / self.ours_s


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", default="1K,1M,8M,16M")
    parser.add_argument("--tensors", type=int, default=0, help="per round; 0: by size")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sizes = [KINDS[kind] for kind in options.kinds.split(",")]
    print(f"{'bytes':>10} {'ours us':>10} {'torch us':>10} {'ours GB/s':>10} {'ratio':>7}")
    for result in measure(sizes, rounds=options.rounds, tensors=options.tensors):
        rate = result.nbytes / result.ours_s / 1e9
        ours_us, torch_us = result.ours_s * 1e6, result.torch_s * 1e6
        print(
            f"{result.nbytes:>10} {ours_us:>10.1f} {torch_us:>10.1f} {rate:>10.2f} "
            f"{result.ratio:>7.1f}"
        )


def measure(sizes: Sequence[int], *, rounds: int, tensors: int = 0) -> list[Result]:
    """Return one result per size."""
    context = torch.multiprocessing.get_context("spawn")
    theirs = context.Queue()
    pipe, child_pipe = multiprocessing.get_context("spawn").Pipe()
    with TensorIpcReceiver() as receiver:
        child = context.Process(target=produce, args=(receiver.handle, theirs, child_pipe))
        child.start()
        try:
            pulls = {
                "ours": lambda: receiver.recv_any(WAIT_S).tensor,
                "torch": lambda: theirs.get(timeout=WAIT_S),
            }
            return [_compare(pipe, nbytes, pulls, rounds, tensors) for nbytes in sizes]
        finally:
            pipe.send(None)
            child.join(WAIT_S)
            child.kill()
            theirs.close()


def _compare(
    pipe: Connection,
    nbytes: int,
    pulls: dict[str, Callable[[], torch.Tensor]],
    rounds: int,
    tensors: int,
) -> Result:
    count = tensors or max(min(BUDGET_NBYTES // nbytes, MAX_TENSORS), 8)
    times: dict[str, list[float]] = {which: [] for which in pulls}
    for turn in range(rounds + 1):
        for which, pull in pulls.items():
            seconds = _round(pipe, which, nbytes, count, pull)
            if turn:  # the first warms up
                times[which].append(seconds / count)
    return Result(nbytes, statistics.median(times["ours"]), statistics.median(times["torch"]))


def _round(
    pipe: Connection, which: str, nbytes: int, count: int, pull: Callable[[], torch.Tensor]
) -> float:
    start = time.perf_counter()
    pipe.send((which, nbytes, count))
    for number in range(count):
        tensor = pull()
        seen = int(tensor[::LINE].max())
        if seen != number % 251:
            raise RuntimeError(f"tensor {number} of {which} holds {seen}")
        del tensor
    pipe.send("got all")  # torch's producer must live longer than the tensors that it sent
    seconds = time.perf_counter() - start
    pipe.recv()
    return seconds


def produce(handle: TensorQueueHandle, theirs: Queue[torch.Tensor], pipe: Connection) -> None:
    """Send tensors of the requested sizes, until the pipe sends None."""
    torch.set_num_threads(1)
    with TensorIpcSender(handle) as sender:
        while (order := pipe.recv()) is not None:
            which, nbytes, count = order
            push = sender.send_tensor if which == "ours" else theirs.put
            for number in range(count):
                push(torch.full((nbytes,), number % 251, dtype=torch.uint8))
            pipe.recv()
            pipe.send("ready")


if __name__ == "__main__":
    main()
