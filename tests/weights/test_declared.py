"""Parts of tensors that ranks declare: what arrives of them, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

import weightsync as ws
from tests.crew import Crew, crew
from tests.weights.test_holdings import Told, assemble, differing, held_by, tell
from weightsync.errors import ConfigError
from weightsync.weights.sources.base import (
    DeclaredSource,
    SourceExtras,
    SourceWatch,
    as_source,
)

Tensors = dict[str, torch.Tensor]
HIDDEN, SIZE, HEADS = 4, 6, 9


@pytest.fixture(scope="module")
def ranks() -> Iterator[Crew]:
    with crew(3) as made:
        yield made


def full(step: float = 0.0) -> Tensors:
    """Two layers with two experts each, and a norm."""
    generator = torch.Generator().manual_seed(1)
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (7, HIDDEN)}
    for layer in range(2):
        prefix = f"layers.{layer}."
        shapes |= {f"{prefix}{name}_proj.weight": (HEADS, HIDDEN) for name in "qkv"}
        shapes |= {f"{prefix}experts.{e}.up.weight": (SIZE, HIDDEN) for e in range(3)}
        shapes[f"{prefix}norm.weight"] = (HIDDEN,)
    shapes["scale"] = ()
    return {n: torch.randn(shape, generator=generator) + step for n, shape in shapes.items()}


class Trainer:
    """One rank of three: fused q, k and v split by rows, one expert each, and the rest whole.

    The rows of a rank are every third one, so that the spans of a part are several.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.rows = [row for row in range(HEADS) if row % 3 == rank]
        self.tensors: Tensors = {}
        self.set(0.0)

    def set(self, step: float) -> None:
        """Write the parameters in place, as an optimizer does."""
        model = full(step)
        made = {name: tensor for name, tensor in model.items() if self.holds(name)}
        for layer in range(2):
            prefix = f"layers.{layer}."
            heads = [model[f"{prefix}{name}_proj.weight"][self.rows] for name in "qkv"]
            made[f"{prefix}qkv"] = torch.cat(heads)
        made["embed.weight"] = model["embed.weight"][:, self.columns[0] : self.columns[1]]
        for name, tensor in made.items():
            self.tensors.setdefault(name, torch.empty(tensor.shape)).copy_(tensor)

    @property
    def columns(self) -> tuple[int, int]:
        """Uneven: 2, 2 and none of 4 columns."""
        return min(2 * self.rank, HIDDEN), min(2 * self.rank + 2, HIDDEN)

    def holds(self, name: str) -> bool:
        kept = "experts" not in name or f"experts.{self.rank}." in name
        return kept and "_proj" not in name and name != "embed.weight"

    def declare(self) -> list[ws.Holding]:
        listed = []
        for name, tensor in self.tensors.items():
            if name.endswith("qkv"):
                spans = [(row, row + 1) for row in self.rows]
                for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                    sent = name.replace("qkv", f"{part}_proj.weight")
                    whole = (HEADS, HIDDEN)
                    listed.append(ws.Holding(sent, whole, [spans, (0, HIDDEN)], rows))
            elif name == "embed.weight":
                listed.append(ws.Holding(name, (7, HIDDEN), [(0, 7), self.columns], tensor))
            else:
                spans = [(0, size) for size in tensor.shape]
                listed.append(ws.Holding(name, tensor.shape, spans, tensor))
        return listed


def given(trainer: Trainer, form: str) -> Any:
    return trainer.declare() if form == "list" else trainer.declare


FORMS = ("list", "callable")
OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "cast and renamed": {"dtype": torch.bfloat16, "rename": {"scale": "s"}},
}


def expected(step: float, dtype: torch.dtype | None = None, **_: Any) -> Tensors:
    found = {name: tensor.to(dtype or torch.float32) for name, tensor in full(step).items()}
    return found if dtype is None else {n.replace("scale", "s"): t for n, t in found.items()}


class Received(dict[str, torch.Tensor]):
    def load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.update((name, tensor.clone()) for name, tensor in pairs)


def updates(rank: int, form: str, options: dict[str, Any]) -> list[list[str]]:
    """Send three updates of three ranks to a receiver; return what differs after each."""
    trainer, received = Trainer(rank), Received()
    receiver = ws.WeightReceiver(received.load)
    wrong = []
    with closing(receiver):
        to = receiver.handle if rank == 0 else ()
        with ws.connect(given(trainer, form), to=to, **options) as sender:
            for step in (1.0, 2.0, 3.0):
                trainer.set(step)
                sender.send_weights()
                wrong.append(differing(received, expected(step, **options)) if rank == 0 else [])
                received.clear()
    return wrong


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("form", FORMS)
def test_full_tensors_are_made_of_the_parts_of_all_ranks(
    ranks: Crew, form: str, options: dict[str, Any]
) -> None:
    assert ranks.run(updates, form, options) == [[[]] * 3] * 3


def alone(model: Tensors) -> list[ws.Holding]:
    """All parts on one rank: the halves of each tensor of rows."""
    listed = []
    for name, tensor in model.items():
        cut = tensor.shape[0] // 2 if tensor.dim() else 0
        rest = [(0, size) for size in tensor.shape[1:]]
        pieces = [(0, cut), (cut, tensor.shape[0])] if tensor.dim() else [()]
        for piece in pieces:
            part = tensor[slice(*piece)] if piece else tensor
            spans: list[Any] = [piece, *rest] if piece else []
            listed.append(ws.Holding(name, tensor.shape, spans, part))
    return listed


@pytest.mark.parametrize("form", FORMS)
def test_one_rank_alone(form: str) -> None:
    model, received = full(), Received()
    receiver = ws.WeightReceiver(received.load)
    source: Any = alone(model) if form == "list" else lambda: alone(model)
    with closing(receiver), ws.connect(source, to=receiver.handle) as sender:
        for step in (1.0, 2.0):
            for name, tensor in full(step).items():
                model[name].copy_(tensor)
            sender.send_weights()
            assert differing(received, full(step)) == []


def of_rank(rank: int, form: str, options: dict[str, Any]) -> tuple[Told, list[str], bool]:
    trainer = Trainer(rank)
    source = as_source(given(trainer, form), **options)
    assert isinstance(source, DeclaredSource)
    owns = [as_source(Trainer(other).declare(), **options) for other in range(3)]
    source.describe([one.own for one in owns if isinstance(one, DeclaredSource)])
    held = held_by(source)
    trainer.set(5.0)
    return tell(source, held), [spec.name for spec in source.manifest.specs], held.stays


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("form", FORMS)
def test_parts_are_holdings(form: str, options: dict[str, Any]) -> None:
    """No rank gathers for receivers on its host; a list stays where it is."""
    found = [of_rank(rank, form, options) for rank in range(3)]
    trainer = Trainer(0)
    source = as_source(trainer.declare(), **options)
    assert isinstance(source, DeclaredSource)
    others = [as_source(Trainer(rank).declare(), **options) for rank in range(3)]
    source.describe([one.own for one in others if isinstance(one, DeclaredSource)])
    wanted = expected(5.0, **options)
    assert differing(assemble(source.manifest, [told for told, _, _ in found]), wanted) == []
    assert [stays for _, _, stays in found] == [form == "list"] * 3
    names = found[0][1]
    assert found[1][1] == found[2][1] == names
    layers = [".".join(name.split(".")[:2]) for name in names if name.startswith("layers")]
    assert layers == sorted(layers)  # those of a layer stand together


def fails(rank: int, form: str, spoil: str) -> tuple[str, list[list[str]]]:
    """Spoil rank 1's holdings for one update; return its error, and what differs after the next."""
    trainer, received = Trainer(rank), Received()
    receiver = ws.WeightReceiver(received.load)
    listed = trainer.declare()
    now: list[Callable[[], Any]] = [trainer.declare]
    source: Any = listed if form == "list" else (lambda: now[-1]())  # noqa: PLW0108  # another one later
    with closing(receiver):
        to = receiver.handle if rank == 0 else ()
        with ws.connect(source, to=to, timeout_s=20) as sender:
            sender.send_weights()
            if rank == 1:
                kept = listed[0], trainer.tensors["scale"]
                if form == "list":
                    listed[0] = ws.Holding(*SPOILED)
                else:
                    now[0] = {
                        "other": lambda: [ws.Holding(*SPOILED), *trainer.declare()[1:]],
                        "fewer": lambda: trainer.declare()[1:],
                        "raises": lambda: 1 / 0,
                        "none": lambda: None,
                    }[spoil]
            with pytest.raises(ws.WeightSyncError) as caught:
                sender.send_weights()
            if rank == 1:
                listed[0], now[0] = kept[0], trainer.declare
            trainer.set(2.0)
            sender.send_weights()
    return str(caught.value), [differing(received, full(2.0)) if rank == 0 else []]


SPOILED = ("spoiled", (2,), [(0, 2)], torch.zeros(2))


@pytest.mark.parametrize(
    ("form", "spoil", "told"),
    [
        ("list", "other", "not those of connect"),
        ("callable", "other", "spoiled"),
        ("callable", "fewer", "not those of connect"),
        ("callable", "raises", "division by zero"),
        ("callable", "none", "not those of connect"),
    ],
)
def test_a_rank_that_declares_others_is_an_error_of_all(
    ranks: Crew, form: str, spoil: str, told: str
) -> None:
    outcomes = ranks.run(fails, form, spoil)  # a rank that waited for the others would be stuck
    assert all("rank 1" in error and told in error for error, _ in outcomes), outcomes
    assert [wrong for _, wrong in outcomes] == [[[]]] * 3


def refused(rank: int, what: str) -> str:
    """Return the error of connect() on this rank."""
    rows = torch.ones(2, 3)
    listed = {
        "hole": [ws.Holding("w", (7, 3), [(2 * rank, 2 * rank + 2), (0, 3)], rows)],
        "overlap": [ws.Holding("w", (4, 3), [(rank, rank + 2), (0, 3)], rows)],
        "shapes": [ws.Holding("w", (6 + rank, 3), [(2 * rank, 2 * rank + 2), (0, 3)], rows)],
        "dtypes": [
            ws.Holding(
                "w", (6, 3), [(2 * rank, 2 * rank + 2), (0, 3)], rows.half() if rank else rows
            )
        ],
        "experts": [ws.Holding(f"e{i}", (2, 3), [(0, 1), (0, 3)], rows[:1]) for i in range(2)],
        "wrong": [ws.Holding("w", (6, 3), [(0, 2 + rank), (0, 3)], rows)],
    }[what]
    receiver = ws.WeightReceiver(Received().load)
    with closing(receiver):
        to = receiver.handle if rank == 0 else ()
        with pytest.raises(ws.WeightSyncError) as caught:
            ws.connect(listed, to=to)
        kept = [("w", torch.ones(2))]
        with ws.connect(lambda: kept, to=to) as sender:  # the next good call
            sender.send_weights()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("hole", ["ManifestMismatchError", "w[6:7, 0:3]", "none of ranks 0, 1, 2"]),
        ("overlap", ["ConfigError", "w[1:2, 0:3] is held by rank 0", "and rank 1 as [1:3, 0:3]"]),
        ("shapes", ["ManifestMismatchError", "w: float32[6, 3] (rank 0) and float32[7, 3] (rank"]),
        ("dtypes", ["ManifestMismatchError", "w: float32[6, 3] (rank 0) and float16[6, 3]"]),
        ("experts", ["ManifestMismatchError", "e0[1:2, 0:3]", "e1[1:2, 0:3]"]),
        ("wrong", ["ConfigError", "w: its tensor is [2, 3], and [0:3, 0:3] is [3, 3]"]),
    ],
)
def test_what_ranks_cannot_declare_together(ranks: Crew, what: str, told: list[str]) -> None:
    errors = ranks.run(refused, what)
    assert [[part for part in told if part not in error] for error in errors] == [[]] * 3, errors


ROWS = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("holding", "told"),
    [
        (("w", (4, 3), [(0, 2)], ROWS), r"w: \[0:2\] is no part of \[4, 3\]"),
        (("w", (4, 3), [(3, 5), (0, 3)], ROWS), r"w: \[3:5, 0:3\] is no part of \[4, 3\]"),
        (("w", (4, 3), [(-1, 1), (0, 3)], ROWS), r"w: \[-1:1, 0:3\] is no part"),
        (("w", (4, 3), [[(0, 2), (1, 2)], (0, 3)], ROWS), r"w: \[0:2\+1:2, 0:3\] is no part"),
        (("w", (4, 3), [(2, 0), (0, 3)], ROWS), r"w: \[2:0, 0:3\] is no part"),
        (("w", (4, 3), [(0, 3), (0, 3)], ROWS), r"its tensor is \[2, 3\], and \[0:3, 0:3\] is \[3"),
        (("w", (4, 3), [0, 3], ROWS), r"w: its shape is \(4, 3\) and its spans are \[0, 3\]"),
        (("w", (4, 3), [(0, 2.5), (0, 3)], ROWS), r"w: its shape is .* \(begin, end\)"),
        (("w", "43", [(0, 2), (0, 3)], ROWS), r"w: its shape is '43'"),
        (("w", (4, 3), [(0, 2), (0, 3)], [[1]]), r"w: its tensor is a list"),
        (("w", (4, 3), [(0, 2), (0, 3)], ROWS.to_sparse()), r"w: its tensor is .*sparse"),
        (("w", (4, 3), [(0, 2), (0, 3)], torch.empty(2, 3, device="meta")), r"w: .*meta"),
    ],
)
def test_holdings_that_are_not_right(holding: Any, told: str) -> None:
    good = ws.Holding("good", (2, 3), [(0, 2), (0, 3)], ROWS)
    with pytest.raises(ConfigError, match=told) as raised:
        as_source([good, ws.Holding(*holding)])
    assert "good" not in str(raised.value)


def test_a_part_that_is_listed_twice_and_one_with_another_shape() -> None:
    part = ws.Holding("w", (4, 3), [(0, 2), (0, 3)], ROWS)
    other = ws.Holding("w", (2, 3), [(0, 2), (0, 3)], ROWS)
    with pytest.raises(ConfigError) as raised:
        as_source([part, part, other])
    assert "2 holdings are not right: w: [0:2, 0:3] is listed twice" in str(raised.value)
    assert "w: has another shape or dtype in another holding" in str(raised.value)


def test_a_list_of_something_else() -> None:
    with pytest.raises(ConfigError, match=r"\('w', .* come from a callable"):
        as_source([("w", torch.ones(2))])


def test_holdings_are_not_converted() -> None:
    with pytest.raises(ConfigError, match="PerExpertSource cannot convert declared holdings"):
        ws.PerExpertSource([ws.Holding("w", (2, 3), [(0, 2), (0, 3)], ROWS)])


@pytest.mark.parametrize("form", FORMS)
def test_a_change_while_parts_are_sent_is_detected(form: str) -> None:
    """The parts are views: a step of the parameter's optimizer changes them."""
    parameter = torch.nn.Parameter(torch.ones(4, 3))
    parameter.grad = torch.ones(4, 3)
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def declare() -> list[ws.Holding]:
        halves = enumerate(parameter.detach().chunk(2))
        return [ws.Holding("w", (4, 3), [(2 * i, 2 * i + 2), (0, 3)], half) for i, half in halves]

    source = as_source(declare if form == "callable" else declare(), rename={"w": "v"})
    made_of = SourceExtras(source).made_of()
    assert made_of is not None
    watch = SourceWatch()
    watch.begin(*made_of)
    assert watch.end() == []
    watch.begin(*made_of)
    optimizer.step()
    assert watch.end() == ["v"]
