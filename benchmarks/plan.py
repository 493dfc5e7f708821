"""Presets of the comparison: models, rivals and numbers of readers. Imports no torch.

`standard` is meant to end within 22 minutes on two quiet cores: about 115 trials of 5 to 30 s.
`full` adds 1 and 4 GiB, and 10,000 tensors; 30 tensors, float32 and mixed dtypes by all rivals;
queues of 37,000 tensors; real models to 2 and 4 readers; wider Qwen3s; hooks and in place to 2 and
4 readers. It takes hours. `deltas` has more changes than `standard`, for weightsync alone: 10
minutes. `check` is for the guard, and `toy` has no meaningful speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.rivals.registry import RIVALS
from benchmarks.shapes import (
    Step,
    Tensor,
    Workload,
    equal,
    mixed,
    qwen3_8b,
    qwen3_30b_a3b,
    smollm2,
)

MIB = 1 << 20
Make = Callable[[], list[Tensor]]

OURS = tuple(name for name, entry in RIVALS.items() if entry.ours and not entry.delta)
OURS_MAIN = ("weightsync/unpacked/staged", "weightsync/packed/staged")
OURS_HOOKS = ("weightsync/unpacked/hook", "weightsync/packed/hook")
THEIRS = tuple(name for name, entry in RIVALS.items() if not entry.ours and not entry.delta)
DELTAS = tuple(name for name, entry in RIVALS.items() if entry.delta)
OUR_DELTAS = tuple(f"delta/weightsync/{choice}" for choice in ("off", "auto", "always"))
# `auto` is as fast as one of two others.
MOST_DELTAS = tuple(name for name in DELTAS if name != "delta/weightsync/auto")
# Rivals that send every tensor by itself take minutes for 37,000.
NO_QUEUES = tuple(name for name in THEIRS if RIVALS[name].module != "torch_queue")
# One of each kind, the faster ones.
QUICK = ("torch_queue/file_system", "gloo", "tmpfs", "http_body", "packed_rpc")
# Learning rates of the recorded steps.
RATES = ("1e-06", "1e-05", "5e-05")
SMALL = ("weightsync/unpacked/staged", "weightsync/packed/staged", "weightsync/packed/hook")


@dataclass(frozen=True, slots=True)
class Trial:
    """Rivals that are measured one after the other in one process; `standard` has one in each.

    `most_rounds` limits the rounds of the preset.
    """

    workload: str
    readers: int
    rivals: tuple[str, ...]
    most_rounds: int = 99


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Trials in their order, with their time limits.

    An option is measured for about `budget_s`; slow rivals have fewer rounds, so that each ends
    within `aim_s`. A trial beyond `limit_s` is ended.
    """

    name: str
    trials: tuple[Trial, ...]
    rounds: int = 7
    warm_ups: int = 2
    budget_s: float = 8.0
    aim_s: float = 120.0
    limit_s: float = 150.0


def _workload(
    name: str, title: str, make: Make, step: Step | None = None
) -> tuple[str, Callable[[], Workload]]:
    return name, lambda: Workload(name, title, tuple(make()), step)


def _changing() -> Iterator[tuple[str, Callable[[], Workload]]]:
    """Yield workloads of which few values change between updates."""
    yield _workload(
        "toy-1-percent",
        "2 MB in 12 bf16 tensors, 1 % changed at random",
        lambda: equal(2 * MIB, 12),
        Step(share=0.01),
    )
    for percent in ("1", "0.1", "20"):
        # Rows as long as those of a real model: one coding writes rows and columns.
        yield _workload(
            f"512M-300-{percent}-percent",
            f"512 MiB in 300 bf16 tensors, {percent} % changed at random",
            lambda: equal(512 * MIB, 300, columns=1_984),
            Step(share=float(percent) / 100),
        )
    yield _workload(
        "smollm2-1-percent",
        "SmolLM2-135M, 1 % changed at random",
        smollm2,
        Step(share=0.01),
    )
    for rate in RATES:
        yield _workload(
            f"smollm2-{rate}",
            f"SmolLM2-135M, changed as recorded at {rate}",
            smollm2,
            Step(recorded=f"{rate}/6"),
        )


# Names are keys of results: they do not change, and contain bytes, tensors and dtype.
WORKLOADS: dict[str, Callable[[], Workload]] = dict(
    (
        _workload("toy", "2 MB in 12 bf16 tensors", lambda: equal(2 * MIB, 12)),
        _workload("toy-mixed", "1 MB in 30 tensors, mixed", lambda: mixed(MIB, 30)),
        _workload("64M-300", "64 MiB in 300 bf16 tensors", lambda: equal(64 * MIB, 300)),
        _workload("128M-300", "128 MiB in 300 bf16 tensors", lambda: equal(128 * MIB, 300)),
        _workload("512M-30", "512 MiB in 30 bf16 tensors", lambda: equal(512 * MIB, 30)),
        _workload("512M-300", "512 MiB in 300 bf16 tensors", lambda: equal(512 * MIB, 300)),
        _workload(
            "512M-300-f32",
            "512 MiB in 300 f32 tensors",
            lambda: equal(512 * MIB, 300, "float32"),
        ),
        _workload(
            "512M-300-mixed",
            "512 MiB in 300 tensors of bf16, f32, f16",
            lambda: mixed(512 * MIB, 300),
        ),
        _workload("1G-300", "1 GiB in 300 bf16 tensors", lambda: equal(1024 * MIB, 300)),
        _workload("2G-300", "2 GiB in 300 bf16 tensors", lambda: equal(2048 * MIB, 300)),
        _workload("4G-300", "4 GiB in 300 bf16 tensors", lambda: equal(4096 * MIB, 300)),
        _workload("4K-2000", "2,000 bf16 tensors of 4 KiB", lambda: equal(2_000 * 4096, 2_000)),
        _workload("4K-10000", "10,000 bf16 tensors of 4 KiB", lambda: equal(10_000 * 4096, 10_000)),
        _workload("4K-37000", "37,000 bf16 tensors of 4 KiB", lambda: equal(37_000 * 4096, 37_000)),
        _workload("smollm2", "SmolLM2-135M, 272 tensors", smollm2),
        _workload("qwen3-8b-w8", "Qwen3-8B at 1/8 width, 399 tensors", lambda: qwen3_8b(8)),
        _workload("qwen3-8b-w4", "Qwen3-8B at 1/4 width, 399 tensors", lambda: qwen3_8b(4)),
        _workload(
            "qwen3-30b-a3b-w16",
            "Qwen3-30B-A3B at 1/16 width, 18,867 tensors",
            lambda: qwen3_30b_a3b(16),
        ),
        _workload(
            "qwen3-30b-a3b-w8",
            "Qwen3-30B-A3B at 1/8 width, 18,867 tensors",
            lambda: qwen3_30b_a3b(8),
        ),
        *_changing(),
    )
)
CHANGING = tuple(name for name, _ in _changing())
"""Workloads of which few values change between updates."""
_REAL_CHANGING = [name for name in CHANGING if not name.startswith("toy")]


def _each(workloads: Iterable[str], readers: Sequence[int], rivals: Sequence[str]) -> list[Trial]:
    return [Trial(w, r, (rival,)) for w in workloads for r in readers for rival in rivals]


def _standard() -> Iterator[Trial]:
    yield from _each(["512M-300"], [1], (*OURS, *THEIRS))
    yield from _each(["smollm2", "qwen3-8b-w8", "qwen3-30b-a3b-w16"], [1], (*SMALL, *THEIRS))
    yield from _each(["512M-300"], [2, 4], (*OURS_MAIN, *THEIRS))
    yield from _deltas()
    yield from _each(["64M-300", "2G-300"], [1], (*OURS_MAIN, *THEIRS))
    yield from _each(["4K-37000"], [1], (*OURS_MAIN, *NO_QUEUES))
    yield from _each(["512M-30", "512M-300-f32"], [1], (*OURS_MAIN, *QUICK))
    yield from _each(["512M-300-mixed"], [1], OURS_MAIN)
    # 4 GiB: a rival that does not fit this machine's memory is a row with that reason.
    yield from _each(
        ["4G-300"], [1], ("weightsync/unpacked/in_place", "weightsync/packed/in_place")
    )


def _deltas() -> Iterator[Trial]:
    """Yield two minutes of trials: steps of training take most of it, so rounds are few."""
    whole, delta, elsewhere, others = MOST_DELTAS
    for workload, readers, rivals in (
        ("512M-300-1-percent", 1, MOST_DELTAS),
        ("512M-300-1-percent", 4, (whole, delta, others)),
        ("smollm2-1e-06", 1, (delta, elsewhere, others)),
    ):
        yield from (replace(t, most_rounds=5) for t in _each([workload], [readers], rivals))


def _full() -> Iterator[Trial]:
    yield from _standard()
    yield from _each(["512M-300"], [2, 4], [name for name in OURS if name not in OURS_MAIN])
    everyone = (*OURS_MAIN, *OURS_HOOKS, *THEIRS)
    yield from _each(["1G-300", "4G-300", "4K-10000"], [1], everyone)
    yield from _each(["512M-30", "512M-300-f32", "512M-300-mixed", "4K-37000"], [1], THEIRS)
    yield from _each(["smollm2", "qwen3-8b-w8", "qwen3-30b-a3b-w16"], [2, 4], everyone)
    yield from _each(["qwen3-8b-w4", "qwen3-30b-a3b-w8"], [1], everyone)
    yield from _each(_REAL_CHANGING, [1, 4], DELTAS)


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            name="toy",
            trials=(
                Trial("toy", 2, (*OURS, *(name for name in THEIRS if name != "ray_store"))),
                Trial("toy-mixed", 1, ("weightsync/packed/staged", "http_body", "gloo")),
                Trial("toy-1-percent", 2, DELTAS),
                Trial("toy", 1, ("ray_store",)),
            ),
            rounds=3,
            warm_ups=1,
            limit_s=200.0,
        ),
        Preset(
            name="check",
            trials=(
                Trial(
                    "128M-300",
                    1,
                    (*OURS_MAIN, "weightsync/unpacked/in_place", "weightsync/packed/hook"),
                ),
                Trial("4K-10000", 1, OURS_MAIN),
            ),
            rounds=15,
            warm_ups=3,
        ),
        Preset(
            name="deltas",
            trials=tuple(_each(_REAL_CHANGING, [1, 4], OUR_DELTAS)),
            warm_ups=3,
            budget_s=5.0,
        ),
        Preset(name="standard", trials=tuple(_standard()), budget_s=5.0, aim_s=40.0, limit_s=60.0),
        Preset(
            name="full",
            # Those of `standard` too, without its limits of rounds.
            trials=tuple({(t.workload, t.readers, t.rivals): t for t in _full()}.values()),
            rounds=9,
            aim_s=240.0,
            limit_s=300.0,
        ),
    )
}
