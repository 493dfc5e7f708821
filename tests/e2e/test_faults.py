"""Processes that die in the middle of an update, and readers that are late."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import weightsync as ws
from tests.e2e import models, processes, trainers
from tests.e2e.models import BUCKET_NBYTES, digests, fill
from tests.e2e.processes import Apply, Host, wait_until
from weightsync.shm.segment import find_leftovers, live_segments

KILLED = -signal.SIGKILL


@pytest.mark.parametrize("death", trainers.DEATHS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_a_trainer_is_killed(host: Host, apply: Apply, death: Callable[[str], None]) -> None:
    """dynamo#9131: recovery at the next init when the sender died in between."""
    receiver = host.receiver("http", apply=apply, model="plain")
    first = models.make("plain", seed=1)
    with ws.connect(first, to=receiver.url) as sender:
        sender.send_weights()
    held = receiver.digests()
    assert processes.ended(death, receiver.url) == KILLED

    nothing_came = death in (trainers.before_its_message, trainers.at_its_first_tensor)
    touched = apply == "in_place" and not nothing_came
    if death is not trainers.after_prepared:
        wait_until(lambda: receiver.status()["state"] in ("READY", "TORN"), "the update's end")
    status = receiver.status()
    assert status["version"] == 1
    if touched:
        with pytest.raises(ws.NotReadyError) as refused:
            receiver.reading(timeout_s=0.2)
        assert refused.value.update_id == status["update_id"]
        assert status["may_generate"] is False
    else:
        assert receiver.digests() == held
        assert receiver.reading() == 1
    assert status.get("orphaned", False) is (death is trainers.after_prepared)

    second = models.make("plain", seed=2)
    with ws.connect(second, to=receiver.url, packed=True, bucket_nbytes=BUCKET_NBYTES) as sender:
        assert not find_leftovers(), "the dead trainer's segments survived the next start"
        assert receiver.status()["state"] == ("TORN" if touched else "READY")
        for version in (2, 3):
            fill(second, seed=version)
            assert sender.send_weights().version == version
            assert receiver.digests() == digests(second)
            assert receiver.reading() == version


def test_leftovers_go_when_a_receiver_starts(host: Host) -> None:
    receiver = host.receiver("http", model="plain")
    assert processes.ended(trainers.before_its_message, receiver.url) == KILLED
    assert find_leftovers()
    host.receiver("http", model="plain")
    assert not find_leftovers()


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
def test_a_receiver_is_killed_in_the_middle(shm_clean: None, packed: bool) -> None:
    """verl#6967: no wait for ever; the error names who is gone, and a new one can be reached."""
    model = models.make("plain", seed=1)
    with processes.host() as dying, processes.host() as living:
        victim = dying.receiver("http", sink="hook", apply="in_place", model="plain", delay_s=0.2)
        other = living.receiver("http", apply="staged", model="plain")
        with ws.connect(
            model, to=[victim.url, other.url], packed=packed, bucket_nbytes=16 << 10, timeout_s=20
        ) as sender:
            held = other.digests()
            failed: list[BaseException] = []

            def send() -> None:
                try:
                    sender.send_weights()
                except ws.WeightSyncError as exc:
                    failed.append(exc)

            thread = threading.Thread(target=send)
            thread.start()
            wait_until(lambda: victim.status()["state"] == "UPDATING", "the update to begin")
            time.sleep(0.1)
            dying.kill()
            thread.join(processes.WAIT_S)
            assert not thread.is_alive()
            assert isinstance(failed[0], ws.TransportError | ws.TransferError)
            told = str(failed[0]) + "".join(getattr(failed[0], "__notes__", []))
            assert victim.url in told
            assert other.digests() == held
            assert other.reading() == 0
        with processes.host() as fresh:
            replacement = fresh.receiver("http", model="plain")
            with ws.connect(model, to=[replacement.url, other.url], packed=packed) as sender:
                sender.send_weights()
                assert replacement.digests() == other.digests() == digests(model)


def test_a_restarted_receiver_is_met_again(shm_clean: None) -> None:
    """vllm#40646: a restarted engine rejoins; miles#1724: only with the fleet's version."""
    model = models.make("everything", seed=1)
    now: list[Any] = []
    with processes.host() as first:
        now.append(first.receiver())
        with ws.connect(model, to=lambda m: now[-1](m)) as sender:  # noqa: PLW0108 # the last
            sender.send_weights()
            assert now[-1].digests() == digests(model)
            first.kill()
            with processes.host() as second:
                now.append(second.receiver())
                fill(model, seed=2)
                assert sender.send_weights().version == 2
                assert now[-1].digests() == digests(model)
                assert now[-1].reading() == 2
                fill(model, seed=3)
                sender.send_weights()
                assert now[-1].digests() == digests(model)


@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
@pytest.mark.parametrize("slow", [1, 2])
@pytest.mark.parametrize("readers", [2, 4])
def test_ms_swift_10204_a_late_reader_never_sees_an_overwritten_slot(
    host: Host, readers: int, slow: int, verify: bool
) -> None:
    delays = [0.01] * slow + [0.0] * (readers - slow)
    receivers = [
        host.receiver(sink="hook", apply="in_place", model="plain", delay_s=delay)
        for delay in delays
    ]
    model = models.make("plain", seed=1)
    with ws.connect(
        model, to=receivers, packed=True, bucket_nbytes=16 << 10, num_buckets=2, verify=verify
    ) as sender:
        for seed in (2, 3):
            fill(model, seed)
            sender.send_weights()
            wanted = digests(model)
            assert all(receiver.digests() == wanted for receiver in receivers)


def test_tokenspeed_1373_changed_bytes_are_found_and_named(host: Host) -> None:
    receiver = host.receiver()
    model = models.make("everything", seed=1)
    held = receiver.digests()
    with ws.connect(model, to=receiver, packed=True, bucket_nbytes=BUCKET_NBYTES) as sender:
        control = trainers.control_of(sender)
        genuine = control.write_fingerprints

        def spoil(at: int, values: Any) -> None:
            genuine(at, [values[0] ^ 1, *values[1:]])

        control.write_fingerprints = spoil  # type: ignore[method-assign]  # on purpose
        with pytest.raises(ws.VerificationError) as caught:
            sender.send_weights()
        assert "float64_matrix" in caught.value.names
        assert receiver.digests() == held
        assert receiver.reading() == 0
        control.write_fingerprints = genuine  # type: ignore[method-assign]  # as it was
        sender.send_weights()
        assert receiver.digests() == digests(model)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
def test_vllm_51258_two_hundred_updates_leak_nothing(host: Host, packed: bool) -> None:
    receiver = host.receiver("http", model="plain")
    model = models.make("plain", seed=1)
    with ws.connect(
        model, to=receiver.url, packed=packed, bucket_nbytes=BUCKET_NBYTES, num_buckets=2
    ) as sender:
        for _ in range(20):
            sender.send_weights()
        before = processes.footprint(), host.footprint()
        own = [segment.name for segment in live_segments()]
        for _ in range(200):
            sender.send_weights()
        after = processes.footprint(), host.footprint()
        assert [segment.name for segment in live_segments()] == own
        fill(model, seed=2)
        sender.send_weights()
        assert receiver.digests() == digests(model)
    for old, new in zip(before, after, strict=True):
        assert new["fds"] <= old["fds"]
        assert new["segments"] <= old["segments"]
        assert new["rss"] - old["rss"] < 200 * BUCKET_NBYTES / 2


def test_torchtitan_3795_the_trainer_may_write_when_send_weights_returns(host: Host) -> None:
    receiver = host.receiver(sink="hook", apply="in_place", model="plain", delay_s=0.05)
    model = models.make("plain", seed=1)
    with ws.connect(model, to=receiver, packed=False) as sender:
        sender.send_weights()
        sent = digests(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert receiver.digests() == sent


def test_what_a_dead_sender_shared_is_let_go_at_the_next_look(host: Host) -> None:
    receiver = host.receiver("http", model="plain")
    assert processes.ended(trainers.before_its_message, receiver.url) == KILLED
    wait_until(
        lambda: not receiver.status().get("shared_memory"), "the mappings of the dead sender"
    )
    with ws.connect(models.make("plain", seed=2), to=receiver.url) as sender:
        assert receiver.status()["shared_memory"]
        assert sender.send_weights().verified == "held"
