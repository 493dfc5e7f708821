"""Several hosts on one machine, for tests and benchmarks: Linux, root, iproute2 and util-linux.

    with host_network(2) as network:
        a, b = network.hosts
        server = b.popen([sys.executable, "server.py", b.address])
        a.run([sys.executable, "client.py", b.address], timeout_s=30)

Each host has an address of its own on a private switch, host name, /dev/shm, IPC and pids. The
machine's own network does not change, and no packet leaves the machine. All processes end with the
block, or with the process that made it. Needs only the standard library.
"""

from __future__ import annotations

import functools
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from ipaddress import IPv6Address
from pathlib import Path
from typing import TypeVar

from tests.hosts.isolation import END_S, TOOL_PATH, TOOL_S, Arg, HostsError, Isolation, Stream

__all__ = ["Host", "HostNetwork", "HostsError", "host_network", "limit_problem", "netns_problem"]

MAX_HOSTS = 200
SHM_NBYTES = 256 << 20
DEVICE = "eth0"
BRIDGE = "switch"
# The burst of a limit: small compared with a test's data, large compared with a timer's slack.
BURST_NBYTES = 128 << 10
BURST_S = 0.002

T = TypeVar("T")

_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg]?)bit")
_BITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_NEEDED = ("ip", "tc", "mount", "hostname", "unshare")
_PROBE = f"""\
mount -t tmpfs -o size=1m tmpfs /dev/shm
hostname probe
ip link add {BRIDGE} type bridge
ip link add probe0 type veth peer name probe1
"""
_PROBE_LIMIT = "tc qdisc add dev probe0 root handle 1: tbf rate 1gbit burst 128kb latency 50ms\n"
_PROBE_DELAY = "tc qdisc add dev probe1 root netem delay 1ms\n"


@dataclass(frozen=True, kw_only=True)
class Link:
    """A host's place on the switch; `address6` is None where the kernel has no IPv6."""

    name: str
    address: str
    address6: str | None
    mac: str
    port: str


class Host:
    """One host of a network: `name` and both addresses are known to all of its hosts."""

    def __init__(self, link: Link, space: Isolation, switch: Isolation) -> None:
        self._link = link
        self._space = space
        self._switch = switch

    def __repr__(self) -> str:
        return f"Host({self.name!r}, {self.address!r})"

    @property
    def name(self) -> str:
        """The host name, which resolves to `address` on every host of the network."""
        return self._link.name

    @property
    def address(self) -> str:
        """The IPv4 address."""
        return self._link.address

    @property
    def address6(self) -> str | None:
        """The IPv6 address, or None where the kernel has no IPv6."""
        return self._link.address6

    @property
    def mac(self) -> str:
        """The address of its network device."""
        return self._link.mac

    def popen(
        self,
        argv: Sequence[Arg],
        *,
        env: Mapping[str, str] | None = None,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
        start_new_session: bool = False,
    ) -> subprocess.Popen[str]:
        """Start a process on this host: a plain `Popen`, in text mode, whose pid can be signalled.

        `env` is the whole environment, this process's by default. The end of the network kills
        the process and its descendants, waits for it and closes its pipes.
        """
        return self._space.popen(
            argv,
            env=env,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=start_new_session,
        )

    def run(
        self,
        argv: Sequence[Arg],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a process on this host to its end and return its output.

        Raises CalledProcessError when it fails, the error output being in the message's note, and
        TimeoutExpired once it and its process group have been killed.
        """
        pipe = subprocess.PIPE
        process = self.popen(
            argv, env=env, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        try:
            stdout, stderr = process.communicate(stdin, timeout=timeout_s)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(END_S)
        done = subprocess.CompletedProcess(list(argv), process.returncode, stdout, stderr)
        if check and done.returncode:
            error = subprocess.CalledProcessError(done.returncode, done.args, stdout, stderr)
            error.add_note(f"on {self.name}, which said:\n{stderr or stdout}")
            raise error
        return done

    def call(self, function: Callable[[], T]) -> T:
        """Return `function()`, run on this host in a thread of this process.

        A socket that it opens belongs to this host and may be used from any thread. Processes that
        it starts are on this host, but do not end with it: use `popen` for these.
        """
        return self._space.call(function)

    def cut(self) -> None:
        """Drop every packet to and from this host, as in a partition of the network.

        No connection is closed and no interface goes down. Undone by `heal`.
        """
        self._switch.tool(["ip", "-batch", "-"], [f"link set {self._link.port} nomaster"])

    def heal(self) -> None:
        """Pass packets again; connections that did not time out continue."""
        self._switch.tool(["ip", "-batch", "-"], [f"link set {self._link.port} master {BRIDGE}"])

    def ends(self) -> Iterator[tuple[Isolation, str, bool]]:
        """Yield both ends of the host's cable: where, which device, and if it is the host's own."""
        yield self._space, DEVICE, True
        yield self._switch, self._link.port, False


class HostNetwork:
    """`hosts` on a switch of their own; made by `host_network`."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self.hosts = tuple(hosts)
        self._limited: list[tuple[Isolation, str]] = []

    def limit(self, rate: str | None = "1gbit", *, delay: str | None = None) -> None:
        """Limit the rate at which each host sends and receives to `rate`, in tc's notation in bits.

        `delay` ("5ms") is added to each packet on its way, so twice to a round trip; `rate=None`
        with a delay leaves the rate free. Replaces an earlier limit. Raises ValueError for a rate
        that is none, and HostsError where the kernel cannot (see `limit_problem`).
        """
        commands = _limit_commands(rate, delay)
        self.unlimit()
        try:
            for space, device, own in (end for host in self.hosts for end in host.ends()):
                for command in commands if own else _limit_commands(rate, None):
                    space.tool(["tc", "-batch", "-"], [command.format(device=device)])
                    if (space, device) not in self._limited:
                        self._limited.append((space, device))
        except BaseException:
            self.unlimit()
            raise

    def unlimit(self) -> None:
        """Remove every limit."""
        while self._limited:
            space, device = self._limited.pop()
            space.tool(["tc", "-batch", "-"], [f"qdisc del dev {device} root"])


@contextmanager
def host_network(count: int, *, shm_nbytes: int = SHM_NBYTES) -> Iterator[HostNetwork]:
    """Make `count` hosts on one switch, each with a /dev/shm that holds up to `shm_nbytes`.

    The hosts end with the block, and with this process. Raises HostsError with the system's message
    where hosts cannot be made; `netns_problem` checks that beforehand.
    """
    if not 1 <= count <= MAX_HOSTS:
        raise ValueError(f"a network has 1 to {MAX_HOSTS} hosts, not {count}")
    links = _plan(count)
    with ExitStack() as stack:
        switch = _isolate(stack, "the switch", f"ip link add {BRIDGE} type bridge\n")
        hosts = []
        for link in links:
            space = _isolate(stack, link.name, _host_setup(link, links, shm_nbytes))
            _plug_in(link, links, space, switch)
            hosts.append(Host(link, space, switch))
        switch.tool(["ip", "-batch", "-"], [f"link set {BRIDGE} up"])
        yield HostNetwork(hosts)


@functools.cache
def netns_problem() -> str | None:
    """Return why hosts cannot be made here, with the system's message; None if they can."""
    if sys.platform != "linux":
        return f"hosts are made of Linux namespaces, and this is {sys.platform}"
    missing = [name for name in _NEEDED if shutil.which(name, path=TOOL_PATH) is None]
    if missing:
        return f"looked for {', '.join(_NEEDED)} in {TOOL_PATH}; not found: {', '.join(missing)}"
    return _refusal(_PROBE)


@functools.cache
def limit_problem(*, delay: bool = False) -> str | None:
    """Return why `HostNetwork.limit` (with `delay`) cannot work here; None if it can."""
    problem = netns_problem()
    return problem or _refusal(_PROBE + (_PROBE_DELAY if delay else _PROBE_LIMIT))


def _refusal(script: str) -> str | None:
    """Return why the system refuses a script in new namespaces, or None if it does not."""
    argv = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc"]
    done = subprocess.run(
        [*argv, "sh", "-exc", script],
        env={**os.environ, "PATH": TOOL_PATH},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TOOL_S,
        check=False,
    )
    if done.returncode == 0:
        return None
    answer = " / ".join(done.stderr.splitlines()[-2:])
    return f"tried {' '.join(argv)}; the system answered: {answer}"


def _plan(count: int) -> list[Link]:
    subnet = secrets.randbelow(256)
    has_ipv6 = Path("/proc/net/if_inet6").exists()
    return [
        Link(
            name=f"host-{number}",
            address=f"10.83.{subnet}.{number}",
            address6=str(IPv6Address(f"fd83:{subnet:x}::{number:x}")) if has_ipv6 else None,
            mac=f"02:83:00:00:00:{number:02x}",
            port=f"port{number}",
        )
        for number in range(1, count + 1)
    ]


def _isolate(stack: ExitStack, name: str, setup: str) -> Isolation:
    space = Isolation(name, setup)
    stack.callback(space.close)
    return space


def _host_setup(link: Link, links: Sequence[Link], shm_nbytes: int) -> str:
    """Return the script that gives a host its name, the names of the others, and its /dev/shm."""
    names = ["127.0.0.1 localhost", *(f"{other.address} {other.name}" for other in links)]
    # The file of names lies on a tmpfs of its own, unmounted at once: the bind keeps it.
    return f"""\
hostname {link.name}
if [ -e /etc/hosts ]; then
    mount -t tmpfs tmpfs /dev/shm
    printf '%s\\n' {shlex.join(names)} > /dev/shm/hosts
    mount --bind /dev/shm/hosts /etc/hosts
    umount /dev/shm
fi
mount -t tmpfs -o size={shm_nbytes},mode=1777 tmpfs /dev/shm
"""


def _plug_in(link: Link, links: Sequence[Link], space: Isolation, switch: Isolation) -> None:
    """Lay a cable from the switch to the host, and give the host its addresses."""
    switch.tool(
        ["ip", "-batch", "-"],
        [
            f"link add {link.port} type veth"
            f" peer name {DEVICE} address {link.mac} netns {space.pid}",
            f"link set {link.port} master {BRIDGE} up",
        ],
    )
    commands = [f"address add {link.address}/24 dev {DEVICE}"]
    if link.address6:
        commands.append(f"address add {link.address6}/64 dev {DEVICE} nodad")
    commands.append(f"link set {DEVICE} up")
    # Known neighbours: a disconnected host is silent, like one behind a router. Without this, a
    # failed ARP request would end a connect at once.
    commands += [
        f"neigh replace {address} lladdr {other.mac} nud permanent dev {DEVICE}"
        for other in links
        for address in (other.address, other.address6)
        if other is not link and address
    ]
    space.tool(["ip", "-batch", "-"], commands)


def _limit_commands(rate: str | None, delay: str | None) -> list[str]:
    """Return commands for `tc`, with a place for the device."""
    commands = []
    if rate is not None:
        burst = max(BURST_NBYTES, int(_bits(rate) / 8 * BURST_S))
        commands.append(
            f"qdisc add dev {{device}} root handle 1: tbf rate {rate} burst {burst}b latency 50ms"
        )
    if delay is not None:
        place = "root" if rate is None else "parent 1:1"
        commands.append(
            f"qdisc add dev {{device}} {place} handle 10: netem delay {delay} limit 100000"
        )
    return commands


def _bits(rate: str) -> float:
    found = _RATE.fullmatch(rate)
    if found is None or not float(found[1]):
        raise ValueError(f"{rate!r} is no rate in bits a second; give one like '200mbit', '1gbit'")
    return float(found[1]) * _BITS[found[2]]
