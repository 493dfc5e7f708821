"""How long a trainer stands still for `send_async`, beside a plain copy and `send_weights`.

`python -m benchmarks.overlap` (512 MiB in 300 tensors; `--mib`, `--tensors`, `--rounds`). The
receiver is a process of its own. The three take turns; prints medians and their ratio to the copy.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
from torch import nn

import weightsync as ws
from weightsync.testing.contract_processes import SocketTransport, serving

WAIT_S = 120.0


def main() -> None:
    """Print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    numel = (given.mib << 20) // 4 // given.tensors
    model = make(given.tensors, numel)
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"{numel * 4 * given.tensors / 1e6:.0f} MB in {given.tensors} tensors"
    )
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    receiver = spawn.Process(target=receive, args=(theirs, given.tensors, numel), daemon=True)
    receiver.start()
    try:
        measure(model, ours.recv(), given.rounds)
    finally:
        ours.send("end")
        receiver.join(WAIT_S)


def measure(model: nn.Module, address: str, rounds: int) -> None:
    """Measure in turns: each waits until the former one is over."""
    parameters = [parameter.detach() for parameter in model.parameters()]
    copies = [torch.zeros_like(parameter) for parameter in parameters]
    seconds: dict[str, list[float]] = {"plain copy": [], "send_async": [], "send_weights": []}
    with ws.connect(model, to=SocketTransport(address, "receiver"), delta="off") as plain:
        plain.send_weights()
        for _ in range(rounds):
            seconds["plain copy"].append(timed(lambda: torch._foreach_copy_(copies, parameters)))
            seconds["send_weights"].append(timed(plain.send_weights))
    with ws.connect(model, to=SocketTransport(address, "receiver"), delta="off") as sender:
        sender.send_async().result(WAIT_S)
        for _ in range(rounds):
            seconds["plain copy"].append(timed(lambda: torch._foreach_copy_(copies, parameters)))
            started = time.perf_counter()
            future = sender.send_async()
            seconds["send_async"].append(time.perf_counter() - started)
            future.result(WAIT_S)
    copy = statistics.median(seconds["plain copy"])
    for name, measured in seconds.items():
        median = statistics.median(measured)
        print(f"{name}: {median * 1e3:.1f} ms, {median / copy:.2f} x the copy")


def timed(work: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def make(tensors: int, numel: int) -> nn.Module:
    """Return a module of float32 tensors."""
    return nn.ParameterList(torch.rand(numel) for _ in range(tensors))


def receive(pipe: Connection, tensors: int, numel: int) -> None:
    """Receive until the parent says that it is over. Called in a process of its own."""
    receiver = ws.WeightReceiver(make(tensors, numel))
    with serving(receiver) as address:
        pipe.send(address)
        pipe.recv()


if __name__ == "__main__":
    main()
