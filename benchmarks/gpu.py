"""Whole updates between two processes on one GPU, beside a plain copy, a rival and targets.

    python -m benchmarks.gpu

needs no arguments, and no package but torch, msgspec and xxhash. The trainer is this
process, the receiver another on the same GPU; control messages go through a pipe. The limit is a
copy of as many bytes on the device, measured in the same run. `--strict` ends with status 3 if a
target is not met. With `--peer` the receiver is on a second GPU, and the limit is a copy between
both; that was never run. `--rings` times packed updates alone, with the same memory in one bucket
or in several; the best row is what CUDA_BUCKETS of backends/ipc/sender.py is to be. It was never
run on a GPU. `--device cpu --preset toy` runs the same code without a GPU; its figures have no
meaning.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
import torch
from torch import nn

import weightsync as ws
from benchmarks import shapes
from benchmarks.gpu_device import Device, FreshBuffer, launches, watch_launches
from benchmarks.gpu_peer import Peer, fill, module_on, receiving_process, sums
from benchmarks.gpu_table import bars_of, table
from benchmarks.shapes import Tensor
from weightsync.backends.ipc.sender import (
    CUDA_BUCKETS,
    CUDA_RING_NBYTES,
    CUDA_UNIT_NBYTES,
    cuda_ring,
)
from weightsync.tensors import as_bytes
from weightsync.weights.copying.copy_plan import CompiledUnit, Memory, UnitCompiler
from weightsync.weights.copying.fused import FusedUnit, fuse, hashers
from weightsync.weights.copying.layout import ALIGNMENT, StreamLayout
from weightsync.weights.sources.base import ModuleSource

WARM_UPS = 2
UNMET = 3
PEER = "cuda:1"
RIVAL_BUCKET_NBYTES = 1 << 30
"""The default of the protocol that is re-enacted."""
MODELS: dict[str, tuple[str, Callable[[], list[Tensor]]]] = {
    "qwen3-8b": ("Qwen3-8B, full size", shapes.qwen3_8b),
    "qwen3-30b-a3b": ("Qwen3-30B-A3B at half width", lambda: shapes.qwen3_30b_a3b(width=2)),
    "toy": ("40 tensors of three dtypes", lambda: shapes.mixed(2 << 20, 40)),
}
PRESETS = {"full": (("qwen3-8b", "qwen3-30b-a3b"), 10), "toy": (("toy",), 2)}
WAYS = ((False, True), (False, False), (True, True), (True, False))
"""Packed, and verified."""
WRITTEN = "unpacked, written"
"""Verified, with `written` called before the clock starts, as behind the optimizer's step."""
RINGS = (1, 2, 3, 4)
"""Buckets that share the memory of a ring."""
TOY_RING_NBYTES = 1 << 20
# Trainer's model, receiver's two, and room for buckets.
COPIES = 3.3


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kind of update; seconds are medians.

    `data_s` is the time from the first copy to the end of the last, `swap_s` that of the commit's
    copy over the weights in use. `clock` is the clock of both: the GPU's events, or the host's
    where no copy was fused.
    """

    way: str
    path: str
    verified: str
    data_s: float
    total_s: float
    clock: str
    of_copy_rate: float
    sender_pass_s: float
    slots: int
    trainer_extra: int
    receiver_extra: int
    swap_s: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def control_s(self) -> float:
        """The time of the update beside its data and the commit's copy."""
        return self.total_s - self.data_s - self.swap_s


@dataclass(frozen=True, kw_only=True)
class Result:
    """The results of one model. `kernels` are seconds of single passes, alone on the device."""

    title: str
    nbytes: int
    tensors: int
    copy_s: float
    rival_s: float
    kernels: Mapping[str, float]
    fused: bool
    handles: int
    event_handles: int
    largest_group: int
    rows: Sequence[Row]


def kernels_of(module: nn.Module, device: Device, repeats: int) -> tuple[dict[str, float], bool]:
    """Time single passes over all tensors; return also whether the fused kernel made them."""
    flats = [as_bytes(p.detach()) for p in module.parameters()]
    twins = [torch.empty_like(flat) for flat in flats]
    plan = StreamLayout(ModuleSource(module).manifest, unit_nbytes=CUDA_UNIT_NBYTES)
    compiler = UnitCompiler(plan, Memory(twins), Memory(flats))
    units: list[CompiledUnit] = [compiler.compile(unit) for unit in plan.units]
    own = UnitCompiler(plan, Memory(flats), Memory(flats))
    readers = hashers([own.compile(unit) for unit in plan.units])
    bare, proved = (fuse(units, verify=verify) for verify in (False, True))

    def copy(programs: Sequence[CompiledUnit], *, verify: bool) -> None:
        for program in programs:
            program.copy()
        if verify:
            for program in programs:
                program.fingerprint()

    def tensor_by_tensor() -> None:
        for twin, flat in zip(twins, flats, strict=True):
            twin.copy_(flat)

    found = {
        "copies, tensor by tensor": device.seconds(tensor_by_tensor, repeats),
        "one launch, copy": device.seconds(lambda: copy(bare, verify=False), repeats),
        "one launch, copy and fingerprint": device.seconds(
            lambda: copy(proved, verify=True), repeats
        ),
        "one launch, fingerprint only": device.seconds(
            lambda: [reader() for reader in readers], repeats
        ),
    }
    return found, isinstance(proved[0], FusedUnit)


def copy_seconds(nbytes: int, device: Device, repeats: int, other: str = "") -> float:
    """Time one copy of as many bytes in one piece, perhaps to another device: the limit."""
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device.torch)
    target = torch.empty_like(source, device=other or device.torch)
    return device.seconds(lambda: target.copy_(source), repeats)


def measure(
    module: nn.Module,
    peer: Peer,
    device: Device,
    way: tuple[bool, bool],
    repeats: int,
    ring: tuple[int, int] | None = None,
    *,
    written: bool = False,
) -> tuple[Row, Mapping[str, str]]:
    """Time updates of one kind, check the values that arrived, and print the skipped paths.

    `ring` are the bytes of a bucket and the number of buckets; None takes the default. With
    `written` the trainer's pass is over when an update begins.
    """
    packed, verify = way
    name = WRITTEN if written else "packed" if packed else "unpacked"
    before = device.allocated()
    data, swaps, passes, totals, clock = [], [], [], [], "host"
    bucket_nbytes, num_buckets = ring or (None, None)
    with ws.connect(
        module,
        to=peer.handle,
        packed=packed,
        verify=verify,
        delta="off",
        bucket_nbytes=bucket_nbytes,
        num_buckets=num_buckets,
    ) as sender:
        fill(module, seed=1 + 2 * packed + verify)
        for i in range(WARM_UPS + repeats):
            if i == WARM_UPS:
                device.begin_peak()
                peer.ask("begin_peak")
            if written:
                sender.written()
            device.wait()
            launches()
            peer.ask("launches")
            begin = time.perf_counter()
            report = sender.send_weights()
            total = time.perf_counter() - begin
            taken, mine = peer.ask("launches"), launches()
            if i < WARM_UPS:
                continue
            totals.append(total)
            clock = "events" if taken else "host"
            # A packed update's first copy is the trainer's, into the first bucket.
            lead = mine[0][1] if packed and mine else 0.0
            copies = taken[:-1]  # the last launch is the commit's
            data.append(copies[-1][1] + lead if copies else report.seconds.get("load", total))
            swaps.append(taken[-1][1] - taken[-1][0] if copies else 0.0)
            passes.append(mine[-1][1] if mine and not packed else 0.0)
        # The next measurement needs memory, too.
        trainer_extra, receiver_peak = device.peak() - before, peer.ask("peak")
    check_sums(module, peer, f"{name}, {report.verified}")
    row = Row(
        way=name,
        path=report.path,
        verified=report.verified,
        data_s=statistics.median(data),
        total_s=statistics.median(totals),
        clock=clock,
        of_copy_rate=0.0,
        swap_s=statistics.median(swaps),
        sender_pass_s=statistics.median(passes),
        slots=_chunks(module, ring) if packed else 0,
        trainer_extra=trainer_extra if device.on_gpu else report.peak_extra_nbytes,
        receiver_extra=receiver_peak - 2 * report.nbytes if device.on_gpu else 0,
        seconds=dict(report.seconds),
    )
    return row, report.skipped_paths


def check_sums(module: nn.Module, peer: Peer, what: str) -> None:
    """Raise SystemExit, naming the tensors, unless the receiver holds the trainer's values."""
    pairs = zip(sums(module), peer.ask("sums"), module.named_parameters(), strict=True)
    wrong = [name for sent, held, (name, _) in pairs if sent != held]
    if wrong:
        raise SystemExit(
            f"{what}: the receiver does not hold what was sent, {len(wrong)} tensors differ: "
            f"{', '.join(wrong[:5])}"
        )


def _chunks(module: nn.Module, ring: tuple[int, int] | None) -> int:
    manifest = ModuleSource(module).manifest
    bucket_nbytes, _ = ring or cuda_ring(StreamLayout(manifest).nbytes, by_launches=True)
    plan = StreamLayout(manifest, bucket_nbytes=bucket_nbytes, unit_nbytes=CUDA_UNIT_NBYTES)
    return len(plan.chunks)


def rival_seconds(
    module: nn.Module, tensors: Sequence[Tensor], peer: Peer, device: Device, repeats: int
) -> float:
    """Time the re-enacted packed protocol: a new buffer; per chunk a handle, an RPC, a clone."""
    state = {name: as_bytes(p.detach()) for name, p in module.named_parameters()}
    groups = [[(name, state[name]) for name in names] for names in _groups(tensors)]
    sizes = [sum(flat.numel() for _, flat in group) for group in groups]

    def update() -> None:
        buffer = FreshBuffer(max(sizes), device)
        try:
            for group, nbytes in zip(groups, sizes, strict=True):
                torch.cat([flat for _, flat in group], out=buffer.tensor[:nbytes])
                device.wait()
                handle = msgspec.json.encode(buffer.handle()).decode()
                names = [name for name, _ in group]
                peer.ask("chunk", {"names": names, "nbytes": nbytes, "handle": handle})
        finally:
            buffer.close()

    taken = []
    for i in range(WARM_UPS + repeats):
        fill(module, seed=91 + i)
        device.wait()
        begin = time.perf_counter()
        update()
        if i >= WARM_UPS:
            taken.append(time.perf_counter() - begin)
    check_sums(module, peer, "the re-enacted protocol")
    return statistics.median(taken)


def _groups(tensors: Sequence[Tensor]) -> Iterator[list[str]]:
    names: list[str] = []
    nbytes = 0
    for tensor in tensors:
        if names and nbytes + tensor.nbytes > RIVAL_BUCKET_NBYTES:
            yield names
            names, nbytes = [], 0
        names.append(tensor.name)
        nbytes += tensor.nbytes
    if names:
        yield names


def run_model(title: str, tensors: Sequence[Tensor], device: Device, kind: str, n: int) -> Result:
    """Measure all updates and passes of one model, to a receiver on the device `kind`."""
    nbytes = sum(tensor.nbytes for tensor in tensors)
    module = module_on(tensors, device)
    other = kind if kind == PEER else ""
    copies = [copy_seconds(nbytes, device, n, other)]
    kernels, is_fused = kernels_of(module, device, n)
    device.forget()
    rows: list[Row] = []
    with receiving_process(tensors, kind) as peer:
        for way, written in (*((way, False) for way in WAYS), (WAYS[0], True)):
            peer.ask("renew")
            row, skipped = measure(module, peer, device, way, n, written=written)
            rows.append(row)
            for path, reason in skipped.items():
                print(f"{row.way}, verified: {row.verified}: not by {path}: {reason}")
            if other and row.path != "cuda_ipc":
                raise SystemExit(f"{title}: one GPU does not read the other: {dict(skipped)}")
        peer.ask("renew")
        rival = rival_seconds(module, tensors, peer, device, n)
        handles = peer.handles
    device.forget()
    copies.append(copy_seconds(nbytes, device, n, other))
    device.forget()
    copy = min(copies)
    return Result(
        title=title,
        nbytes=nbytes,
        tensors=len(tensors),
        copy_s=copy,
        rival_s=rival,
        kernels=kernels,
        fused=is_fused,
        handles=len(handles),
        event_handles=sum(bool(handle.get("event_sync_required")) for handle in handles),
        largest_group=max(CUDA_RING_NBYTES // CUDA_BUCKETS, *(tensor.nbytes for tensor in tensors)),
        rows=[Row(**{**asdict(row), "of_copy_rate": copy / row.data_s}) for row in rows],
    )


def run(options: argparse.Namespace) -> tuple[dict[str, object], bool]:
    """Measure every model and print the tables; return the results as plain data, and the verdict.

    Without a result no target is met.
    """
    device = Device(options.device)
    models, updates = PRESETS[options.preset]
    updates = options.updates or updates
    torch.set_num_threads(1)
    watch_launches()
    results = []
    for name in options.models.split(",") if options.models else models:
        title, make = MODELS[name]
        tensors = make()
        needed, free = COPIES * sum(tensor.nbytes for tensor in tensors), device.free()
        if free is not None and needed > free:
            print(f"{title}: skipped, it needs {needed / 1e9:.0f} GB and {free / 1e9:.0f} are free")
            continue
        kind = PEER if options.peer else options.device
        results.append(run_model(title, tensors, device, kind, updates))
    where = "two" if options.peer else "one"
    print(f"\ntwo processes on {where} {device.name}, torch {torch.__version__}")
    ring = CUDA_RING_NBYTES
    for result in results:
        print("\n" + table(result, ring_nbytes=ring))
    bars = [bars_of(result, ring_nbytes=ring) for result in results]
    said: dict[str, object] = {
        "device": device.name,
        "torch": torch.__version__,
        "results": [
            {**asdict(result), "bars": [asdict(bar) for bar in its]}
            for result, its in zip(results, bars, strict=True)
        ],
    }
    return said, bool(bars) and all(bar.met for its in bars for bar in its)


def run_rings(options: argparse.Namespace) -> None:
    """Time packed updates of each model with each number of buckets, and print a table of each."""
    device = Device(options.device)
    models, updates = PRESETS[options.preset]
    whole = TOY_RING_NBYTES if options.preset == "toy" else CUDA_RING_NBYTES
    torch.set_num_threads(1)
    watch_launches()
    for name in options.models.split(",") if options.models else models:
        title, make = MODELS[name]
        tensors = make()
        nbytes = sum(tensor.nbytes for tensor in tensors)
        module = module_on(tensors, device)
        copy_s = copy_seconds(nbytes, device, options.updates or updates)
        device.forget()
        best: dict[bool, tuple[float, int]] = {}
        rows = []
        with receiving_process(tensors, options.device) as peer:
            for number in RINGS:
                ring = whole // number // ALIGNMENT * ALIGNMENT, number
                for verify in (True, False):
                    peer.ask("renew")
                    n = options.updates or updates
                    row, _ = measure(module, peer, device, (True, verify), n, ring)
                    found = (row.total_s, number)
                    best[verify] = min(best.get(verify, found), found)
                    rows.append(
                        f"| {number} x {ring[0] / 2**20:.4g} MiB | {row.slots} | {row.verified} | "
                        f"{row.data_s * 1e3:.1f} | {copy_s / row.data_s:.0%} | "
                        f"{row.total_s * 1e3:.1f} |"
                    )
                    print(rows[-1], flush=True)
        print(
            f"{title}, packed, on {device.name}: a copy takes {copy_s * 1e3:.2f} ms; best verified "
            f"with {best[True][1]}, not verified with {best[False][1]} buckets, and CUDA_BUCKETS "
            f"is {CUDA_BUCKETS}\n"
        )
        print("| buckets | turns | verified | data, ms | of the copy's rate | whole, ms |")
        print("|---|---:|---|---:|---:|---:|")
        print("\n".join(rows))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--preset", choices=tuple(PRESETS), default="full")
    parser.add_argument("--models", help=f"some of {', '.join(MODELS)}; joined by commas")
    parser.add_argument("--updates", type=int, help="timed updates of each kind")
    parser.add_argument("--peer", action="store_true", help="the receiver on a second GPU")
    parser.add_argument(
        "--rings", action="store_true", help="only packed updates, with one to four buckets"
    )
    parser.add_argument("--json", type=Path, help="write the results here too")
    parser.add_argument(
        "--strict", action="store_true", help=f"end with status {UNMET} if a target is not met"
    )
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("needs a CUDA GPU; --device cpu --preset toy tries the same code without")
    if options.peer and (options.device == "cpu" or torch.cuda.device_count() < 2):
        parser.error("--peer needs two GPUs")
    if options.rings:
        run_rings(options)
        return 0
    said, met = run(options)
    if options.json is not None:
        options.json.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    return UNMET if options.strict and not met else 0


if __name__ == "__main__":
    raise SystemExit(main())
