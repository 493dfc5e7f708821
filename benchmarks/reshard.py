"""Seconds, memory and regions of reshard plans of published models, and of Mooncake's planner.

    python -m benchmarks.reshard [--rival FOLDER]

FOLDER holds the packages of an environment with `mooncake-transfer-engine`, whose planner is pure
Python. It is given a few layers of a model, because it makes one object for each rank and tensor,
and the same boxes as ours; key heads are cut, not repeated, because it refuses equal boxes within
an axis. Its placements are made beforehand and not timed. Seconds are those of the CPU.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import re
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

from weightsync.cli.mapping import Parallel, parse_mapping, place_model
from weightsync.cli.models import CONFIGS, published
from weightsync.specs import DTYPE_NBYTES, TensorSpec
from weightsync.weights.copying.reshard import Placed, ReshardPlan, plan_reshard

MAPPINGS = (
    ("fsdp=8", "tp=8"),
    ("fsdp=256", "tp=8"),
    ("fsdp=8", "ep=8"),
    ("fsdp=256", "ep=32"),
    ("pp=16,ep=16", "tp=32,dp=8"),
    ("dp=2,fsdp=4", "tp=8"),
    ("fsdp=32,tp=8", "tp=8,dp=4"),
    ("fsdp=256", "tp=7"),
)
COLUMNS = (
    "from",
    "to",
    "patterns",
    "routes",
    "regions",
    "runs",
    "seconds",
    "with its digest",
    "MB",
)
RIVAL_COLUMNS = ("layers", "regions", "seconds", "Mooncake: regions", "seconds")
PER_HOST = 8
LAYERS = {"llama3-70b": 8, "qwen3-235b": 1, "deepseek-v3": 4, "kimi-k2": 2}
"""Layers that the rival is given."""
MOST_REGIONS = 100_000
"""Of the rival, which makes several objects for each."""
ROUNDS = 3
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rival", metavar="FOLDER")
    parser.add_argument("--model", choices=CONFIGS, action="append")
    options = parser.parse_args()
    if options.rival:
        sys.path.append(options.rival)
    for model in options.model or CONFIGS:
        print(f"\n{model}: {len(published(CONFIGS[model])):,} tensors\n")
        print(
            "| from | to | patterns | routes | regions | runs | seconds | with digest | MB |",
            end="",
        )
        print(
            " layers | regions | seconds | Mooncake: regions | seconds |" if options.rival else ""
        )
        for pair in MAPPINGS:
            if "ep" in "".join(pair) and not CONFIGS[model].experts:
                continue
            row = [*pair, *_whole(model, pair)]
            if options.rival:
                row += _beside_rival(model, pair)
            print(f"| {' | '.join(row)} |", flush=True)


def _whole(model: str, pair: tuple[str, str]) -> list[str]:
    """Return the cells of a whole model."""
    config = CONFIGS[model]
    specs = published(config)
    heads = None if config.kv_lora_rank else config.num_key_value_heads
    held, wanted = (place_model(specs, parse_mapping(text), key_heads=heads) for text in pair)
    hosts = [
        {number: f"{side} {number // PER_HOST}" for number in range(parse_mapping(text).ranks)}
        for side, text in zip(("trainer", "receiver"), pair, strict=True)
    ]

    def make() -> ReshardPlan:
        return plan_reshard(held, wanted, rank_hosts=hosts[0], receiver_hosts=hosts[1])

    seconds, plan = _timed(make)
    digest, _ = _timed(lambda: make().digest)
    tracemalloc.start()
    kept = make()
    assert kept.digest == plan.digest
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    totals = plan.totals
    return [
        f"{len(plan.patterns)}",
        f"{len(plan.routes)}",
        f"{totals.regions:,}",
        f"{totals.runs:,}",
        f"{seconds:.2f}",
        f"{digest:.2f}",
        f"{peak / 1e6:.1f}",
    ]


def _beside_rival(model: str, pair: tuple[str, str]) -> list[str]:
    """Return the cells of a few layers, planned by both."""
    sides = [parse_mapping(text) for text in pair]
    count = max(LAYERS[model], *(side.pp for side in sides))
    specs = [spec for spec in published(CONFIGS[model]) if _layer(spec) < count]
    held, wanted = (place_model(specs, side) for side in sides)
    seconds, plan = _timed(lambda: plan_reshard(held, wanted))
    cells = [f"{count}", f"{plan.totals.regions:,}", f"{seconds:.3f}"]
    if plan.totals.regions > MOST_REGIONS:
        return [*cells, "not run: too many", ""]
    try:
        placements = [
            _mooncake(placed, side) for placed, side in zip((held, wanted), sides, strict=True)
        ]
        weight = importlib.import_module("mooncake.reshard.weight")
        limits = weight.PlanningLimits(10**9, 10**9, 10**12)
        theirs, found = _timed(
            lambda: weight.plan_placement_transfer(*placements, planning_limits=limits)
        )
    except ValueError as exc:
        return [*cells, f"refused: {str(exc)[:60]}", ""]
    return [*cells, f"{len(found.operations):,}", f"{theirs:.3f}"]


def _timed(make: Callable[[], Any]) -> tuple[float, Any]:
    """Return the least seconds of CPU of some rounds, and what the last one made."""
    seconds = []
    made = None
    for _ in range(ROUNDS):
        made = None
        gc.collect()
        begin = time.process_time()
        made = make()
        seconds.append(time.process_time() - begin)
        if seconds[0] > 5:
            break
    return min(seconds), made


def _layer(spec: TensorSpec) -> int:
    found = _LAYER.search(spec.name)
    return int(found[1]) if found else 0


def _mooncake(placed: Sequence[Placed], side: Parallel) -> Any:
    """Return a placement of Mooncake: fsdp is its axis tp, since it has no other that cuts."""
    weight: Any = importlib.import_module("mooncake.reshard.weight")
    if side.fsdp > 1 and side.tp > 1:
        raise ValueError("it has no two axes that cut one dimension")

    def rank_of(number: int) -> Any:
        rest, tp = divmod(number, side.tp)
        rest, ep = divmod(rest, side.ep)
        rest, fsdp = divmod(rest, side.fsdp)
        pp, dp = divmod(rest, side.dp)
        return weight.ParallelRank(dp=dp, tp=max(tp, fsdp), pp=pp, ep=ep)

    ranks = [rank_of(number) for number in range(side.ranks)]
    topology = weight.ParallelTopology(
        tp_size=max(side.tp, side.fsdp),
        pp_size=side.pp,
        ep_size=side.ep,
        dp_size=side.dp,
        participants=tuple(
            weight.TopologyParticipant(f"rank{number:05}", rank)
            for number, rank in enumerate(ranks)
        ),
    )
    fragments: list[list[Any]] = [[] for _ in ranks]
    known: list[list[Any]] = [[] for _ in ranks]
    for one in placed:
        spec = one.spec
        tensor = _descriptor(one, side)
        for part, members in zip(one.boxes.parts, one.boxes.members, strict=True):
            if any(len(spans) > 1 for spans in part.box.spans):
                raise ValueError("it has no boxes of several spans")
            for number in members:
                known[number].append(tensor)
                local = part.box.local_shape
                nbytes = TensorSpec("x", spec.dtype, local).nbytes
                begins = tuple(spans[0][0] for spans in part.box.spans)
                fragments[number].append(
                    weight.PlacementFragment(spec.name, begins, local, nbytes, ranks[number])
                )
    common = {
        "resource_id": "model",
        "revision": "1",
        "weight_generation": 1,
        "placement_set_id": "set",
        "topology_id": topology.topology_id,
    }
    parts = tuple(
        weight.WeightPlacementPart(
            participant_id=f"rank{number:05}",
            rank=rank,
            tensors=tuple(known[number]),
            fragments=tuple(fragments[number]),
            **common,
        )
        for number, rank in enumerate(ranks)
    )
    del common["topology_id"]
    return weight.WeightPlacementManifest(topology=topology, parts=parts, **common)


def _descriptor(placed: Placed, side: Parallel) -> Any:
    weight: Any = importlib.import_module("mooncake.reshard.weight")
    spec = placed.spec
    cuts = [
        dim
        for dim, size in enumerate(spec.shape)
        if any(part.box.spans[dim] != ((0, size),) for part in placed.boxes.parts)
    ]
    expert = _EXPERT.search(spec.name)
    axes: list[Any] = [weight.SplitAxis("tp", dim) for dim in cuts]
    if not cuts and max(side.tp, side.fsdp) > 1:
        axes.append(weight.ReplicatedAxis("tp"))
    if side.dp > 1:
        axes.append(weight.ReplicatedAxis("dp"))
    if side.ep > 1:
        axes.append((weight.OwnershipAxis if expert else weight.ReplicatedAxis)("ep"))
    if side.pp > 1:
        axes.append(weight.OwnershipAxis("pp"))
    return weight.TensorDescriptor(
        tensor_id=spec.name,
        global_shape=spec.shape,
        dtype=spec.dtype,
        itemsize=DTYPE_NBYTES[spec.dtype],
        shard_dims=tuple(cuts),
        layout_fingerprint="rows",
        parallel_axes=tuple(axes),
        layer_id=_layer(spec),
        expert_id=int(expert[1]) if expert else None,
    )


if __name__ == "__main__":
    main()
