"""Receivers in other processes and on other hosts that fetch from each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import weightsync as ws
from tests.e2e import models, processes
from tests.e2e.processes import wait_until
from tests.e2e.several_hosts import sent_nbytes
from tests.e2e.test_hosts_chain import MIDDLE_S, RATE, TIMEOUT_S, Chain, backends
from tests.e2e.test_hosts_faults import check_all_hold
from tests.hosts.namespaces import HostNetwork, host_network, limit_problem
from weightsync.shm.segment import cleanup_stale

HOSTS_APART = [
    pytest.mark.skipif(bool(limit_problem()), reason="needs root, and tc"),
    pytest.mark.timeout(120),
]


class TestOneHost:
    @pytest.mark.parametrize("apply", ["staged", "in_place"])
    @pytest.mark.parametrize("sink", ["module", "hook"])
    @pytest.mark.usefixtures("shm_clean")
    def test_over_http(self, sink: Any, apply: Any) -> None:
        trainer = models.make("everything")
        with processes.host() as one, processes.host() as other:
            source = one.receiver("http", sink="module", apply=apply)
            fetching = other.receiver("http", sink=sink, apply=apply)
            with ws.connect(trainer, to=source.url) as sender:
                sender.send_weights(3)
                report = fetching.fetch([source.url])
                assert (report["version"], report["path"]) == (3, "shared_memory")
                assert fetching.digests().items() <= source.digests().items()
                sender.send_weights()
            assert "senders" not in fetching.status()  # none is connected

    @pytest.mark.usefixtures("shm_clean")
    def test_a_source_that_dies_is_gone_round(self) -> None:
        trainer = models.make("wide")
        with processes.host() as here, processes.host() as one, processes.host() as other:
            dying, living = one.receiver("http", model="wide"), other.receiver("http", model="wide")
            fetching = here.receiver("http", model="wide")
            with ws.connect(trainer, to=[dying.url, living.url]) as sender:
                sender.send_weights(3)
            fetching.sabotage("load", "raise")  # a failure of its own: the source goes on
            with pytest.raises(ws.WeightSyncError):
                fetching.fetch([dying.url])
            one.kill()
            report = fetching.fetch([dying.url, living.url])
            assert report["receivers"][0]["source"] == living.url
            assert fetching.digests() == models.digests(trainer)

    @pytest.mark.usefixtures("shm_clean")
    def test_a_fetching_process_that_dies_costs_the_source_nothing(self) -> None:
        trainer = models.make("wide")
        with processes.host() as one:
            source = one.receiver("http", model="wide")
            with ws.connect(trainer, to=source.url) as sender:
                sender.send_weights(3)
                with processes.host() as other:
                    fetching = other.receiver("http", model="wide")
                    fetching.sabotage("load", "die")
                    with pytest.raises(ws.ConnectError):
                        fetching.fetch([source.url])
                models.touch(trainer, 1)
                sender.send_weights()
                assert source.digests() == models.digests(trainer)
                again = one.receiver("http", model="wide")
                again.fetch([source.url])
                assert again.digests() == models.digests(trainer)

    @pytest.mark.usefixtures("shm_clean")
    def test_while_a_trainer_sends_again_and_again(self) -> None:
        """Each fetch ends with one whole version, and no update waits for it."""
        trainer = models.make("wide")
        with processes.host() as one, processes.host() as other:
            source = one.receiver("http", model="wide")
            fetching = other.receiver("http", model="wide")
            known: dict[int, dict[str, str]] = {}
            fetched: list[tuple[int, dict[str, str]]] = []
            over = threading.Event()

            def fetch() -> None:
                while not over.is_set():
                    version = fetching.fetch([source.url])["version"]
                    fetched.append((version, fetching.digests()))

            with ws.connect(trainer, to=source.url) as sender:
                sender.send_weights()
                thread = threading.Thread(target=fetch)
                known[1] = models.digests(trainer)
                thread.start()
                for step in range(2, 30):
                    models.touch(trainer, step)
                    known[step] = models.digests(trainer)
                    sender.send_weights()
                    time.sleep(0.05)
                wait_until(lambda: len(fetched) > 2, "fetches")
                over.set()
                thread.join()
            assert len({version for version, _ in fetched}) > 1
            assert all(known[version] == digests for version, digests in fetched)


@pytest.fixture(scope="module")
def network() -> Iterator[HostNetwork]:
    with host_network(4) as made:
        yield made


@pytest.fixture
def chain(network: HostNetwork) -> Iterator[Chain]:
    with ExitStack() as stack:
        yield Chain(network, stack)
        network.unlimit()
    for host in network.hosts:
        host.call(cleanup_stale)


class TestOtherHosts:
    pytestmark = HOSTS_APART

    @backends
    def test_from_another_host(self, chain: Chain, backend: str) -> None:
        *present, joining = chain.receivers
        chain.receivers = present
        chain.connect(backend=backend)
        chain.trainer.send(seed=1)
        report = joining.fetch([present[0].url], backend=backend)
        assert (report["path"], report["verified"]) == (backend, "held")
        check_all_hold(chain.trainer, 1, [*present, joining])

    def test_one_that_joins_takes_no_bytes_of_the_trainer(self, chain: Chain) -> None:
        *present, joining = chain.receivers
        chain.receivers = present
        chain.connect()
        chain.trainer.send(seed=1)
        before = sent_nbytes(chain.network.hosts[0])
        report = chain.trainer.do("call", "add", joining.url)
        assert sent_nbytes(chain.network.hosts[0]) - before < 0.02 * report.nbytes
        assert report.receivers[0].source in {remote.url for remote in present}
        assert report.path == "tcp"
        check_all_hold(chain.trainer, 1, [*present, joining])
        chain.trainer.send(seed=2)
        check_all_hold(chain.trainer, 2, [*present, joining])

    def test_a_source_that_feeds_another_host_does_not_lend(self, chain: Chain) -> None:
        first, last, joining = chain.receivers
        chain.receivers = [first, last]
        chain.connect()
        chain.trainer.send(seed=1)
        chain.begin(2)
        with pytest.raises(ws.SourceBusyError, match="passes an update on"):
            joining.fetch([first.url], timeout_s=0.5)
        joining.fetch([first.url, last.url], timeout_s=TIMEOUT_S)
        assert chain.trainer.end().version == 2
        check_all_hold(chain.trainer, 2, [first, last, joining])

    def test_a_source_that_dies_in_the_middle(self, chain: Chain) -> None:
        """The next source sends; nothing of the first one's stays."""
        *present, joining = chain.receivers
        chain.receivers = present
        chain.connect()
        chain.trainer.send(seed=1)
        chain.network.limit(RATE)
        reports: list[Any] = []
        urls = [remote.url for remote in present]
        thread = threading.Thread(
            target=lambda: reports.append(joining.fetch(urls, timeout_s=TIMEOUT_S))
        )
        thread.start()
        time.sleep(MIDDLE_S)
        chain.hosts[0].kill()
        thread.join()
        assert reports[0]["receivers"][0]["source"] == urls[1]
        check_all_hold(chain.trainer, 1, [present[1], joining])
