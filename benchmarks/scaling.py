"""Time of updates by hosts, workers and bytes, beside the cost model of docs/scaling.md.

    python -m benchmarks.scaling [--mib 128] [--rates 500mbit,2500mbit] [--hosts 1,2,4]

Hosts are network namespaces of this machine on a switch whose links are limited by `tc`; each
receiving host runs one worker. Every point is compared with one raw Gloo broadcast of the same
bytes, as one flat tensor, between the same hosts, and with bytes over link rate. Needs root.
Prints one table, or JSON with --json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from torch import nn

import weightsync as ws
from benchmarks.receiving import serve_until_killed
from tests.hosts.namespaces import Host, HostNetwork, host_network, limit_problem, netns_problem
from weightsync.backends.tcp.backend import BUCKET_NBYTES

PORT = 8600
STORE_PORT = 8700
TOKEN = "scaling"  # noqa: S105  # a private network
WAIT_S = 120.0
GOODPUT = 0.956
"""The share of a limited link that one TCP stream gets, without headers (measured)."""
IN_FLIGHT = 2
"""Buckets that share a link, so that a host passes one on when it has received two."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measurement; seconds are medians."""

    hosts: int
    rate_mbit: float
    mib: int
    tensors: int
    link_s: float
    update_s: float
    broadcast_s: float
    connect_s: float
    messages: int

    @property
    def model_s(self) -> float:
        """The model of docs/scaling.md: the bytes, and two buckets for every host but the first."""
        bucket_s = (BUCKET_NBYTES << 3) / (self.rate_mbit * 1e6)
        return (self.link_s + (self.hosts - 1) * IN_FLIGHT * bucket_s) / GOODPUT


def model_of(mib: int, tensors: int) -> nn.Module:
    """Return a module of equal bf16 parameters."""
    numel = (mib << 20) // tensors // 2
    module = nn.Module()
    module.weights = nn.ParameterList(
        nn.Parameter(torch.ones(numel, dtype=torch.bfloat16), requires_grad=False)
        for _ in range(tensors)
    )
    return module


def receive(address: str, mib: int, tensors: int) -> None:
    """Serve one worker until killed."""
    receiver = ws.WeightReceiver(model_of(mib, tensors))
    serve_until_killed(receiver, address, PORT, TOKEN)


def send(urls: Sequence[str], mib: int, tensors: int, rounds: int) -> None:
    """Send `rounds` updates; print the medians as JSON."""
    model = model_of(mib, tensors)
    started = time.perf_counter()
    with ws.connect(model, to=urls, token=TOKEN, timeout_s=WAIT_S, delta="off") as sender:
        connect_s = time.perf_counter() - started
        sender.send_weights()
        reports = [sender.send_weights() for _ in range(rounds)]
    seconds = statistics.median(report.seconds["total"] for report in reports)
    messages = reports[0].control_messages
    print(json.dumps({"update_s": seconds, "connect_s": connect_s, "messages": messages}))


def broadcast(rank: int, size: int, address: str, mib: int, rounds: int) -> None:
    """Broadcast one flat tensor from rank 0; rank 0 prints the median as JSON."""
    own = os.environ["OWN_ADDRESS"]
    c10d: Any = dist  # torch types half of what it exports
    store = c10d.TCPStore(
        address, STORE_PORT, size, is_master=rank == 0, timeout=timedelta(seconds=WAIT_S)
    )
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=own)]
    options._timeout = timedelta(seconds=WAIT_S)
    group = c10d.ProcessGroupGloo(store, rank, size, options)
    flat = torch.ones(mib << 20, dtype=torch.uint8)
    taken = []
    for _ in range(rounds + 1):
        group.barrier().wait()
        started = time.perf_counter()
        group.broadcast([flat], dist.BroadcastOptions()).wait()
        group.barrier().wait()
        taken.append(time.perf_counter() - started)
    if rank == 0:
        print(json.dumps({"broadcast_s": statistics.median(taken[1:])}))


def measure(network: HostNetwork, count: int, rate_mbit: float, args: argparse.Namespace) -> Point:
    """Measure one point: `count` receiving hosts behind links of `rate_mbit`."""
    trainer, receivers = network.hosts[0], network.hosts[1 : count + 1]
    size = [str(args.mib), str(args.tensors)]
    servers = [start(host, "receive", host.address, *size) for host in receivers]
    try:
        for server in servers:
            if server.stdout is None or server.stdout.readline().strip() != "ready":
                raise RuntimeError("a receiver did not start")
        urls = ",".join(f"http://{host.address}:{PORT}" for host in receivers)
        told = finish(start(trainer, "send", urls, *size, str(args.rounds)))
    finally:
        for server in servers:
            server.kill()
            server.wait()
    ranks = [
        start(
            host,
            "broadcast",
            str(rank),
            str(count + 1),
            trainer.address,
            str(args.mib),
            str(args.rounds),
        )
        for rank, host in enumerate([trainer, *receivers])
    ]
    raw, *_ = [finish(process) for process in ranks]
    return Point(
        hosts=count,
        rate_mbit=rate_mbit,
        mib=args.mib,
        tensors=args.tensors,
        link_s=(args.mib << 23) / (rate_mbit * 1e6),
        broadcast_s=raw["broadcast_s"],
        update_s=told["update_s"],
        connect_s=told["connect_s"],
        messages=int(told["messages"]),
    )


def start(host: Host, *argv: str) -> subprocess.Popen[str]:
    """Run this module's `argv` on a host."""
    root = str(Path(__file__).resolve().parent.parent)
    env = {**os.environ, "PYTHONPATH": root, "OWN_ADDRESS": host.address}
    return host.popen(
        [sys.executable, "-m", "benchmarks.scaling", *argv], env=env, stdout=subprocess.PIPE
    )


def finish(process: subprocess.Popen[str]) -> dict[str, float]:
    """Wait for a process; return the JSON that it printed last, if any."""
    out, _ = process.communicate(timeout=WAIT_S * 3)
    if process.returncode:
        raise RuntimeError(f"{process.args!r} ended with {process.returncode}")
    lines = out.strip().splitlines()
    told: dict[str, float] = json.loads(lines[-1]) if lines else {}
    return told


def mbit(rate: str) -> float:
    """Return megabits of a rate as `tc` writes it."""
    return float(rate.removesuffix("bit")[:-1]) * {"m": 1, "g": 1000}[rate[-4]]


def table(points: Sequence[Point]) -> str:
    """Return the points as a Markdown table."""
    lines = [
        "| receiving hosts | link | bytes over link | model | update | update / model "
        "| one raw broadcast | update / broadcast | connect, once |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {p.hosts} | {p.rate_mbit:g} Mbit/s | {p.link_s:.2f} s | {p.model_s:.2f} s | "
        f"{p.update_s:.2f} s | {p.update_s / p.model_s:.2f} | {p.broadcast_s:.2f} s | "
        f"{p.update_s / p.broadcast_s:.2f} | "
        f"{p.connect_s:.2f} s |"
        for p in points
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure every combination of hosts and rates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rates", default="500mbit,2500mbit")
    parser.add_argument("--hosts", default="1,2,4")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    problem = netns_problem() or limit_problem()
    if problem:
        sys.exit(f"hosts cannot be made here: {problem}")
    counts = [int(count) for count in args.hosts.split(",")]
    points = []
    with host_network(max(counts) + 1, shm_nbytes=(args.mib << 20) + (256 << 20)) as network:
        for rate in args.rates.split(","):
            network.limit(rate=rate)
            points += [measure(network, count, mbit(rate), args) for count in counts]
    if args.json:
        print(json.dumps([asdict(point) for point in points], indent=1))
    else:
        print(table(points))


if __name__ == "__main__":
    roles = {
        "receive": lambda a: receive(a[0], int(a[1]), int(a[2])),
        "send": lambda a: send(a[0].split(","), int(a[1]), int(a[2]), int(a[3])),
        "broadcast": lambda a: broadcast(int(a[0]), int(a[1]), a[2], int(a[3]), int(a[4])),
    }
    if len(sys.argv) > 1 and sys.argv[1] in roles:
        torch.set_num_threads(1)
        roles[sys.argv[1]](sys.argv[2:])
    else:
        main()
