"""Which rank feeds which receiver, and how: the order of the ways, and why others are not there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import weightsync as ws
from weightsync.backends.base import Backend
from weightsync.backends.ipc.backend import IpcBackend
from weightsync.backends.registry import choose_backends
from weightsync.backends.tcp.backend import TcpBackend
from weightsync.errors import ConfigError, HandleError
from weightsync.ranks.commands import RankInfo
from weightsync.transports.callback import CallbackTransport
from weightsync.update.fleet import Member
from weightsync.update.paths import Candidate, candidates, span_ranks, spanning_paths
from weightsync.update.paths import assign as assign_paths
from weightsync.wire.messages import PROTOCOL, Status

HERE, THERE = "HOST-here", "HOST-there"


IPC, TCP = IpcBackend(), TcpBackend()
BACKENDS: dict[str, list[Backend]] = {"auto": [IPC, TCP], "ipc": [IPC], "tcp": [TCP]}
Way = tuple[int, str]


def card(*keys: str, no_cuda_ipc: str | None = None) -> RankInfo:
    ipc = {} if no_cuda_ipc is None else {"no_cuda_ipc": no_cuda_ipc}
    facts = {"ipc": ipc, "tcp": None}
    return RankInfo(keys=list(keys), stable=True, sender_id="s", backends=facts)


def member(*keys: str) -> Member:
    facts: dict[str, Any] = {"ipc": {}, "tcp": None}
    transport = CallbackTransport(lambda _: None)
    status = Status(
        instance="r",
        protocol=PROTOCOL,
        state="READY",
        version=0,
        may_generate=True,
        apply="staged",
        verification="held",
        device_keys=list(keys),
        backends=facts,
    )
    return Member(transport, status=status)


def ways(member: Member, ranks: Sequence[RankInfo], backend: str) -> list[Way]:
    return [(way.rank, way.path) for way in candidates(member, ranks, BACKENDS[backend])]


def assign(wishes: Mapping[Member, Sequence[Candidate]]) -> dict[Member, Way]:
    known = {backend.name: backend for backend in BACKENDS["auto"]}
    chosen = assign_paths(wishes, lambda name: known[name].requires)
    return {member: (way.rank, way.path) for member, way in chosen.items()}


CPU = [card(HERE)]
GPUS = [card("GPU-0", HERE), card("GPU-1", HERE), card("GPU-2", THERE)]


class TestWays:
    @pytest.mark.parametrize(
        ("keys", "wanted"),
        [
            ((HERE,), [(0, "shared_memory"), (0, "tcp")]),
            (("GPU-9", HERE), [(0, "shared_memory"), (0, "tcp")]),
            ((THERE,), [(0, "tcp")]),
            ((), [(0, "tcp")]),
        ],
    )
    def test_from_a_cpu(self, keys: tuple[str, ...], wanted: list[Way]) -> None:
        assert ways(member(*keys), CPU, "auto") == wanted

    @pytest.mark.parametrize(
        ("keys", "wanted"),
        [
            (("GPU-1", HERE), [(1, "cuda_ipc"), (1, "shared_memory")]),
            (("GPU-2", THERE), [(2, "cuda_ipc"), (2, "shared_memory")]),
            (("GPU-7", THERE), [(2, "shared_memory")]),
            ((HERE,), [(0, "shared_memory")]),
        ],
    )
    def test_the_rank_beside_the_receiver_feeds_it(
        self, keys: tuple[str, ...], wanted: list[Way]
    ) -> None:
        assert ways(member(*keys), GPUS, "ipc") == wanted

    def test_why_not_faster_is_said(self) -> None:
        far = member("GPU-9", "HOST-far")
        assert ways(far, GPUS, "ipc") == []
        assert "GPU-9, HOST-far" in far.skipped["cuda_ipc"]
        assert "HOST-far" in far.skipped["shared_memory"]
        refused = member("GPU-0", HERE)
        found = ways(refused, [card("GPU-0", HERE, no_cuda_ipc="no ptrace")], "auto")
        assert found[0] == (0, "shared_memory")
        assert refused.skipped == {"cuda_ipc": "no ptrace"}

    def test_a_gpu_that_the_receivers_own_reads(self) -> None:
        peers = {"GPU-0": "no peer access", "GPU-1": ""}
        beside = member("GPU-9", HERE)
        beside.status.backends["ipc"] = {"peers": peers}
        first, *others = candidates(beside, GPUS, BACKENDS["ipc"])
        assert (first.rank, first.path, first.gpus) == (1, "cuda_ipc", ("GPU-1", "GPU-9"))
        assert [way.path for way in others] == ["shared_memory"]
        near = member("GPU-0", HERE)  # its own GPU is nearer than another one
        near.status.backends["ipc"] = {"peers": {"GPU-1": ""}}
        assert ways(near, GPUS, "ipc")[0] == (0, "cuda_ipc")

    def test_why_a_gpu_beside_is_not_read_is_said(self) -> None:
        beside = member("GPU-9", HERE)
        beside.status.backends["ipc"] = {"peers": {"GPU-0": "no peer access", "GPU-1": ""}}
        ranks = [GPUS[0], card("GPU-1", HERE, no_cuda_ipc="expandable segments")]
        assert ways(beside, ranks, "ipc")[0][1] == "shared_memory"
        assert beside.skipped["cuda_ipc"] == "no peer access; expandable segments"
        blind = member("GPU-9", HERE)
        assert ways(blind, GPUS[:1], "ipc") == [(0, "shared_memory")]
        assert "which the receiver does not see (CUDA_VISIBLE_DEVICES" in blind.skipped["cuda_ipc"]

    def test_a_path_that_failed_in_an_update_is_left(self) -> None:
        near = member("GPU-0", HERE)
        assert not near.refuse_gpus(HandleError("the driver refuses"))
        near.note_gpus(0, "cuda_ipc", ("GPU-0", "GPU-0"))
        assert not near.refuse_gpus(ws.VerificationError(names=["a"]))
        assert near.refuse_gpus(HandleError("the driver refuses"))
        assert ways(near, GPUS[:1], "ipc") == [(0, "shared_memory")]
        assert near.skipped == {"cuda_ipc": "the driver refuses"}
        near.status = replace(near.status, instance="restarted")
        assert ways(near, GPUS[:1], "ipc")[0] == (0, "cuda_ipc")

    def test_a_backend_is_taken_at_its_word(self) -> None:
        assert ways(member(HERE), CPU, "tcp") == [(0, "tcp")]
        with pytest.raises(ConfigError, match=r"carrier pigeon.*known: auto, ipc, nixl, tcp"):
            choose_backends("carrier pigeon")

    def test_the_order_given_counts_more_than_the_cost(self) -> None:
        near = member(HERE)
        given = candidates(near, CPU, [TCP, IPC], ordered=True)
        assert [way.path for way in given] == ["tcp", "shared_memory"]

    def test_a_backend_that_one_side_lacks_is_no_way(self) -> None:
        near = member(HERE)
        facts: dict[str, Any] = {"ipc": {}}
        near.status = replace(near.status, backends=facts, unusable_backends={"tcp": "no network"})
        assert ways(near, CPU, "auto") == [(0, "shared_memory")]
        assert near.skipped == {"tcp": "no network"}
        near.skipped.clear()
        near.status = replace(near.status, unusable_backends={})
        assert ways(near, CPU, "tcp") == []
        assert near.skipped == {"tcp": "the receiver does not know this backend"}

    def test_a_name_that_is_none_opens_nothing(self) -> None:
        with pytest.raises(ConfigError, match="no backend 'typo'; known: auto, ipc, nixl, tcp"):
            ws.connect(torch.nn.Linear(1, 1), to=_never, backend="typo")


def _never(_: object) -> None:
    raise AssertionError("nobody is asked")


class TestSettling:
    def test_everyone_has_the_first_of_its_ways(self) -> None:
        near, far = member(HERE), member(THERE)
        wishes = {m: candidates(m, CPU, BACKENDS["auto"]) for m in (near, far)}
        assert assign(wishes) == {
            near: (0, "shared_memory"),
            far: (0, "tcp"),
        }

    def test_one_rank_has_one_ring(self) -> None:
        on_gpu, on_host = member("GPU-0", HERE), member(HERE)
        wishes = {m: candidates(m, GPUS, BACKENDS["ipc"]) for m in (on_gpu, on_host)}
        chosen = assign(wishes)
        assert chosen == {
            on_gpu: (0, "shared_memory"),
            on_host: (0, "shared_memory"),
        }
        assert "sends to another receiver by shared_memory" in on_gpu.skipped["cuda_ipc"]

    def test_rings_of_other_ranks_do_not_matter(self) -> None:
        on_gpu, on_host = member("GPU-1", HERE), member(HERE)
        wishes = {m: candidates(m, GPUS, BACKENDS["ipc"]) for m in (on_gpu, on_host)}
        assert assign(wishes)[on_gpu] == (1, "cuda_ipc")


class TestOfAllRanks:
    """The path from each rank, where each sends what it holds."""

    def reached(self, ranks: Sequence[RankInfo], *members: Member) -> dict[int, str] | str:
        for one in members:
            one.status.backends["ipc"] = {"streams": True}
        found = spanning_paths(members, ranks, IPC)
        return found if isinstance(found, str) else {r: way.path for r, way in found.items()}

    def test_a_gpu_that_a_receiver_cannot_see_is_read_through_the_host(self) -> None:
        paths = {0: "cuda_ipc", 1: "shared_memory"}
        assert self.reached(GPUS[:2], member("GPU-0", HERE)) == paths

    def test_gpus_that_receivers_read_need_no_host(self) -> None:
        others = member("GPU-0", HERE), member("GPU-1", HERE)
        for one, other in zip(others, ("GPU-1", "GPU-0"), strict=True):
            one.status.backends["ipc"] = {"streams": True, "peers": {other: ""}}
        found = spanning_paths(others, GPUS[:2], IPC)
        assert not isinstance(found, str)
        assert {r: way.path for r, way in found.items()} == {0: "cuda_ipc", 1: "cuda_ipc"}
        left = spanning_paths(others, GPUS[:2], IPC, [(others[0], "cuda_ipc")])
        assert not isinstance(left, str)
        assert {way.path for way in left.values()} == {"shared_memory"}

    def test_one_path_of_a_rank_for_all_receivers(self) -> None:
        others = member("GPU-0", HERE), member("GPU-1", HERE)
        assert self.reached(GPUS[:2], *others) == {0: "shared_memory", 1: "shared_memory"}

    def test_a_rank_that_does_not_reach_one_is_named(self) -> None:
        why = self.reached(GPUS, member("GPU-0", HERE))
        assert isinstance(why, str)
        assert why.startswith("rank 2 does not reach ")
        assert THERE in why

    def test_a_receiver_that_reads_one_rank_alone_is_named(self) -> None:
        older = member(HERE)
        why = spanning_paths([older], CPU, IPC)
        assert why == f"{older.target} reads from one rank by ipc"

    def spanned(
        self,
        ranks: Sequence[RankInfo],
        *members: Member,
        refused: Sequence[tuple[Member, str]] = (),
        backends: str = "auto",
    ) -> dict[Member, tuple[str, list[str]]] | str:
        for one in members:
            one.status.backends.update(ipc={"streams": True}, tcp={"streams": True})
        found = span_ranks(members, ranks, BACKENDS[backends], refused, ordered=False)
        if isinstance(found, str):
            return found
        return {
            one: (name, [reach.path for reach in spanning.paths.values()])
            for name, spanning in found.items()
            for one in spanning.members
        }

    def test_each_receiver_by_the_backend_that_reaches_it_best(self) -> None:
        near, far = member(HERE), member(THERE)
        wanted = {near: ("ipc", ["shared_memory"]), far: ("tcp", ["tcp"])}
        assert self.spanned(CPU, near, far) == wanted

    def test_a_ring_that_feeds_other_hosts_too_is_on_the_host(self) -> None:
        near, far = member("GPU-0", HERE), member(THERE)
        alone, beside = self.spanned(GPUS[:1], near), self.spanned(GPUS[:1], near, far)
        assert alone == {near: ("ipc", ["cuda_ipc"])}
        assert beside == {near: ("ipc", ["shared_memory"]), far: ("tcp", ["tcp"])}

    def test_ranks_on_several_hosts_reach_all_over_the_network(self) -> None:
        near = member(HERE)
        assert self.spanned([card(HERE), card(THERE)], near) == {near: ("tcp", ["tcp", "tcp"])}

    def test_what_was_refused_is_not_tried_again(self) -> None:
        near = member(HERE)
        assert self.spanned(CPU, near, refused=[(near, "ipc")]) == {near: ("tcp", ["tcp"])}
        both = [(near, "ipc"), (near, "tcp")]
        assert self.spanned(CPU, near, refused=both) == f"no path is left to {near.target}"

    def test_why_no_backend_spans_the_ranks(self) -> None:
        far = member(THERE)
        why = self.spanned(CPU, far, backends="ipc")
        assert isinstance(why, str)
        assert why.startswith(f"rank 0 does not reach {far.target}: ")
