"""Phase by phase, who dies or fails: survivors hold one known version, and the next update heals.

Three receivers: the victim and one more load as the case says, the third is staged. Every fleet
mixes callbacks and HTTP. The update that is hit sends the whole model, or is a delta. With `nixl`
each receiver is a host of its own, and the victim is the middle one of the chain.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import pytest

import weightsync as ws
from tests.e2e import models, processes, trainers
from tests.e2e.models import digests, fill, touch
from tests.e2e.processes import Apply, Host, Remote, wait_until
from tests.e2e.relays import Relay
from tests.hosts.namespaces import netns_problem
from weightsync.wire.messages import FinishRequest, InitRequest, UpdateRequest

Phase = Literal["init", "start", "middle", "prepared", "finish", "between"]
Fault = Literal["receiver dies", "receiver raises", "receiver cut off"]
PHASES: tuple[Phase, ...] = ("init", "start", "middle", "prepared", "finish", "between")
APPLIES: tuple[Apply, ...] = ("staged", "in_place")
FAULTS: tuple[Fault, ...] = ("receiver dies", "receiver raises", "receiver cut off")
PACKED: dict[str, Any] = {"packed": True, "bucket_nbytes": 16 << 10, "num_buckets": 2}
UNPACKED: dict[str, Any] = {"packed": False}
TIMEOUT_S = 15.0
KILLED = -signal.SIGKILL


@dataclass(frozen=True)
class Case:
    """One cell: `holds` are the versions that survivors may hold after the fault, 1 is the old."""

    phase: Phase
    fault: Fault
    apply: Apply
    packed: bool
    delta: bool = False
    backend: str = "auto"

    @property
    def name(self) -> str:
        path = "packed" if self.packed else "unpacked"
        path = path if self.backend == "auto" else self.backend
        kind = "-delta" if self.delta else ""
        return f"{self.phase}-{self.fault}-{self.apply}-{path}{kind}".replace(" ", "_")

    @property
    def holds(self) -> set[int]:
        if self.phase == "init":
            return {1}
        if self.phase in ("finish", "between"):
            return {2}
        if self.phase == "prepared":
            return {2}
        # Before the end of the bytes staged ones go back; in place they may have been touched.
        return {1} if self.apply == "staged" else {1, 2}

    @property
    def heals_itself(self) -> bool:
        """Who raises once in an update that cannot go back is sent it again, by itself."""
        late = self.phase in ("finish", "between")
        return self.fault == "receiver raises" and (late or self.apply == "in_place")


QUICK = {
    ("init", "receiver dies", "staged", True),
    ("init", "receiver raises", "in_place", True),
    ("init", "receiver cut off", "staged", True),
    ("start", "receiver dies", "in_place", True),
    ("start", "receiver raises", "staged", True),
    ("start", "receiver raises", "in_place", True),
    ("start", "receiver cut off", "staged", True),
    ("middle", "receiver dies", "staged", True),
    ("middle", "receiver dies", "in_place", False),
    ("middle", "receiver raises", "staged", False),
    ("middle", "receiver raises", "in_place", True),
    ("middle", "receiver cut off", "staged", False),
    ("middle", "receiver cut off", "in_place", True),
    ("prepared", "receiver dies", "staged", True),
    ("prepared", "receiver cut off", "in_place", True),
    ("finish", "receiver dies", "in_place", True),
    ("finish", "receiver raises", "staged", True),
    ("finish", "receiver cut off", "staged", True),
    ("between", "receiver dies", "staged", True),
    ("between", "receiver raises", "in_place", True),
    ("between", "receiver cut off", "in_place", True),
}
"""Each fault in each phase, and in the middle on each path; all cells are run in a soak."""

QUICK_DELTAS = {
    ("start", "receiver raises", "staged", True),
    ("middle", "receiver dies", "staged", False),
    ("middle", "receiver dies", "in_place", True),
    ("middle", "receiver raises", "in_place", False),
    ("middle", "receiver cut off", "staged", True),
    ("prepared", "receiver dies", "staged", True),
    ("finish", "receiver cut off", "in_place", True),
    ("between", "receiver raises", "staged", True),
}


QUICK_NIXL = {
    ("start", "receiver raises", "staged", False),
    ("middle", "receiver dies", "staged", False),
    ("middle", "receiver dies", "in_place", True),
    ("middle", "receiver cut off", "in_place", False),
    ("finish", "receiver dies", "staged", True),
}


def cases() -> Iterator[Any]:
    for phase, fault, apply in itertools.product(PHASES, FAULTS, APPLIES):
        if fault == "receiver raises" and phase == "prepared":
            continue  # nothing runs in a receiver then
        paths = (True, False) if phase == "middle" else (True,)
        kinds = (False, True) if phase != "init" else (False,)  # no delta before the connection
        for packed, delta in itertools.product(paths, kinds):
            cell = (phase, fault, apply, packed)
            quick = cell in (QUICK_DELTAS if delta else QUICK)
            case = Case(*cell, delta)
            yield pytest.param(case, id=case.name, marks=() if quick else pytest.mark.soak)
        for delta in kinds:
            quick = (phase, fault, apply, delta) in QUICK_NIXL
            case = Case(phase, fault, apply, True, delta, "nixl")
            yield pytest.param(case, id=case.name, marks=() if quick else pytest.mark.soak)


class Fleet:
    """Three receivers of version 1, the victim in a process of its own."""

    def __init__(self, case: Case, ours: Host, theirs: Host, last: Host) -> None:
        first = theirs.receiver("http", apply=case.apply, model="plain")
        self.victim = Relay(first, "the-victim")
        second = ours.receiver("callback", apply=case.apply, model="plain")
        third = last.receiver("http", apply="staged", model="plain")
        self.survivors = [Relay(second, "second"), Relay(third, "third")]
        self.relays = [self.survivors[0], self.victim, self.survivors[1]]
        self.model = models.make("plain", seed=1)
        self.known = {1: digests(self.model)}

    def change(self, version: int, *, all_values: bool) -> None:
        """Make the weights of a version."""
        (fill if all_values else touch)(self.model, seed=version)
        self.known[version] = digests(self.model)

    def versions(self, relays: list[Relay]) -> set[int]:
        """The versions in use; each is whole, and the bytes are those that were sent as it."""
        held = set()
        for relay in relays:
            version = relay.remote.reading(timeout_s=10.0)
            assert relay.remote.digests() == self.known[version], f"{relay.name} at {version}"
            held.add(version)
        return held


def arrange(case: Case, fleet: Fleet, host: Host) -> None:
    """Set the fault up."""
    victim = fleet.victim
    if case.fault == "receiver raises" or (case.fault, case.phase) in (
        ("receiver dies", "middle"),
        ("receiver dies", "finish"),
    ):
        step = {"middle": "load", "between": "finish"}.get(case.phase, case.phase)
        victim.remote.sabotage(step, "raise" if "raises" in case.fault else "die")  # type: ignore[arg-type]  # one of Step
    else:
        act = host.kill if case.fault == "receiver dies" else lambda: setattr(victim, "cut", True)
        if case.phase == "middle":
            victim.deaf = True
        elif case.phase == "finish":
            victim.before[FinishRequest] = lambda: setattr(victim, "deaf", True)
        elif case.phase == "prepared":
            dies = case.fault == "receiver dies"
            (victim.after if dies else victim.before)[UpdateRequest if dies else FinishRequest] = (
                act
            )
        else:
            kind = {"init": InitRequest, "start": UpdateRequest, "between": FinishRequest}
            victim.before[kind[case.phase]] = act
    if case.phase == "between":
        do = victim.before.pop(FinishRequest, lambda: None)
        others = [relay.remote for relay in fleet.survivors]

        def once_they_have_it() -> None:
            wait_until(lambda: all(r.status()["version"] == 2 for r in others), "their finish")
            do()

        victim.before[FinishRequest] = once_they_have_it


def bounded(call: Callable[[], object]) -> BaseException | None:
    """Return what `call` raised, within bounds."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as exc:  # noqa: BLE001  # handed to the test
            raised.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(processes.WAIT_S)
    assert not thread.is_alive(), "it hangs"
    return raised[0] if raised else None


@contextmanager
def connected(case: Case, fleet: Fleet) -> Iterator[ws.WeightSender]:
    with ws.connect(
        fleet.model,
        to=fleet.relays,
        timeout_s=TIMEOUT_S,
        delta="always" if case.delta else "off",
        backend=case.backend,
        **(PACKED if case.packed else UNPACKED),
    ) as sender:
        assert (sender.path == "nixl") is (case.backend == "nixl")
        yield sender


@pytest.fixture(scope="module")
def apart_processes() -> Iterator[list[Host]]:
    pytest.importorskip("nixl", reason="the package nixl, which `make venv` installs")
    if problem := netns_problem():
        pytest.skip(f"hosts cannot be made here: {problem}")
    with ExitStack() as stack:
        yield [stack.enter_context(processes.host(apart=True)) for _ in range(3)]


@pytest.fixture
def apart(
    apart_processes: list[Host], monkeypatch: pytest.MonkeyPatch, shm_clean: None
) -> Iterator[list[Host]]:
    """Processes of receivers which are hosts of their own, for `nixl`; used again by all tests."""
    for name, value in {**processes.NIXL_OVER_TCP, "WEIGHTSYNC_ADDRESS": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    yield apart_processes
    for each in apart_processes:
        each.forget()


@pytest.mark.parametrize("case", list(cases()))
def test_a_receiver_fails(case: Case, request: pytest.FixtureRequest) -> None:
    is_apart = case.backend == "nixl"
    hosts = request.getfixturevalue("apart") if is_apart else [request.getfixturevalue("host")]
    with processes.host(apart=is_apart) as theirs, ExitStack() as stack:
        fleet = Fleet(case, hosts[0], theirs, hosts[-1])
        if case.delta:
            sender = stack.enter_context(connected(case, fleet))
            sender.send_weights()
        else:
            with connected(case, fleet) as sender:
                sender.send_weights()
        if case.phase == "init":
            arrange(case, fleet, theirs)
            error = bounded(lambda: stack.enter_context(connected(case, fleet)))
        else:
            if not case.delta:
                sender = stack.enter_context(connected(case, fleet))
            fleet.change(2, all_values=not case.delta)
            arrange(case, fleet, theirs)
            error = bounded(sender.send_weights)
            assert all((relay.deltas > 0) is case.delta for relay in fleet.relays)

        if case.heals_itself and error is None:
            assert fleet.versions(fleet.relays) == {2}
        else:
            assert isinstance(
                error, ws.TransportError | ws.TransferError | ws.RemoteError | ws.ProtocolError
            ), error
            assert fleet.victim.name in str(error)
            held = fleet.versions(fleet.survivors)
            assert len(held) == 1
            assert held <= case.holds

        if case.fault == "receiver dies":
            again = stack.enter_context(processes.host(apart=is_apart))
            fleet.victim.redirect(again.receiver("callback", apply=case.apply, model="plain"))
        fleet.victim.cut = fleet.victim.deaf = False
        if case.phase == "init":
            sender = stack.enter_context(connected(case, fleet))
        fleet.change(9, all_values=not case.delta)
        report = sender.send_weights(version=9)
        assert report.version == 9
        assert fleet.versions(fleet.relays) == {9}
        assert report.rule == "two-phase" or case.apply == "in_place"
        if case.delta:
            fleet.change(10, all_values=False)
            assert is_delta(sender.send_weights(version=10))
            assert fleet.versions(fleet.relays) == {10}


def is_delta(report: ws.SyncReport) -> bool:
    return report.delta is not None and report.delta.sent


TRAINERS: dict[str, tuple[Callable[..., None], set[str]]] = {
    "init": (trainers.in_a_fleet_at_init, {"READY"}),
    "start": (trainers.in_a_fleet_at_start, {"READY"}),
    "middle-packed": (trainers.in_a_fleet_in_the_middle, {"READY", "TORN"}),
    "middle-unpacked": (trainers.in_a_fleet_while_read, {"READY", "TORN"}),
    "prepared": (trainers.in_a_fleet_after_prepared, {"PREPARED"}),
    "finish": (trainers.in_a_fleet_during_finish, {"READY", "PREPARED"}),
    "between": (trainers.in_a_fleet_between_finishes, {"READY", "PREPARED"}),
}


LONG = {
    ("init", "staged", False),
    ("start", "in_place", False),
    ("middle-unpacked", "staged", False),
    ("prepared", "in_place", False),
    ("between", "staged", False),
    ("middle-packed", "staged", True),
    ("prepared", "in_place", True),
    ("between", "staged", True),
}
DELTAS = ("middle-packed", "prepared", "between")


QUICK_NIXL_DEATHS = {("middle-packed", "staged", False), ("between", "in_place", False)}


def deaths() -> Iterator[Any]:
    for phase, apply, delta in itertools.product(TRAINERS, APPLIES, (False, True)):
        if delta and phase not in DELTAS:
            continue
        cell = (phase, apply, delta)
        name = "-".join([phase, apply, *["delta"] * delta])
        marks = pytest.mark.soak if cell in LONG else ()
        yield pytest.param(*cell, "auto", id=name, marks=marks)
        # The nine tensors before that death are a coded delta that fills no bucket.
        if phase != "middle-unpacked" and cell != ("middle-packed", "in_place", True):
            marks = () if cell in QUICK_NIXL_DEATHS else pytest.mark.soak
            yield pytest.param(*cell, "nixl", id=f"{name}-nixl", marks=marks)


@pytest.mark.parametrize(("phase", "apply", "delta", "backend"), list(deaths()))
def test_the_trainer_is_killed(
    request: pytest.FixtureRequest, phase: str, apply: Apply, delta: bool, backend: str
) -> None:
    """It dies in its first update, of the whole model, or in its second one, which is a delta."""
    is_apart = backend == "nixl"
    hosts = request.getfixturevalue("apart") if is_apart else [request.getfixturevalue("host")]
    die, states = TRAINERS[phase]
    if is_apart:
        die = partial(trainers.over_nixl, die)
    receivers = [
        hosts[0].receiver("http", apply=apply, model="plain"),
        hosts[len(hosts) // 2].receiver("http", apply="staged", model="plain"),
        hosts[-1].receiver("http", apply=apply, model="plain"),
    ]
    first, theirs = models.make("plain", seed=1), models.make("plain", seed=1 if delta else 7)
    if delta:
        touch(theirs, seed=7)
    known = {1: digests(first), 2: digests(theirs)}
    urls = [receiver.url for receiver in receivers]
    if not delta:
        with ws.connect(first, to=urls, backend=backend) as sender:
            sender.send_weights()
    assert processes.ended(die, urls, *[delta] * delta) == KILLED

    settled = {"READY", "TORN", "PREPARED"}
    wait_until(lambda: {r.status()["state"] for r in receivers} <= settled, "the update's end")
    assert {r.status()["state"] for r in receivers} <= states
    for receiver in receivers:
        whole(receiver, known, may_be_torn=apply == "in_place")
    committed = any(r.status()["version"] == 2 for r in receivers)
    assert committed is (phase in ("finish", "between"))
    if committed:
        waiting = [r.status() for r in receivers if r.status()["state"] == "PREPARED"]
        assert phase == "finish" or waiting
        assert all((s["version"], s["prepared_version"]) == (1, 2) for s in waiting)

    options: dict[str, Any] = {"delta": "always" if delta else "off", "backend": backend}
    with ws.connect(first, to=urls, **options) as sender:
        for receiver in receivers:
            whole(receiver, known, may_be_torn=apply == "in_place" and not committed)
        assert {r.status()["version"] for r in receivers} == {2 if committed else 1}
        fill(first, seed=3)
        known[3] = digests(first)
        assert sender.send_weights(version=3).rule == "two-phase"
        assert [receiver.reading() for receiver in receivers] == [3, 3, 3]
        assert all(receiver.digests() == known[3] for receiver in receivers)
        if delta:
            touch(first, seed=4)
            assert is_delta(sender.send_weights(version=4))
            assert all(receiver.digests() == digests(first) for receiver in receivers)


def whole(receiver: Remote, known: dict[int, dict[str, str]], *, may_be_torn: bool) -> None:
    """It holds one whole version, or says that it does not and refuses."""
    try:
        version = receiver.reading(timeout_s=0.3)
    except ws.NotReadyError:
        assert may_be_torn
        assert receiver.status()["may_generate"] is False
        return
    assert receiver.digests() == known[version]
