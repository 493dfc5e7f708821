"""Full tensors of sharded models, on real ranks: bit for bit, and one layer at a time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.crew import Crew
from tests.weights import trainer_models
from tests.weights.trainer_models import MODELS, fsdp, is_unsharded, plain
from weightsync.errors import ManifestMismatchError
from weightsync.weights.copying import shards
from weightsync.weights.sources.base import (
    ModuleSource,
    WeightSource,
    as_source,
    checked,
    find_ties,
    groups_of,
)

TOKENS = torch.arange(6).view(2, 3)


def same_bytes(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return (
        type(found) is torch.Tensor
        and (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        and torch.equal(
            found.contiguous().view(-1).view(torch.uint8),
            wanted.detach().contiguous().view(-1).view(torch.uint8),
        )
    )


def differences(source: WeightSource, wanted: WeightSource) -> list[str]:
    """Compare what two sources yield, cast to what they announce; return what differs."""
    if source.manifest.digest != wanted.manifest.digest:
        return ["manifest"]
    specs = source.manifest.specs
    pairs = zip(checked(source.tensors(), source.manifest), wanted.tensors(), specs, strict=True)
    return [
        spec.name
        for (_, found), (_, full), spec in pairs
        if not same_bytes(found.to(getattr(torch, spec.dtype)), full.to(getattr(torch, spec.dtype)))
    ]


def gathers_whole(_: int, kind: str, cast: str | None) -> tuple[list[str], bool, dict[str, str]]:
    dtype = getattr(torch, cast) if cast else None
    source = ModuleSource(MODELS[kind](), dtype=dtype)
    wanted = ModuleSource(plain(), dtype=dtype)
    twice = differences(source, wanted) + differences(source, wanted)
    return twice, source.stable_tensors() is None, dict(source.manifest.aliases)


@pytest.mark.parametrize("cast", [None, "bfloat16"])
@pytest.mark.parametrize("kind", MODELS)
def test_bit_for_bit_the_unsharded_model(ranks: Crew, kind: str, cast: str | None) -> None:
    for differing, on_the_fly, aliases in ranks.run(gathers_whole, kind, cast):
        assert differing == []
        assert on_the_fly
        assert aliases == {"head.weight": "embed.weight"}


def local_dtypes(_: int) -> set[torch.dtype]:
    """Gather with a cast while watching what the collectives carry."""
    carried = set()
    original = DTensor.full_tensor

    def watched(tensor: DTensor) -> torch.Tensor:
        carried.add(tensor.to_local().dtype)
        return original(tensor)

    source = ModuleSource(fsdp(), dtype=torch.bfloat16)
    DTensor.full_tensor = watched  # type: ignore[method-assign, assignment]  # to look at real gathers
    try:
        list(source.tensors())
    finally:
        DTensor.full_tensor = original  # type: ignore[method-assign]  # put back
    return carried


def test_a_cast_comes_before_the_gather(two_ranks: Crew) -> None:
    assert two_ranks.run(local_dtypes) == [{torch.bfloat16}] * 2


def train(model: nn.Module, between: Callable[[], None]) -> dict[str, torch.Tensor]:
    """Two steps; `between` is called where FSDP may hold gathered parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        between()
        loss = model(TOKENS + step).float().square().mean()
        between()
        loss.backward()
        between()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(TOKENS)
        between()
    full = {name: shards.gather(t) for name, t in model.state_dict().items()}
    return dict(sorted(full.items()))


def trains_on(_: int, bf16: bool, reshard: bool | int) -> tuple[bool, list[bool], bool, bool]:
    model = fsdp(bf16=bf16, reshard_after_forward=reshard)
    source = ModuleSource(model)
    planned = source._found.tensors
    unsharded: list[bool] = []
    right: list[bool] = []

    def send() -> None:
        unsharded.append(is_unsharded(model))
        found = dict(source.tensors())
        state = {n: shards.gather(t) for n, t in model.state_dict().items()}
        right.append(all(same_bytes(found[name], state[name]) for name in found))

    sent = train(model, send)
    quiet = train(fsdp(bf16=bf16, reshard_after_forward=reshard), lambda: None)
    unharmed = all(same_bytes(a, b) for a, b in zip(sent.values(), quiet.values(), strict=True))
    return any(unsharded), right, unharmed, source._found.tensors is planned


@pytest.mark.parametrize(("bf16", "reshard"), [(False, True), (False, False), (True, False)])
def test_at_every_moment_of_training(two_ranks: Crew, bf16: bool, reshard: bool) -> None:
    for met_unsharded, right, unharmed, planned_once in two_ranks.run(trains_on, bf16, reshard):
        assert met_unsharded is not reshard
        assert right == [True] * 8
        assert unharmed
        assert planned_once


def test_between_forward_and_backward_on_a_smaller_mesh(ranks: Crew) -> None:
    """`reshard_after_forward=2` of 4 leaves DTensors of another mesh in the module."""
    results = ranks.run(trains_on, False, 2)
    for _, right, unharmed, planned_once in results:
        assert right == [True] * 8
        assert unharmed
        assert planned_once


def made_while_unsharded(_: int) -> list[str]:
    model = fsdp(reshard_after_forward=False)
    with torch.no_grad():
        model(TOKENS)
    assert is_unsharded(model)
    return differences(ModuleSource(model), ModuleSource(plain()))


def test_a_source_made_after_a_forward_pass(two_ranks: Crew) -> None:
    assert two_ranks.run(made_while_unsharded) == [[]] * 2


def peak(_: int) -> tuple[int, int, int]:
    """Return the most gathered bytes alive at once, the bound, and the bytes of the model."""
    source = ModuleSource(fsdp(layers=6))
    alive: dict[int, int] = {}
    most = 0
    gather = shards.gather

    def counted(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        nonlocal most
        full = gather(tensor, dtype)
        if isinstance(tensor, DTensor):
            key = len(alive) + id(full)
            alive[key] = full.nbytes
            weakref.finalize(full, alive.pop, key)
        most = max(most, sum(alive.values()))
        return full

    shards.gather = counted
    try:
        for _name, _tensor in checked(source.tensors(), source.manifest):
            pass
    finally:
        shards.gather = gather
    specs = source.manifest.specs
    largest_group = max(sum(specs[i].nbytes for i in g) for g in groups_of(source.manifest))
    return most, largest_group + max(spec.nbytes for spec in specs), source.manifest.nbytes


def test_the_peak_is_one_layer_and_one_tensor(two_ranks: Crew) -> None:
    for most, bound, model in two_ranks.run(peak):
        assert 0 < most <= bound < model / 2


def gathered_when(_: int) -> tuple[list[int], list[int]]:
    """Return how many tensors were made when each was handed out, and how many may be."""
    source = ModuleSource(fsdp())
    made: list[int] = []
    gather = shards.gather

    def counted(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        made.append(1)
        return gather(tensor, dtype)

    shards.gather = counted
    try:
        pairs = checked(source.tensors(), source.manifest)
        found = [len(made)] + [len(made) for _ in pairs]
    finally:
        shards.gather = gather
    allowed = [0] + [group.stop for group in groups_of(source.manifest) for _ in group]
    return found, allowed


def test_nothing_of_the_next_layer_is_gathered_early(two_ranks: Crew) -> None:
    for found, allowed in two_ranks.run(gathered_when):
        assert found == allowed


def other_sources(_: int) -> dict[str, list[str]]:
    model = fsdp()
    wanted = ModuleSource(plain(), dtype=torch.bfloat16)
    tied = {"head.weight"}

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        return ((n, t) for n, t in model.state_dict().items() if n not in tied)

    plain_pairs = {n: t for n, t in plain().state_dict().items() if n not in tied}
    state = as_source(model.state_dict(), dtype=torch.bfloat16)
    found = {
        "callable": differences(as_source(pairs), as_source(plain_pairs)),
        "state dict": differences(state, as_source(plain().state_dict(), dtype=torch.bfloat16)),
        "aliases": [] if state.manifest.aliases == wanted.manifest.aliases else ["aliases"],
    }
    ddp = ModuleSource(trainer_models.replicated())
    found["ddp"] = differences(ddp, ModuleSource(plain()))
    found["ddp is stable"] = [] if ddp.stable_tensors() is not None else ["gathered"]
    return found


def test_state_dicts_callables_and_ddp(two_ranks: Crew) -> None:
    for found in two_ranks.run(other_sources):
        assert [what for what, wrong in found.items() if wrong] == []


def ties(_: int) -> dict[str, str]:
    """Tensors of one row each, empty on the second rank, and two views of one storage."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = {
        f"row{i}": distribute_tensor(torch.full((1, 3), float(i)), mesh, [Shard(0)])
        for i in range(50)
    }
    flat = torch.arange(6.0)
    views = {
        f"view{i}": DTensor.from_local(flat[3 * i : 3 * i + 3].view(1, 3), mesh, [Shard(0)])
        for i in range(2)
    }
    return find_ties({**rows, **views, "again": rows["row7"].detach()}.items())


def test_ranks_with_empty_shards_find_the_same_ties(two_ranks: Crew) -> None:
    assert two_ranks.run(ties) == [{"again": "row7"}] * 2


def changes(_: int) -> list[str]:
    """A module that is sharded after connect stays the same model; another size does not."""
    model = plain()
    source = ModuleSource(model)
    assert source.stable_tensors() is not None
    for part in [*model.layers, model]:
        fully_shard(part)
    found = differences(source, ModuleSource(plain()))
    assert source.stable_tensors() is None
    model.norm = nn.LayerNorm(trainer_models.WIDTH + 1)
    with pytest.raises(ManifestMismatchError, match=r"norm\.weight: .* now, norm\.bias: "):
        list(source.tensors())
    return found


def test_a_module_that_changes_after_connect(two_ranks: Crew) -> None:
    assert two_ranks.run(changes) == [[]] * 2


def old_fsdp(_: int) -> str:
    try:
        ModuleSource(FullyShardedDataParallel(plain(), device_id=torch.device("cpu")))
    except ValueError as exc:
        return str(exc)
    return ""


def test_flat_parameters_are_refused(two_ranks: Crew) -> None:
    for message in two_ranks.run(old_fsdp):
        assert "shard it with fully_shard" in message
