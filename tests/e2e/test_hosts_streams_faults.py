"""Two trainer hosts that each send what their rank holds to two others, of which one fails."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

import weightsync as ws
from tests.e2e import processes, several_hosts
from tests.e2e.processes import Remote, wait_until
from tests.e2e.sabotage import Act, Step
from tests.e2e.several_hosts import Trainer, half_reachable, sent_nbytes, together, told
from tests.e2e.test_hosts_chain import BUCKET_NBYTES, MIDDLE_S, RATE, TIMEOUT_S, stopped
from tests.hosts.namespaces import HostNetwork, host_network, limit_problem
from weightsync.shm.segment import cleanup_stale

pytestmark = [
    pytest.mark.skipif(bool(limit_problem()), reason="needs root, and tc"),
    pytest.mark.timeout(120),
]
PATIENT_S = 60.0


@pytest.fixture(scope="module")
def network() -> Iterator[HostNetwork]:
    with host_network(4) as made:
        yield made


class Crossed:
    """Ranks on the first two hosts, and receivers on the two others, which may die.

    Half of the model, 8.4 MB, takes 0.7 s on the link of each trainer host.
    """

    def __init__(self, network: HostNetwork, stack: ExitStack) -> None:
        self.network, self._stack = network, stack
        self.crew: list[Trainer] = []
        self.hosts = [stack.enter_context(several_hosts.receivers(h)) for h in network.hosts[2:]]
        self.fleet: list[Remote] = []

    def connect(
        self, places: Sequence[int] = (0, 1), apply: Sequence[str] = (), **options: object
    ) -> None:
        self.fleet = [
            self.hosts[place].receiver("http", model="squares", apply=each)
            for place, each in zip(places, apply or ["staged"] * len(places), strict=True)
        ]
        self.crew = self._stack.enter_context(
            several_hosts.ranks(*self.network.hosts[:2], model="squares")
        )
        given = {"timeout_s": TIMEOUT_S, "bucket_nbytes": BUCKET_NBYTES, "delta": "off", **options}
        outcomes = together(self.crew, "connect", [remote.url for remote in self.fleet], **given)
        assert not [outcome for outcome in outcomes if isinstance(outcome, Exception)], outcomes

    def send(self, seed: int) -> ws.SyncReport:
        self.begin(seed, None)
        return self.end()

    def begin(self, seed: int, rate: str | None = RATE) -> None:
        """Send, over slow links if there is a `rate`; return in the middle then."""
        if rate is not None:
            self.network.limit(rate)
        for rank in self.crew:
            rank.begin("send", seed)
        time.sleep(MIDDLE_S if rate is not None else 0.0)

    def end(self) -> ws.SyncReport:
        first, second = (rank.end() for rank in self.crew)
        assert first == second
        assert first.gathered == {}
        report: ws.SyncReport = first
        return report

    def check(self, version: int, fleet: Sequence[Remote]) -> None:
        wanted = self.crew[0].do("digests")
        for remote in fleet:
            assert remote.digests() == wanted, remote.url
            assert remote.reading() == version


def victims(*quick: int) -> pytest.MarkDecorator:
    """Each of two hosts, by either backend; by `nixl` only these outside of soaks."""
    cells = [pytest.param("tcp", victim) for victim in (0, 1)]
    for victim in (0, 1):
        marks = () if victim in quick else pytest.mark.soak
        cells.append(pytest.param("nixl", victim, marks=marks))
    return pytest.mark.parametrize(("backend", "victim"), cells)


@pytest.fixture
def crossed(network: HostNetwork) -> Iterator[Crossed]:
    with ExitStack() as stack:
        yield Crossed(network, stack)
        network.unlimit()
    for host in network.hosts:
        host.call(cleanup_stale)


@victims(0)
def test_a_receiving_host_that_is_killed_costs_only_itself(
    crossed: Crossed, backend: str, victim: int
) -> None:
    """The other host reads what that one would have passed on from the rank itself."""
    crossed.connect(on_failure="drop", num_buckets=32, backend=backend)
    crossed.send(1)
    before = [sent_nbytes(host) for host in crossed.network.hosts[:2]]
    crossed.begin(2)
    crossed.hosts[victim].kill()
    report = crossed.end()
    after = [sent_nbytes(host) for host in crossed.network.hosts[:2]]
    assert list(report.dropped) == [crossed.fleet[victim].url]
    assert report.version == 2
    sent = [now - then for now, then in zip(after, before, strict=True)]
    # What was on its way to that host, from either rank, is sent again.
    assert sum(sent) < 1.45 * report.nbytes
    crossed.check(2, [crossed.fleet[1 - victim]])
    crossed.network.unlimit()
    assert crossed.send(3).version == 3
    crossed.check(3, [crossed.fleet[1 - victim]])


def test_a_receiving_host_that_is_killed_without_drop_ends_the_update(crossed: Crossed) -> None:
    crossed.connect()
    crossed.send(1)
    held = crossed.fleet[0].digests()
    crossed.begin(2)
    crossed.hosts[1].kill()
    errors = [_error(rank) for rank in crossed.crew]
    assert all(crossed.fleet[1].url in told(error) for error in errors), errors
    assert crossed.fleet[0].digests() == held
    assert crossed.fleet[0].reading() == 1


@victims()
def test_a_receiving_host_that_stands_still_is_gone_round(
    crossed: Crossed, backend: str, victim: int
) -> None:
    crossed.connect(on_failure="drop", backend=backend)
    crossed.send(1)
    crossed.begin(2)
    with stopped(crossed.hosts[victim]):
        report = crossed.end()
    assert list(report.dropped) == [crossed.fleet[victim].url]
    crossed.check(2, [crossed.fleet[1 - victim]])


@victims(1)
def test_a_trainer_host_that_is_killed_commits_nowhere(
    crossed: Crossed, backend: str, victim: int
) -> None:
    crossed.connect(backend=backend)
    crossed.send(1)
    held = [remote.digests() for remote in crossed.fleet]
    crossed.begin(2)
    crossed.crew[victim].kill()
    error = _error(crossed.crew[1 - victim])
    assert f"rank {victim}" in told(error), told(error)
    crossed.network.unlimit()
    wait_until(lambda: are_ready(crossed.fleet), "the update's end")
    assert [remote.digests() for remote in crossed.fleet] == held
    assert [remote.reading() for remote in crossed.fleet] == [1, 1]


def test_receivers_that_all_lost_a_source_end_the_update_on_all_ranks(crossed: Crossed) -> None:
    """No rank waits for a host that is to come: as where another rank was killed meanwhile."""
    crossed.connect(timeout_s=PATIENT_S, num_buckets=4)
    crossed.send(1)
    for remote in crossed.fleet:
        remote.sabotage("start", "lose")
    began = time.monotonic()
    assert crossed.send(2).version == 2
    # The windows of all ranks would wait for three quarters of the time.
    assert time.monotonic() - began < PATIENT_S / 2
    crossed.check(2, crossed.fleet)


@victims()
def test_a_trainer_host_that_is_cut_off_commits_nowhere(
    crossed: Crossed, backend: str, victim: int
) -> None:
    crossed.connect(backend=backend)
    crossed.send(1)
    held = [remote.digests() for remote in crossed.fleet]
    crossed.begin(2)
    with cut(crossed, victim):
        errors = [_error(rank) for rank in crossed.crew]
        assert all(isinstance(error, ws.WeightSyncError) for error in errors)
        wait_until(lambda: are_ready(crossed.fleet), "the update's end")
    assert [remote.digests() for remote in crossed.fleet] == held
    assert [remote.reading() for remote in crossed.fleet] == [1, 1]


CELLS = list(
    itertools.product(
        ("start", "load", "finish"), ("raise", "die"), ("staged", "in_place"), ("tcp", "nixl")
    )
)
QUICK = {
    ("load", "die", "staged", "nixl"),
    ("load", "raise", "in_place", "tcp"),
    ("finish", "die", "in_place", "nixl"),
}
"""Of the fault matrix with two trainer hosts; all cells are run in a soak."""


@pytest.mark.parametrize(
    ("step", "act", "apply", "backend"),
    [pytest.param(*cell, marks=() if cell in QUICK else pytest.mark.soak) for cell in CELLS],
)
def test_a_receiver_fails_at_a_step(
    crossed: Crossed, step: Step, act: Act, apply: str, backend: str
) -> None:
    """Survivors hold one known version, all ranks name the victim, and the next update heals."""
    # No timeout has to end here, and none may on a busy machine.
    patient = {"timeout_s": 10 * TIMEOUT_S, "backend": backend}
    crossed.connect(apply=(apply, apply, "staged"), places=(0, 1, 1), **patient)
    crossed.send(1)
    known = {1: crossed.crew[0].do("digests")}
    victim, *survivors = crossed.fleet
    victim.sabotage(step, act)
    crossed.begin(2, None)
    outcomes = [outcome_of(rank) for rank in crossed.crew]
    known[2] = crossed.crew[0].do("digests")
    if act == "raise" and not isinstance(outcomes[0], Exception):
        # One that cannot go back, and raises once, is sent the weights again.
        assert step == "finish" or apply == "in_place"
        crossed.check(2, crossed.fleet)
    else:
        assert all(victim.url in told(error) for error in outcomes), outcomes
        versions = {remote.reading(timeout_s=TIMEOUT_S) for remote in survivors}
        (version,) = versions
        late = {2} if step == "finish" else {1}
        assert version in (late if apply == "staged" else late | {2})
        assert all(remote.digests() == known[version] for remote in survivors)
    if act == "die":
        together(crossed.crew, "call", "remove", victim.url)
    healed = crossed.send(3)
    crossed.check(healed.version, survivors if act == "die" else crossed.fleet)


@pytest.mark.parametrize("step", ["base", "open", "load"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_worker_that_fails_keeps_no_other_of_its_engine_waiting(
    crossed: Crossed, place: int, step: Step
) -> None:
    """Whichever of them feeds the other, and before the first byte of any stream."""
    crossed.connect((0, 0))
    together(crossed.crew, "end_sender")
    urls = [remote.url for remote in crossed.fleet]
    given = {"timeout_s": PATIENT_S, "delta": "always" if step == "base" else "off"}
    assert together(crossed.crew, "connect_in_rounds", urls, **given) == [None, None]
    crossed.send(1)
    crossed.fleet[place].sabotage(step, "raise")
    crossed.begin(2, None)
    began = time.monotonic()
    errors = [_error(rank) for rank in crossed.crew]
    assert time.monotonic() - began < PATIENT_S / 2
    assert all(urls[place] in told(error) for error in errors), errors
    assert f"sabotage of {step}" in told(errors[0])
    crossed.send(3)
    crossed.check(2, crossed.fleet)


def outcome_of(rank: Trainer) -> Any:
    try:
        return rank.end(timeout_s=processes.WAIT_S)
    except ws.WeightSyncError as exc:
        return exc


def are_ready(fleet: Sequence[Remote]) -> bool:
    return all(remote.status()["state"] == "READY" for remote in fleet)


@contextmanager
def cut(crossed: Crossed, host: int) -> Iterator[None]:
    crossed.network.hosts[host].cut()
    try:
        yield
    finally:
        crossed.network.hosts[host].heal()


def test_a_second_worker_of_a_host_is_killed(crossed: Crossed) -> None:
    """It costs a second attempt of the others, which reads all of it again."""
    crossed.connect(on_failure="drop")
    second = crossed._stack.enter_context(several_hosts.receivers(crossed.network.hosts[3]))
    beside = second.receiver("http", model="squares")
    added = together(crossed.crew, "call", "add", beside.url)
    assert not [outcome for outcome in added if isinstance(outcome, Exception)], added
    crossed.send(1)
    crossed.check(1, [*crossed.fleet, beside])
    crossed.begin(2)
    second.kill()
    report = crossed.end()
    assert list(report.dropped) == [beside.url]
    crossed.check(2, crossed.fleet)


def test_hosts_leave_and_join(crossed: Crossed) -> None:
    """Ranks other than 0 learn of it before the next update."""
    crossed.connect((0, 1, 1))
    crossed.send(1)
    first, feeder, beside = crossed.fleet
    together(crossed.crew, "call", "remove", feeder.url)
    assert crossed.send(2).version == 2
    crossed.check(2, [first, beside])
    assert feeder.reading() == 1
    added = together(crossed.crew, "call", "add", feeder.url)
    assert not [outcome for outcome in added if isinstance(outcome, Exception)], added
    crossed.check(2, crossed.fleet)
    for version in (3, 4):
        assert crossed.send(version).version == version
        crossed.check(version, crossed.fleet)
    together(crossed.crew, "call", "remove", first.url)
    assert crossed.send(5).version == 5
    crossed.check(5, [feeder, beside])


def test_a_trainer_host_that_a_receiver_cannot_reach(crossed: Crossed) -> None:
    """The tensors are gathered, for a reason that names it, and sent by rank 0."""
    first, second, deaf, other = crossed.network.hosts
    with half_reachable(second, deaf=deaf, others=[first, other]) as address:
        crossed.fleet = [each.receiver("http", model="squares") for each in crossed.hosts]
        crossed.crew = crossed._stack.enter_context(
            several_hosts.ranks(first, second, model="squares")
        )
        crossed.crew[1].do("environ", "WEIGHTSYNC_ADDRESS", address)
        urls = [remote.url for remote in crossed.fleet]
        outcomes = together(crossed.crew, "connect", urls, timeout_s=TIMEOUT_S)
        assert not [outcome for outcome in outcomes if isinstance(outcome, Exception)], outcomes
        crossed.begin(1, None)
        report, _ = (rank.end() for rank in crossed.crew)
    reason = report.gathered["all tensors"]
    assert address in reason
    assert crossed.fleet[0].url in reason
    crossed.check(1, crossed.fleet)


def _error(rank: Trainer) -> ws.WeightSyncError:
    with pytest.raises(ws.WeightSyncError) as raised:
        rank.end(timeout_s=processes.WAIT_S)
    return raised.value
