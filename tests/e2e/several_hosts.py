"""Receivers and trainers on several hosts: the processes of this folder, put into namespaces.

A forked process enters the namespaces of its host first, and ends with the process that started it.
"""

from __future__ import annotations

import ctypes
import ipaddress
import json
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import weightsync as ws
from tests.children import CONTEXT
from tests.e2e import models, processes
from tests.e2e.processes import WAIT_S, Remote
from tests.e2e.ranks_at_work import Gathered
from tests.hosts.isolation import TOOL_PATH
from tests.hosts.namespaces import BRIDGE, DEVICE, Host
from weightsync.transports.http import HttpTransport
from weightsync.wire.messages import (
    AbortRequest,
    FinishRequest,
    Reply,
    Request,
    Status,
    StatusRequest,
    UpdateRequest,
)
from weightsync.wire.problem import Problem, from_problem, to_problem

_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
_TOOLS = {"PATH": TOOL_PATH}
_DIES_WITH_PARENT = 1
_LISTENING = "0A"

_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def started(host: Host, target: Callable[..., None], *args: object) -> Iterator[BaseProcess]:
    """Run `target` on a host, in a process that does not outlive the block."""
    space, _, _ = next(iter(host.ends()))
    with processes.started(_on_host, space.pid, target, args) as process:
        yield process


@contextmanager
def receivers(host: Host, *, port: int = 0, address: str | None = None) -> Iterator[processes.Host]:
    """A process of receivers on a host, which serves at `address` (the host's IPv4 one)."""
    address = address or host.address
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    pairs = [CONTEXT.Pipe() for _ in range(processes.PIPES)]
    listener = host.call(lambda: _listener(family, address, port))
    theirs = [there for _, there in pairs]
    with started(host, processes._serve, theirs, listener) as process:
        bound = listener.getsockname()[1]
        listener.close()
        for there in theirs:
            there.close()
        made = processes.Host(process, [here for here, _ in pairs], bound)
        made.url = (
            f"http://[{address}]:{bound}"
            if family == socket.AF_INET6
            else (f"http://{address}:{bound}")
        )
        try:
            yield made
        finally:
            for here, _ in pairs:
                here.close()
            process.join(WAIT_S)


def port_of(remote: Remote) -> int:
    return int(remote.url.rpartition("/")[0].rpartition(":")[2])


class Trainer:
    """One rank of a trainer, in a process on a host; its errors are raised here."""

    def __init__(self, host: Host, process: BaseProcess, end: Connection) -> None:
        self.host = host
        self.process = process
        self._end = end

    def begin(self, what: str, *args: object, **options: object) -> None:
        """Start a call of `_Work`."""
        self._end.send((what, args, options))

    def end(self, *, timeout_s: float = WAIT_S) -> Any:
        """Return the result of the call, or raise its error."""
        assert self._end.poll(timeout_s), f"no answer within {timeout_s} s"
        result, problem, notes = self._end.recv()
        if problem is None:
            return result
        error = from_problem(problem)
        for note in notes:
            error.add_note(note)
        raise error

    def do(self, what: str, *args: object, **options: object) -> Any:
        self.begin(what, *args, **options)
        return self.end()

    def send(self, seed: int | None = None, **options: object) -> ws.SyncReport:
        return cast(ws.SyncReport, self.do("send", seed, **options))

    def kill(self) -> None:
        processes.kill(self.process)


@contextmanager
def trainer(host: Host) -> Iterator[Trainer]:
    here, there = CONTEXT.Pipe()
    with started(host, _work, there) as process:
        there.close()
        try:
            yield Trainer(host, process, here)
        finally:
            here.close()
            process.join(WAIT_S)


@contextmanager
def ranks(*hosts: Host, model: str = "plain") -> Iterator[list[Trainer]]:
    """A trainer with a rank on each of these hosts, joined by Gloo over their network."""
    with ExitStack() as stack:
        made = [stack.enter_context(trainer(host)) for host in hosts]
        join(made, model)
        yield made


def join(crew: Sequence[Trainer], model: str) -> None:
    """Join processes on hosts to a trainer, the first of them as rank 0."""
    host = crew[0].host
    listener = host.call(lambda: _listener(socket.AF_INET, host.address, 0))
    port = listener.getsockname()[1]
    listener.close()
    for rank, each in enumerate(crew):
        each.begin("join", rank, len(crew), host.address, port, model)
    for each in crew:
        each.end()


def together(crew: Sequence[Trainer], what: str, *args: object, **options: object) -> list[Any]:
    """Make one call on every rank; return the result or error of each."""
    for each in crew:
        each.begin(what, *args, **options)
    return [_outcome(each) for each in crew]


def told(error: BaseException) -> str:
    """Return the text of an error with its notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


@dataclass(frozen=True)
class Listening:
    """A listening TCP socket: address and port."""

    address: str
    port: int


def listening(host: Host) -> set[Listening]:
    """Return all listening sockets of a host."""
    files = ["cat", "/proc/net/tcp", "/proc/net/tcp6"]
    said = host.run(files, timeout_s=WAIT_S, env={"PATH": TOOL_PATH}, check=False).stdout
    rows = [line.split() for line in said.splitlines()]
    return {_listening(row[1]) for row in rows if len(row) > 3 and row[3] == _LISTENING}


@contextmanager
def half_reachable(host: Host, *, deaf: Host, others: Sequence[Host]) -> Iterator[str]:
    """A second address of a host, without a route to or from `deaf`."""
    address, nowhere = "10.84.0.1", f"{host.address.rpartition('.')[0]}.250"
    _ip(host, f"address add {address}/32 dev {DEVICE}")
    for other in others:
        _ip(other, f"route add {address}/32 via {host.address}")
    _ip(deaf, f"neigh replace {nowhere} lladdr 02:83:00:00:00:fa nud permanent dev {DEVICE}")
    _ip(deaf, f"route add {address}/32 via {nowhere}")
    try:
        yield address
    finally:
        _ip(host, f"address del {address}/32 dev {DEVICE}")
        for other in (deaf, *others):
            _ip(other, f"route del {address}/32")


class DataAddress:
    """An address of a host beside its own one, which may change: for what it sends of the model."""

    def __init__(self, host: Host, others: Sequence[Host], number: int = 0) -> None:
        self.host, self._others = host, list(others)
        self._network = f"10.84.{number}"
        self.address = ""
        self._used = 0

    def change(self) -> str:
        """Take the address away, if there is one, and give the host another; return that."""
        self.take_away()
        self._used += 1
        address = f"{self._network}.{self._used}"
        _ip(self.host, f"address add {address}/32 dev {DEVICE}")
        self.address = address
        for other in self._others:
            _ip(other, f"route add {address}/32 via {self.host.address}")
        return address

    def lose_route(self) -> None:
        """Have no packet of the others reach the address, which the host keeps."""
        for other in self._others:
            _ip(other, f"route replace blackhole {self.address}/32")

    def take_away(self) -> None:
        """Leave the host without it. Idempotent."""
        address, self.address = self.address, ""
        if address:
            _ip(self.host, f"address del {address}/32 dev {DEVICE}")
            for other in self._others:
                _ip(other, f"route del {address}/32")


@contextmanager
def data_address(host: Host, *others: Host, number: int = 0) -> Iterator[DataAddress]:
    """A second address of a host, with a route to it on each of `others`."""
    made = DataAddress(host, others, number)
    made.change()
    try:
        yield made
    finally:
        made.take_away()


@contextmanager
def on_two_networks(host: Host, moved: Host, *also: Host) -> Iterator[str]:
    """Move one host to another network, of which `host` has a device too; yield its address.

    So have the hosts `also`. Others of the first network have no route to it, nor it to them.
    """
    network, length, device = "10.85.0", 24, "eth1"
    other, both = f"{network}.2", dict(zip([host, *also], (1, *range(3, 250)), strict=False))
    for here, number in both.items():
        (space, _, _), (switch, _, _) = here.ends()
        port = f"other-port-{number}"
        commands = [
            f"link add {port} type veth peer name {device} netns {space.pid}",
            f"link set {port} master {BRIDGE} up",
        ]
        switch.tool(["ip", "-batch", "-"], commands)
        own = f"address add {network}.{number}/{length} dev {device}"
        space.tool(["ip", "-batch", "-"], [own, f"link set {device} up"])
        # UCX looks there for devices.
        here.run(["mount", "-t", "sysfs", "sysfs", "/sys"], timeout_s=WAIT_S, env=_TOOLS)
    _ip(moved, f"address del {moved.address}/{length} dev {DEVICE}")
    _ip(moved, f"address add {other}/{length} dev {DEVICE}")
    try:
        yield other
    finally:
        for here in both:
            here.run(["umount", "/sys"], timeout_s=WAIT_S, env=_TOOLS)
            _ip(here, f"link del {device}")
        _ip(moved, f"address del {other}/{length} dev {DEVICE}")
        _ip(moved, f"address add {moved.address}/{length} dev {DEVICE}")


def _ip(host: Host, command: str) -> None:
    space, _, _ = next(iter(host.ends()))
    space.tool(["ip", "-batch", "-"], [command])


def sent_nbytes(host: Host) -> int:
    """Bytes that the kernel counted on a host's way out."""
    listed = host.run(["ip", "-s", "-j", "link"], timeout_s=10).stdout
    links = [link for link in json.loads(listed) if "LOOPBACK" not in link["flags"]]
    return sum(link["stats64"]["tx"]["bytes"] for link in links)


def sent_again_nbytes(host: Host) -> int:
    """Bytes that TCP sent again, at most, as where a loaded machine is late to acknowledge."""
    listed = host.run(["cat", "/proc/self/net/snmp"], timeout_s=10).stdout.splitlines()
    names, values = (line.split() for line in listed if line.startswith("Tcp:"))
    return int(dict(zip(names, values, strict=True))["RetransSegs"]) * 1514  # a frame of Ethernet


def segments(host: Host) -> list[str]:
    """Return the names of the segments in a host's /dev/shm."""
    return host.call(lambda: [p.name for p in Path("/dev/shm").glob("weightsync-*")])


def _listening(place: str) -> Listening:
    address, _, port = place.partition(":")
    words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
    return Listening(str(ipaddress.ip_address(b"".join(words))), int(port, 16))


def _listener(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    # asyncio turns Nagle's algorithm off only where the protocol is spelled out.
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((address, port))
    made.listen(64)
    return made


def _outcome(each: Trainer) -> Any:
    try:
        return each.end()
    except ws.WeightSyncError as exc:
        return exc


def _on_host(holder: int, target: Callable[..., None], args: Sequence[object]) -> None:
    """Enter the namespaces that `holder` keeps; only a child is in the new pid namespace."""
    here = Path.cwd()
    if _libc.setns(os.pidfd_open(holder), _NAMESPACES) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    _libc.prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    code = 1
    try:
        os.chdir(here)
        target(*args)
        code = 0
    except BaseException:  # noqa: BLE001 # a forked child has no caller
        traceback.print_exc()
    finally:
        os._exit(code)


def _work(end: Connection) -> None:
    torch.set_num_threads(1)
    work = _Work()
    while True:
        try:
            what, args, options = end.recv()
        except EOFError:
            return
        result, problem, notes = None, cast("Problem | None", None), cast("list[str]", [])
        try:
            result = getattr(work, what)(*args, **options)
        except Exception as exc:  # noqa: BLE001 # the test raises it
            if not isinstance(exc, ws.WeightSyncError):
                traceback.print_exc()
            problem, notes = to_problem(exc), list(getattr(exc, "__notes__", []))
        end.send((result, problem, notes))


class DiesBetweenFinishes(HttpTransport):
    """Kills its own process instead of the `finish` to this receiver, after the other finished."""

    def __init__(self, url: str, other: str) -> None:
        super().__init__(url)
        self._other = other

    def call(self, request: Request, *, timeout_s: float) -> Reply:
        if isinstance(request, FinishRequest):
            other = HttpTransport(self._other)
            asked = StatusRequest()
            while cast(Status, other.call(asked, timeout_s=5)).last_finished != request.update_id:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().call(request, timeout_s=timeout_s)


class OneAtATime(HttpTransport):
    """Transport to a receiver that cannot report its status during a step."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._lock = threading.Lock()

    def call(self, request: Request, *, timeout_s: float) -> Reply:
        with self._lock:
            return super().call(request, timeout_s=timeout_s)


class InRounds(HttpTransport):
    """Transport to the workers of one engine, which hear of an abort when all have answered."""

    _all = threading.Condition()
    _begun = 0

    def call(self, request: Request, *, timeout_s: float) -> Reply:
        with self._all:
            if isinstance(request, AbortRequest):
                self._all.wait_for(lambda: not InRounds._begun, WAIT_S)
            InRounds._begun += isinstance(request, UpdateRequest)
        try:
            return super().call(request, timeout_s=timeout_s)
        finally:
            with self._all:
                InRounds._begun -= isinstance(request, UpdateRequest)
                self._all.notify_all()


class _Work:
    """The calls that a trainer's process handles; one method per call."""

    def __init__(self) -> None:
        self.twin = models.make("plain")
        self.model: nn.Module = self.twin
        self.gathers = False
        self.sender: Any = None

    def join(self, rank: int, size: int, address: str, port: int, model: str) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{address}:{port}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=WAIT_S / 2),
        )
        self.twin, self.model = models.make(model), models.make(model)
        mesh = init_device_mesh("cpu", (size,))
        for layer in getattr(self.model, "layers", ()):
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def leave(self) -> None:
        """End the sender, and leave the group of ranks, of which others may be gone."""
        self.end_sender()
        dist.destroy_process_group()

    def gather(self) -> None:
        """From the next `connect` on, all tensors are gathered."""
        self.gathers = True

    @property
    def source(self) -> Any:
        return Gathered(self.model) if self.gathers else self.model

    def environ(self, name: str, value: str) -> None:
        os.environ[name] = value

    def connect(self, to: Sequence[str], model: str = "plain", **options: Any) -> str:
        if not dist.is_initialized():
            self.model = self.twin = models.make(model)
        options = {"bucket_nbytes": models.BUCKET_NBYTES, **options}
        self.sender = ws.connect(self.source, to=list(to), **options)
        return str(self.sender.path)

    def connect_one_at_a_time(self, to: Sequence[str], **options: Any) -> None:
        self.sender = ws.connect(self.source, to=[OneAtATime(url) for url in to], **options)

    def connect_in_rounds(self, to: Sequence[str], **options: Any) -> None:
        self.sender = ws.connect(self.source, to=[InRounds(url) for url in to], **options)

    def connect_to_die(self, dies: str, first: str) -> None:
        self.model = self.twin = models.make("plain")
        targets = [HttpTransport(first), DiesBetweenFinishes(dies, first)]
        self.sender = ws.connect(self.model, to=targets, packed=True)

    def touch(self, seed: int) -> None:
        """Change one value in a hundred."""
        models.touch(self.twin, seed)
        self._copy_twin()

    def fill(self, seed: int) -> None:
        models.fill(self.twin, seed)
        self._copy_twin()

    def _copy_twin(self) -> None:
        """Have the model the values of the twin, of which it has its shards."""
        if self.twin is self.model:
            return
        whole = dict(self.twin.named_parameters())
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                assert isinstance(parameter, DTensor)
                mesh, placements = parameter.device_mesh, parameter.placements
                cut = distribute_tensor(whole[name].data, mesh, placements, src_data_rank=None)
                parameter.to_local().copy_(cut.to_local())

    def send(self, seed: int | None, **options: Any) -> ws.SyncReport:
        if seed is not None:
            self.fill(seed)
        return cast(ws.SyncReport, self.sender.send_weights(**options))

    def send_copy(self, seed: int) -> ws.SyncReport:
        """Send a copy, and change the weights before it is sent."""
        self.fill(seed)
        sent = self.sender.send_async()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        return cast(ws.SyncReport, sent.result(WAIT_S))

    def send_part(self, seed: int, names: Sequence[str]) -> ws.SyncReport:
        self.fill(seed)
        state = self.model.state_dict()
        with self.sender.update(partial=True) as update:
            update.send([(name, state[name]) for name in names])
        return cast(ws.SyncReport, update.last_report)

    def call(self, what: str, *args: Any) -> Any:
        """Call a method of the sender."""
        return getattr(self.sender, what)(*args)

    def end_sender(self) -> None:
        """Close the sender, if there is one."""
        sender, self.sender = self.sender, None
        if sender is not None:
            sender.close()

    def targets(self) -> list[str]:
        return list(self.sender.targets)

    def digests(self, shard: tuple[int, int] | None = None) -> dict[str, str]:
        """Digests of the weights, or of what `models.keep_columns` keeps of them."""
        if shard is not None:
            return models.digests(models.columns_of(self.twin, *shard).items())
        return models.digests(self.twin)

    def footprint(self) -> dict[str, int]:
        return processes.footprint()
