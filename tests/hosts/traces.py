"""Leftovers of hosts on the machine, and a connection between two hosts."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.hosts.isolation import TOOL_PATH
from tests.hosts.namespaces import Host

WAIT_S = 60.0


def machine_state() -> dict[str, set[str]]:
    """Return the named network namespaces, interfaces and mounts of the machine.

    Those that examples/two_hosts.sh makes are left out: it may be running at the same time.
    """
    return {
        "names": {name for name in _ip("netns", "list") if not name.startswith("weightsync-")},
        "interfaces": set(_ip("-brief", "link")),
        "mounts": {
            line
            for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
            if "/netns" not in line
        },
    }


def network_of(pid: int) -> str:
    """Return the identity of the network namespace that a process is in."""
    return str(Path(f"/proc/{pid}/ns/net").readlink())


def processes_in(networks: set[str]) -> list[int]:
    """Return the pids of the living processes in any of these network namespaces."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if network_of(int(entry.name)) in networks:
                    found.append(int(entry.name))
            except OSError:
                continue  # it has ended, or is a kernel thread
    return found


def wait_until_empty(networks: set[str]) -> None:
    """Wait until no process lives in these network namespaces. Raises AssertionError."""
    deadline = time.monotonic() + WAIT_S
    while (left := processes_in(networks)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, f"processes {left} outlived their hosts"


@contextmanager
def connection(source: Host, target: Host) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Connect one host to the other; yield the end of each, both with a bounded wait."""
    with target.call(lambda: socket.create_server((target.address, 0))) as listener:
        address = listener.getsockname()
        near = source.call(lambda: socket.create_connection(address, timeout=WAIT_S))
        with near, listener.accept()[0] as far:
            far.settimeout(WAIT_S)
            yield near, far


def _ip(*arguments: str) -> list[str]:
    return subprocess.run(
        ["ip", *arguments],
        env={**os.environ, "PATH": TOOL_PATH},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    ).stdout.splitlines()
