"""Fleets that grow, shrink, restart and fail: one version for all, nobody disturbed for another."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import requests
import torch

import weightsync as ws
from tests.e2e import models, processes
from tests.e2e.models import digests, fill
from tests.e2e.processes import Host
from tests.e2e.relays import Relay
from weightsync.backends.ring import MAX_READERS
from weightsync.wire.messages import (
    AbortRequest,
    FetchRequest,
    FinishRequest,
    InitRequest,
    ShutdownRequest,
    StatusRequest,
    UpdateRequest,
)

FORMS: dict[str, dict[str, Any]] = {
    "packed": {"packed": True, "bucket_nbytes": 16 << 10, "num_buckets": 2},
    "unpacked": {"packed": False},
}
TIMEOUT_S = 15.0
FORM = pytest.mark.parametrize("form", FORMS)


def make(host: Host, count: int, *, apply: str = "mixed", **place: Any) -> list[Relay]:
    """Receivers behind relays: callback and HTTP, staged and in place in turn."""
    relays = []
    for i in range(count):
        kind = ("staged", "in_place")[i % 2] if apply == "mixed" else apply
        remote = host.receiver(("callback", "http")[i % 2], apply=kind, model="plain", **place)
        relays.append(Relay(remote, f"receiver {chr(ord('A') + i)}"))
    return relays


def keeps_no_copy(host: Host, name: str = "hook") -> Relay:
    """A receiver from which others cannot fetch."""
    return Relay(host.receiver(sink="hook", apply="in_place", model="plain"), name)


def connect(model: torch.nn.Module, to: object, form: str = "packed", **more: Any) -> Any:
    settings: dict[str, Any] = {"timeout_s": TIMEOUT_S, **FORMS[form], **more}
    return ws.connect(model, to=to, **settings)  # type: ignore[arg-type]  # a target or several


def holds(relays: list[Relay], version: int, model: torch.nn.Module) -> None:
    """All generate with this version, bit for bit."""
    wanted = digests(model)
    for relay in relays:
        assert relay.remote.reading() == version, relay.name
        assert relay.remote.digests() == wanted, relay.name


def frozen(relays: list[Relay]) -> Callable[[], None]:
    """Return what asserts that these are as they were, and were only asked for what they hold."""
    before = [(len(relay.seen), relay.remote.status()) for relay in relays]

    def check() -> None:
        for relay, (seen, status) in zip(relays, before, strict=True):
            assert set(relay.seen[seen:]) <= {StatusRequest, FetchRequest}, relay.name
            now = relay.remote.status()
            for each in (status, now):
                for entry in each.get("shared_memory", []):
                    entry.pop("age_s")
            assert now == status, relay.name

    return check


@pytest.mark.parametrize(("form", "count"), [("packed", 1), ("packed", 3), ("unpacked", 2)])
def test_a_fleet_is_kept_in_step(host: Host, form: str, count: int) -> None:
    model, relays = models.make("plain", seed=1), make(host, count)
    with connect(model, relays, form) as sender:
        for version in (1, 2, 3):
            fill(model, seed=version)
            report = sender.send_weights()
            assert (report.version, report.rule, report.dropped) == (version, "two-phase", {})
            assert [r.target for r in report.receivers] == [relay.name for relay in relays]
            assert report.control_messages == 2 * count
            holds(relays, version, model)


class TestJoining:
    @FORM
    def test_a_late_joiner_gets_the_current_version(self, host: Host, form: str) -> None:
        model = models.make("plain", seed=1)
        first, second, late = make(host, 3)
        with connect(model, [first, second], form) as sender:
            sender.send_weights(label="blue")
            undisturbed = frozen([first, second])
            report = sender.add(late)
            undisturbed()
            assert report is not None
            assert (report.version, [r.target for r in report.receivers]) == (1, [late.name])
            assert late.remote.status()["label"] == "blue"
            holds([first, second, late], 1, model)
            fill(model, seed=2)
            sender.send_weights()
            holds([first, second, late], 2, model)

    def test_before_the_first_version_there_is_nothing_to_bring(self, host: Host) -> None:
        model, (first, late) = models.make("plain", seed=1), make(host, 2)
        with connect(model, first) as sender:
            assert sender.add(late) is None
            assert late.remote.reading() == 0
            sender.send_weights()
            holds([first, late], 1, model)

    def test_miles_1724_a_joiner_takes_no_traffic_before_it_has_weights(self, host: Host) -> None:
        model = models.make("plain", seed=1)
        first, late = make(host, 2)
        told: list[tuple[str, str]] = []

        def look() -> None:
            with pytest.raises(ws.NotReadyError) as refused:
                late.remote.reading(timeout_s=0.2)
            told.append((refused.value.state, str(refused.value)))
            health = requests.get(f"{late.remote.url}/health", timeout=10)
            told.append((str(health.status_code), health.json()["detail"]))

        with connect(model, first) as sender:
            sender.send_weights(version=4)
            late.after[InitRequest] = lambda: None if told else look()
            sender.add(late)
            assert [state for state, _ in told] == ["CATCHING_UP", "503"]
            assert all("holds version 0" in text and "version 4" in text for _, text in told)
            assert requests.get(f"{late.remote.url}/health", timeout=10).status_code == 200
            holds([first, late], 4, model)

    def test_a_sender_that_never_sent_a_version_does_not_make_one_up(self, host: Host) -> None:
        model = models.make("plain", seed=1)
        first, late = make(host, 2)
        with connect(model, first) as sender:
            sender.send_weights(version=5)
        sent = digests(model)
        fill(model, seed=2)
        with connect(model, first) as resumed:
            assert resumed.version == 5
            assert resumed.add(late) is not None  # by the first
            assert late.remote.reading() == 5
            assert late.remote.digests() == sent
            with pytest.raises(ws.ConfigError, match="has not sent version 5"):
                resumed.resync(late.name)
            resumed.send_weights()
            holds([first, late], 6, model)

    def test_a_joiner_whose_sender_leaves_is_ready_again(self, host: Host) -> None:
        model, (late,) = models.make("plain", seed=1), make(host, 1)
        first = keeps_no_copy(host)
        with connect(model, first) as sender:
            sender.send_weights()
        with connect(model, first) as sender:
            sender.add(late)
            assert late.remote.status()["state"] == "CATCHING_UP"
            sender.remove(late.name)
            assert late.remote.reading() == 0
            sender.add(late)
            assert late.remote.status()["state"] == "CATCHING_UP"
        assert late.remote.reading() == 0

    def test_a_receiver_that_fell_behind_joins_at_connect(self, host: Host) -> None:
        model = models.make("plain", seed=1)
        ahead, behind = make(host, 2)
        with connect(model, ahead) as sender:
            sender.send_weights(version=3)
        with connect(model, [ahead, behind]) as sender:
            assert ahead.remote.reading() == 3
            with pytest.raises(ws.NotReadyError, match="fleet that holds version 3"):
                behind.remote.reading(timeout_s=0.2)
            assert sender.send_weights().version == 4
            holds([ahead, behind], 4, model)

    def test_a_changed_source_is_not_passed_off_as_the_version_sent(self, host: Host) -> None:
        model, (late,) = models.make("plain", seed=1), make(host, 1)
        first, second = keeps_no_copy(host), keeps_no_copy(host, "another")
        with connect(model, [first, second]) as sender:
            sender.send_weights()
            fill(model, seed=2)
            undisturbed = frozen([first, second])
            with pytest.raises(ws.TransferError, match="changed since version 1"):
                sender.add(late)
            undisturbed()
            assert sender.targets == [first.name, second.name]
            assert late.remote.reading() == 0
            assert not late.remote.status().get("shared_memory")
            sender.send_weights()
            holds([first, second], 2, model)

    def test_a_changed_source_is_not_sent_again(self, host: Host) -> None:
        model, (first, second) = models.make("plain", seed=1), make(host, 2)
        with connect(model, [first, second]) as sender:
            sender.send_weights()
            sent = digests(model)
            fill(model, seed=2)
            with pytest.raises(ws.TransferError, match="changed since version 1"):
                sender.resync(first.name)
            assert first.remote.digests() == second.remote.digests() == sent
            sender.send_weights()
            holds([first, second], 2, model)

    @pytest.mark.parametrize("step", ["init", "start", "load", "finish"])
    def test_a_joiner_that_fails_leaves_no_trace(self, host: Host, step: Any) -> None:
        model, (late,) = models.make("plain", seed=1), make(host, 1)
        first, second = keeps_no_copy(host), keeps_no_copy(host, "another")
        with connect(model, [first, second]) as sender:
            sender.send_weights()
            late.remote.sabotage(step, "raise")
            undisturbed = frozen([first, second])
            with pytest.raises(ws.RemoteError, match=late.name):
                sender.add(late)
            undisturbed()
            assert sender.targets == [first.name, second.name]
            assert not late.remote.status().get("shared_memory")
            fill(model, seed=2)
            sender.send_weights()
            holds([first, second], 2, model)
            assert sender.add(late) is not None
            holds([first, second, late], 2, model)

    @pytest.mark.parametrize("step", ["init", "start", "load", "finish"])
    def test_a_joiner_that_fails_once_is_sent_the_version(self, host: Host, step: Any) -> None:
        """What it cannot fetch from a receiver, the source sends."""
        model = models.make("plain", seed=1)
        first, second, late = make(host, 3, apply="staged")
        with connect(model, [first, second]) as sender:
            sender.send_weights()
            late.remote.sabotage(step, "raise")
            assert sender.add(late) is not None
            holds([first, second, late], 1, model)
            fill(model, seed=2)
            sender.send_weights()
            holds([first, second, late], 2, model)


class TestWhoIsWho:
    def test_one_receiver_is_named_once(self, host: Host) -> None:
        model = models.make("plain", seed=1)
        first, second = make(host, 2)
        again = Relay(first.remote, "the first again")
        with pytest.raises(ws.ConfigError, match="same receiver") as caught:
            connect(model, [first, second, again])
        assert "receiver A" in str(caught.value)
        assert "the first again" in str(caught.value)
        with connect(model, [first, second]) as sender:
            sender.send_weights()
            undisturbed = frozen([second])
            for target, told in ((again, "same receiver"), (first, "already")):
                with pytest.raises(ws.ConfigError, match=told):
                    sender.add(target)
            undisturbed()
            assert sender.targets == [first.name, second.name]
            sender.send_weights()
            holds([first, second], 2, model)

    def test_callables_of_one_name_are_told_apart(self) -> None:
        receivers = [ws.WeightReceiver(torch.nn.Linear(8, 8)) for _ in range(3)]
        with ws.connect(torch.nn.Linear(8, 8), to=[r.handle for r in receivers]) as sender:
            first, second, third = sender.targets
            assert (second, third) == (f"{first}#2", f"{first}#3")
            sender.remove(second)
            sender.send_weights()
            assert [receiver.version for receiver in receivers] == [1, 0, 1]
            sender.add(receivers[1].handle)
            assert sender.targets == [first, third, second]
        for receiver in receivers:
            receiver.close()

    def test_another_protocol_is_named(self, host: Host) -> None:
        first, second = (relay.remote for relay in make(host, 2))

        def of_tomorrow(message: Any) -> object:
            reply = second(message)
            if message["call"] == "weight_info":
                reply.update(protocol_min=7, protocol=7)  # type: ignore[attr-defined]  # plain data
            return reply

        model = models.make("plain", seed=1)
        with pytest.raises(
            ws.ProtocolError,
            match="of_tomorrow: no common protocol: the sender has 1, the receiver 7",
        ):
            connect(model, [first, of_tomorrow])
        with connect(model, first) as sender:
            with pytest.raises(
                ws.ProtocolError,
                match="of_tomorrow: no common protocol: the sender has 1, the receiver 7",
            ):
                sender.add(of_tomorrow)
            sender.send_weights()

    def test_two_receivers_behind_one_target_are_found_out(self, host: Host) -> None:
        """A balancer that sends each message to another server: two claim one place."""
        pair = [host.receiver(model="plain"), host.receiver(model="plain")]
        turn = iter(range(10_000))

        def balancer(message: Any) -> object:
            return pair[next(turn) % 2](message)

        model = models.make("plain", seed=1)
        with pytest.raises(ws.ProtocolError, match=r"balancer.*several receivers"):
            connect(model, balancer)
        assert [remote.reading() for remote in pair] == [0, 0]

    def test_an_answer_without_a_look_at_the_ring_is_found_out(self, host: Host) -> None:
        """The bytes of one receiver's place are read by nobody: it must not be waited for."""
        model, (first, second) = models.make("plain", seed=1), make(host, 2, apply="staged")

        def elsewhere(message: Any) -> object:
            if message["call"] == "update_weights":
                return {"state": "PREPARED", "version": 0, "apply": "staged"}
            return second.remote(message)

        with connect(model, [first, elsewhere]) as sender:
            with pytest.raises(ws.ProtocolError, match=r"elsewhere.*the ring to its end"):
                sender.send_weights()
            assert first.remote.reading() == 0

    def test_an_unreachable_target_is_named(self, host: Host) -> None:
        model, (first,) = models.make("plain", seed=1), make(host, 1)
        nowhere = "http://127.0.0.1:9"
        with pytest.raises(ws.ConnectError, match=nowhere):
            connect(model, [first, nowhere])
        with connect(model, first) as sender:
            with pytest.raises(ws.ConnectError, match=nowhere):
                sender.add(nowhere)
            assert sender.targets == [first.name]
            with pytest.raises(ws.ConfigError, match="no receiver nobody in the fleet: receiver A"):
                sender.remove("nobody")
            with pytest.raises(ws.ConfigError, match="last receiver"):
                sender.remove(first.name)
            sender.send_weights()
            holds([first], 1, model)


class TestLeaving:
    @FORM
    def test_who_leaves_keeps_its_weights(self, host: Host, form: str) -> None:
        model, relays = models.make("plain", seed=1), make(host, 3)
        leaving = relays[1]
        with connect(model, relays, form) as sender:
            sender.send_weights()
            sent = digests(model)
            undisturbed = frozen([relays[0], relays[2]])
            sender.remove(leaving.name)
            undisturbed()
            assert leaving.closed
            assert not leaving.remote.status().get("shared_memory")
            fill(model, seed=2)
            sender.send_weights()
            holds([relays[0], relays[2]], 2, model)
            assert leaving.remote.digests() == sent
            assert leaving.remote.reading() == 1

    def test_places_are_never_used_up(self, host: Host) -> None:
        model = models.make("plain", seed=1)
        first, guest = make(host, 2)
        with connect(model, first) as sender:
            sender.send_weights()
            for _ in range(MAX_READERS + 4):
                sender.add(guest)
                sender.remove(guest.name)
            sender.add(guest)
            fill(model, seed=2)
            sender.send_weights()
            holds([first, guest], 2, model)


class TestResync:
    @FORM
    def test_one_is_brought_up_to_date_alone(self, host: Host, form: str) -> None:
        model, relays = models.make("plain", seed=1), make(host, 3)
        with connect(model, relays, form) as sender:
            with pytest.raises(ws.ConfigError, match="no version was sent"):
                sender.resync(relays[0].name)
            sender.send_weights()
            for lost in relays:
                others = frozen([relay for relay in relays if relay is not lost])
                torn = host.receiver("http", model="plain")
                lost.redirect(torn)
                report = sender.resync(lost.name)
                others()
                assert report.version == 1
                padding = report.written_nbytes - report.nbytes
                assert padding < 64 * report.tensors if form == "packed" else padding < 0
                holds(relays, 1, model)
            fill(model, seed=2)
            sender.send_weights()
            holds(relays, 2, model)

    def test_after_an_update_of_the_callers_own_tensors_there_is_nothing_to_repeat(
        self, host: Host
    ) -> None:
        model, (first, late) = models.make("plain", seed=1), make(host, 2)
        with connect(model, first) as sender:
            sender.send_weights()
            with sender.update(partial=True) as update:
                update.send([("large", model.get_parameter("large").detach())])
            with pytest.raises(ws.ConfigError, match="has not sent version 2 as a whole"):
                sender.resync(first.name)
            assert sender.add(late) is None
            with pytest.raises(ws.NotReadyError):
                late.remote.reading(timeout_s=0.2)
            with (
                pytest.raises(ws.ProtocolError, match=late.name),
                sender.update(partial=True) as update,
            ):
                update.send([("large", model.get_parameter("large").detach())])
            sender.send_weights()
            holds([first, late], sender.version, model)


class TestRestarts:
    @FORM
    def test_a_restarted_target_is_met_again(self, host: Host, form: str) -> None:
        """vllm#40646, NeMo-RL#3944."""
        model, relays = models.make("plain", seed=1), make(host, 3)
        with connect(model, relays, form) as sender:
            sender.send_weights()
            for version, restarted in enumerate(relays, 2):
                restarted.redirect(host.receiver("http", model="plain"))
                states: list[str] = []
                remote = restarted.remote
                restarted.after[InitRequest] = lambda: states.append(remote.status()["state"])  # noqa: B023  # called within the turn
                fill(model, seed=version)
                assert sender.send_weights().version == version
                assert states == ["CATCHING_UP"]
                holds(relays, version, model)

    @pytest.mark.parametrize("apply", ["staged", "in_place"])
    @pytest.mark.parametrize("on_failure", ["abort", "drop"])
    def test_a_restart_between_prepare_and_finish(
        self, host: Host, apply: str, on_failure: str
    ) -> None:
        model, relays = models.make("plain", seed=1), make(host, 3, apply=apply)
        with connect(model, relays, on_failure=on_failure) as sender:
            sender.send_weights()
            fill(model, seed=2)
            fresh = host.receiver(model="plain")
            relays[1].before[FinishRequest] = lambda: relays[1].redirect(fresh)
            others = [len(relays[0].seen), len(relays[2].seen)]
            report = sender.send_weights()
            assert (report.version, report.rule, report.dropped) == (2, "roll-forward", {})
            assert {r.target for r in report.receivers} == {relay.name for relay in relays}
            for relay, seen in zip((relays[0], relays[2]), others, strict=True):
                assert relay.seen[seen:] == [UpdateRequest, FinishRequest]
            holds(relays, 2, model)


class TestFailures:
    @pytest.mark.parametrize("step", ["start", "load"])
    def test_one_refusal_aborts_all_staged(self, host: Host, step: Any) -> None:
        model, relays = models.make("plain", seed=1), make(host, 3, apply="staged")
        with connect(model, relays, "unpacked") as sender:
            sender.send_weights()
            sent = digests(model)
            fill(model, seed=2)
            relays[1].remote.sabotage(step, "raise")
            seen = [len(relay.seen) for relay in relays]
            with pytest.raises(ws.RemoteError, match=relays[1].name):
                sender.send_weights()
            for relay, start in zip(relays, seen, strict=True):
                assert FinishRequest not in relay.seen[start:]
                assert relay.remote.reading() == 1
                assert relay.remote.digests() == sent
            assert sender.send_weights().version == 2
            holds(relays, 2, model)

    @FORM
    def test_in_place_the_others_go_on_and_the_failed_one_follows(
        self, host: Host, form: str
    ) -> None:
        """dynamo#9131, NeMo-RL#3274, trl#6913."""
        model, relays = models.make("plain", seed=1), make(host, 3, apply="in_place")
        with connect(model, relays, form) as sender:
            sender.send_weights()
            fill(model, seed=2)
            relays[1].remote.sabotage("load", "raise")
            report = sender.send_weights()
            assert (report.version, report.rule) == (2, "roll-forward")
            assert len(report.receivers) == 3
            holds(relays, 2, model)
            assert sender.send_weights().rule == "two-phase"

    @FORM
    def test_who_cannot_be_healed_is_named_and_the_others_hold_the_version(
        self, host: Host, form: str
    ) -> None:
        model = models.make("plain", seed=1)
        others = make(host, 2)
        lost = Relay(
            host.receiver("http", sink="hook", apply="in_place", model="plain"), "the lost one"
        )
        with connect(model, [*others, lost], form) as sender:
            sender.send_weights()
            fill(model, seed=2)
            lost.remote.hinder(failing_calls=1000)
            with pytest.raises(ws.RemoteError, match=r"the lost one failed.*hold version 2"):
                sender.send_weights()
            holds(others, 2, model)
            with pytest.raises(ws.NotReadyError):
                lost.remote.reading(timeout_s=0.2)
            assert sender.version == 2
            lost.remote.hinder()
            undisturbed = frozen(others)
            sender.resync(lost.name)
            undisturbed()
            assert lost.remote.digests() == digests(model)
            fill(model, seed=3)
            sender.send_weights()
            holds(others, 3, model)

    def test_two_may_fail_at_once(self, host: Host) -> None:
        model, relays = models.make("plain", seed=1), make(host, 3, apply="in_place")
        with connect(model, relays, "unpacked") as sender:
            sender.send_weights()
            fill(model, seed=2)
            relays[0].remote.sabotage("load", "raise")
            relays[2].remote.sabotage("finish", "raise")
            assert sender.send_weights().rule == "roll-forward"
            holds(relays, 2, model)
            fill(model, seed=3)
            relays[0].before[FinishRequest] = lambda: setattr(relays[0], "cut", True)
            relays[2].before[FinishRequest] = lambda: setattr(relays[2], "cut", True)
            with pytest.raises(ws.ConnectError) as caught:
                sender.send_weights()
            assert all(relay.name in str(caught.value) for relay in (relays[0], relays[2]))
            holds([relays[1]], 3, model)
            with pytest.raises(ws.ConnectError, match=relays[0].name):
                sender.send_weights()
            holds([relays[1]], 3, model)
            relays[0].cut = relays[2].cut = False
            sender.send_weights()
            holds(relays, 4, model)

    def test_a_lost_answer_to_finish_is_asked_for_again(self, host: Host) -> None:
        model, relays = models.make("plain", seed=1), make(host, 2)
        with connect(model, relays) as sender:
            sender.send_weights()
            fill(model, seed=2)

            def once() -> None:
                relays[0].deaf = True
                threading.Timer(0.05, lambda: setattr(relays[0], "deaf", False)).start()

            relays[0].before[FinishRequest] = once
            try:
                sender.send_weights()
            except ws.ConnectError:
                assert relays[1].remote.reading() == 2
                relays[0].deaf = False
                sender.resync(relays[0].name)
            holds(relays, 2, model)

    def test_a_reader_that_stopped_is_named(self, shm_clean: None) -> None:
        """verl#6967: nobody knew who was missing."""
        model = models.make("plain", seed=1)
        with processes.host() as living, processes.host() as sleeping:
            other = living.receiver("http", model="plain")
            asleep = sleeping.receiver("http", model="plain")
            with connect(model, [other.url, asleep.url], timeout_s=3.0) as sender:
                sender.send_weights()
                with (
                    sleeping.stopped(),
                    pytest.raises(
                        (ws.TransferTimeout, ws.TransportTimeout),
                        match=asleep.url,  # whichever is first
                    ),
                ):
                    sender.send_weights()
                assert other.reading() == 1
                assert sender.send_weights().version == 2
                assert asleep.reading() == other.reading() == 2

    def test_a_target_that_answers_slowly_is_named(self, host: Host) -> None:
        model, (first,) = models.make("plain", seed=1), make(host, 1)
        silent = Silent()
        with silent as url:
            with pytest.raises(ws.TransportTimeout, match=url):
                connect(model, [first, url], timeout_s=3.0)
            with connect(model, first, timeout_s=3.0) as sender:
                with pytest.raises(ws.TransportTimeout, match=url):
                    sender.add(url)
                sender.send_weights()
        holds([first], 1, model)


class TestDropping:
    @pytest.mark.parametrize(
        ("form", "step", "apply"),
        [
            ("packed", "start", "staged"),
            ("unpacked", "start", "in_place"),
            ("packed", "load", "in_place"),
            ("packed", "load", "mixed"),
            ("unpacked", "load", "staged"),
            ("packed", "finish", "mixed"),
            ("unpacked", "finish", "in_place"),
        ],
    )
    def test_a_fleet_goes_on_without_who_fails(
        self, host: Host, form: str, step: Any, apply: str
    ) -> None:
        model, relays = models.make("plain", seed=1), make(host, 3, apply=apply)
        with connect(model, relays, form, on_failure="drop") as sender:
            sender.send_weights()
            fill(model, seed=2)
            relays[1].remote.sabotage(step, "raise")
            report = sender.send_weights()
            assert list(report.dropped) == [relays[1].name]
            assert f"sabotage of {step}" in report.dropped[relays[1].name]
            assert sender.targets == [relays[0].name, relays[2].name]
            holds([relays[0], relays[2]], 2, model)
            assert not relays[1].remote.status().get("shared_memory")
            assert sender.send_weights().dropped == {}
            assert sender.add(relays[1]) is not None
            holds(relays, 3, model)

    @pytest.mark.parametrize("when", [UpdateRequest, FinishRequest, AbortRequest])
    def test_who_is_cut_off_is_dropped(self, host: Host, when: type) -> None:
        model, relays = models.make("plain", seed=1), make(host, 3)
        with connect(model, relays, on_failure="drop") as sender:
            sender.send_weights()
            fill(model, seed=2)
            relays[2].before[when] = lambda: setattr(relays[2], "cut", True)
            if when is AbortRequest:
                relays[0].remote.sabotage("load", "raise")
            report = sender.send_weights()
            gone = relays[:1] if when is AbortRequest else []
            gone += [relays[2]]
            assert set(report.dropped) == {relay.name for relay in gone}
            holds([relay for relay in relays if relay not in gone], 2, model)

    def test_who_was_lost_since_is_dropped_when_we_meet(self, host: Host) -> None:
        model, relays = models.make("plain", seed=1), make(host, 3)
        with connect(model, relays, on_failure="drop") as sender:
            sender.send_weights()
            sender.release()
            relays[0].cut = True
            fill(model, seed=2)
            assert list(sender.send_weights().dropped) == [relays[0].name]
            holds(relays[1:], 2, model)

    def test_the_last_one_is_never_dropped(self, host: Host) -> None:
        model, relays = models.make("plain", seed=1), make(host, 2)
        with connect(model, relays, on_failure="drop") as sender:
            sender.send_weights()
            for relay in relays:
                relay.cut = True
            with pytest.raises(ws.ConnectError, match="receiver"):
                sender.send_weights()
            assert len(sender.targets) >= 1
            for relay in relays:
                relay.cut = False
            fill(model, seed=2)
            sender.send_weights()
            holds(
                [relay for relay in relays if relay.name in sender.targets], sender.version, model
            )

    def test_at_connect_everyone_has_to_be_there(self, host: Host) -> None:
        first, second = make(host, 2)
        second.cut = True
        with pytest.raises(ws.ConnectError, match=second.name):
            connect(models.make("plain"), [first, second], on_failure="drop")

    def test_a_block_that_lost_one_goes_without_it_the_next_time(self, host: Host) -> None:
        model, relays = models.make("plain", seed=1), make(host, 3, apply="staged")
        with connect(model, relays, on_failure="drop") as sender:
            relays[1].remote.sabotage("load", "raise")
            with pytest.raises(ws.RemoteError, match=relays[1].name), sender.update() as update:
                update.send(model.named_parameters())
            assert sender.targets == [relays[0].name, relays[2].name]
            with sender.update() as update:
                update.send(model.named_parameters())
            assert list(update.last_report.dropped) == [relays[1].name]
            holds([relays[0], relays[2]], 1, model)


class Silent:
    """A server that takes connections and never answers."""

    def __enter__(self) -> str:
        self._listener = socket.create_server(("127.0.0.1", 0))
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        self._listener.close()


def test_messages_are_counted_over_all_who_ever_were_there(host: Host) -> None:
    model, relays = models.make("plain", seed=1), make(host, 2)
    with connect(model, relays, on_failure="drop") as sender:
        sender.send_weights()
        relays[1].cut = True
        report = sender.send_weights()
        assert report.control_messages >= 4
        assert StatusRequest in relays[0].seen
        assert ShutdownRequest in relays[1].seen
