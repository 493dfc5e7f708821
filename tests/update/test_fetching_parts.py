"""Receivers that hold parts of tensors, from which others fetch together; all in one process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import weightsync as ws
from tests.weights.meshes import member, shard
from weightsync.tensors import as_bytes
from weightsync.weights.copying.shards import local_of
from weightsync.weights.sources.base import ModuleSource
from weightsync.wire.messages import Reply, Request, UpdateRequest

SHAPES: dict[str, tuple[int, ...]] = {
    "rows": (10, 37),
    "columns": (40, 22),
    "uneven": (7, 5),
    "few": (1, 3),
    "experts": (6, 8, 6),
    "norm": (5,),
    "scalar": (),
    "wide": (64, 520),
}
Placing = Callable[[str, int], Sequence[Placement]]
"""Returns the placements of a tensor of this name and number of dimensions."""


def whole(seed: int | None) -> nn.Module:
    """A module of random tensors, or of zeros."""
    module = nn.Module()
    generator = torch.Generator().manual_seed(seed or 0)
    for i, (name, shape) in enumerate(SHAPES.items()):
        made = torch.randn(shape, generator=generator)
        dtype = (torch.float32, torch.bfloat16, torch.float64)[i % 3]
        made = made.to(dtype) if seed is not None else torch.zeros(shape, dtype=dtype)
        module.register_parameter(name, nn.Parameter(made))
    return module


def part(rank: int, mesh: Sequence[int], placing: Placing, seed: int | None = None) -> nn.Module:
    """What a rank of a mesh holds of `whole`, cut by torch."""
    module = nn.Module()
    with member(rank, mesh) as made:
        for name, full in whole(seed).named_parameters():
            cut = shard(full.detach(), made, *placing(name, full.dim()))
            module.register_parameter(name, nn.Parameter(cut))
    return module


def rows(name: str, ndim: int) -> list[Placement]:
    return [Shard(0) if ndim > 1 else Replicate()]


def columns(name: str, ndim: int) -> list[Placement]:
    return [Shard(1) if ndim > 1 else Replicate()]


def replicas(name: str, ndim: int) -> list[Placement]:
    return [Replicate(), *rows(name, ndim)]


def grid(name: str, ndim: int) -> list[Placement]:
    return [Shard(0), Shard(1)] if ndim > 1 else [Replicate(), Replicate()]


def strided(name: str, ndim: int) -> list[Placement]:
    if ndim < 2:
        return [Replicate()]
    return [_StridedShard(0, split_factor=2)]


def anywhere(seed: int, ndims: int) -> Placing:
    """Random placements, other ones for each tensor."""

    def place(name: str, ndim: int) -> list[Placement]:
        chosen = random.Random(f"{seed} {name}")
        kinds = [*map(Shard, range(ndim)), Replicate()]
        return [chosen.choice(kinds) for _ in range(ndims)]

    return place


MESHES: dict[str, tuple[tuple[int, ...], Placing]] = {
    "rows of 2": ((2,), rows),
    "rows of 3": ((3,), rows),
    "columns of 2": ((2,), columns),
    "replicas": ((2, 2), replicas),
    "grid": ((2, 2), grid),
    "strided": ((2,), strided),
    "any 1": ((3,), anywhere(1, 1)),
    "any 2": ((2, 3), anywhere(2, 2)),
}


def holders(mesh: Sequence[int], placing: Placing, **options: Any) -> list[ws.WeightReceiver]:
    count = torch.tensor(mesh).prod().item()
    return [ws.WeightReceiver(part(rank, mesh, placing), **options) for rank in range(int(count))]


def ends_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: local_of(t).detach().clone() for name, t in module.named_parameters()}


def check_equal(have: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert have.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(as_bytes(have[name].contiguous()), as_bytes(tensor.contiguous())), name


@contextmanager
def updated(receivers: list[ws.WeightReceiver], seed: int = 1) -> Iterator[ws.WeightSender]:
    """Send version 7 to the receivers; close all at the end."""
    with ws.connect(whole(seed), to=receivers, delta="off") as sender:
        sender.send_weights(7, label="seven")
        yield sender
    for receiver in receivers:
        receiver.close()


@pytest.mark.parametrize("apply", ["staged", "in_place"])
@pytest.mark.parametrize("name", MESHES)
def test_a_whole_module_from_parts(name: str, apply: Any) -> None:
    """Each element once: what the peers gave adds up to the model."""
    peers = holders(*MESHES[name], apply=apply)
    module = whole(None)
    with updated(peers):
        report = ws.fetch(module, peers)
    check_equal(ends_of(module), ends_of(whole(1)))
    assert (report.version, report.label, report.verified) == (7, "seven", "held")
    assert report.gathered == {}
    assert report.summed == report.tensors  # one word each, over the boxes of all
    (receiver,) = report.receivers
    assert len(receiver.peers) == len(peers) or "any" in name
    assert sum(receiver.peers.values()) == report.nbytes


@pytest.mark.parametrize("apply", ["staged", "in_place"])
@pytest.mark.parametrize(
    ("peers", "joins"),
    [
        ("rows of 2", "columns of 2"),
        ("rows of 3", "rows of 2"),
        ("grid", "rows of 3"),
        ("strided", "grid"),
        ("replicas", "strided"),
        ("any 1", "any 2"),
        ("any 2", "any 1"),
    ],
)
def test_parts_from_parts(peers: str, joins: str, apply: Any) -> None:
    """Each rank of another mesh gets what torch cuts for it."""
    mesh, placing = MESHES[joins]
    serving = holders(*MESHES[peers])
    with updated(serving):
        for rank in range(int(torch.tensor(mesh).prod())):
            module = part(rank, mesh, placing)
            receiver = ws.WeightReceiver(module, apply=apply)
            report = ws.fetch(receiver, serving)
            check_equal(ends_of(module), ends_of(part(rank, mesh, placing, seed=1)))
            assert (report.verified, receiver.version) == ("held", 7)
            receiver.close()


@pytest.mark.parametrize("name", ["rows of 3", "grid"])
def test_parts_from_a_whole_module(name: str) -> None:
    serving = [ws.WeightReceiver(whole(None))]
    mesh, placing = MESHES[name]
    with updated(serving):
        for rank in range(int(torch.tensor(mesh).prod())):
            module = part(rank, mesh, placing)
            report = ws.fetch(module, serving)
            check_equal(ends_of(module), ends_of(part(rank, mesh, placing, seed=1)))
            assert report.verified == "held"


def test_a_receiver_that_fetches_goes_on_with_what_it_has() -> None:
    """One that joins no fleet may generate until the commit."""
    peers = holders(*MESHES["rows of 2"])
    receiver = ws.WeightReceiver(whole(None))
    seen: list[tuple[str, bool]] = []
    with updated(peers):
        dispatch: Any = receiver.dispatch

        def look(request: Request) -> Reply:
            reply: Reply = dispatch(request)
            seen.append((receiver.status().state, receiver.may_generate))
            return reply

        receiver.dispatch = look  # type: ignore[method-assign]  # to look at it
        ws.fetch(receiver, peers)
    assert (
        {"READY", "PREPARED"} <= {state for state, _ in seen} <= {"READY", "UPDATING", "PREPARED"}
    )
    assert all(may_generate for _, may_generate in seen)
    receiver.close()


def test_replicas_share_the_work() -> None:
    """Of equal parts each peer gives some; together they give the model once."""
    peers = holders(*MESHES["replicas"])
    with updated(peers):
        report = ws.fetch(whole(None), peers)
    given = list(report.receivers[0].peers.values())
    assert len(given) == 4
    assert max(given) < 0.8 * report.nbytes
    assert sum(given) == report.nbytes


@pytest.mark.parametrize("name", ["rows of 2", "columns of 2", "strided", "any 2"])
def test_peers_of_two_meshes(name: str) -> None:
    """Parts that overlap are cut until they are replicas; each element is read once."""
    mesh, placing = MESHES[name]
    peers = holders(*MESHES["rows of 3"]) + holders(mesh, placing)
    with updated(peers):
        module = whole(None)
        report = ws.fetch(module, peers)
        check_equal(ends_of(module), ends_of(whole(1)))
        given = report.receivers[0].peers
        assert sum(given.values()) == report.nbytes
        assert len(given) > 3
        # With one of each mesh gone, the others have all.
        module = whole(None)
        ws.fetch(module, peers[1:])
        check_equal(ends_of(module), ends_of(whole(1)))


def test_a_module_that_holds_all_in_dtensors_is_fetched_from_alone() -> None:
    peers = holders((2,), lambda *_: [Replicate()])
    with updated(peers):
        assert [peer.status().fetchable for peer in peers] == [True, True]
        module = whole(None)
        report = ws.fetch(module, peers[1])
    check_equal(ends_of(module), ends_of(whole(1)))
    assert report.receivers[0].peers == {}


@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_a_hook_gets_whole_tensors(apply: Any) -> None:
    got: dict[str, torch.Tensor] = {}

    def load_weights(pairs: Any) -> None:
        got.update((name, tensor.clone()) for name, tensor in pairs)

    peers = holders(*MESHES["rows of 3"])
    with updated(peers):
        receiver = ws.WeightReceiver(load_weights, apply=apply)
        assert ws.fetch(receiver, peers).verified == "arrived"
        receiver.close()
    check_equal(got, ends_of(whole(1)))


def unchanged(receiver: ws.WeightReceiver, module: nn.Module) -> None:
    check_equal(ends_of(module), ends_of(whole(None)))
    status = receiver.status()
    assert (status.version, status.state, status.senders) == (0, "READY", {})


class TestRefused:
    """One typed error; nothing is changed, and the next good call works."""

    @pytest.fixture
    def joining(self) -> Iterator[tuple[ws.WeightReceiver, nn.Module]]:
        module = whole(None)
        receiver = ws.WeightReceiver(module)
        yield receiver, module
        receiver.close()

    def test_a_hole(self, joining: Any) -> None:
        receiver, module = joining
        peers = holders(*MESHES["rows of 3"])
        with updated(peers):
            for missing in range(3):
                rest = [peer for i, peer in enumerate(peers) if i != missing]
                with pytest.raises(ws.ManifestMismatchError, match="do not make a model"):
                    ws.fetch(receiver, rest)
                unchanged(receiver, module)
            with pytest.raises(ws.ManifestMismatchError, match="no other source holds the rest"):
                ws.fetch(receiver, [peers[0], peers[0]])
            unchanged(receiver, module)
            ws.fetch(receiver, peers)
        check_equal(ends_of(module), ends_of(whole(1)))

    def test_a_peer_of_another_update(self, joining: Any) -> None:
        """Its version, its id, or both: parts of two updates never make a model."""
        receiver, module = joining
        peers = holders(*MESHES["rows of 2"])
        for version in (8, 7):
            with ws.connect(whole(1), to=peers) as sender:
                sender.send_weights(7, rewind=True)
            with ws.connect(whole(2), to=peers[1]) as sender:
                sender.send_weights(version, rewind=True)
            with pytest.raises(ws.ManifestMismatchError, match="no other source holds the rest"):
                ws.fetch(receiver, peers)
            unchanged(receiver, module)
        with ws.connect(whole(3), to=peers) as sender:
            sender.send_weights()
            ws.fetch(receiver, peers)
        check_equal(ends_of(module), ends_of(whole(3)))

    def test_a_peer_that_other_code_has_written_to(self, joining: Any) -> None:
        receiver, module = joining
        peers = holders(*MESHES["rows of 2"])
        with updated(peers) as sender:
            with torch.no_grad():
                next(peers[1].sink.module.parameters()).zero_()  # type: ignore[attr-defined]
            with pytest.raises(ws.ConfigError, match="not, or not any more, those of one update"):
                ws.fetch(receiver, peers)
            unchanged(receiver, module)
            sender.send_weights()
            ws.fetch(receiver, peers)
        check_equal(ends_of(module), ends_of(whole(1)))

    def test_peers_that_got_no_update(self, joining: Any) -> None:
        receiver, module = joining
        peers = holders(*MESHES["rows of 2"])
        with pytest.raises(ws.ConfigError, match="keeps no whole copy"):
            ws.fetch(receiver, peers)
        unchanged(receiver, module)

    def test_boxes_that_are_not_those_of_the_update(
        self, joining: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A peer that would serve the part of another one says no: it was not verified there."""
        receiver, module = joining
        peers = holders(*MESHES["rows of 2"])
        with updated(peers):
            sink: Any = peers[1].sink
            manifest = ModuleSource(whole(1)).manifest
            other = peers[0].sink.parts_in_use(manifest)
            with monkeypatch.context() as patch:
                own = sink.parts_in_use(manifest)
                wrong = [(i, box, t) for (i, box, _), (_, _, t) in zip(other, own, strict=True)]
                patch.setattr(sink, "parts_in_use", lambda _: wrong)
                with pytest.raises(ws.ConfigError, match="those of one update"):
                    ws.fetch(receiver, peers)
                unchanged(receiver, module)
            ws.fetch(receiver, peers)
        check_equal(ends_of(module), ends_of(whole(1)))

    def test_a_joiner_that_wants_what_nobody_has(self) -> None:
        module = whole(None)
        module.more = nn.Parameter(torch.zeros(3))
        receiver = ws.WeightReceiver(module)
        peers = holders(*MESHES["rows of 2"])
        with updated(peers):
            with pytest.raises(ws.ManifestMismatchError, match="more"):
                ws.fetch(receiver, peers)
            assert receiver.version == 0
            assert not any(t.detach().count_nonzero() for t in module.parameters())
        receiver.close()

    def test_peers_that_replace_their_weights_meanwhile(
        self, joining: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It begins again, and gets all parts of the later update."""
        receiver, module = joining
        peers = holders(*MESHES["rows of 2"])
        trainer = whole(1)
        with ws.connect(trainer, to=peers) as sender:
            sender.send_weights(7)
            dispatch: Any = receiver.dispatch
            renewed: list[bool] = []

            def renew_once(request: Request) -> Reply:
                if isinstance(request, UpdateRequest) and not renewed:
                    renewed.append(True)
                    with torch.no_grad():
                        for tensor, other in zip(
                            trainer.parameters(), whole(2).parameters(), strict=True
                        ):
                            tensor.copy_(other)
                    sender.send_weights(8)
                reply: Reply = dispatch(request)
                return reply

            monkeypatch.setattr(receiver, "dispatch", renew_once)
            assert ws.fetch(receiver, peers).version == 8
        check_equal(ends_of(module), ends_of(whole(2)))

    @pytest.mark.parametrize("backend", ["tcp", "ipc"])
    def test_each_backend_that_reads_streams(self, joining: Any, backend: str) -> None:
        receiver, module = joining
        peers = holders(*MESHES["grid"])
        with updated(peers):
            report = ws.fetch(receiver, peers, backend=backend)
        assert report.path == {"tcp": "tcp", "ipc": "shared_memory"}[backend]
        check_equal(ends_of(module), ends_of(whole(1)))
