"""Updates by ranks on several hosts to as many receiving hosts, beside one uplink for all.

    python -m benchmarks.uplinks [--mib 512] [--hosts 2,4] [--rate 1gbit] [--rounds 3]

Hosts are network namespaces of this machine on a switch; `tc` limits what each sends and receives.
Each trainer host has one rank of FSDP2, each receiving host one worker, which holds the columns of
a part of each tensor, or the whole module. Four trainers send the same bf16 model: the ranks, each
what it holds; the same by `nixl`; the ranks, from a source that only makes full tensors, so that
they gather and rank 0 feeds a chain of hosts; and one process that has the whole model. Seconds,
and the bytes that the kernel counts on each trainer host's way out, are medians of whole updates.
At the end the weights are doubled and sent once more, and each receiver compares all that it holds.
Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args

os.environ["OMP_NUM_THREADS"] = "1"

import fastapi
import torch
import torch.distributed as dist
import uvicorn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import weightsync as ws
from benchmarks.shards import Gathered
from tests.hosts.namespaces import DEVICE, Host, HostNetwork, host_network, limit_problem
from tests.hosts.namespaces import netns_problem as no_hosts
from weightsync.server.listening import listen

TENSORS, COLUMNS = 64, 1024
PORT, STORE_PORT = 8600, 8700
WAIT_S = 300.0

Trainer = Literal["streams", "nixl", "gathers", "one"]
SENT_BY: dict[Trainer, str] = {
    "streams": "each rank, what it holds",
    "nixl": "each rank, what it holds, by `nixl`",
    "gathers": "rank 0, what all gathered",
    "one": "one process that has all",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """Medians of one trainer; `sent` are the bytes that left each trainer host."""

    hosts: int
    loads: str
    trainer: Trainer
    update_s: float
    sent: list[float]
    nbytes: int


def model_of(mib: int) -> nn.Module:
    """Return a module of equal bf16 parameters, with the same values in every process."""
    rows = (mib << 20) // TENSORS // COLUMNS // 2
    module = nn.Module()
    numbers = (torch.arange(rows * COLUMNS, dtype=torch.int32) % 251).view(rows, COLUMNS)
    module.weights = nn.ParameterList(
        nn.Parameter((numbers + i % 5).bfloat16()) for i in range(TENSORS)
    )
    return module


def receive(address: str, mib: int, part: int, count: int) -> None:
    """Serve columns of the model, or all of it where `count` is 1; say at the end if all is right.

    Ends at the end of the standard input.
    """
    module = model_of(mib)
    wanted = [2 * p.detach().chunk(count, 1)[part] for p in module.parameters()]
    if count > 1:
        dist.init_process_group("fake", rank=part, world_size=count, store=FakeStore())
        mesh = init_device_mesh("cpu", (count,))
        module.weights = nn.ParameterList(
            nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(1)], src_data_rank=None))
            for p in module.parameters()
        )
    receiver = ws.WeightReceiver(module)
    app = fastapi.FastAPI()
    app.include_router(ws.server.weight_router(receiver, token=None))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    listener = listen(address, PORT)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    print("ready", flush=True)
    sys.stdin.read()
    held = [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]
    print(json.dumps({"right": all(map(torch.equal, held, wanted))}))
    server.should_exit = True
    thread.join()
    receiver.close()


def send(
    kind: Trainer, rank: int, size: int, address: str, urls: list[str], mib: int, rounds: int
) -> None:
    """Send updates from one rank; print the medians as JSON."""
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    store = dist.TCPStore(address, STORE_PORT, size, is_master=rank == 0)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=WAIT_S)
    )
    model = model_of(mib)
    if size > 1:
        fully_shard(model)
    source: Any = Gathered(model) if kind == "gathers" else model
    seconds, sent = [], []
    by = "nixl" if kind == "nixl" else "tcp"
    with ws.connect(source, to=urls, backend=by, delta="off", timeout_s=WAIT_S) as sender:
        sender.send_weights()
        for _ in range(rounds):
            dist.barrier()
            before, began = sent_nbytes(), time.perf_counter()
            report = sender.send_weights()
            seconds.append(time.perf_counter() - began)
            sent.append(sent_nbytes() - before)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        sender.send_weights()
    if bool(report.gathered) is not (kind == "gathers"):
        raise SystemExit(f"{kind}: gathered {report.gathered}")
    told = {"update_s": statistics.median(seconds), "sent": statistics.median(sent)}
    print(json.dumps({**told, "nbytes": report.nbytes}))
    dist.barrier()
    dist.destroy_process_group()


def sent_nbytes() -> int:
    """Return the bytes that the kernel counted on this host's way out."""
    lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.strip().startswith(f"{DEVICE}:"))
    return int(line.partition(":")[2].split()[8])


def measure(network: HostNetwork, count: int, kind: Trainer, args: Any, *, shards: bool) -> Row:
    """Measure one trainer on the first `count` hosts, and receivers on the next ones."""
    trainers, receiving = network.hosts[:count], network.hosts[count : 2 * count]
    if kind == "one":
        trainers = trainers[:1]
    parts = count if shards else 1
    servers = [
        start(host, "receive", host.address, args.mib, k % parts, parts)
        for k, host in enumerate(receiving)
    ]
    try:
        for server in servers:
            if server.stdout is None or server.stdout.readline().strip() != "ready":
                raise RuntimeError("a receiver did not start")
        urls = ",".join(f"http://{host.address}:{PORT}" for host in receiving)
        ranks = [
            start(
                host, "send", kind, rank, len(trainers), trainers[0].address, urls,
                args.mib, args.rounds,
            )
            for rank, host in enumerate(trainers)
        ]  # fmt: skip
        told = [finish(process) for process in ranks]
        if not all(finish(server)["right"] for server in servers):
            raise SystemExit(f"{kind}: a receiver holds other weights than were sent")
    finally:
        for server in servers:
            server.kill()
            server.wait()
    return Row(
        hosts=count,
        loads=f"1/{count} of each tensor" if shards else "the module",
        trainer=kind,
        update_s=max(one["update_s"] for one in told),
        sent=[one["sent"] for one in told],
        nbytes=told[0]["nbytes"],
    )


def start(host: Host, *argv: object) -> subprocess.Popen[str]:
    """Run this module's `argv` on a host."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    command = [sys.executable, "-m", "benchmarks.uplinks", *map(str, argv)]
    pipe = subprocess.PIPE
    return host.popen(command, env=env, stdin=pipe, stdout=pipe)


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    """End a process's input, and wait for it; return the JSON that it printed last."""
    out, _ = process.communicate("", timeout=3 * WAIT_S)
    if process.returncode:
        raise RuntimeError(f"{process.args!r} ended with {process.returncode}")
    told: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return told


HEAD = (
    "trainer and receiving hosts",
    "a receiver loads",
    "sent by",
    "update, s",
    "of one uplink",
    "of the gather",
    "most that left a trainer host / its part",
)


def rows_of(found: Sequence[Row]) -> list[str]:
    """Return the rows of a table, of the trainers to the same receivers."""
    seconds = {row.trainer: row.update_s for row in found}
    lines = []
    for row in found:
        cells = (
            f"{row.hosts} and {row.hosts}",
            row.loads,
            SENT_BY[row.trainer],
            f"{row.update_s:.2f}",
            f"{row.update_s / seconds['one']:.2f}" if "one" in seconds else "",
            f"{row.update_s / seconds['gathers']:.2f}" if "gathers" in seconds else "",
            f"{max(row.sent) * len(row.sent) / row.nbytes:.3f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--hosts", default="2,4")
    parser.add_argument("--loads", default="shards,modules")
    parser.add_argument("--trainers", default=",".join(get_args(Trainer)))
    args = parser.parse_args()
    problem = no_hosts() or limit_problem()
    if problem:
        sys.exit(f"hosts cannot be made here: {problem}")
    counts = [int(count) for count in args.hosts.split(",")]
    print(f"{args.mib} MiB, {args.rate}; the load before: {os.getloadavg()[0]:.1f}\n")
    print(f"| {' | '.join(HEAD)} |")
    print("|---|---|---" + "|---:" * (len(HEAD) - 3) + "|", flush=True)
    with host_network(2 * max(counts), shm_nbytes=(args.mib << 21) + (256 << 20)) as network:
        network.limit(rate=args.rate)
        for count in counts:
            for loads in args.loads.split(","):
                kinds: list[Trainer] = args.trainers.split(",")
                shards = loads == "shards"
                found = [measure(network, count, kind, args, shards=shards) for kind in kinds]
                print("\n".join(rows_of(found)), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    match sys.argv[1:]:
        case ["receive", address, mib, part, count]:
            receive(address, int(mib), int(part), int(count))
        case ["send", kind, rank, size, address, urls, mib, rounds]:
            sent_by: Any = kind
            listed = urls.split(",")
            send(sent_by, int(rank), int(size), address, listed, int(mib), int(rounds))
        case _:
            main()
