"""Nothing of a network outlives its block, or the process that made it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from tests.hosts.fixtures import make_network
from tests.hosts.namespaces import HostsError, host_network
from tests.hosts.traces import (
    WAIT_S,
    machine_state,
    network_of,
    processes_in,
    wait_until_empty,
)

__all__ = ["make_network"]

# A process with a child of its own, which nobody here knows.
FAMILY = ["sh", "-c", "sleep 600 & echo started; wait"]
MAKER = """
import os, subprocess, sys, time
from tests.hosts.namespaces import host_network
from tests.hosts.traces import network_of

with host_network(2) as network:
    for host in network.hosts:
        family = host.popen(["sh", "-c", "sleep 600 & echo started; wait"], stdout=subprocess.PIPE)
        family.stdout.readline()
        print(network_of(family.pid), flush=True)
    time.sleep(600)
"""


class AnError(Exception):
    pass


@pytest.mark.usefixtures("make_network")
@pytest.mark.parametrize("error", [None, AnError(), KeyboardInterrupt()])
def test_nothing_outlives_the_block(error: BaseException | None) -> None:
    before = machine_state()
    networks: set[str] = set()
    expected: AbstractContextManager[object] = nullcontext()
    if error is not None:
        expected = pytest.raises(type(error))
    with expected, host_network(2) as network:
        for host in network.hosts:
            process = host.popen(FAMILY, stdout=subprocess.PIPE)
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
            networks.add(network_of(process.pid))
        assert len(networks) == 2
        assert len(processes_in(networks)) == 6  # a shell, its child and a holder on each
        assert machine_state() == before
        if error is not None:
            raise error
    assert not processes_in(networks)
    assert process.returncode == -signal.SIGKILL
    assert machine_state() == before


@pytest.mark.usefixtures("make_network")
@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_the_process_that_made_it(kill: signal.Signals) -> None:
    before = machine_state()
    maker = subprocess.Popen(
        [sys.executable, "-c", MAKER],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        assert maker.stdout is not None
        assert select.select([maker.stdout], [], [], WAIT_S)[0]
        networks = {maker.stdout.readline().strip(), maker.stdout.readline().strip()}
        assert len(networks) == 2
        assert len(processes_in(networks)) == 6
        maker.send_signal(kill)
        said = maker.communicate(timeout=WAIT_S)[1]
    finally:
        maker.kill()
        maker.communicate(timeout=WAIT_S)
    assert maker.returncode == -kill
    assert "ResourceWarning" not in said
    wait_until_empty(networks)
    assert machine_state() == before


@pytest.mark.usefixtures("make_network")
def test_hosts_that_cannot_be_finished_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    own = network_of(os.getpid())
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    before = children.read_text(encoding="ascii") if children.exists() else ""
    # Shared memory of a size that mount refuses: the switch and the script's start are there.
    with (
        pytest.raises(HostsError, match=r"making host-1: .*/dev/shm"),
        host_network(2, shm_nbytes=-1),
    ):
        pass
    assert network_of(os.getpid()) == own
    assert (children.read_text(encoding="ascii") if children.exists() else "") == before
