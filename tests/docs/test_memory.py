"""docs/memory.md: the column of Qwen3-8B follows the formulas, and updates take what they say."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import weightsync as ws
from benchmarks.shapes import qwen3_8b
from tests.crew import Crew, crew
from tests.docs.pages import ROOT
from weightsync.backends.ipc import sender as ipc
from weightsync.backends.ring import HOST_BUCKET_NBYTES, HOST_BUCKETS
from weightsync.backends.tcp import backend as tcp
from weightsync.report import SyncReport
from weightsync.weights.copying.layout import layer_of
from weightsync.weights.deltas.change_log import KEPT_VERSIONS

PAGE = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
MIB = 1 << 20
CONTROL_NBYTES = 64 << 10
"""More than the counters and fingerprints of these models take."""


def rows_of(title: str) -> dict[str, list[str]]:
    """Return the rows of the table of a section, by their first cell."""
    lines = re.findall(
        r"^\| (.*) \|$", PAGE.partition(f"## {title}")[2].partition("\n## ")[0], re.MULTILINE
    )
    return {row[0]: row for row in ([c.strip() for c in line.split("|")] for line in lines[1:])}


ROWS = {
    (side, name): row
    for side in ("trainer", "receiver")
    for name, row in rows_of(f"On {'the' if side == 'trainer' else 'a'} {side}").items()
}
FORMULAS = {key: row[2].strip("`") for key, row in ROWS.items() if row[2].startswith("`")}


def nbytes_of(side: str, *names: str, whole: int, group: int = 0) -> int:
    """Return what the formulas of some rows give for a model of `whole` bytes."""
    given = {"B": whole, "G": group, "MiB": MIB}
    return sum(int(eval(FORMULAS[side, name], {}, given)) for name in names)  # our own page


def shown(nbytes: int) -> str:
    """Write bytes as the page does, with three figures."""
    unit, scale = ("GB", 1e9) if nbytes >= 1e9 else ("MB", 1e6)
    return f"{float(f'{nbytes / scale:.3g}'):g} {unit}" if nbytes else "0"


def groups_of_qwen3_8b() -> dict[str, int]:
    """Return the bytes of each group that is gathered, or given to a hook, at once."""
    groups: dict[str, int] = {}
    for tensor in qwen3_8b():
        name = layer_of(tensor.name)
        groups[name] = groups.get(name, 0) + 2 * math.prod(tensor.shape)
    return groups


@pytest.mark.parametrize(("side", "name"), FORMULAS)
def test_the_column_of_qwen3_8b_is_what_the_formula_gives(side: str, name: str) -> None:
    groups = groups_of_qwen3_8b().values()
    assert ROWS[side, name][4] == shown(nbytes_of(side, name, whole=sum(groups), group=max(groups)))


def test_the_worked_example_has_figures_of_the_tables_alone() -> None:
    told = {row[4] for row in ROWS.values()}
    groups = groups_of_qwen3_8b().values()
    more = ("sums of lines", "marks of lines", "copy for coded values")
    told.add(shown(nbytes_of("trainer", *more, whole=sum(groups))))
    section = PAGE.partition("## Worked example")[2].partition("\n## ")[0]
    found = set(re.findall(r"[\d.]+ [MG]B", section))
    assert found - told == {"1.09 GB"}  # measured, on another page
    assert len(found) > 5


def test_the_sizes_of_rings_are_those_of_the_code() -> None:
    def ring(name: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", FORMULAS["trainer", name])]

    assert ring("ring of a CPU trainer") == [HOST_BUCKETS, HOST_BUCKET_NBYTES // MIB]
    assert ring("ring of a GPU trainer")[1] == ipc.STAGED_BUCKET_NBYTES // MIB
    bucket_nbytes, number = ipc.cuda_ring(1 << 34, by_launches=True)
    assert ring("ring on a GPU") == [number, bucket_nbytes // MIB]
    assert ring("ring, to other hosts")[1] == tcp.BUCKET_NBYTES // MIB
    assert ring("marks of lines")[0] == KEPT_VERSIONS


WIDTH, LAYERS = 512, 24
WHOLE = LAYERS * WIDTH * WIDTH * 2
GROUP = WIDTH * WIDTH * 2


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(LAYERS)
        )


def hook(pairs: Any) -> list[str]:
    return [name for name, _ in pairs]


def slow_hook(pairs: Any) -> list[str]:
    """Take as long as the next groups take that are assembled meanwhile."""
    time.sleep(0.02)
    return hook(pairs)


RING, FAR = "ring of a CPU trainer", "ring, to other hosts"
SUMS, CODED = "sums of lines", "copy for coded values"
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Any, tuple[str, ...], tuple[str, ...]]] = {
    "unpacked, staged": ({}, {}, None, (RING,), ("second set of weights",)),
    "in place": ({}, {"apply": "in_place"}, None, (RING,), ("in place",)),
    "packed": ({"packed": True}, {}, None, (RING,), ("second set of weights",)),
    "copied": (
        {"adopt": False, "packed": False},
        {},
        None,
        (RING, "copies of parameters"),
        ("second set of weights",),
    ),
    "another host": ({"backend": "tcp"}, {}, None, (FAR,), ("second set of weights",)),
    "deltas": ({"delta": "always"}, {}, None, (RING, SUMS), ("second set of weights",)),
    "deltas to another host": (
        {"backend": "tcp", "delta": "always"},
        {},
        None,
        (FAR, SUMS, CODED),
        ("second set of weights",),
    ),
    "staged hook": ({}, {"apply": "staged"}, ws.HookSink(hook), (RING,), ("staged hook",)),
    "staged hook, clones": (
        {},
        {"apply": "staged"},
        ws.HookSink(hook, keeps_views=True),
        (RING,),
        ("staged hook that keeps its tensors",),
    ),
    "hook in place": ({}, {"apply": "in_place"}, ws.HookSink(hook), (RING,), ("hook in place",)),
    "hook in place, clones": (
        {},
        {"apply": "in_place"},
        ws.HookSink(hook, keeps_views=True),
        (RING,),
        ("hook in place that keeps its tensors",),
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("shm_clean")
def test_an_update_takes_what_the_formulas_say(case: str) -> None:
    connect, receive, sink, trainer, receiver = CASES[case]
    model = Layers()
    with (
        closing(ws.WeightReceiver(sink or Layers(), **receive)) as at,
        ws.connect(model, to=at.handle, **{"delta": "off", **connect}) as sender,
    ):
        report = sender.send_weights()
        with torch.no_grad():
            next(model.parameters())[0, 0] += 1
        report = sender.send_weights()
    assert report.nbytes == WHOLE
    wanted = nbytes_of("trainer", *trainer, whole=WHOLE, group=GROUP)
    marks = nbytes_of("trainer", "marks of lines", whole=WHOLE) if SUMS in trainer else 0
    assert wanted <= report.peak_extra_nbytes <= wanted + marks + CONTROL_NBYTES
    (one,) = report.receivers
    assert one.peak_extra_nbytes == nbytes_of("receiver", *receiver, whole=WHOLE, group=GROUP)


@pytest.mark.usefixtures("shm_clean")
def test_a_snapshot_takes_the_model_once_more() -> None:
    with (
        closing(ws.WeightReceiver(Layers())) as at,
        ws.connect(Layers(), to=at.handle, delta="off") as sender,
    ):
        before = sender.send_weights().peak_extra_nbytes
        after = sender.send_async().result(60).peak_extra_nbytes
    assert after == before + nbytes_of("trainer", "snapshot", whole=WHOLE)


RANKS = 2


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Crew]:
    with crew(RANKS) as made:
        yield made


def updates_of_ranks(rank: int, sink: str, snapshot: bool) -> tuple[SyncReport, int, int]:
    """Send shards twice; return the report, what this rank sends, and its bytes of the model."""
    model = Layers()
    for layer in model.layers:
        fully_shard(layer)
    made: Any = {
        "module": Layers,
        "hook": lambda: ws.HookSink(slow_hook),
        "clones": lambda: ws.HookSink(slow_hook, keeps_views=True),
    }[sink]
    apply: Any = "staged" if sink == "module" else "in_place"
    with (
        closing(ws.WeightReceiver(made(), apply=apply)) as at,
        ws.connect(model, to=at.handle if rank == 0 else ()) as sender,
    ):
        for _ in range(2):
            with torch.no_grad():
                next(model.parameters()).mul_(2.0)
            report = sender.send_async().result(60) if snapshot else sender.send_weights()
        held = sum(p.to_local().nbytes for p in model.parameters() if isinstance(p, DTensor))
        extra = sender._group.worker._extra_nbytes()
    return report, held, extra


@pytest.mark.parametrize(
    ("sink", "row"),
    [
        ("module", "second set of weights"),
        ("hook", "hook in place, of several ranks"),
        ("clones", "hook in place, of several ranks, that keeps its tensors"),
    ],
)
@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.usefixtures("shm_clean")
def test_an_update_of_several_ranks_takes_what_the_formulas_say(
    two_ranks: Crew, sink: str, row: str, snapshot: bool
) -> None:
    """A ring on each rank, its own part of a snapshot, and nothing of a gathered group."""
    for report, held, extra in two_ranks.run(updates_of_ranks, sink, snapshot):
        assert (report.nbytes, report.gathered) == (WHOLE, {})
        assert held == WHOLE // RANKS
        wanted = nbytes_of("trainer", RING, whole=WHOLE, group=GROUP)
        if snapshot:
            wanted += nbytes_of("trainer", "snapshot", whole=held)
        assert wanted <= extra <= wanted + CONTROL_NBYTES
        assert wanted <= report.peak_extra_nbytes <= wanted + CONTROL_NBYTES
        (one,) = report.receivers
        assert one.peak_extra_nbytes == nbytes_of("receiver", row, whole=WHOLE, group=GROUP)


def test_the_arguments_that_it_names_exist() -> None:
    names = set(re.findall(r"\b(\w+)=", " ".join(re.findall(r"`([^`]+)`", PAGE))))
    known = set(ws.connect.__annotations__) | set(ws.WeightReceiver.__init__.__annotations__)
    assert names - known - set(ws.HookSink.__init__.__annotations__) == set()
