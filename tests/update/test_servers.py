"""Senders and servers of several workers: one URL, a member of the fleet for each worker."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import requests
from fastapi import FastAPI
from torch import nn

import weightsync as ws
from tests.server.live import TOKEN, held_port, serving
from tests.update.uniform import fill, make
from weightsync.server import Workers, worker_path, workers_router
from weightsync.update import outgoing
from weightsync.wire.messages import (
    FinishRequest,
    Reply,
    Request,
    ShutdownRequest,
    StatusRequest,
    StepReply,
    UpdateRequest,
)

TIMEOUT_S = 10.0
State = tuple[str, int, float]


class Served:
    """A server of several real receivers at one port; it may be stopped and started again."""

    def __init__(self, count: int, *, apply: Any = "staged", port: int = 0) -> None:
        self.models = [make() for _ in range(count)]
        self.receivers = [ws.WeightReceiver(model, apply=apply) for model in self.models]
        self.seen: list[list[Request]] = [[] for _ in range(count)]
        self.before: list[Callable[[Request], None]] = [lambda _: None] * count
        for k in range(count):
            self._watch(k)
        workers = Workers({worker_path(k): r for k, r in enumerate(self.receivers)})
        app = FastAPI()
        app.include_router(workers_router(workers, token=TOKEN))
        self._stack = ExitStack()
        self._stack.callback(workers.close)
        for receiver in self.receivers:
            self._stack.callback(receiver.close)
        self.url = self._stack.enter_context(serving(app, port=port))

    def _watch(self, k: int) -> None:
        dispatch = self.receivers[k].dispatch

        def watched(request: Request) -> Reply:
            self.seen[k].append(request)
            self.before[k](request)
            return dispatch(request)

        self.receivers[k].dispatch = watched  # type: ignore[method-assign]  # to look at messages

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def targets(self) -> list[str]:
        return [f"{self.url}/workers/{k}" for k in range(len(self.receivers))]

    @property
    def held(self) -> list[State]:
        pairs = zip(self.receivers, self.models, strict=True)
        return [(r.status().state, r.version, m.weight[0, 0].item()) for r, m in pairs]

    def close(self) -> None:
        self._stack.close()


def refuse(*kinds: type) -> Callable[[Request], None]:
    def before(request: Request) -> None:
        if isinstance(request, kinds):
            raise ws.TransferError("broken")

    return before


Serve = Callable[..., Served]


@pytest.fixture
def serve(shm_clean: None) -> Iterator[Serve]:
    with ExitStack() as stack:

        def start(count: int, **options: Any) -> Served:
            # Held until the test ends: a server that starts again has the port of the first one.
            port = options.pop("port", None) or stack.enter_context(held_port())
            served = Served(count, port=port, **options)
            stack.callback(served.close)
            return served

        yield start


@contextmanager
def connected(model: nn.Module, to: object, **more: Any) -> Iterator[ws.WeightSender]:
    sender = ws.connect(model, to=to, token=TOKEN, timeout_s=TIMEOUT_S, **more)  # type: ignore[arg-type]  # a target or several
    with sender:
        yield sender


@pytest.mark.parametrize("packed", [True, False])
def test_one_url_is_as_many_receivers_as_it_has_workers(serve: Serve, packed: bool) -> None:
    model, served = make(), serve(3)
    with connected(model, served.url, packed=packed) as sender:
        assert sender.targets == served.targets
        for version in (1, 2, 3):
            fill(model, version)
            seen = [len(messages) for messages in served.seen]
            report = sender.send_weights()
            assert served.held == [("READY", version, version)] * 3
            new = [messages[n:] for messages, n in zip(served.seen, seen, strict=True)]
            if version > 1:
                assert report.control_messages == 6
                assert [[type(m) for m in one] for one in new] == [
                    [UpdateRequest, FinishRequest]
                ] * 3
        assert [r.target for r in report.receivers] == served.targets
    assert all(not receiver.shared_memory_usage() for receiver in served.receivers)


def test_a_server_of_one_worker_is_one_receiver(serve: Serve) -> None:
    served = serve(1)
    with connected(make(4), served.url) as sender:
        assert sender.targets == [served.url]
        sender.send_weights()
        assert served.held == [("READY", 1, 4)]


def test_one_shot_and_known_names_reach_all_workers(serve: Serve) -> None:
    served = serve(2)
    report = ws.send_weights(make(2), served.url, token=TOKEN, timeout_s=TIMEOUT_S)
    ws.close()
    assert len(report.receivers) == 2
    assert served.held == [("READY", 1, 2)] * 2
    args = {"send_mode": "http", "url": served.url, "token": TOKEN}
    for packed in (False, True):
        pairs = iter(make(5 + packed).state_dict().items())
        ws.IPCWeightTransferEngine.trainer_send_weights(pairs, {**args, "packed": packed})
        assert served.held == [("READY", 2 + packed, 5 + packed)] * 2


def test_servers_come_and_go_by_their_url(serve: Serve) -> None:
    model, first, second = make(1), serve(2), serve(2)
    with connected(model, first.url) as sender:
        sender.send_weights()
        report = sender.add(second.url + "/")
        assert report is not None
        assert [r.target for r in report.receivers] == second.targets
        assert second.held == first.held == [("READY", 1, 1)] * 2
        assert sender.targets == [*first.targets, *second.targets]
        with pytest.raises(ws.ConfigError, match="are the same receiver"):
            sender.add(second.url)
        assert sender.targets == [*first.targets, *second.targets]
        report = sender.resync(second.url)
        assert [r.target for r in report.receivers] == second.targets
        seen = [len(messages) for messages in first.seen]
        sender.remove(second.url)
        assert sender.targets == first.targets
        assert seen == [len(messages) for messages in first.seen]
        assert all(isinstance(messages[-1], ShutdownRequest) for messages in second.seen)
        fill(model, 2)
        sender.send_weights()
        assert (first.held, second.held) == ([("READY", 2, 2)] * 2, [("READY", 1, 1)] * 2)
        with pytest.raises(ws.ConfigError, match="is the last receiver"):
            sender.remove(first.url)
        with pytest.raises(ws.ConfigError, match="no receiver"):
            sender.resync(second.url)
        for call in (sender.remove, sender.resync):
            with pytest.raises(ws.ConfigError, match="a Linear is no name of a receiver"):
                call(nn.Linear(1, 1))  # type: ignore[arg-type]


def test_no_worker_of_a_server_is_updated_or_let_go_alone(serve: Serve) -> None:
    """Workers apart are no replica: a server of such generates nothing."""
    model, served, other = make(1), serve(2), serve(1)
    with connected(model, [served.url, other.url]) as sender:
        sender.send_weights()
        for call in (sender.remove, sender.resync):
            with pytest.raises(ws.ConfigError) as refused:
                call(served.targets[0])
            assert str(refused.value).endswith(f"; name {served.url}")
        assert sender.targets == [*served.targets, other.url]
        assert requests.get(f"{served.url}/health", timeout=TIMEOUT_S).status_code == 200
        assert len(sender.resync(served.url).receivers) == 2


def test_a_server_that_cannot_be_added_leaves_the_fleet_as_it_was(serve: Serve) -> None:
    model, first, second = make(1), serve(2), serve(2)
    with connected(model, first.url) as sender:
        sender.send_weights()
        second.before[1] = refuse(UpdateRequest)
        with pytest.raises(ws.TransferError, match=r"workers/1.*broken"):
            sender.add(second.url)
        assert sender.targets == first.targets
        assert all(not receiver.shared_memory_usage() for receiver in second.receivers)
        fill(model, 2)
        assert len(sender.send_weights().receivers) == 2


@pytest.mark.parametrize(
    ("kind", "held"), [(UpdateRequest, ("READY", 1, 1)), (FinishRequest, ("READY", 2, 2))]
)
def test_one_worker_that_fails_is_told_of_as_such(serve: Serve, kind: type, held: State) -> None:
    model, served = make(1), serve(2)
    with connected(model, served.url) as sender:
        sender.send_weights()
        fill(model, 2)
        served.before[1] = refuse(kind)
        with pytest.raises(ws.TransferError, match=r"workers/1.*broken"):
            sender.send_weights()
        assert served.held[0] == held
        served.before[1] = lambda _: None
        sender.send_weights()
        assert {(state, value) for state, _, value in served.held} == {("READY", 2)}
        assert len(set(served.held)) == 1


def test_a_server_is_dropped_as_a_whole_and_keeps_its_old_version(serve: Serve) -> None:
    model, good, bad = make(1), serve(2), serve(2)
    with connected(model, [good.url, bad.url], on_failure="drop") as sender:
        sender.send_weights()
        fill(model, 2)
        bad.before[1] = refuse(UpdateRequest)
        report = sender.send_weights()
        assert set(report.dropped) == set(bad.targets)
        assert all(why.count(bad.url) == 1 for why in report.dropped.values())
        assert "broken" in report.dropped[bad.targets[1]]
        assert "its server lost" in report.dropped[bad.targets[0]]
        assert sender.targets == good.targets == [r.target for r in report.receivers]
        assert good.held == [("READY", 2, 2)] * 2
        assert bad.held == [("READY", 1, 1)] * 2
        first, second = (receiver.report().fleet for receiver in good.receivers)
        assert first is not None
        assert second is None  # one worker of each server is told
        stays, left = first.servers
        assert (stays.target, stays.workers, stays.path) == (good.url, 2, "shared_memory")
        assert stays.load_s > 0
        assert not stays.error
        assert (left.target, left.workers) == (bad.url, 2)
        assert "its server lost" in left.error or "broken" in left.error
        bad.before[1] = lambda _: None
        sender.add(bad.url)
        assert bad.held == [("READY", 2, 2)] * 2


def fleet_of(served: Served) -> list[tuple[str, int | None]]:
    """Return the servers that a server knows, and the versions of those that hold it already."""
    record = served.receivers[0].report().fleet
    assert record is not None
    assert record.version == served.receivers[0].version
    return [(server.target, server.version) for server in record.servers]


def test_a_server_learns_of_its_fleet_with_each_update(serve: Serve) -> None:
    model, one, other = make(1), serve(1), serve(1)
    with connected(model, one.url) as sender:
        sender.send_weights()
        assert fleet_of(one) == []
        sender.add(other.url)
        sender.send_weights()
        assert fleet_of(one) == fleet_of(other) == [(one.url, None), (other.url, None)]
        sender.remove(other.url)
        sender.send_weights()
        assert fleet_of(one) == []


def test_what_cannot_be_described_ends_no_update(serve: Serve, monkeypatch: Any) -> None:
    model, one, other = make(1), serve(1), serve(1)
    with connected(model, [one.url, other.url]) as sender:
        monkeypatch.setattr(outgoing, "_clipped", refuse_text)
        sender.send_weights()
        assert one.held == other.held == [("READY", 1, 1)]
        assert one.receivers[0].report().fleet is None


def refuse_text(text: str) -> str:
    raise ValueError(text)


def test_a_time_that_is_none_is_no_time(serve: Serve) -> None:
    model, one, other = make(1), serve(1), serve(1)
    with connected(model, [one.url, other.url]) as sender:
        member = sender._coordinator.fleet.members[0]  # type: ignore[union-attr]  # of rank 0
        transaction = outgoing.UpdateTransaction(
            sender._coordinator.fleet,  # type: ignore[union-attr]
            sender._coordinator.paths,  # type: ignore[union-attr]
            [member],
            verify=True,
        )
        seconds = {"load": math.nan}
        transaction.replies[member] = StepReply(state="PREPARED", version=0, seconds=seconds)
        assert transaction._described_server("x", [member]).load_s == 0


def test_a_server_that_fails_in_its_finish_is_dropped_as_a_whole(serve: Serve) -> None:
    model, good, bad = make(1), serve(1), serve(2)
    with connected(model, [good.url, bad.url], on_failure="drop") as sender:
        sender.send_weights()
        bad.before[0] = refuse(FinishRequest)
        assert set(sender.send_weights().dropped) == set(bad.targets)
        assert sender.targets == [good.url]
        health = requests.get(f"{bad.url}/health", timeout=TIMEOUT_S)
        assert health.status_code == 503
        assert "the workers hold different" in health.text


@pytest.mark.parametrize("apply", ["staged", "in_place"])
@pytest.mark.parametrize("kind", [UpdateRequest, FinishRequest])
def test_the_last_server_is_not_cut_in_two(serve: Serve, apply: str, kind: type) -> None:
    model, served = make(1), serve(2, apply=apply)
    with connected(model, served.url, on_failure="drop") as sender:
        sender.send_weights()
        fill(model, 2)
        served.before[1] = refuse(kind)
        with pytest.raises(ws.TransferError, match=r"workers/1.*broken"):
            sender.send_weights()
        assert sender.targets == served.targets
        served.before[1] = lambda _: None
        sender.send_weights()
        assert len(set(served.held)) == 1
        assert served.held[0][::2] == ("READY", 2)


@pytest.mark.parametrize(
    ("now", "released", "on_failure"),
    [
        (1, False, "abort"),
        (1, True, "drop"),
        (2, False, "drop"),
        (2, True, "abort"),
        (3, False, "drop"),
        (3, True, "abort"),
    ],
)
def test_a_server_is_met_again_with_the_workers_that_it_has_now(
    serve: Serve, now: int, released: bool, on_failure: str
) -> None:
    model, other, served = make(1), serve(1), serve(2)
    with connected(model, [served.url, other.url], on_failure=on_failure) as sender:
        sender.send_weights()
        if released:
            sender.release()
        served.close()
        again = serve(now, port=served.port)
        fill(model, 2)
        report = sender.send_weights()
        assert not report.dropped
        assert len(report.receivers) == now + 1
        assert again.held == [("READY", 2, 2)] * now
        assert other.held == [("READY", 2, 2)]
        assert sender.targets == [*(again.targets if now > 1 else [again.url]), other.url]
        fill(model, 3)
        assert sender.send_weights().control_messages == 2 * (now + 1)


@pytest.mark.parametrize("on_failure", ["abort", "drop"])
def test_a_receiver_that_became_several_is_met_again(serve: Serve, on_failure: str) -> None:
    model, served, other = make(1), serve(1), serve(1)
    with connected(model, [served.url, other.url], on_failure=on_failure) as sender:
        sender.send_weights()
        served.close()
        again = serve(2, port=served.port)
        assert len(sender.send_weights().receivers) == 3
        assert again.held == [("READY", 2, 1)] * 2
        assert sender.targets == [*again.targets, other.url]


def test_a_server_that_comes_back_with_a_broken_worker_is_dropped_as_a_whole(serve: Serve) -> None:
    model, other, served = make(1), serve(1), serve(2)
    with connected(model, [served.url, other.url], on_failure="drop") as sender:
        sender.send_weights()
        served.close()
        again = serve(3, port=served.port)
        again.before[2] = silent
        report = sender.send_weights()
        assert set(report.dropped) == set(again.targets)
        assert "worker 2 is lost" in report.dropped[again.targets[2]]
        assert sender.targets == [other.url]
        assert other.held == [("READY", 2, 1)]
        assert again.held == [("READY", 0, 0)] * 3


def silent(request: Request) -> None:
    """As for a worker whose process ended: its server answers in its place."""
    raise ws.NotReadyError("worker 2 is lost", state="LOST")


def through_a_proxy(request: Request) -> None:
    raise ValueError("bad gateway")


@pytest.mark.parametrize("before", [silent, through_a_proxy])
def test_a_server_with_a_worker_that_says_nothing_is_dropped(
    serve: Serve, before: Callable[[Request], None]
) -> None:
    model, other, served = make(1), serve(1), serve(2)
    with connected(model, [other.url, served.url], on_failure="drop") as sender:
        sender.send_weights()
        sender.release()
        served.before[1] = before
        report = sender.send_weights()
        assert set(report.dropped) == set(served.targets)
        assert other.held == [("READY", 2, 1)]
        with pytest.raises(ws.WeightSyncError):
            sender.add(served.url)
        assert sender.targets == [other.url]


@pytest.mark.parametrize("before", [silent, through_a_proxy])
def test_a_worker_that_says_nothing_at_first_is_no_failure_to_go_on_without(
    serve: Serve, before: Callable[[Request], None]
) -> None:
    other, served = serve(1), serve(2)
    served.before[1] = before
    with pytest.raises(ws.WeightSyncError, match="workers/1"):
        ws.connect(
            make(),
            to=[other.url, served.url],
            token=TOKEN,
            timeout_s=TIMEOUT_S,
            on_failure="drop",
        )


def test_a_message_names_a_receiver_once(serve: Serve) -> None:
    model, other, served = make(1), serve(1), serve(2)
    with connected(model, [other.url, served.url], on_failure="drop") as sender:
        sender.send_weights()
        sender.release()
        served.close()
        for target, why in sender.send_weights().dropped.items():
            assert why.count(served.url) == 1, (target, why)
    other.close()
    with pytest.raises(ws.ConnectError) as refused:
        ws.connect(model, to=[other.url, served.url], token=TOKEN, timeout_s=TIMEOUT_S)
    assert str(refused.value).count(other.url) == 1
    notes = refused.value.__notes__
    assert [note.count("http://") for note in notes] == [1], notes


def test_resync_does_not_guess_at_a_server_of_another_shape(serve: Serve) -> None:
    model, served = make(1), serve(2)
    with connected(model, served.url) as sender:
        sender.send_weights()
        served.close()
        again = serve(3, port=served.port)
        with pytest.raises(ws.ProtocolError, match="restarted with another number of workers"):
            sender.resync(served.url)
        fill(model, 2)
        sender.send_weights()
        assert again.held == [("READY", 2, 2)] * 3


def test_a_transport_that_reaches_one_receiver_alone_says_so(serve: Serve) -> None:
    served = serve(2)
    workers = Workers({worker_path(k): r for k, r in enumerate(served.receivers)})

    def callback(message: Any) -> object:
        path = {"weight_info": "weight_info"}[message["call"]]
        return json.loads(requests.get(f"{served.url}/{path}", timeout=TIMEOUT_S).content)

    with pytest.raises(ws.ProtocolError, match="is a server of 2 workers, and its transport"):
        ws.connect(make(), to=callback, timeout_s=TIMEOUT_S)
    workers.close()


def test_a_wrong_token_is_refused_at_once(serve: Serve) -> None:
    served = serve(2)
    with pytest.raises(ws.AuthError):
        ws.connect(make(), to=served.url, token="wrong", timeout_s=TIMEOUT_S)
    assert all(isinstance(m, StatusRequest) for messages in served.seen for m in messages)
