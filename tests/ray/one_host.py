"""Tests of several actors on one host. Run by test_ray.py, in a sandbox."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

import weightsync as ws
from tests.e2e.models import digests, fill, make
from tests.ray import actors
from tests.ray.actors import Holding
from weightsync.errors import (
    ConfigError,
    ConnectError,
    ManifestMismatchError,
    TransportError,
    UpdateConflictError,
)
from weightsync.ray import RayActorTransport
from weightsync.transports.ray_actor import actor_name
from weightsync.wire.messages import AbortRequest, FinishRequest, Status, StatusRequest

WAIT_S = 60.0


pytestmark = pytest.mark.usefixtures("node")


START_S = 240.0
"""Two workers import torch, on a busy machine."""


@pytest.fixture(scope="module")
def rollouts(node: None) -> list[Any]:
    made = [actors.Rollout.remote(seed=seed) for seed in (1, 2)]
    held(made, START_S)
    return made


@pytest.fixture(scope="module")
def pair(node: None) -> list[Any]:
    made = [actors.Rollout.remote("plain", seed) for seed in (1, 2)]
    held(made, START_S)
    return made


def held(handles: list[Any], timeout_s: float = WAIT_S) -> list[Any]:
    return [ray.get(handle.held.remote(), timeout=timeout_s) for handle in handles]


@pytest.mark.parametrize("packed", [False, True])
def test_every_actor_holds_what_was_sent_bit_for_bit(rollouts: list[Any], packed: bool) -> None:
    model = make("everything")
    with ws.connect(model, to=rollouts, packed=packed) as sender:
        for seed in (11, 12, 13):
            fill(model, seed)
            report = sender.send_weights()
            assert held(rollouts) == [(report.version, digests(model))] * 2
            assert {one.target for one in report.receivers} == set(map(actor_name, rollouts))


def test_the_one_call_form_takes_an_actor_alone_and_keeps_the_connection(
    rollouts: list[Any],
) -> None:
    model = make("everything")
    try:
        for seed in (21, 22):
            fill(model, seed)
            report = ws.send_weights(model, to=rollouts[0])
            assert held(rollouts[:1]) == [(report.version, digests(model))]
    finally:
        ws.close()


def test_asyncio_trainers_send_to_actors(rollouts: list[Any]) -> None:
    model = make("everything", seed=31)
    with ws.connect(model, to=rollouts) as sender:
        report = asyncio.run(sender.asend_weights())
    assert held(rollouts) == [(report.version, digests(model))] * 2


def test_only_plain_types_travel() -> None:
    recording = actors.Recording.remote()
    model = make("everything")
    for packed in (False, True):
        with ws.connect(model, to=recording, packed=packed) as sender:
            sender.send_weights()
            sender.send_weights()
    with pytest.raises(UpdateConflictError):
        RayActorTransport(recording).call(FinishRequest(update_id="another"), timeout_s=WAIT_S)
    seen = ray.get(recording.types.remote(), timeout=WAIT_S)
    assert {"dict", "str", "int", "list"} <= seen
    assert seen <= {"dict", "list", "str", "int", "float", "bool", "NoneType", "bytes"}


def test_the_known_names_send_to_actors(rollouts: list[Any], pair: list[Any]) -> None:
    model = make("plain", seed=41)
    for packed in (False, True):
        fill(model, 41 + packed)
        ws.IPCWeightTransferEngine.trainer_send_weights(
            model.named_parameters(),
            {"send_mode": "ray", "llm_handle": pair, "packed": packed},
        )
        assert [tensors for _, tensors in held(pair)] == [digests(model)] * 2
    with pytest.raises(ManifestMismatchError) as caught:
        ws.IPCWeightTransferEngine.trainer_send_weights(
            model.named_parameters(), {"send_mode": "ray", "llm_handle": rollouts}
        )
    notes = "".join([str(caught.value), *caught.value.__notes__])
    assert all(actor_name(handle) in notes for handle in rollouts)


def test_verbs_are_methods_and_raise_what_the_receiver_raises(rollouts: list[Any]) -> None:
    status = ray.get(rollouts[0].weight_info.remote(), timeout=WAIT_S)
    assert status["state"] == "READY"
    assert ray.get(rollouts[0].pause.remote({"mode": "wait"}), timeout=WAIT_S)["paused"] is True
    ray.get(rollouts[0].resume.remote(), timeout=WAIT_S)
    with pytest.raises(UpdateConflictError) as caught:
        ray.get(rollouts[0].finish_weight_update.remote({"update_id": "none"}), timeout=WAIT_S)
    assert caught.value.state == "READY"


def test_the_errors_of_all_peers_are_gathered(rollouts: list[Any], pair: list[Any]) -> None:
    before = held(rollouts[:1])
    with pytest.raises(ManifestMismatchError) as caught:
        ws.connect(make("everything"), to=[*pair, rollouts[0]])
    notes = "".join([str(caught.value), *caught.value.__notes__])
    assert all(actor_name(handle) in notes for handle in pair)
    assert actor_name(rollouts[0]) not in notes
    assert held(rollouts[:1]) == before


def test_an_actor_without_receiver_says_what_to_do() -> None:
    empty = actors.WithoutReceiver.options(num_cpus=0).remote()
    with pytest.raises(ConfigError, match=r"Empty has no receiver; assign self\.weightsync_rec"):
        ws.connect(make("plain"), to=empty)


def test_an_actor_of_another_class_is_refused() -> None:
    class Foreign:
        pass

    actor: Any = ray.remote(num_cpus=0)(Foreign)
    with pytest.raises(ConfigError, match=r"Foreign .*has no method weightsync_handle"):
        ws.connect(make("plain"), to=actor.remote())


@pytest.mark.parametrize("kind", [actors.Slow, actors.SlowAsync], ids=["threaded", "async"])
def test_status_and_abort_pass_an_update_that_is_held_up(kind: Any, tmp_path: Path) -> None:
    gate = Holding(tmp_path)
    slow = kind.remote(tmp_path)
    transport = RayActorTransport(slow)
    model = make("plain")
    gate.let_go("load0")
    with ws.connect(model, to=slow) as sender, ThreadPoolExecutor(2) as pool:
        sender.send_weights()
        fill(model, 1)
        update = pool.submit(sender.send_weights)
        try:
            gate.wait_until_stands("load1")
            status = transport.call(StatusRequest(), timeout_s=WAIT_S)
            assert isinstance(status, Status)
            assert (status.state, status.version, status.busy) == ("UPDATING", 1, True)
            if kind is actors.SlowAsync:
                assert ray.get(slow.ticks.remote(), timeout=WAIT_S) == 3
            abort = pool.submit(
                transport.call, AbortRequest(update_id=status.update_id), timeout_s=WAIT_S
            )
            while status.state == "UPDATING":
                status = transport.call(StatusRequest(), timeout_s=WAIT_S)
                assert isinstance(status, Status)
            assert status.state == "ABORTING"
            assert not update.done()
        finally:
            gate.let_go("load1")
        abort.result(WAIT_S)
        with pytest.raises(ws.WeightSyncError):
            update.result(WAIT_S)
        (tmp_path / "free").touch()
        report = sender.send_weights()
    assert held([slow]) == [(report.version, digests(model.named_parameters()))]


def test_no_verb_waits_for_the_methods_of_the_class(tmp_path: Path) -> None:
    busy = actors.Rollout.remote(folder=tmp_path)
    gate = Holding(tmp_path)
    work = busy.work.remote("long")
    try:
        gate.wait_until_stands("long")
        model = make("everything", seed=51)
        with ws.connect(model, to=busy) as sender:
            assert sender.send_weights().version == 1
        assert ray.wait([work], timeout=0)[1] == [work]
    finally:
        gate.let_go("long")
    assert ray.get(work, timeout=WAIT_S) == "long"
    assert held([busy]) == [(1, digests(model))]


def instance(handle: Any) -> str | None:
    """Return the instance id of the actor, None while it does not reply."""
    try:
        return str(ray.get(handle.weight_info.remote(), timeout=WAIT_S)["instance"])
    except RayActorError:
        return None


def restart(handle: Any) -> None:
    before = instance(handle)
    ray.kill(handle, no_restart=False)
    deadline = time.monotonic() + WAIT_S
    while instance(handle) in (before, None):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_an_actor_that_ray_restarts_is_met_again(pair: list[Any]) -> None:
    model = make("plain", seed=71)
    both = [actors.Rollout.options(max_restarts=1).remote("plain", 1), pair[0]]
    with ws.connect(model, to=both) as sender:
        version = sender.send_weights().version
        restart(both[0])
        assert held(both[:1])[0][0] == 0
        fill(model, 72)
        report = sender.send_weights()
    assert report.version == version + 1
    assert held(both) == [(report.version, digests(model))] * 2


def test_an_actor_that_dies_in_the_middle_is_named_and_the_others_agree(
    pair: list[Any], tmp_path: Path
) -> None:
    gate = Holding(tmp_path)
    model = make("plain", seed=61)
    doomed = actors.Slow.remote(tmp_path)
    gate.let_go("load0")
    with ThreadPoolExecutor(1) as pool:
        sender = ws.connect(model, to=[doomed, *pair], timeout_s=WAIT_S)
        version = sender.send_weights().version
        fill(model, 62)
        update = pool.submit(sender.send_weights)
        gate.wait_until_stands(f"load{version}")
        ray.kill(doomed)
        with pytest.raises(TransportError) as caught:
            update.result(WAIT_S)
        assert isinstance(caught.value, ConnectError)
        notes: list[str] = getattr(caught.value, "__notes__", [])
        assert actor_name(doomed) in "".join([str(caught.value), *notes])
        states = [ray.get(other.weight_info.remote(), timeout=WAIT_S) for other in pair]
        assert len({(state["version"], state["state"]) for state in states}) == 1
        assert states[0]["state"] == "READY"
        sender.close()
    with ws.connect(model, to=pair) as sender:
        report = sender.send_weights()
    assert held(pair) == [(report.version, digests(model))] * 2
    with pytest.raises(ConnectError, match=actor_name(doomed)):
        RayActorTransport(doomed).call(StatusRequest(), timeout_s=WAIT_S)
