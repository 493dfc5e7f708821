"""What crosses the links between hosts: each byte once a chain, and evenly over the uplinks."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.cli.mapping import Parallel, place_model
from weightsync.specs import TensorSpec
from weightsync.weights.copying.reshard import Boxes, LocalBox, Placed
from weightsync.weights.copying.shards import Slice
from weightsync.weights.copying.uplinks import HostLinks, plan_links

MODEL = [
    TensorSpec("embed_tokens.weight", "bfloat16", (24, 4)),
    *(
        TensorSpec(f"layers.{layer}.{name}.weight", "bfloat16", shape)
        for layer in range(4)
        for name, shape in (
            ("q_proj", (16, 8)),
            ("k_proj", (4, 8)),
            ("o_proj", (8, 16)),
            *((f"experts.{e}.up_proj", (6, 8)) for e in range(4)),
            ("norm", (8,)),
        )
    ),
]
NBYTES = sum(spec.nbytes for spec in MODEL)

sizes = st.sampled_from([1, 2, 3, 4])
mappings = st.builds(
    Parallel, pp=st.sampled_from([1, 2]), dp=sizes, fsdp=sizes, ep=st.sampled_from([1, 2, 4])
) | st.builds(Parallel, dp=sizes, tp=sizes)


def hosts_of(parallel: Parallel, per_host: int, name: str) -> dict[int, str]:
    return {number: f"{name}{number // per_host}" for number in range(parallel.ranks)}


def links_of(
    trainer: Parallel, receivers: Parallel, per_host: int, *, names: tuple[str, str] = ("t", "r")
) -> HostLinks:
    return plan_links(
        place_model(MODEL, trainer, key_heads=2),
        place_model(MODEL, receivers, key_heads=2),
        rank_hosts=hosts_of(trainer, per_host, names[0]),
        receiver_hosts=hosts_of(receivers, per_host, names[1]),
    )


def wanted_by_host(receivers: Parallel, per_host: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return which elements of each tensor the workers of each host want."""
    hosts = hosts_of(receivers, per_host, "r")
    wanted: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for one in place_model(MODEL, receivers, key_heads=2):
        for part, members in zip(one.boxes.parts, one.boxes.members, strict=True):
            for member in members:
                known = wanted[hosts[member]]
                grid = known.setdefault(
                    one.spec.name, torch.zeros(one.spec.shape, dtype=torch.bool)
                )
                for index, _ in part.box.parts():
                    grid[index] = True
    return wanted


@settings(max_examples=60, deadline=None)
@given(mappings, mappings, st.integers(1, 4))
def test_a_host_is_sent_what_its_workers_want_once(
    trainer: Parallel, receivers: Parallel, per_host: int
) -> None:
    links = links_of(trainer, receivers, per_host)
    wanted = wanted_by_host(receivers, per_host)
    assert links.received == {
        host: 2 * sum(int(grid.sum()) for grid in grids.values()) for host, grids in wanted.items()
    }
    # Those of one chain want the same, and those of another something else.
    seen = []
    for hosts in links.chains:
        first, *others = (wanted[host] for host in hosts)
        for other in others:
            assert first.keys() == other.keys()
            assert all(torch.equal(grid, other[name]) for name, grid in first.items())
        seen.append({name: grid.tolist() for name, grid in first.items()})
    assert all(one not in seen[:i] for i, one in enumerate(seen))
    assert links.least_sent <= max(links.sent.values())
    # What leaves the trainer does so once a chain.
    assert sum(links.sent.values()) == sum(links.received[hosts[0]] for hosts in links.chains)


def test_further_hosts_of_a_chain_cost_the_trainer_nothing() -> None:
    one, many = (links_of(Parallel(fsdp=4), Parallel(tp=2, dp=dp), 2) for dp in (1, 8))
    assert one.sent == many.sent
    assert sum(many.sent.values()) == NBYTES
    assert many.received == {f"r{i}": NBYTES for i in range(8)}


def test_boxes_of_one_host_that_overlap_are_sent_once() -> None:
    spec = TensorSpec("w", "bfloat16", (8, 2))
    held = [Placed(spec, Boxes(spec.shape, [(0, LocalBox(Slice.whole_of(spec.shape)))]))]
    rows = [((0, 6),), ((4, 8),)]
    wants = [(i, LocalBox(Slice(spec.shape, (span, ((0, 2),))))) for i, span in enumerate(rows)]
    wanted = [Placed(spec, Boxes(spec.shape, wants))]
    links = plan_links(held, wanted, rank_hosts={0: "t"}, receiver_hosts=dict.fromkeys((0, 1), "r"))
    assert links.received == {"r": spec.nbytes}


def test_what_ranks_of_the_same_host_hold_crosses_no_link() -> None:
    apart = links_of(Parallel(fsdp=4), Parallel(tp=2, dp=2), 2)
    shared = links_of(Parallel(fsdp=4), Parallel(tp=2, dp=2), 2, names=("h", "h"))
    assert len(apart.chains) == 1
    assert shared.chains == (("h0",), ("h1",))
    assert set(shared.nbytes) == {("h0", 1), ("h1", 0)}
    whole = links_of(Parallel(dp=4), Parallel(tp=2, dp=2), 2, names=("h", "h"))
    assert whole.nbytes == {}
    assert whole.imbalance == 1


def test_replicas_are_used_evenly_by_host() -> None:
    """One large tensor of all replicas, wanted by several chains: each from another host."""
    everyone = links_of(Parallel(dp=8), Parallel(fsdp=8), 1)
    assert len(everyone.chains) == 8
    assert everyone.imbalance < 1.2
    embedding = TensorSpec("embed_tokens.weight", "bfloat16", (64, 8))
    alone = plan_links(
        place_model([embedding], Parallel(dp=8)),
        place_model([embedding], Parallel(fsdp=4)),
        rank_hosts={rank: f"t{rank // 2}" for rank in range(8)},
        receiver_hosts={i: f"r{i}" for i in range(4)},
    )
    assert alone.sent == dict.fromkeys(("t0", "t1", "t2", "t3"), embedding.nbytes // 4)


def test_what_few_hosts_hold_bounds_the_balance() -> None:
    """Two of four hosts hold a large tensor, and all of them a small one."""
    specs = [TensorSpec(name, "bfloat16", (rows, 8)) for name, rows in (("few", 64), ("all", 8))]

    def placed(spec: TensorSpec, members: range) -> Placed:
        whole = LocalBox(Slice.whole_of(spec.shape))
        return Placed(spec, Boxes(spec.shape, [(member, whole) for member in members]))

    held = [placed(specs[0], range(2)), placed(specs[1], range(4))]
    links = plan_links(
        held,
        [placed(spec, range(2)) for spec in specs],
        rank_hosts={rank: f"t{rank}" for rank in range(4)},
        receiver_hosts={0: "r0", 1: "r1"},
    )
    # Both hosts are one chain, which each byte leaves for once: half from each that holds it.
    assert links.chains == (("r0", "r1"),)
    assert links.least_sent == specs[0].nbytes / 2
    assert links.sent["t0"] + links.sent["t1"] >= specs[0].nbytes
    assert links.least_imbalance <= links.imbalance


@pytest.mark.parametrize(
    ("trainers", "receivers", "most"),
    [
        (1, 1, 8e9),  # one host sends all
        (4, 1, 8e9),  # a host that wants all gets all over its own link
        (1, 4, 8e9),
        (8, 4, 2e9),  # each of four hosts wants a quarter
    ],
)
def test_the_busiest_link_decides(trainers: int, receivers: int, most: float) -> None:
    chains = tuple((f"r{c}",) for c in range(receivers))
    share = int(8e9 / trainers / receivers)
    names = tuple(f"t{t}" for t in range(trainers))
    links = HostLinks(names, chains, {(t, c): share for t in names for c in range(receivers)}, 1000)
    assert links.seconds(8) == pytest.approx(most / 1e9 + 0.002)
    assert links.seconds(16) == pytest.approx(most / 2e9 + 0.002)


def test_a_chain_of_hosts_adds_two_buckets_for_each_host() -> None:
    hosts = tuple(f"r{i}" for i in range(9))
    links = HostLinks(("t",), (hosts,), {("t", 0): 10**9}, 0)
    assert links.seconds(8) - links.seconds(8e9) == pytest.approx(1 + 16 * (4 << 20) / 1e9)


def test_equal_inputs_give_equal_plans() -> None:
    first, again = (links_of(Parallel(dp=2, fsdp=4), Parallel(tp=2, dp=4), 4) for _ in range(2))
    assert (first.nbytes, Counter(first.received)) == (again.nbytes, Counter(again.received))
