"""SGLang's schedulers as receivers: rounds to all ranks, commits on all of them or none."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weightsync as ws
from tests.gloo import as_rank
from tests.integrations.sglang_schedulers import Schedulers, Trained
from weightsync.errors import (
    BackendUnavailableError,
    ConfigError,
    ManifestMismatchError,
    WeightSyncError,
)
from weightsync.integrations.sglang import servers
from weightsync.integrations.sglang.receiving import ModelSink, gather_texts
from weightsync.specs import Manifest, TensorSpec
from weightsync.transports.base import BaseTransport
from weightsync.weights.sinks.base import NamedTensor
from weightsync.wire.messages import AbortRequest


@pytest.fixture(autouse=True)
def no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is repaired alone does not wait long for the messages of others."""
    monkeypatch.setattr("weightsync.integrations.vllm.server._GATHER_UPDATE_S", 1.0)


@pytest.fixture
def server() -> Iterator[Schedulers]:
    made = Schedulers(2)
    yield made
    made.close()


@pytest.fixture
def trained() -> Trained:
    model = Trained()
    model.step(0)
    return model


def test_both_ranks_hold_each_version(server: Schedulers, trained: Trained) -> None:
    with ws.connect(trained, to=f"sglang+{server.url}") as sender:
        for step in range(1, 4):
            trained.step(step)
            report = sender.send_weights()
            assert server.holds(trained)
            assert "staged, verified: arrived" in str(report)
            assert "by shared_memory" in str(report)
            assert server.version == str(report.version)
    for rank in server.ranks:
        assert rank.log == ["stop", "flush", "load", "start"] * 3
        assert not rank.paused
    assert "pause_generation" not in server.calls


def test_a_plain_url_finds_the_plug_in(server: Schedulers, trained: Trained) -> None:
    with ws.connect(trained, to=server.url) as sender:
        assert "by shared_memory" in str(sender.send_weights())
    assert server.holds(trained)


def test_a_pause_of_a_user_is_kept(server: Schedulers, trained: Trained) -> None:
    server.answer("pause_generation", b"{}")
    with ws.connect(trained, to=servers(server.url)) as sender:
        sender.send_weights()
    assert server.holds(trained)
    assert all(rank.paused for rank in server.ranks)


def call(server: Schedulers, what: str, *tags: str) -> None:
    server.answer(f"{what}_memory_occupation", json.dumps({"tags": tags or None}).encode())


@pytest.mark.parametrize("delta", ["off", "always"])
def test_weights_that_were_released_are_gone_until_a_whole_update(
    server: Schedulers, trained: Trained, delta: Any
) -> None:
    """Nothing is generated without them, nor without a cache; every tensor comes again."""
    with ws.connect(trained, to=server.url, delta=delta) as sender:
        sender.send_weights()
        sender.send_weights()
        call(server, "release")
        with pytest.raises(WeightSyncError, match=r"nothing is changed: .* sleeps \(level 2\)"):
            sender.send_weights()
        call(server, "resume", "weights")
        assert all(one.receiver.status().state == "TORN" for one in server.receivers)
        server.answer("continue_generation", b"{}")
        assert all(rank.paused for rank in server.ranks)
        sender.send_weights()  # nothing has changed since the former one
        assert server.holds(trained)
        assert all(rank.paused for rank in server.ranks), "its cache is not there yet"
        call(server, "resume", "kv_cache", "cuda_graph")
        assert not any(rank.paused for rank in server.ranks)
        trained.step(1)
        sender.send_weights()
    assert server.holds(trained)
    assert not any(rank.paused for rank in server.ranks)


def test_weights_that_sglang_keeps_are_whole_when_they_are_awake(
    server: Schedulers, trained: Trained
) -> None:
    server.keeps = True
    with ws.connect(trained, to=server.url) as sender:
        sender.send_weights()
        call(server, "release", "weights")
        with pytest.raises(WeightSyncError, match="level 1"):
            sender.send_weights()
        call(server, "resume", "weights")
        assert all(one.receiver.status().state == "READY" for one in server.receivers)
        assert all(not one.receiver.asleep for one in server.receivers)
        assert not any(rank.paused for rank in server.ranks)
        sender.send_weights()
    assert server.holds(trained)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_user_s_pause_outlasts_a_release(
    server: Schedulers, trained: Trained, keeps: bool
) -> None:
    server.keeps = keeps
    with ws.connect(trained, to=server.url) as sender:
        sender.send_weights()
        server.answer("pause_generation", b"{}")
        call(server, "release")
        call(server, "resume")
        sender.send_weights()
        assert all(rank.paused for rank in server.ranks)
        server.answer("continue_generation", b"{}")
    assert not any(rank.paused for rank in server.ranks)


def test_a_cache_alone_may_be_released(server: Schedulers, trained: Trained) -> None:
    with ws.connect(trained, to=server.url) as sender:
        sender.send_weights()
        call(server, "release", "kv_cache")
        trained.step(1)
        sender.send_weights()
        assert server.holds(trained)
        assert all(rank.paused for rank in server.ranks)
        call(server, "resume", "kv_cache")
    assert not any(rank.paused for rank in server.ranks)


def test_a_server_that_slept_before_the_first_sender_says_so(
    server: Schedulers, trained: Trained
) -> None:
    for receiver in server.receivers:
        receiver.note_asleep({"weights", "kv_cache"}, keeps=False)
    with pytest.raises(WeightSyncError, match="sleeps"):
        ws.connect(trained, to=server.url)
    call(server, "resume", "weights", "kv_cache")
    with ws.connect(trained, to=server.url) as sender:
        sender.send_weights()
    assert server.holds(trained)
    assert not any(rank.paused for rank in server.ranks)


def test_no_rank_commits_where_one_cannot_flush(server: Schedulers, trained: Trained) -> None:
    with ws.connect(trained, to=server.url) as sender:
        sender.send_weights()
        kept = [rank.model.embed.clone() for rank in server.ranks]
        server.ranks[1].flushes = False
        trained.step(1)
        with pytest.raises(WeightSyncError, match=r"rank 1 .* cannot flush its cache"):
            sender.send_weights()
        for rank, former in zip(server.ranks, kept, strict=True):
            assert torch.equal(rank.model.embed, former)
            assert not rank.paused
        server.ranks[1].flushes = True
        sender.send_weights()
    assert server.holds(trained)


def test_a_server_of_two_versions_generates_nothing(
    server: Schedulers, trained: Trained, caplog: pytest.LogCaptureFixture
) -> None:
    with ws.connect(trained, to=server.url) as sender:
        sender.send_weights()
        server.ranks[1].model.fails = RuntimeError("out of memory")
        trained.step(1)
        with (
            caplog.at_level(logging.ERROR),
            pytest.raises(WeightSyncError, match="out of memory"),
        ):
            sender.send_weights()
        assert "hold no single version" in caplog.text
        assert all(rank.paused for rank in server.ranks)
        server.answer("continue_generation", b"{}")
        assert all(rank.paused for rank in server.ranks)
        server.ranks[1].model.fails = None
        sender.send_weights()
        assert server.holds(trained)
    assert not any(rank.paused for rank in server.ranks)


def test_names_are_checked_before_any_byte(server: Schedulers, trained: Trained) -> None:
    before = [rank.model.embed.clone() for rank in server.ranks]
    trained.other = torch.nn.Parameter(torch.zeros(3))
    del trained.up
    with pytest.raises(ManifestMismatchError) as caught:
        ws.connect(trained, to=server.url).send_weights()
    assert "other" in str(caught.value)
    assert "gate_up" in str(caught.value)
    assert all(rank.log == [] for rank in server.ranks)
    for rank, former in zip(server.ranks, before, strict=True):
        assert torch.equal(rank.model.embed, former)


def test_shapes_are_checked_before_any_byte(server: Schedulers, trained: Trained) -> None:
    trained.embed = torch.nn.Parameter(torch.zeros(15, 8))
    with pytest.raises(ManifestMismatchError, match="embed has another shape"):
        ws.connect(trained, to=server.url).send_weights()


def test_a_part_of_the_model(server: Schedulers, trained: Trained) -> None:
    with ws.connect(trained, to=server.url) as sender:
        sender.send_weights()
        part = torch.ones(16, 8)
        with sender.update(partial=True) as update:
            update.send([("embed", part)])
    assert all(torch.equal(rank.model.embed, part) for rank in server.ranks)


def load_all_but_embed(
    load: Callable[[Iterable[NamedTensor]], None], pairs: Iterable[NamedTensor]
) -> None:
    load(pair for pair in pairs if pair[0] != "embed")


@pytest.mark.parametrize("kept", [1, 256])
def test_every_message_of_an_update_is_checked_when_it_is_loaded(
    server: Schedulers, trained: Trained, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """A loader that skips what it took in its trial, as SGLang's do without a word."""
    monkeypatch.setattr("weightsync.integrations.sglang.receiving._KEPT", kept)
    with ws.connect(trained, to=server.url) as sender:
        sender.send_weights()
        for rank in server.ranks:
            monkeypatch.setattr(rank, "load", partial(load_all_but_embed, rank.load))

        def send_two_messages() -> None:
            with sender.update(partial=True) as update:
                update.send([("embed", torch.ones(16, 8))])
                update.send([("gate", torch.ones(8, 8)), ("up", torch.ones(8, 8))])

        with pytest.raises(WeightSyncError, match="did not write all of embed"):
            send_two_messages()


def test_a_trainer_that_was_refused_leaves_no_check_of_its_own(
    server: Schedulers, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had the same names, and other shapes: the loader wrote nothing of it in its trial."""
    wide = {
        name: torch.zeros(*(n + 8 for n in t.shape)) for name, t in trained.state_dict().items()
    }
    with pytest.raises(ManifestMismatchError):
        ws.connect(wide, to=server.url)
    with ws.connect(trained, to=server.url) as sender:
        sender.send_weights()
        for rank in server.ranks:
            monkeypatch.setattr(rank, "load", partial(load_all_but_embed, rank.load))
        with torch.no_grad():
            trained.embed.add_(1)
        with pytest.raises(WeightSyncError, match="did not write all of embed"):
            sender.send_weights()


def test_what_the_last_offer_says_of_ties_is_loaded() -> None:
    """An earlier message had the same names, and no tied one."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (torch.nn.Parameter(torch.zeros(4)) for _ in "ab")

        def load_weights(self, pairs: Iterable[NamedTensor]) -> None:
            own = dict(self.named_parameters())
            for name, tensor in pairs:
                own[name].data.copy_(tensor)

    model = Model()
    engine: Any = SimpleNamespace(
        model=model, load=model.load_weights, check=lambda: None, device=torch.device("cpu")
    )
    sink = ModelSink(engine, "cpu")
    spec = TensorSpec("a", "float32", (4,))
    alone, tied = Manifest((spec,)), Manifest((spec,), {"b": "a"})
    for offer, wanted in ((alone, 0.0), (tied, 1.0), (alone, 1.0), (tied, 2.0)):
        sink.difference(offer)
        sink._load([("a", torch.full((4,), 2.0 if wanted == 2 else 1.0))])
        assert model.b.tolist() == [wanted] * 4


def test_a_server_that_must_not_be_updated_says_why(server: Schedulers, trained: Trained) -> None:
    server.ranks[0].refuses = server.ranks[1].refuses = "the model family Odd"
    with pytest.raises(ConfigError, match="the model family Odd"):
        ws.connect(trained, to=server.url)


def test_replicas_are_refused(trained: Trained) -> None:
    server = Schedulers(1, replicas=2)
    try:
        with pytest.raises(BackendUnavailableError, match="2 data parallel replicas"):
            ws.connect(trained, to=server.url)
    finally:
        server.close()


@pytest.mark.parametrize("option", ["pause=wait", "names=any"])
def test_settings_of_files_are_refused(server: Schedulers, trained: Trained, option: str) -> None:
    with pytest.raises(ConfigError, match="for updates by files"):
        ws.connect(trained, to=f"sglang+{server.url}?{option}")


def test_adapters_are_refused(server: Schedulers) -> None:
    first, *others = servers(server.url)
    assert isinstance(first, BaseTransport)
    with pytest.raises(ConfigError, match="takes no adapters"):
        first.below("adapters/style")
    for transport in (first, *others):
        transport.close()


def test_an_update_that_one_rank_lost_is_committed_by_none(
    server: Schedulers, trained: Trained
) -> None:
    with ws.connect(trained, to=server.url) as sender:
        sender.send_weights()
        kept = server.ranks[0].model.embed.clone()
        mixed: list[bool] = []

        def look(_: str) -> None:
            server.before = lambda _: None
            mixed.append(not torch.equal(server.ranks[0].model.embed, kept))
            mixed.extend(rank.paused for rank in server.ranks)

        def forget(text: str) -> None:
            if "finish_weight_update" in text:
                server.before = look
                lost = server.receivers[1].receiver
                lost.dispatch(
                    AbortRequest(update_id=lost.status().update_id, reason="it was given up here")
                )

        server.before = forget
        trained.step(1)
        sender.send_weights()  # nothing was committed, so it began anew
    assert mixed == [False, False, False]
    assert server.holds(trained)


def gathered(rank: int, folder: str) -> list[bytes]:
    with as_rank(rank, 2, folder, 60):
        assert dist.group.WORLD is not None
        return gather_texts(b"x" * (3 + 4 * rank), dist.group.WORLD)


def test_ranks_gather_texts_of_unlike_lengths(tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        found = list(pool.map(gathered, range(2), [str(tmp_path)] * 2))
    assert found == [[b"xxx", b"xxxxxxx"]] * 2
