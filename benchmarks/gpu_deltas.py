"""Deltas between two processes on one GPU, and `send_async`, beside plain copies.

    python -m benchmarks.gpu_deltas

Before each update a share of the 64-byte lines of the model changes, chosen at random. The phases
are the sender's own; "pointer" commits by pointers instead of a second copy, for servers that
capture no graphs. A second table has the passes of a delta of 1 % alone, in one process: to find
the lines that changed, to find and pack them, to apply them, which reads them back, and to read
back the 64th part of the model that is looked at besides. None of it was run on a GPU. `--device
cpu --preset toy` runs the same code without a GPU; its figures have no meaning.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import nn

import weightsync as ws
from benchmarks.gpu import MODELS
from benchmarks.gpu_device import Device
from benchmarks.gpu_peer import Peer, fill, module_on, receiving_process, sums
from benchmarks.tables import LINE_NBYTES, table
from weightsync.tensors import as_bytes
from weightsync.weights.copying.copy_plan import Memory
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.lines.memory import LineBuffer, LineMemory, LineTable, new_marks
from weightsync.weights.sources.base import ModuleSource

T = TypeVar("T")

WARM_UPS = 2
SHARES = (0.001, 0.01, 0.1)
PRESETS = {"full": ("qwen3-8b", 7), "toy": ("toy", 2)}
PASSES_SHARE = 0.01
PASSES_HEAD = ("pass over 1 % of the lines, alone", "ms", "x copy")
PACKET_LINES = 1 << 20
READ_BACK = 64
TARGETS = (("find, pack, apply and verify", 0.010), ("send_async, of a copy", 1.1))
HEAD = ("update", "lines changed", "verified", "path", "ms", "x copy", "MB sent", "ms of it")


class Row(NamedTuple):
    """One kind of update; `seconds` is the median."""

    update: str
    changed: str
    report: ws.SyncReport
    seconds: float
    sent: str = ""
    parts: str = ""

    def cells(self, copy_s: float) -> list[str]:
        """Return the cells of the table, beside a plain copy of `copy_s` seconds."""
        return [
            self.update,
            self.changed,
            self.report.verified,
            self.report.path,
            f"{self.seconds * 1e3:.1f}",
            f"{self.seconds / copy_s:.2f}",
            self.sent,
            self.parts,
        ]


def step(module: nn.Module, share: float) -> None:
    """Flip a bit in a share of the lines of every parameter."""
    for parameter in module.parameters():
        raw = parameter.data.view(-1).view(torch.uint8)
        lines = raw[: raw.numel() // LINE_NBYTES * LINE_NBYTES].view(-1, LINE_NBYTES)
        lines[:, 0] ^= (torch.rand(len(lines), device=lines.device) < share).to(torch.uint8)


def measure(
    module: nn.Module, peer: Peer, device: Device, share: float, n: int, name: str = "delta"
) -> Row:
    """Time updates by deltas, and check the last one."""
    totals, phases = [], []
    with ws.connect(module, to=peer.handle, delta="always") as sender:
        for i in range(WARM_UPS + n):
            step(module, share)
            device.wait()
            begin = time.perf_counter()
            report = sender.send_weights()
            if i >= WARM_UPS:
                totals.append(time.perf_counter() - begin)
                phases.append(report.seconds)
    check(module, peer, "a delta")
    delta = report.delta
    if delta is None or not delta.sent:
        raise SystemExit(f"no delta was sent: {delta and delta.reason}")
    medians = {name: statistics.median(p.get(name, 0.0) for p in phases) for name in phases[-1]}
    parts = ", ".join(f"{name} {s * 1e3:.1f}" for name, s in medians.items() if s >= 5e-5)
    sent = f"{delta.nbytes / 1e6:.1f}"
    return Row(name, f"{delta.share:.1%}", report, statistics.median(totals), sent, parts)


def measure_async(module: nn.Module, peer: Peer, device: Device, n: int) -> Row:
    """Time how long `send_async` keeps the caller, and check what arrives."""
    returned = []
    with ws.connect(module, to=peer.handle, delta="off") as sender:
        for i in range(WARM_UPS + n):
            fill(module, i)
            device.wait()
            begin = time.perf_counter()
            handle = sender.send_async()
            if i >= WARM_UPS:
                returned.append(time.perf_counter() - begin)
            report = handle.result()
    check(module, peer, "send_async")
    return Row("send_async, until it returns", "all", report, statistics.median(returned))


def passes(module: nn.Module, other: nn.Module, device: Device, n: int) -> dict[str, float]:
    """Return the median seconds of each pass of a delta; `other` holds the same weights at first.

    Raises SystemExit where it does not hold them afterwards.
    """
    source = ModuleSource(module)
    layout = StreamLayout(source.manifest)
    specs, tensors = source.manifest.specs, source.stable_tensors() or []
    pairs = [(spec.name, tensor) for spec, tensor in zip(specs, tensors, strict=True)]
    memory = LineMemory(layout, Memory([as_bytes(p.detach()) for p in other.parameters()]))
    finding, packing = LineTable(layout), LineTable(layout)
    for line_table in (finding, packing):
        for _ in line_table.scan(pairs, new_marks(line_table.lines)):
            pass
    found: dict[str, list[float]] = {}
    pool: list[LineBuffer] = []  # touched in the warm-ups, as a ring is

    def timed(name: str, work: Callable[[], T]) -> T:
        device.wait()
        begin = time.perf_counter()
        result = work()
        device.wait()
        found.setdefault(name, []).append(time.perf_counter() - begin)
        return result

    for _ in range(WARM_UPS + n):
        step(module, PASSES_SHARE)
        before = finding.total
        timed("find", lambda: list(finding.scan(pairs, new_marks(finding.lines))))
        count = timed("find and pack", lambda: _packed(packing, pairs, pool))
        filled = pool[:count]
        change = timed("apply, read back", partial(_applied, memory, filled))
        timed("read back besides", lambda: memory.sum_of(0, memory.lines // READ_BACK))
        if (before + change - finding.total) % (1 << 64) or packing.total != finding.total:
            raise SystemExit("the passes of a delta: what was applied is not what was found")
    if sums(module) != sums(other):
        raise SystemExit("the passes of a delta: the memory does not hold what was applied")
    return {name: statistics.median(seconds[WARM_UPS:]) for name, seconds in found.items()}


def _packed(
    line_table: LineTable, pairs: Sequence[tuple[str, torch.Tensor]], pool: list[LineBuffer]
) -> int:
    """Write the lines that changed to buffers of `pool`, and return how many were needed."""
    scan = line_table.scan(pairs, new_marks(line_table.lines), packs=True)
    next(scan)
    used = 0
    try:
        while True:
            if used == len(pool):
                memory = torch.zeros(PACKET_LINES * (LINE_NBYTES + 4), dtype=torch.uint8)
                pool.append(LineBuffer(memory))
            pool[used].count = 0
            used += 1
            scan.send(pool[used - 1])
    except StopIteration:
        return used


def _applied(memory: LineMemory, buffers: Sequence[LineBuffer]) -> int:
    """Write these lines, and return by how much their sums have changed."""
    return sum(memory.write(buffer.filled, buffer.content) for buffer in buffers if buffer.count)


def plain_copy(module: nn.Module, other: nn.Module, device: Device, n: int) -> float:
    """Return the seconds of a copy of all parameters to those of another module."""
    pairs = list(zip(other.parameters(), module.parameters(), strict=True))
    return device.seconds(lambda: [into.data.copy_(part.data) for into, part in pairs], n)


def check(module: nn.Module, peer: Peer, what: str) -> None:
    """End the benchmark where the receiver does not hold the module's weights."""
    if sums(module) != peer.ask("sums"):
        raise SystemExit(f"{what}: the receiver does not hold what was sent")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--preset", choices=tuple(PRESETS), default="full")
    parser.add_argument("--updates", type=int, help="timed updates of each kind")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("needs a CUDA GPU; --device cpu --preset toy tries the same code without")
    torch.set_num_threads(1)
    name, n = PRESETS[options.preset]
    n = options.updates or n
    device = Device(options.device)
    title, make = MODELS[name]
    tensors = make()
    module = module_on(tensors, device)
    fill(module, 0)
    other = module_on(tensors, device)
    copy_s = plain_copy(module, other, device, n)
    apart = passes(module, other, device, n)
    del other
    device.forget()
    rows = []
    with receiving_process(tensors, options.device) as peer:
        for share in SHARES:
            peer.ask("renew")
            rows.append(measure(module, peer, device, share, n))
            print(" ".join(rows[-1].cells(copy_s)), flush=True)
        peer.ask("renew", "pointer")
        rows.append(measure(module, peer, device, PASSES_SHARE, n, "delta, pointer"))
        peer.ask("renew")
        rows.append(measure_async(module, peer, device, n))
    nbytes = sum(tensor.nbytes for tensor in tensors)
    print(
        f"{title}, {nbytes / 1e9:.2f} GB in {len(tensors)} tensors, {device.name}, torch "
        f"{torch.__version__}; a plain copy takes {copy_s * 1e3:.2f} ms"
    )
    print(table(HEAD, [row.cells(copy_s) for row in rows]))
    print("\nThe passes of a delta\n")
    cells = [[name, f"{s * 1e3:.2f}", f"{s / copy_s:.2f}"] for name, s in apart.items()]
    print(table(PASSES_HEAD, cells))
    together = sum(seconds for name, seconds in apart.items() if name != "find")
    reached = together, rows[-1].seconds / copy_s
    for (what, limit), value in zip(TARGETS, reached, strict=True):
        print(f"{what}: {value:.4g}, target {limit:g}: {'met' if value <= limit else 'NOT MET'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
