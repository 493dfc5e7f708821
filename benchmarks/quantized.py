"""Updates that quantize on their way, on one host and over a link, beside bf16 and a plain copy.

    python -m benchmarks.quantized [--mib 128] [--rate 1gbit] [--rounds 5]
    python -m benchmarks.quantized --stages
    python -m benchmarks.quantized --casts

The model is linear layers in bf16. One trainer sends it to five receivers in turn: as it is, and by
each scheme that has a name; each receiver is a process with a module of the sent dtypes, reached
over HTTP. On one host, seconds stand beside a copy of the bf16 bytes in the trainer's process, in
the same round. Over the link, both are network namespaces, whose rate `tc` limits; that needs root.
All updates are whole (`delta="off"`) and verified, medians of the rounds.

`--stages` times what is done to one weight of 8 MiB, in one process: the rounding, and the copies
and fingerprints after it. Each is repeated for 24 weights in turn, which no cache holds; of all
times the fastest twentieth counts, so that other programs disturb it little.

`--casts` sends a model in float32 to receivers in bf16, by `dtype=torch.bfloat16` and by
`dtype="receiver"`, and with the latter to one whose last layer is float32; on this host.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Literal, cast

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import nn
from xxhash import xxh3_64_intdigest

import weightsync as ws
from benchmarks.receiving import serve_until_killed
from tests.hosts.namespaces import host_network, limit_problem, netns_problem
from weightsync.tensors import TORCH_DTYPES
from weightsync.weights.sources.quantized import SCHEMES, SchemeName, quantize

KINDS = ("bf16", *SCHEMES)
BY_DTYPE, BY_RECEIVER, MIXED = CASTS = ("dtype", "receiver", "receiver-mixed")
PORT = 8600
TOKEN = "quantized"  # noqa: S105  # for this run's processes
ROWS, COLUMNS = 1024, 4096
SHM_NBYTES = 1 << 31
ROOT = Path(__file__).resolve().parent.parent

Popen = Callable[..., "subprocess.Popen[str]"]


def trained(mib: int) -> nn.Sequential:
    """Return a model of `mib` MiB in bf16."""
    layers = max(1, (mib << 20) // (2 * ROWS * COLUMNS))
    model = nn.Sequential(*[nn.Linear(COLUMNS, ROWS, bias=False) for _ in range(layers)])
    return model.bfloat16().requires_grad_(False)


def sent(model: nn.Module, kind: str) -> object:
    """Return what `connect` takes to send `model` as `kind`."""
    if kind == "bf16" or kind in CASTS:
        return model
    return ws.QuantizedSource(model, cast(SchemeName, kind))


def dtype_of(kind: str) -> torch.dtype | Literal["receiver"] | None:
    """Return the `dtype` with which `connect` sends `kind`."""
    if kind == BY_DTYPE:
        return torch.bfloat16
    return "receiver" if kind in CASTS else None


def served(mib: int, kind: str) -> nn.Module:
    """Return a module of the names and dtypes that are sent as `kind`."""
    model = trained(mib)
    if kind == MIXED:
        list(model)[-1].float()
    if kind == "bf16" or kind in CASTS:
        return model
    for spec in ws.QuantizedSource(model, cast(SchemeName, kind)).manifest.specs:
        layer, _, name = spec.name.rpartition(".")
        tensor = torch.zeros(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
        held = nn.Parameter(tensor, requires_grad=False)
        model.get_submodule(layer).register_parameter(name, held)
    return model


def send(address: str, mib: int, rounds: int, kinds: Sequence[str]) -> None:
    """Send rounds to all receivers; print seconds of each kind, and of a plain copy, as JSON."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = trained(mib)
    if kinds == list(CASTS):
        model.float()
    copy = [torch.empty_like(parameter) for parameter in model.parameters()]
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    nbytes: dict[str, int] = {}
    with ExitStack() as opened:
        senders = {
            kind: opened.enter_context(
                ws.connect(
                    sent(model, kind),
                    to=f"http://{address}:{PORT + i}",
                    token=TOKEN,
                    delta="off",
                    dtype=dtype_of(kind),
                )
            )
            for i, kind in enumerate(kinds)
        }
        for turn in range(rounds + 1):
            for parameter in model.parameters():
                parameter.normal_(0, 0.02)
            seen: dict[str, float] = {"copy": _timed(lambda: _copy(model, copy))}
            for kind, sender in senders.items():
                started = time.perf_counter()
                report = sender.send_weights()
                seen[kind] = time.perf_counter() - started
                nbytes[kind] = report.nbytes
                if report.verified is None:
                    raise RuntimeError(f"{kind}: {report} is not verified")
            if turn:  # the first one compiles loops, and shares memory
                for kind, took in seen.items():
                    seconds[kind].append(took)
    print(json.dumps({"seconds": seconds, "nbytes": nbytes}))


def _timed(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _copy(model: nn.Module, to: list[torch.Tensor]) -> None:
    for parameter, target in zip(model.parameters(), to, strict=True):
        target.copy_(parameter)


def measure(
    receiving: Popen,
    sending: Popen,
    address: str,
    mib: int,
    rounds: int,
    kinds: Sequence[str] = KINDS,
) -> Told:
    """Start the receivers and the trainer, and return what it printed."""
    started: list[subprocess.Popen[str]] = []
    try:
        for i, kind in enumerate(kinds):
            server = _start(receiving, "receive", address, str(PORT + i), str(mib), kind)
            started.append(server)
        for server in started:
            if server.stdout is None or server.stdout.readline().strip() != "ready":
                raise RuntimeError("a receiver did not start")
        trainer = _start(sending, "send", address, str(mib), str(rounds), *kinds)
        started.append(trainer)
        out, _ = trainer.communicate()
        if trainer.returncode:
            raise RuntimeError(f"the trainer ended with {trainer.returncode}")
        return cast(Told, json.loads(out.strip().splitlines()[-1]))
    finally:
        for process in started:
            process.kill()
            process.wait()


Told = Mapping[str, Mapping[str, list[float]]]


def _start(popen: Popen, *argv: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.quantized", *argv]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return popen(command, env=env, stdout=subprocess.PIPE)


def table(told: Told, beside: str) -> str:
    """Return the medians, and each in a round beside `beside`, as a Markdown table."""
    seconds = told["seconds"]
    lines = [f"| sent | MB | ms | beside {beside} |", "|---|---:|---:|---:|"]
    for kind, took in seconds.items():
        if kind == "copy" and beside != "copy":
            continue
        ratio = statistics.median(a / b for a, b in zip(took, seconds[beside], strict=True))
        nbytes: object = told["nbytes"].get(kind)
        mb = f"{nbytes / 1e6:.1f}" if isinstance(nbytes, int) else ""
        lines.append(f"| {kind} | {mb} | {statistics.median(took) * 1e3:.1f} | {ratio:.2f} |")
    return "\n".join(lines)


def stages() -> None:
    """Print how long the stages of a quantized update take, in ns for each value, and in copies."""
    torch.set_num_threads(1)
    rows, count = ROWS, 24
    weights = [torch.randn(rows, COLUMNS).mul_(0.02).bfloat16() for _ in range(count)]
    copies = [torch.zeros_like(weight) for weight in weights]
    values = rows * COLUMNS
    arenas = [torch.zeros(values, dtype=torch.uint8) for _ in range(count)]
    bucket, made = torch.zeros(values, dtype=torch.uint8), torch.zeros(values, dtype=torch.uint8)
    calls: dict[str, Callable[[int], object]] = {
        "copy of bf16": lambda i: copies[i].copy_(weights[i])
    }
    for kind, scheme in SCHEMES.items():
        calls[kind] = lambda i, scheme=scheme: quantize(weights[i], scheme, made)  # type: ignore[misc]  # mypy infers no default of a lambda
    calls["into the bucket"] = lambda _: bucket.copy_(made)
    calls["fingerprint of the bucket"] = lambda _: xxh3_64_intdigest(bucket.numpy())
    calls["from the bucket"] = lambda i: arenas[i].copy_(bucket)
    calls["fingerprint of what was written"] = lambda i: xxh3_64_intdigest(arenas[i].numpy())
    plain = 0.0
    for name, call in calls.items():
        seconds = sorted(_timed(partial(call, i)) for _ in range(10) for i in range(count))
        took = seconds[len(seconds) // 20]
        plain = plain or took
        print(f"| {name} | {took / values * 1e9:.3f} | {took / plain:.2f} |", flush=True)


def main() -> None:
    """Measure on this host, and over a link where hosts can be made."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stages", action="store_true")
    parser.add_argument("--casts", action="store_true")
    args = parser.parse_args()
    if args.stages:
        stages()
        return
    here = partial(subprocess.Popen, text=True)
    if args.casts:
        told = measure(here, here, "127.0.0.1", args.mib, args.rounds, CASTS)
        print(table(told, BY_DTYPE), flush=True)
        return
    print(table(measure(here, here, "127.0.0.1", args.mib, args.rounds), "copy"), flush=True)
    if problem := netns_problem() or limit_problem():
        sys.exit(f"no link can be made here: {problem}")
    with host_network(2, shm_nbytes=SHM_NBYTES) as network:
        network.limit(args.rate)
        trainer, receiver = network.hosts
        told = measure(receiver.popen, trainer.popen, receiver.address, args.mib, args.rounds)
    print(f"\nOver {args.rate}:\n", table(told, "bf16"), sep="\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["receive"]:
        _, _, address, port, mib, kind = sys.argv
        serve_until_killed(ws.WeightReceiver(served(int(mib), kind)), address, int(port), TOKEN)
    elif sys.argv[1:2] == ["send"]:
        send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
    else:
        main()
