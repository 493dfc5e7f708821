"""Whole updates between two processes on one GPU, beside a plain copy of the same tensors.

    python -m benchmarks.gpu

needs no arguments. The trainer is this process, the receiver another on the same GPU; control
messages go through a pipe. What counts is the last column: how many times as long an update takes
as copying the same tensors once on the device, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

import weightsync as ws

ANSWER_S = 600.0
WARM_UPS = 2
# Elements of one decoder layer's tensors, in shares; 0 is a norm of NORM elements.
LAYER = (4, 1, 1, 4, 0, 0, 12, 12, 12, 0, 0)
NORM = 128
# Trainer's model, receiver's two, and room for buckets: copies that share the GPU.
COPIES = 3.5


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to update, and what it took; `times_copy` is against the plain copy."""

    way: str
    road: str
    apply: str
    verified: str
    seconds: float
    gbps: float
    stall_ms: float
    extra_mb: float
    times_copy: float


def sizes_of(nbytes: int, tensors: int) -> list[int]:
    """Return the elements (bf16) of `tensors` tensors of about `nbytes` bytes in all."""
    shares = [LAYER[i % len(LAYER)] for i in range(tensors)]
    unit = nbytes / 2 / max(sum(shares), 1)
    return [max(1, int(share * unit)) if share else NORM for share in shares]


class Weights(nn.Module):
    """bf16 parameters of these sizes."""

    def __init__(self, sizes: Sequence[int], device: str) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.zeros(n, dtype=torch.bfloat16, device=device), requires_grad=False)
            for n in sizes
        )

    def fill(self, seed: int) -> None:
        """Overwrite every parameter with other bits."""
        for i, weight in enumerate(self.weights):
            weight.data.view(torch.int16).random_().add_(seed + i)

    def sums(self) -> list[int]:
        """Return one number per parameter that tells other contents apart."""
        return [int(w.data.view(torch.int16).sum(dtype=torch.int64)) for w in self.weights]


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def median_seconds(work: Callable[[], object], repeats: int, device: str) -> float:
    taken = []
    for i in range(WARM_UPS + repeats):
        settle(device)
        begin = time.perf_counter()
        work()
        settle(device)
        if i >= WARM_UPS:
            taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def copy_seconds(model: Weights, repeats: int, device: str) -> float:
    """Time one copy of every parameter to a second set on the same device."""
    taken = _copy_to_twins(model, repeats, device)
    if device == "cuda":
        torch.cuda.empty_cache()
    return taken


def _copy_to_twins(model: Weights, repeats: int, device: str) -> float:
    pairs = [(torch.empty_like(weight), weight) for weight in model.weights]

    def copy() -> None:
        for twin, weight in pairs:
            twin.copy_(weight)

    return median_seconds(copy, repeats, device)


class Receiver:
    """The receiving process's end of the pipe; `handle` is the callback of `ws.connect`."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._turn = threading.Lock()

    def handle(self, message: Mapping[str, object]) -> object:
        return self._ask("handle", message)

    def sums(self) -> list[int]:
        return list(self._ask("sums"))

    def _ask(self, what: str, argument: object = None) -> Any:
        with self._turn:
            self._pipe.send_bytes(json.dumps([what, argument]).encode())
            if not self._pipe.poll(ANSWER_S):
                raise TimeoutError(f"the receiver did not answer {what} within {ANSWER_S:.0f} s")
            answer = json.loads(self._pipe.recv_bytes())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]


def serve(pipe: Connection, sizes: Sequence[int], device: str) -> None:
    """Run in the receiving process until the pipe closes."""
    model = Weights(sizes, device)
    receiver = ws.WeightReceiver(model)
    answers: dict[str, Callable[[Any], object]] = {
        "handle": receiver.handle,
        "sums": lambda _: model.sums(),
    }
    while True:
        try:
            what, argument = json.loads(pipe.recv_bytes())
        except EOFError:
            break
        try:
            answer: dict[str, object] = {"result": answers[what](argument)}
        except Exception as exc:  # noqa: BLE001 # the trainer raises it
            answer = {"error": f"{type(exc).__name__}: {exc}"}
        pipe.send_bytes(json.dumps(answer).encode())
    receiver.close()


@contextmanager
def receiving_process(sizes: Sequence[int], device: str) -> Iterator[Receiver]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, sizes, device), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Receiver(ours)
    finally:
        ours.close()
        process.join(30)
        if process.is_alive():
            process.kill()
            process.join()


def measure(
    model: Weights, receiver: Receiver, *, packed: bool, verify: bool, repeats: int, device: str
) -> tuple[Row, Mapping[str, str]]:
    """Time updates of one way, check what arrived, and say which roads were passed over."""
    reports: list[ws.SyncReport] = []
    with ws.connect(model, to=receiver.handle, packed=packed, verify=verify) as sender:
        model.fill(seed=1 + 2 * packed + verify)
        seconds = median_seconds(lambda: reports.append(sender.send_weights()), repeats, device)
    if receiver.sums() != model.sums():
        raise SystemExit("the receiver does not hold what was sent")
    last = reports[-1]
    row = Row(
        way="packed" if packed else "unpacked",
        road=last.road,
        apply=last.apply,
        verified=last.verified,
        seconds=seconds,
        gbps=last.nbytes / seconds / 1e9,
        stall_ms=statistics.median(report.stall_s for report in reports[WARM_UPS:]) * 1e3,
        extra_mb=last.peak_extra_nbytes / 1e6,
        times_copy=0.0,
    )
    return row, last.skipped_roads


def fitting(nbytes: int, device: str) -> int:
    """Return `nbytes`, or less where the GPU has no room for every copy of it."""
    if device != "cuda":
        return nbytes
    free, _ = torch.cuda.mem_get_info()
    return min(nbytes, int(free / COPIES))


def table(rows: Sequence[Row], copy_gbps: float) -> str:
    head = f"{'way':<9} {'road':<14} {'apply':<9} {'verified':<9} {'ms':>9} {'GB/s':>8} "
    lines = [head + f"{'stall ms':>9} {'extra MB':>9} {'x copy':>7}"]
    lines += [
        f"{r.way:<9} {r.road:<14} {r.apply:<9} {r.verified:<9} {r.seconds * 1e3:9.2f} "
        f"{r.gbps:8.2f} {r.stall_ms:9.3f} {r.extra_mb:9.1f} {r.times_copy:7.2f}"
        for r in rows
    ]
    lines.append(f"{'copy':<9} {'same device':<14} {'':<9} {'':<9} {'':>9} {copy_gbps:8.2f}")
    return "\n".join(lines)


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure every way, print the table last, and return all of it as plain data."""
    device: str = options.device
    sizes = sizes_of(fitting(options.nbytes, device), options.tensors)
    nbytes = 2 * sum(sizes)
    model = Weights(sizes, device)
    before = copy_seconds(model, options.updates, device)
    measured: list[Row] = []
    for packed in (False, True):
        for verify in (True, False):
            with receiving_process(sizes, device) as receiver:
                row, skipped = measure(
                    model,
                    receiver,
                    packed=packed,
                    verify=verify,
                    repeats=options.updates,
                    device=device,
                )
            measured.append(row)
            for road, reason in skipped.items():
                print(f"{row.way}, verified: {row.verified}: not by {road}: {reason}")
    copy = min(before, copy_seconds(model, options.updates, device))
    rows = [
        Row(**{**asdict(row), "times_copy": row.seconds / copy if copy else 0.0})
        for row in measured
    ]
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"\n{nbytes / 1e9:.3f} GB of bf16 in {len(sizes)} tensors, two processes on one {name}\n")
    print(table(rows, nbytes / copy / 1e9))
    return {
        "device": name,
        "torch": torch.__version__,
        "nbytes": nbytes,
        "tensors": len(sizes),
        "copy_gbps": nbytes / copy / 1e9,
        "rows": [asdict(row) for row in rows],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--nbytes", type=int, default=16_000_000_000, help="bytes of weights")
    parser.add_argument("--tensors", type=int, default=399)
    parser.add_argument("--updates", type=int, default=10, help="timed updates of each way")
    parser.add_argument("--json", type=Path, help="write the results here too")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("needs a CUDA GPU; --device cpu --nbytes 50000000 tries the same code without")
    results = run(options)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
