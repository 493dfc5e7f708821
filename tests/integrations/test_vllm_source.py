"""Sources that describe themselves, as vLLM's WeightSource: alone, and split among ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import weightsync as ws
from tests.crew import Crew, crew
from tests.weights.test_holdings import Told, assemble, differing, held_by, tell
from weightsync.integrations.vllm.source import DescribedSource
from weightsync.weights.sources.base import as_source


@dataclass(frozen=True)
class Meta:
    """As vLLM's ParamMeta. `owners` are ranks; None is every rank."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = None


@dataclass
class Described:
    """Has the methods of WeightSource in vLLM 0.29 to 0.32. `step` is added to each tensor."""

    model: dict[str, torch.Tensor]
    held: Sequence[str] | None = None
    step: float = 0.0
    passes: int = 0
    meta: dict[str, Meta] = field(default_factory=dict)

    def metadata(self) -> list[Any]:
        return [
            self.meta.get(name) or Meta(name, tensor.dtype, tuple(tensor.shape))
            for name, tensor in self.model.items()
        ]

    def held_names(self) -> Sequence[str] | None:
        return self.held

    def groups(self) -> list[list[str]]:
        """One group per layer, those of which this rank holds anything."""
        layers: dict[str, list[str]] = {}
        for name in self.model:
            layers.setdefault(name.partition(".")[0], []).append(name)
        held = self.model if self.held is None else self.held
        return [group for group in layers.values() if any(name in held for name in group)]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        self.passes += 1
        for name in (name for group in self.groups() for name in group):
            absent = self.held is not None and name not in self.held
            yield name, None if absent else self.model[name] + self.step


@dataclass
class Owned:
    """Has the members of WeightSource in vLLM 0.33. `step` is added to each tensor."""

    model: dict[str, torch.Tensor]
    owners: Callable[[str], tuple[int, ...] | None] = lambda _: None
    step: float = 0.0
    passes: int = 0
    rank: int = 0
    full: bool = True

    @cached_property
    def metadata(self) -> list[Any]:
        return [
            Meta(name, tensor.dtype, tuple(tensor.shape), self.owners(name))
            for name, tensor in self.model.items()
        ]

    def owned_names(self, rank: int) -> list[str]:
        return [m.name for m in self.metadata if m.owners is None or rank in m.owners]

    def implements_iter_full(self) -> bool:
        return self.full

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.passes += 1
        for name, tensor in self.model.items():
            owners = self.owners(name)
            if owners is None or self.rank in owners:
                yield name, tensor + self.step

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError("weightsync sends full tensors")


def weights() -> dict[str, torch.Tensor]:
    """Three layers of two tensors, and one that is empty, in three dtypes."""
    made = {
        f"{layer}.{part}": torch.arange(6 * i + 12.0).view(-1, 2).to(dtype)
        for i, layer in enumerate(("a", "b", "c"))
        for part, dtype in (("w", torch.float32), ("v", torch.bfloat16))
    }
    return {**made, "c.empty": torch.zeros(0, 3), "c.scale": torch.tensor(2.0)}


class Held(dict[str, torch.Tensor]):
    """What a load_weights hook was given."""

    def load(self, pairs: Any) -> None:
        self.update((name, tensor.clone()) for name, tensor in pairs)


Either = Described | Owned
"""A source in one of the two shapes."""


def same(held: dict[str, torch.Tensor], source: Either) -> bool:
    return held.keys() == source.model.keys() and all(
        torch.equal(held[name], tensor + source.step) and held[name].dtype == tensor.dtype
        for name, tensor in source.model.items()
    )


@pytest.mark.parametrize("shape", [Described, Owned])
def test_every_update_iterates_anew_and_the_description_is_read_once(
    shape: Callable[[Any], Either],
) -> None:
    source, held = shape(weights()), Held()
    receiver = ws.WeightReceiver(held.load)
    with closing(receiver), ws.connect(source, to=receiver.handle) as sender:
        assert source.passes == 0
        for step in (1, 2, 3):
            source.step = float(step)
            sender.send_weights()
            assert source.passes == step
            assert same(held, source)


@pytest.mark.parametrize("shape", [Described, Owned])
def test_names_and_dtypes_are_mapped_on_the_way(shape: Callable[[Any], Either]) -> None:
    source = as_source(shape(weights()), dtype=torch.float16, rename={"a.w": "renamed"})
    assert isinstance(source, DescribedSource)
    assert source.manifest.specs[0].name == "renamed"
    assert {spec.dtype for spec in source.manifest.specs} == {"float16"}
    assert [name for name, _ in source.tensors()] == [spec.name for spec in source.manifest.specs]


def missing(source: Either) -> None:
    del source.model["b.v"]


def added(source: Either) -> None:
    source.model["d.w"] = torch.zeros(2)


def swapped(source: Either) -> None:
    source.model["a.w"] = source.model.pop("a.w")


def reshaped(source: Either) -> None:
    source.model["b.w"] = torch.zeros(3)


@pytest.mark.parametrize("shape", [Described, Owned])
@pytest.mark.parametrize("break_it", [missing, added, swapped, reshaped])
def test_an_iteration_that_is_not_the_description_moves_nothing(
    shape: Callable[[Any], Either], break_it: Callable[[Either], None]
) -> None:
    source, held = shape(weights()), Held()
    receiver = ws.WeightReceiver(held.load)
    with closing(receiver), ws.connect(source, to=receiver.handle, timeout_s=5) as sender:
        sender.send_weights()
        before = dict(held)
        break_it(source)
        with pytest.raises(ws.ManifestMismatchError, match="the source"):
            sender.send_weights()
        assert receiver.status().version == 1
        assert all(torch.equal(held[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    "source",
    [
        Described(weights(), [name for name in weights() if not name.startswith("b")]),
        Owned(weights(), lambda name: (1,) if name in ("b.w", "b.v") else None),
    ],
)
def test_a_single_rank_that_holds_a_part_is_refused(source: Either) -> None:
    receiver = ws.WeightReceiver(Held().load)
    message = r"no rank's source holds b\.w, b\.v; a rank has to"
    with closing(receiver), pytest.raises(ws.ManifestMismatchError, match=message):
        ws.connect(source, to=receiver.handle)


def test_held_names_that_are_not_described_or_not_iterated_are_refused() -> None:
    with pytest.raises(ws.ManifestMismatchError, match=r"held_names\(\) .*metadata lacks: z\.w"):
        DescribedSource(Described(weights(), ["a.w", "z.w"]))
    owned: Any = Owned(weights())
    owned.owned_names = lambda _: ["a.w", "z.w"]
    with pytest.raises(ws.ManifestMismatchError, match=r"owned_names\(\) .* lacks: z\.w"):
        DescribedSource(owned)
    silent = Described(weights(), ["a.w", "b.w"])
    silent.groups = lambda: [["a.w", "a.v"]]  # type: ignore[method-assign]
    with pytest.raises(ws.ManifestMismatchError, match=r"groups\(\) .* leaves out .*: b\.w"):
        DescribedSource(silent)


@pytest.mark.parametrize(
    "meta",
    [
        Meta("a", "float32", (4,)),  # type: ignore[arg-type]
        Meta("a", torch.float32, (-1,)),
        Meta("a", torch.float32, None),  # type: ignore[arg-type]
        Meta(7, torch.float32, (4,)),  # type: ignore[arg-type]
    ],
)
def test_a_description_that_does_not_fit_is_named(meta: Meta) -> None:
    source = Described({"a": torch.ones(4)}, meta={"a": meta})
    with pytest.raises(ws.ConfigError, match=r"the metadata of a Described has Meta\(name="):
        as_source(source)


def test_a_source_of_shards_alone_is_refused() -> None:
    with pytest.raises(ws.ConfigError, match=r"a Owned implements iter_local\(\) alone, .* full"):
        as_source(Owned(weights(), full=False))


class Both(Described):
    """Is written for every vLLM, and has the methods where an older one is installed."""

    def iter_full(self) -> Iterator[tuple[str, Any]]:
        return iter(self)


def test_a_source_with_the_methods_and_iter_full_goes_by_its_methods() -> None:
    names = [name for name in weights() if name != "b.v"]
    assert list(as_source(Both(weights())).manifest.index) == list(weights())
    assert DescribedSource(Both(weights(), names)).held == [0, 1, 2, 4, 5, 6, 7]


class Labelled:
    """Has metadata, and is no source."""

    metadata = "of something else"


def test_other_objects_with_metadata_are_no_sources() -> None:
    with pytest.raises(ws.ConfigError, match="cannot send from an object of Labelled"):
        as_source(Labelled())


@pytest.mark.parametrize(
    "described",
    [
        Described(weights(), [name for name in weights() if name != "b.v"]),
        Owned(weights(), lambda name: (1,) if name == "b.v" else None),
    ],
)
def test_a_part_inside_of_another_source_is_refused(described: Either) -> None:
    source = DescribedSource(described)  # as another source uses it
    with pytest.raises(ws.ConfigError, match=r"does not hold 'b\.v': .* not inside of another"):
        list(source.tensors())


@pytest.fixture(scope="module")
def ranks() -> Iterator[Crew]:
    with crew(3) as made:
        yield made


def layers_of(rank: int, split: str) -> Sequence[str] | None:
    """Return the names that a rank holds."""
    names = list(weights())
    match split:
        case "by layer":  # as pipeline stages
            return [name for name in names if name.startswith("abc"[rank])]
        case "by name":  # as experts: no rank holds a whole layer
            return names[rank::3]
        case "two hold all":
            return names if rank else names[:3]
        case "one says all":
            return None if rank == 1 else []
    raise AssertionError(split)


def owners_of(split: str) -> Callable[[str], tuple[int, ...] | None]:
    """Return the ranks of each tensor, of which one rank alone knows that it holds all."""
    held = [layers_of(rank, split) for rank in range(3)]

    def owners(name: str) -> tuple[int, ...] | None:
        ranks = tuple(rank for rank, names in enumerate(held) if names is None or name in names)
        return None if ranks == (0, 1, 2) else ranks

    return owners


def split_source(rank: int, split: str, shape: str) -> Either:
    """Return a rank's source, in a shape."""
    if shape == "owned":
        return Owned(weights(), owners_of(split), rank=rank)
    return Described(weights(), layers_of(rank, split))


def updates(rank: int, split: str, packed: bool | None, shape: str) -> Any:
    """Send three updates; return what rank 0's receiver held after each."""
    source, held = split_source(rank, split, shape), Held()
    receiver = ws.WeightReceiver(held.load)
    right = []
    with closing(receiver):
        to = receiver.handle if rank == 0 else ()
        with ws.connect(source, to=to, packed=packed, bucket_nbytes=64) as sender:
            for step in (1, 2, 3):
                source.step = float(step)
                sender.send_weights()
                right.append(rank > 0 or same(held, source))
    return right


@pytest.mark.parametrize("shape", ["held", "owned"])
@pytest.mark.parametrize("packed", [None, False])
@pytest.mark.parametrize("split", ["by layer", "by name", "two hold all", "one says all"])
def test_ranks_that_hold_different_tensors_send_all(
    ranks: Crew, split: str, packed: bool | None, shape: str
) -> None:
    assert ranks.run(updates, split, packed, shape) == [[True] * 3] * 3


class Negated(ws.WrappingSource):
    """Sends the tensors of another source with the opposite sign."""

    @property
    def manifest(self) -> ws.Manifest:
        return self.source.manifest

    def convert(
        self, pairs: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in pairs:
            yield name, -tensor


def wrapped(rank: int, wrappers: int, shape: str) -> list[bool]:
    """Send twice what the ranks hold by name, in wrappers; return whether it arrived."""
    described, held = split_source(rank, "by name", shape), Held()
    source: object = described
    for _ in range(wrappers):
        source = Negated(source)
    receiver = ws.WeightReceiver(held.load)
    right = []
    with closing(receiver):
        to = receiver.handle if rank == 0 else ()
        with ws.connect(source, to=to) as sender:
            for step in (1, 2):
                described.step = float(step)
                sender.send_weights()
                found = Held((name, -t if wrappers % 2 else t) for name, t in held.items())
                right.append(rank > 0 or same(found, described))
    return right


@pytest.mark.parametrize("shape", ["held", "owned"])
@pytest.mark.parametrize("wrappers", [1, 2])
def test_ranks_exchange_what_they_hold_of_a_source_that_is_wrapped(
    ranks: Crew, wrappers: int, shape: str
) -> None:
    assert ranks.run(wrapped, wrappers, shape) == [[True] * 2] * 3


def wrapped_shards(rank: int) -> tuple[str, bool]:
    """Rank 1 yields another tensor in the second update; return its error, and the next update."""
    mesh = DeviceMesh.from_group(torch.distributed.group.WORLD, "cpu")  # type: ignore[arg-type]
    full = {f"layers.{i}.w": torch.arange(6.0).view(3, 2) + i for i in range(4)}
    model = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in full.items()}
    given = dict(model)
    held = Held()
    receiver = ws.WeightReceiver(held.load)
    with closing(receiver):
        to = receiver.handle if rank == 0 else ()
        source = Negated(lambda: iter(given.items()))
        with ws.connect(source, to=to, timeout_s=10) as sender:
            sender.send_weights()
            if rank == 1:
                given["layers.2.w"] = torch.zeros(1)  # type: ignore[assignment]  # no shard
            with pytest.raises(ws.ManifestMismatchError) as caught:
                sender.send_weights()
            given.update(model)
            sender.send_weights()
    right = rank > 0 or all(torch.equal(held[name], -tensor) for name, tensor in full.items())
    return str(caught.value), right


def test_a_rank_that_yields_another_shard_is_an_error_of_all_also_in_a_wrapper(
    ranks: Crew,
) -> None:
    outcomes = ranks.run(wrapped_shards)  # a rank that waited for the others would be stuck
    assert all("rank 1: " in error and "layers.2.w" in error for error, _ in outcomes), outcomes
    assert [right for _, right in outcomes] == [True] * 3


class Gathering(Owned):
    """Gathers each DTensor while it is iterated, as vLLM's ModuleSource does."""

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().iter_full():
            gather = getattr(tensor, "full_tensor", None)
            yield name, tensor if gather is None else gather()


def stages_of(rank: int, shape: str) -> Either:
    """Rank 0 holds all but one tensor; ranks 1 and 2 hold that one together, in shards."""
    full = weights()
    stage = torch.distributed.new_group([1, 2])
    model: dict[str, Any] = dict(full)
    if rank:
        pair = DeviceMesh.from_group(stage, "cpu")
        model["b.w"] = distribute_tensor(full["b.w"], pair, [Shard(0)])
    names = [name for name in full if (name == "b.w") == bool(rank)]
    owners = {name: (1, 2) if name == "b.w" else (0,) for name in full}
    if shape == "owned":
        return Gathering(model, owners.__getitem__, rank=rank)
    return Described(model, names)


def sharded_stages(rank: int, shape: str) -> bool:
    source, full = stages_of(rank, shape), weights()
    held = Held()
    receiver = ws.WeightReceiver(held.load)
    with closing(receiver):
        to = receiver.handle if rank == 0 else ()
        with ws.connect(source, to=to) as sender:
            sender.send_weights()
            sender.send_weights()
    return rank > 0 or all(torch.equal(held[name], tensor) for name, tensor in full.items())


@pytest.mark.parametrize("shape", ["held", "owned"])
def test_a_stage_of_shards_is_gathered_by_its_ranks_and_broadcast(ranks: Crew, shape: str) -> None:
    assert ranks.run(sharded_stages, shape) == [True] * 3


def told(rank: int, split: str, shape: str) -> tuple[Told, int]:
    """Return what a rank tells of its part, in the third iteration, and how many there were."""
    given = split_source(rank, split, shape)
    source = as_source(given)
    held = held_by(source)
    list(held.pairs())
    given.step = 3.0
    return tell(source, held), given.passes


@pytest.mark.parametrize("shape", ["held", "owned"])
@pytest.mark.parametrize("split", ["by layer", "by name", "two hold all", "one says all"])
def test_ranks_tell_which_tensors_they_hold(ranks: Crew, split: str, shape: str) -> None:
    found = ranks.run(told, split, shape)
    wanted = {name: tensor + 3 for name, tensor in weights().items()}
    manifest = as_source(Described(weights())).manifest
    assert differing(assemble(manifest, [one for one, _ in found]), wanted) == []
    assert [passes for _, passes in found] == [3] * 3  # at connect, and once for each update


def told_of_stages(rank: int, shape: str) -> Told:
    return tell(as_source(stages_of(rank, shape)))


@pytest.mark.parametrize("shape", ["held", "owned"])
def test_ranks_tell_their_shards_of_a_stage(ranks: Crew, shape: str) -> None:
    manifest = as_source(Described(weights())).manifest
    found = ranks.run(told_of_stages, shape)
    assert differing(assemble(manifest, found), weights()) == []


def failing(rank: int, where: str) -> Any:
    """Rank 1 fails in an update; return each rank's error, and whether the next update is right."""
    source, held = Described(weights(), layers_of(rank, "by name")), Held()
    receiver = ws.WeightReceiver(held.load)
    model = source.model
    with closing(receiver):
        to = receiver.handle if rank == 0 else ()
        with ws.connect(source, to=to, timeout_s=10) as sender:
            sender.send_weights()
            if rank == 1:
                source.model = dict(model)
                if where == "iteration":
                    del source.model["c.w"]
                elif where == "None":
                    source.model["c.w"] = Absent()  # type: ignore[assignment]  # what is tested
                else:  # a tensor that cannot be moved to the others
                    source.model["c.w"] = Unmovable(model["c.w"])
            try:
                sender.send_weights()
                error = ""
            except ws.WeightSyncError as exc:
                error = str(exc)
            source.model, source.held = model, layers_of(rank, "by name")
            source.step = 5.0
            sender.send_weights()
            return error, rank > 0 or same(held, source)


class Absent:
    """What a source makes None of."""

    def __add__(self, other: Any) -> None:
        return None


class Unmovable(torch.Tensor):
    """A tensor whose bytes cannot be read."""

    def __new__(cls, data: torch.Tensor) -> Self:
        return data.as_subclass(cls)

    def __add__(self, other: Any) -> Any:
        return self

    def detach(self) -> Any:
        raise RuntimeError("planted: out of memory")


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("iteration", "the source diverges from its manifest"),
        ("None", "None for 'c.w', which its held_names"),
        ("memory", "planted: out of memory"),
    ],
)
def test_a_rank_that_fails_is_an_error_of_all_and_the_next_update_is_right(
    ranks: Crew, where: str, message: str
) -> None:
    outcomes = ranks.run(failing, where)
    assert all(message in error for error, _ in outcomes), outcomes
    assert [right for _, right in outcomes] == [True] * 3


def refused(rank: int, kind: str) -> str:
    """Return the error of connect() on each rank."""
    names = [name for name in weights() if name != "b.w" or kind != "orphan"]
    source = Described(weights(), names)
    if kind == "shape" and rank == 2:
        source.meta["b.w"] = Meta("b.w", torch.float32, (1,))
    with pytest.raises(ws.ManifestMismatchError) as caught:
        ws.connect(source, to=Held().load if rank == 0 else (), timeout_s=5)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [("orphan", "no rank's source holds b.w;"), ("shape", "at position 2 rank 2 has b.w")],
)
def test_ranks_whose_descriptions_do_not_fit_are_told(ranks: Crew, kind: str, message: str) -> None:
    assert all(message in error for error in ranks.run(refused, kind))
