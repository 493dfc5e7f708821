"""Receivers on other hosts: bytes, faults and recoveries, with real processes on loopback."""

from __future__ import annotations

import pytest

from tests.backends.hosts import Party, party

pytestmark = pytest.mark.usefixtures("shm_clean")


def check_all_hold(party: Party) -> None:
    wanted = party.model.content()
    for worker in party.workers:
        assert worker.ask("content") == wanted, worker.name


@pytest.mark.parametrize("hosts", [(1,), (2,), (1, 2), (1, 1, 2)])
def test_every_worker_gets_every_bit(hosts: tuple[int, ...]) -> None:
    with party(*hosts) as fleet:
        for seed in range(3):
            fleet.model.fill(seed)
            assert fleet.send(verify=seed != 1) == []
            check_all_hold(fleet)
