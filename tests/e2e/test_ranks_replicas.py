"""Tensors that several ranks hold and that differ between them are named, whatever the source."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import weightsync as ws
from tests.crew import Crew
from tests.integrations.test_vllm_source import Described
from tests.weights import trainer_models
from weightsync.ranks import replicas
from weightsync.ranks.comm import join_ranks
from weightsync.ranks.replicas import ReplicaCheck
from weightsync.weights.copying.shards import local_of

NORM = "norm.weight"
UP = "layers.1.up.weight"
GATE = "layers.1.gate.weight"
ROPE = "layers.2.rope"
Found = tuple[tuple[str, ...], list[str]]
"""The names in a report, and the lines that rank 0 logged."""


def ignoring() -> nn.Module:
    """FSDP2 that leaves one parameter alone, so that each rank has a copy of its own."""
    model = trainer_models.plain()
    fully_shard(model, ignored_params={model.norm.weight})
    return model


def untied(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The state dict without the head, which is tied to the embedding."""
    return [(name, t) for name, t in model.state_dict().items() if name != "head.weight"]


class Own:
    """A WeightSource of another module's state dict, made for each update."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.manifest = ws.Manifest(
            tuple(
                ws.TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
                for name, tensor in untied(model)
            )
        )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in untied(self.model):
            yield name, tensor.clone()

    def stable_tensors(self) -> None:
        return None


MODELS: dict[str, Callable[[], nn.Module]] = {
    **trainer_models.MODELS,
    "plain": trainer_models.plain,
    "ddp": trainer_models.replicated,
    "ignoring": ignoring,
}
SOURCES: dict[str, Callable[[nn.Module], Any]] = {
    "module": lambda model: model,
    "state dict": lambda model: model.state_dict(),
    "callable": lambda model: lambda: untied(model),
    "own": Own,
}


def change(model: nn.Module, name: str) -> None:
    """Change one element of this rank's copy or shard, as a step on this rank alone would."""
    tensors = {n.removeprefix("module."): t for n, t in model.state_dict(keep_vars=True).items()}
    with torch.no_grad():
        local_of(tensors[name]).view(-1)[:1] += 1


@contextmanager
def logged() -> Iterator[list[str]]:
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Lines()
    replicas.logger.addHandler(handler)
    try:
        yield lines
    finally:
        replicas.logger.removeHandler(handler)


@contextmanager
def connected(model: nn.Module, source: Any, **settings: Any) -> Iterator[ws.WeightSender]:
    """Connect this rank to a receiver in rank 0's process."""
    dtype = settings.get("dtype")
    receiver = ws.WeightReceiver(trainer_models.plain().to(dtype or torch.float32))
    with ws.connect(source, to=receiver.handle, timeout_s=20.0, **settings) as sender:
        yield sender


def send_thrice(
    rank: int, kind: str, source: str, changes: dict[int, list[str]], settings: dict[str, Any]
) -> list[Found]:
    """Return what three updates report, of which the first one follows a change on some ranks."""
    model = MODELS[kind]()
    for name in changes.get(rank, ()):
        change(model, name)
    found = []
    with connected(model, SOURCES[source](model), **settings) as sender:
        for _ in range(3):
            with logged() as lines:
                report = sender.send_weights()
            found.append((report.replicas_differ, lines))
    return found


DIFFER = [
    (2, "plain", "module", {1: [NORM]}, {}),
    (2, "plain", "module", {1: [NORM]}, {"dtype": torch.bfloat16}),
    (2, "plain", "module", {0: [NORM]}, {"packed": True}),
    (2, "ddp", "module", {1: [ROPE]}, {}),
    (4, "plain", "module", {2: [NORM], 3: [NORM]}, {}),
    (4, "one_dimension", "module", {3: [ROPE]}, {}),
    (2, "ignoring", "module", {1: [NORM]}, {}),
    (4, "hybrid", "module", {2: [UP]}, {}),
    (4, "hybrid", "state dict", {3: [UP]}, {}),
    (4, "tensor_parallel", "module", {1: [GATE]}, {}),
    (2, "plain", "state dict", {1: [NORM]}, {}),
    (2, "plain", "callable", {1: [NORM]}, {}),
    (2, "plain", "own", {1: [NORM]}, {}),
    (4, "one_dimension", "callable", {1: [ROPE]}, {}),
]
UNLIKE = {
    "plain": {1: "rank 1 unlike rank 0", 0: "rank 1 unlike rank 0"},
    "hybrid": {2: "rank 2 unlike rank 0", 3: "rank 3 unlike rank 1"},
}


@pytest.mark.parametrize(("size", "kind", "source", "changes", "settings"), DIFFER)
def test_what_differs_is_named_once_with_its_ranks(
    crews: dict[int, Crew],
    size: int,
    kind: str,
    source: str,
    changes: dict[int, list[str]],
    settings: dict[str, Any],
) -> None:
    results = crews[size].run(send_thrice, kind, source, changes, settings)
    name = next(iter(changes.values()))[0]
    at = min(changes)
    for rank, (first, *later) in enumerate(results):
        assert first[0] == (name,)
        assert [names for names, _ in later] == [(), ()]
        assert [lines for _, lines in later] == [[], []]
        assert len(first[1]) == (rank == 0)
    line = results[0][0][1][0]
    unlike = UNLIKE.get(kind, {}).get(at, f"rank {at} unlike rank")
    if len(changes) > 1:
        unlike = "ranks 2 and 3 unlike rank 0"
    assert line.startswith(f"1 tensor that several ranks hold differs between them: {name} (")
    assert unlike in line
    assert 'check_replicas="off"' in line


ALIKE = [
    *((2, kind, "module") for kind in ("plain", "ddp", "ignoring")),
    *((4, kind, "module") for kind in trainer_models.MODELS),
    *((4, kind, "state dict") for kind in ("hybrid", "tensor_parallel")),
    *((2, "plain", source) for source in SOURCES),
]


@pytest.mark.parametrize(("size", "kind", "source"), ALIKE)
def test_replicas_that_are_alike_are_not_named(
    crews: dict[int, Crew], size: int, kind: str, source: str
) -> None:
    settings = {"check_replicas": "always"}
    for found in crews[size].run(send_thrice, kind, source, {}, settings):
        assert found == [((), [])] * 3


def test_it_may_be_compared_always_or_never(crews: dict[int, Crew]) -> None:
    for when, updates in (("always", 3), ("off", 0)):
        settings = {"check_replicas": when}
        for source in SOURCES:
            results = crews[2].run(send_thrice, "plain", source, {1: [NORM]}, settings)
            wanted = [(NORM,)] * updates + [()] * (3 - updates)
            assert [[names for names, _ in found] for found in results] == [wanted] * 2
            assert [len(lines) for _, lines in results[0]] == [len(names) for names in wanted]


def by_other_calls(rank: int) -> list[tuple[str, ...]]:
    """What `send_async`, and a block of a part in two calls, report; and once more."""
    model = trainer_models.plain()
    if rank:
        change(model, NORM)
        change(model, UP)
    with connected(model, model) as sender:
        found = [sender.send_async().result(30).replicas_differ for _ in range(2)]
    with connected(model, model) as sender:
        for _ in range(2):
            with sender.update() as update:
                state = list(model.state_dict().items())
                update.send(state[:6])
                update.send(state[6:])
            assert update.last_report is not None
            found.append(update.last_report.replicas_differ)
    return found


def test_copies_and_parts_are_compared_too(crews: dict[int, Crew]) -> None:
    both = (UP, NORM)
    assert crews[2].run(by_other_calls) == [[both, (), both, ()]] * 2


def hold_in_part(rank: int, shared: bool) -> tuple[Found, dict[str, float]]:
    """Rank 0 holds experts 0 and 1, rank 1 holds 1 and 2, and its own of expert 1."""
    held = {name: torch.full((4,), float(i)) for i, name in enumerate(("e.0", "e.1", "e.2"))}
    if rank and shared:
        held["e.1"] += 0.5
    source = Described(held, ["e.0", "e.1"] if rank == 0 else ["e.1", "e.2"])
    got: dict[str, float] = {}

    def load(pairs: Any) -> list[str]:
        got.update((name, float(tensor[0])) for name, tensor in pairs)
        return list(got)

    receiver = ws.WeightReceiver(load)
    with ws.connect(source, to=receiver.handle, timeout_s=20.0) as sender, logged() as lines:
        report = sender.send_weights()
    return (report.replicas_differ, lines), got


def test_a_name_that_two_ranks_hold_is_compared(crews: dict[int, Crew]) -> None:
    (found, got), (other, _) = crews[2].run(hold_in_part, True)
    assert found[0] == other[0] == ("e.1",)
    assert "e.1 (rank 1 unlike rank 0)" in found[1][0]
    assert got == {"e.0": 0.0, "e.1": 1.0, "e.2": 2.0}
    for found, _ in crews[2].run(hold_in_part, False):
        assert found == ((), [])


def many(rank: int, count: int) -> tuple[tuple[str, ...], list[str]]:
    """Compare tensors of which every tenth differs on the last rank."""
    comm = join_ranks(None, timeout_s=20.0)
    check = ReplicaCheck(comm, "first")
    names = [f"t{i}" for i in range(count)]
    last = rank == comm.size - 1
    with logged() as lines:
        check.note_all(torch.tensor([i + 0.5 * (last and i % 10 == 0)]) for i in range(count))
        check.compare(names)
    comm.close()
    return check.take_differing(), lines


def test_every_tensor_that_differs_is_found_among_many(crews: dict[int, Crew]) -> None:
    wanted = tuple(f"t{i}" for i in range(0, 5000, 10))
    results = crews[4].run(many, 5000)
    assert [names for names, _ in results] == [wanted] * 4
    assert results[0][1][0].startswith("500 tensors that several ranks hold differ between them: ")
    assert "t0 (rank 3 unlike rank 0), t10 (rank 3 unlike rank 0)" in results[0][1][0]
    assert "and 490 more" in results[0][1][0]
