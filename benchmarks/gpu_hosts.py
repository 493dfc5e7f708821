"""Updates of a model on a GPU through the memory of its host, beside plain copies.

    python -m benchmarks.gpu_hosts

The receiver is a process of this host: by shared memory its model is on the host, by the backends
between hosts it is on the host or on the GPU. `--device cpu` tries the same code without a GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

import weightsync as ws
from benchmarks.gpu_device import Device
from benchmarks.gpu_peer import Peer, fill, module_on, receiving_process, sums
from benchmarks.shapes import Tensor, equal
from benchmarks.tables import table
from weightsync.backends.nixl.carrier import GPU_VARIABLE

WARM_UPS = 2


class Way(NamedTuple):
    """One kind of update; `on` is where the receiver's model is, `share` changes of each step."""

    title: str
    on: str
    options: Mapping[str, Any]
    share: float = 1.0
    lends: bool = False
    verify: Sequence[bool] = (True, False)


def ways(device: str) -> list[Way]:
    """Return all kinds."""
    found = [Way("shared memory", "cpu", {"backend": "ipc"})]
    found += [Way("tcp", on, {"backend": "tcp"}) for on in dict.fromkeys(("cpu", device))]
    delta = {"backend": "tcp", "delta": "always"}
    found.append(Way("tcp, delta of 1 %", device, delta, 0.01, verify=[True]))
    nixl = {"backend": "nixl"}
    found.append(Way("nixl, packed", "cpu", nixl))
    found.append(Way("nixl, read on the GPU", "cpu", nixl, lends=True, verify=[False]))
    return found


def step(module: nn.Module, seed: int, share: float) -> None:
    """Overwrite all parameters, or flip a bit of a random share of their values."""
    if share == 1.0:
        fill(module, seed)
        return
    for parameter in module.parameters():
        words = parameter.data.view(-1).view(torch.int16)
        words ^= (torch.rand(words.numel(), device=words.device) < share).to(torch.int16)


def measure(module: nn.Module, peer: Peer, way: Way, *, verify: bool, n: int) -> list[str]:
    """Time updates of one kind, check the last one, and return a row of the table."""
    os.environ[GPU_VARIABLE] = str(int(way.lends))
    totals, phases = [], []
    options = {"delta": "off", **way.options}
    with ws.connect(module, to=peer.handle, verify=verify, **options) as sender:
        for i in range(WARM_UPS + n):
            step(module, i, way.share)
            if module_device(module).type == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            report = sender.send_weights()
            if i >= WARM_UPS:
                totals.append(time.perf_counter() - begin)
                phases.append(report.seconds)
    if sums(module) != peer.ask("sums"):
        raise SystemExit(f"{way.title}: the receiver does not hold what was sent")
    total = statistics.median(totals)
    medians = {name: statistics.median(p.get(name, 0.0) for p in phases) for name in phases[-1]}
    parts = ", ".join(f"{name} {s * 1e3:.0f}" for name, s in medians.items() if s >= 5e-4)
    return [
        way.title,
        way.on,
        report.verified,
        report.path,
        f"{total * 1e3:.0f}",
        f"{report.nbytes / total / 1e9:.2f}",
        f"{report.written_nbytes / 1e6:.0f}",
        parts,
    ]


def module_device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def copies(module: nn.Module, device: Device, n: int) -> list[list[str]]:
    """Time plain copies of the model: from its device to the host, back, and within the host."""
    nbytes = sum(p.nbytes for p in module.parameters())
    there = torch.zeros(nbytes, dtype=torch.uint8, device=device.torch)
    pinned = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.on_gpu)
    paged, other = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
    rows = []
    for title, work in {
        "copy, device to pinned memory": lambda: pinned.copy_(there),
        "copy, device to pageable memory": lambda: paged.copy_(there),
        "copy, pinned memory to device": lambda: there.copy_(pinned),
        "copy, within the host": lambda: other.copy_(paged),
    }.items():
        seconds = device.seconds(work, n)
        rows.append(
            [title, "", "", "", f"{seconds * 1e3:.0f}", f"{nbytes / seconds / 1e9:.2f}", "", ""]
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--backends", default="ipc,tcp,nixl", help="joined by commas")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    device = Device(options.device)
    tensors: list[Tensor] = list(equal(options.mib << 20, options.tensors))
    module = module_on(tensors, device)
    fill(module, 0)
    wanted = options.backends.split(",")
    chosen = [way for way in ways(options.device) if way.options["backend"] in wanted]
    rows = copies(module, device, options.updates)
    for on in dict.fromkeys(way.on for way in chosen):
        with receiving_process(tensors, on) as peer:
            for way in chosen:
                for verify in (True, False):
                    if way.on == on and verify in way.verify:
                        peer.ask("renew")
                        rows.append(measure(module, peer, way, verify=verify, n=options.updates))
                        print(" ".join(rows[-1]), flush=True)
    print(f"{options.mib} MiB in {len(tensors)} tensors, {device.name}, torch {torch.__version__}")
    head = ["way", "to", "verified", "path", "ms", "GB/s", "packed MB", "ms of it"]
    print(table(head, rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
