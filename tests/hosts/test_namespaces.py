from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.hosts.fixtures import MakeNetwork, make_network
from tests.hosts.isolation import TOOL_PATH
from tests.hosts.namespaces import Host, HostsError, host_network, limit_problem, netns_problem
from tests.hosts.traces import WAIT_S, connection
from weightsync.shm.host_keys import host_key

__all__ = ["make_network"]

SILENCE_S = 0.3
NBYTES = 8 << 20
RATE = "200mbit"
RATE_NBYTES = 200e6 / 8


def ping(source: Host, address: str, target: Host) -> str:
    """Send a word by TCP; return what came back, and assert who it came from."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with target.call(lambda: socket.create_server(("", 0), family=family)) as listener:
        port = listener.getsockname()[1]
        near = source.call(lambda: socket.create_connection((address, port), timeout=WAIT_S))
        far, peer = listener.accept()
        with near, far:
            assert peer[0] in {source.address, source.address6}
            near.sendall(b"ping")
            far.sendall(far.recv(16) + b" and back")
            return near.recv(64).decode()


def test_hosts_reach_each_other_by_address_and_name(make_network: MakeNetwork) -> None:
    a, b, c = make_network(3).hosts
    assert len({a.address, b.address, c.address}) == 3
    for source, target in ((a, b), (b, c), (c, a)):
        assert ping(source, target.address, target) == "ping and back"
        assert ping(source, target.name, target) == "ping and back"
    if Path("/proc/net/if_inet6").exists():
        assert b.address6 is not None
        assert ping(a, b.address6, b) == "ping and back"


def test_only_the_loopback_and_the_switch_are_reachable(make_network: MakeNetwork) -> None:
    (host,) = make_network(1).hosts
    interfaces = host.call(lambda: {name for _, name in socket.if_nameindex()})
    # A kernel may add fallback tunnels to each namespace; none of these is ever up.
    up = host.run(
        ["ip", "-brief", "link", "show", "up"], env={"PATH": TOOL_PATH}, timeout_s=WAIT_S
    ).stdout
    assert {"lo", "eth0"} <= interfaces
    assert {line.split()[0].partition("@")[0] for line in up.splitlines()} == {"lo", "eth0"}
    with pytest.raises(OSError, match="unreachable"):
        host.call(lambda: socket.create_connection(("192.0.2.1", 80), timeout=WAIT_S))


def test_the_host_name_is_private(make_network: MakeNetwork) -> None:
    before = socket.gethostname()
    a, b = make_network(2).hosts
    assert [host.call(socket.gethostname) for host in (a, b)] == [a.name, b.name]
    assert b.run(["uname", "-n"], timeout_s=WAIT_S).stdout == f"{b.name}\n"
    assert socket.gethostname() == before


def test_each_host_has_its_own_key(make_network: MakeNetwork) -> None:
    hosts = make_network(3).hosts
    keys = {host.call(host_key.__wrapped__) for host in hosts} | {host_key.__wrapped__()}
    assert len(keys) == 4


def test_shared_memory_is_private_and_of_the_chosen_size(make_network: MakeNetwork) -> None:
    a, b = make_network(2, shm_nbytes=4 << 20).hosts
    file = Path(f"/dev/shm/only-on-one-host-{os.getpid()}")
    a.call(lambda: file.write_text("here"))
    assert a.run(["cat", str(file)], timeout_s=WAIT_S).stdout == "here"
    assert not b.call(file.exists)
    assert not file.exists()
    status = b.call(lambda: os.statvfs("/dev/shm"))
    assert status.f_blocks * status.f_frsize == 4 << 20


def test_a_process_has_pipes_and_a_pid_to_signal(make_network: MakeNetwork) -> None:
    (host,) = make_network(1).hosts
    process = host.popen(
        ["sh", "-c", 'read -r word; echo "$word $MARK $$"; exec sleep 600'],
        env={**os.environ, "MARK": "marked"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("hello\n")
    process.stdin.flush()
    word, mark, pid_inside = process.stdout.readline().split()
    assert (word, mark) == ("hello", "marked")
    assert int(pid_inside) != process.pid
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(WAIT_S) == -signal.SIGTERM


def test_a_process_starts_in_the_same_directory(make_network: MakeNetwork) -> None:
    (host,) = make_network(1).hosts
    assert host.run(["pwd"], timeout_s=WAIT_S).stdout == f"{Path.cwd()}\n"


def test_run_says_what_a_failed_command_said(make_network: MakeNetwork) -> None:
    (host,) = make_network(1).hosts
    with pytest.raises(subprocess.CalledProcessError) as failed:
        host.run(["sh", "-c", "echo no luck >&2; exit 3"], timeout_s=WAIT_S)
    assert failed.value.returncode == 3
    assert "no luck" in failed.value.__notes__[0]
    assert host.run(["false"], timeout_s=WAIT_S, check=False).returncode == 1


def test_run_ends_what_takes_too_long(make_network: MakeNetwork) -> None:
    (host,) = make_network(1).hosts
    with pytest.raises(subprocess.TimeoutExpired):
        host.run(["sh", "-c", "sleep 600 & wait"], timeout_s=0.2)


def transfer_s(source: Host, target: Host) -> float:
    """Return the time in which some bytes go from one host to the other, and an answer back."""
    with connection(source, target) as (near, far):

        def drain() -> None:
            left = NBYTES
            while left:
                left -= len(far.recv(1 << 20))
            far.sendall(b".")

        thread = threading.Thread(target=drain)
        thread.start()
        start = time.perf_counter()
        near.sendall(bytes(NBYTES))
        assert near.recv(1) == b"."
        seconds = time.perf_counter() - start
        thread.join(WAIT_S)
        return seconds


def test_a_rate_is_a_limit_in_both_directions(make_network: MakeNetwork) -> None:
    problem = limit_problem()
    if problem is not None:
        pytest.skip(f"rates cannot be limited here: {problem}")
    network = make_network(2)
    a, b = network.hosts
    free_s = min(transfer_s(a, b) for _ in range(3))
    network.limit(RATE)
    limited_s = [transfer_s(a, b), transfer_s(b, a)]
    network.limit(RATE)  # again is no error
    network.unlimit()
    again_s = min(transfer_s(a, b) for _ in range(3))
    # What may pass at once: a burst at each end of the cable.
    fastest_s = (NBYTES - (1 << 20)) / RATE_NBYTES
    assert min(limited_s) > fastest_s
    assert min(limited_s) / max(free_s, again_s) > 3


def round_trip_s(source: Host, target: Host) -> float:
    with connection(source, target) as (near, far):
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        start = time.perf_counter()
        near.sendall(b"?")
        far.sendall(far.recv(1))
        near.recv(1)
        return time.perf_counter() - start


@pytest.mark.parametrize("rate", [None, "1gbit"])
def test_a_delay_is_added_to_each_way(make_network: MakeNetwork, rate: str | None) -> None:
    problem = limit_problem(delay=True)
    if problem is not None:
        pytest.skip(f"packets cannot be delayed here: {problem}")
    network = make_network(2)
    network.limit(rate, delay="20ms")
    assert round_trip_s(*network.hosts) >= 0.04


def test_a_delay_that_the_kernel_lacks_is_an_error_and_no_limit(make_network: MakeNetwork) -> None:
    if limit_problem() is not None or limit_problem(delay=True) is None:
        pytest.skip("this kernel delays packets, or limits no rates")
    network = make_network(2)
    with pytest.raises(HostsError, match=r"(?s)tc on host-1: .*netem delay"):
        network.limit(RATE, delay="1ms")
    shown = (
        network.hosts[0]
        .run(["tc", "qdisc", "show"], env={"PATH": TOOL_PATH}, timeout_s=WAIT_S)
        .stdout
    )
    assert "tbf" not in shown


@pytest.mark.parametrize("rate", ["fast", "0mbit", "10mbps", "-1gbit"])
def test_a_rate_that_is_none_is_refused(make_network: MakeNetwork, rate: str) -> None:
    with pytest.raises(ValueError, match="no rate in bits"):
        make_network(1).limit(rate)


def test_a_partition_closes_nothing_and_heals(make_network: MakeNetwork) -> None:
    a, b, c = make_network(3).hosts
    with connection(a, b) as (near, far), connection(a, c) as (other, witness):
        b.cut()
        far.settimeout(SILENCE_S)
        near.sendall(b"late")
        with pytest.raises(TimeoutError):
            far.recv(16)
        with pytest.raises(TimeoutError):
            a.call(lambda: socket.create_connection((b.address, 9), timeout=SILENCE_S))
        other.sendall(b"not cut")
        assert witness.recv(16) == b"not cut"
        b.heal()
        far.settimeout(WAIT_S)
        assert far.recv(16) == b"late"
    with pytest.raises(ConnectionRefusedError):
        a.call(lambda: socket.create_connection((b.address, 9), timeout=WAIT_S))


def test_a_network_has_at_least_one_host() -> None:
    with pytest.raises(ValueError, match="1 to 200 hosts, not 0"), host_network(0):
        pass


def test_the_problem_is_what_the_system_answered(make_network: MakeNetwork) -> None:
    assert netns_problem() is None
    script = "from tests.hosts.namespaces import netns_problem; print(netns_problem())"
    said = subprocess.run(
        ["setpriv", "--bounding-set=-sys_admin", sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    ).stdout
    assert said.startswith("tried unshare --net --mount")
    assert "Operation not permitted" in said


def test_a_missing_tool_is_named() -> None:
    script = """
from tests.hosts import namespaces
namespaces.TOOL_PATH = "/nowhere"
print(namespaces.netns_problem())
"""
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S, check=True
    ).stdout
    assert "in /nowhere; not found: ip, tc, mount, hostname, unshare" in said
