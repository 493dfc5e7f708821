"""The trainer's cost of more receivers on the same host.

    python benchmarks/fleet.py --mbytes 256 --receivers 4 --rounds 9

Prints, packed and unpacked, the bytes that the trainer's process writes and its CPU time for a
fleet, as multiples of one receiver. The two take turns, so that other work affects both.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import torch
from torch import nn

import weightsync as ws
from weightsync.wire.problem import Problem, encode_problem, from_problem, to_problem

WIDTH = 1024
WARM_UP = 2


def make_model(mbytes: int) -> nn.Module:
    """Layers of 2 MB in bfloat16."""
    layers = max(1, mbytes * 1_000_000 // (WIDTH * WIDTH * 2))
    return nn.ModuleList(
        nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(layers)
    )


def serve(pipe: Connection, mbytes: int) -> None:
    """Answer messages until the pipe closes."""
    torch.set_num_threads(1)
    receiver = ws.WeightReceiver(make_model(mbytes))
    pipe.send_bytes(b"{}")
    while True:
        try:
            message = json.loads(pipe.recv_bytes())
        except EOFError:
            break
        try:
            answer: object = {"reply": receiver.handle(message)}
        except ws.WeightSyncError as exc:
            answer = {"problem": encode_problem(to_problem(exc)).decode()}
        pipe.send_bytes(json.dumps(answer).encode())
    receiver.close()


class Caller:
    """Carries messages to one receiver's process, one at a time."""

    def __init__(self, pipe: Connection, name: str) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()
        self.__qualname__ = name

    def __call__(self, message: Mapping[str, object]) -> object:
        with self._lock:
            self._pipe.send_bytes(json.dumps(message).encode())
            answer = json.loads(self._pipe.recv_bytes())
        if "problem" in answer:
            raise from_problem(Problem(**json.loads(answer["problem"])))
        return answer["reply"]


@contextmanager
def receivers(count: int, mbytes: int) -> Iterator[list[Caller]]:
    """Start `count` processes; they end with the block."""
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(count)]
    processes = [context.Process(target=serve, args=(theirs, mbytes)) for _, theirs in pairs]
    try:
        for process in processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()
        for ours, _ in pairs:
            ours.recv_bytes()
        yield [Caller(ours, f"receiver-{i}") for i, (ours, _) in enumerate(pairs)]
    finally:
        for ours, _ in pairs:
            ours.close()
        for process in processes:
            process.join(30)
            if process.is_alive():
                process.kill()


@dataclass
class Measured:
    """Seconds of each round, and the bytes that one round wrote."""

    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    written_nbytes: int = 0
    nbytes: int = 0

    def round(self, sender: ws.WeightSender) -> None:
        """Send one more update."""
        wall, cpu = time.perf_counter(), time.process_time()
        report = sender.send_weights()
        self.cpu_s.append(time.process_time() - cpu)
        self.wall_s.append(time.perf_counter() - wall)
        self.written_nbytes, self.nbytes = report.written_nbytes, report.nbytes


def measure(count: int, mbytes: int, rounds: int, *, packed: bool) -> tuple[Measured, Measured]:
    """Return the costs of one receiver and of `count` receivers."""
    with receivers(count + 1, mbytes) as callers, ExitStack() as stack:
        senders = [
            stack.enter_context(ws.connect(make_model(mbytes), to=to, packed=packed, delta="off"))
            for to in (callers[:1], callers[1:])
        ]
        for sender in senders * WARM_UP:
            sender.send_weights()
        one, many = Measured(), Measured()
        for _ in range(rounds):
            one.round(senders[0])
            many.round(senders[1])
    return one, many


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbytes", type=int, default=256)
    parser.add_argument("--receivers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for packed in (True, False):
        one, many = measure(arguments.receivers, arguments.mbytes, arguments.rounds, packed=packed)
        cpu = [statistics.median(each.cpu_s) for each in (one, many)]
        wall = [statistics.median(each.wall_s) for each in (one, many)]
        sys.stdout.write(
            f"{'packed' if packed else 'unpacked'}, {arguments.receivers} receivers: written "
            f"{many.written_nbytes / many.nbytes:.3f} x the model; the trainer's CPU time "
            f"{cpu[1] * 1e3:.1f} ms, {cpu[1] / cpu[0]:.2f} x that for one receiver; wall time "
            f"{wall[1] * 1e3:.1f} ms, {wall[1] / wall[0]:.2f} x\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
