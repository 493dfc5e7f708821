"""Receivers and trainers in processes of their own.

One host process holds many receivers, each reached over pipes by a user's callback or over HTTP by
its own URL. Processes are forked from a server that has loaded torch, and share only JSON messages
with the tests.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

import weightsync as ws
from tests.children import CONTEXT, load_beforehand
from tests.e2e import models, sabotage
from tests.side_by_side import mount_own_shm
from weightsync.weights.copying.shards import local_of
from weightsync.wire.problem import Problem, encode_problem, from_problem, to_problem

WAIT_S = 60.0
NIXL_OVER_TCP = {"UCX_TLS": "tcp,self", "UCX_LOG_LEVEL": "error"}
"""Environment of processes that are hosts of their own. UCX reads it once for each process."""
PIPES = 8
"""Concurrent calls to a process, each on a pipe of its own."""

Sink = Literal["module", "hook"]
Apply = Literal["staged", "in_place"]
Carrier = Literal["callback", "http"]

load_beforehand("tests.e2e.processes", "tests.e2e.trainers", "tests.e2e.serving")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The settings of a receiver; its hook sleeps `delay_s` in every call.

    `shard` is (k, n): its module has the columns of part k of n, as DTensors.
    """

    sink: Sink = "module"
    apply: Apply = "staged"
    model: str = "everything"
    delay_s: float = 0.0
    lease_s: float = 20.0
    cast: bool = False
    shard: tuple[int, int] | None = None


class Remote:
    """A receiver in another process. As a callable it is a user's callback."""

    def __init__(self, host: Host, name: str, carrier: Carrier) -> None:
        self._host = host
        self.name = name
        self.carrier = carrier
        self.url = f"{host.url}/{name}"
        self.__qualname__ = name

    @property
    def to(self) -> Any:
        """The receiver as a target of `connect`."""
        return self.url if self.carrier == "http" else self

    def __call__(self, message: Mapping[str, object]) -> object:
        return self._host.ask(self.name, "handle", message)

    def digests(self) -> dict[str, str]:
        """Digests of every tensor in use."""
        return dict(self._host.ask(self.name, "digests"))

    def reading(self, timeout_s: float = 5.0) -> int:
        """Make a step inside `reading`, and return the version. Raises the errors of `reading`."""
        return int(self._host.ask(self.name, "reading", timeout_s))

    def hinder(self, *, delay_s: float = 0.0, failing_calls: int = 0) -> None:
        """Make every later call of its hook sleep, and the next ones raise in the middle."""
        self._host.ask(self.name, "hinder", [delay_s, failing_calls])

    def status(self) -> dict[str, Any]:
        return dict(self._host.ask(self.name, "status"))

    def fetch(self, sources: Sequence[str], **options: Any) -> Any:
        """Have it fetch the weights of another receiver; return the report as plain data."""
        return self._host.ask(self.name, "fetch", [list(sources), options])

    def sabotage(self, step: sabotage.Step, act: sabotage.Act) -> None:
        """Make its next `step` raise, or end its process."""
        self._host.ask(self.name, "sabotage", [step, act])

    def call(self, call: str, body: object) -> Any:
        """Send a message as it is."""
        return self._host.ask(self.name, "handle", {"call": call, "body": body})


class Host:
    """The parent's end of a process of receivers."""

    def __init__(self, process: BaseProcess, pipes: Sequence[Connection], port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self._free: queue.Queue[Connection] = queue.Queue()
        for pipe in pipes:
            self._free.put(pipe)
        self._made = 0

    def receiver(self, carrier: Carrier = "callback", **place: Any) -> Remote:
        """Make a receiver of `Place(**place)`."""
        self._made += 1
        name = f"receiver-{self._made}"
        self.ask(name, "make", asdict(Place(**place)))
        return Remote(self, name, carrier)

    def footprint(self) -> dict[str, int]:
        return dict(self.ask("", "footprint"))

    def forget(self) -> None:
        """Close every receiver."""
        self.ask("", "forget")

    def run(self, function: Callable[[Any], object], argument: object = None) -> Any:
        """Call a module's function in that process; argument and result are plain data."""
        return self.ask("", "run", [function.__module__, function.__name__, argument])

    def kill(self) -> None:
        """SIGKILL, and wait until it is dead."""
        kill(self.process)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop all threads of the process during the block."""
        assert self.process.pid is not None
        stop(self.process.pid)
        try:
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)

    def ask(self, name: str, what: str, argument: object = None) -> Any:
        pipe = self._free.get(timeout=WAIT_S)
        try:
            pipe.send_bytes(json.dumps([name, what, argument]).encode())
            assert pipe.poll(WAIT_S), f"{name} did not answer {what} within {WAIT_S} s"
            answer = json.loads(pipe.recv_bytes())
        except (EOFError, OSError) as exc:
            raise ws.ConnectError(f"{name}: the process is gone: {exc}") from exc
        finally:
            self._free.put(pipe)
        if "problem" in answer:
            problem = msgspec.json.decode(answer["problem"], type=Problem)
            raise from_problem(problem, peer=name)
        return answer["result"]


@contextmanager
def host(*, apart: bool = False) -> Iterator[Host]:
    """Start a process of receivers, which ends with the context in any case.

    With `apart` it has a /dev/shm of its own, so that it is a host of its own to weightsync.
    """
    pairs = [CONTEXT.Pipe() for _ in range(PIPES)]
    # asyncio turns Nagle's algorithm off only where the protocol is spelled out.
    with socket.socket(proto=socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        process = CONTEXT.Process(target=_serve, args=([c for _, c in pairs], listener, apart))
        process.start()
        port = listener.getsockname()[1]
    for _, child in pairs:
        child.close()
    try:
        yield Host(process, [parent for parent, _ in pairs], port)
    finally:
        for parent, _ in pairs:
            parent.close()
        process.join(WAIT_S)
        if process.is_alive():
            kill(process)
            raise AssertionError(f"the receivers' process did not end within {WAIT_S} s")


def kill(process: BaseProcess) -> None:
    """SIGKILL, and wait until it is dead."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(WAIT_S)
    assert not process.is_alive()


def stop(pid: int) -> None:
    """SIGSTOP, and wait until every thread has stopped."""
    os.kill(pid, signal.SIGSTOP)

    def stands() -> bool:
        tasks = Path(f"/proc/{pid}/task").glob("*/stat")
        return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)

    wait_until(stands, f"process {pid} to stop")


@contextmanager
def started(target: Callable[..., None], *args: object) -> Iterator[BaseProcess]:
    """Run `target` in a process that does not outlive the block."""
    process = CONTEXT.Process(target=target, args=args)
    process.start()
    try:
        yield process
    finally:
        if process.is_alive():
            kill(process)
        process.join(WAIT_S)


def ended(target: Callable[..., None], *args: object) -> int | None:
    """Run `target` to its end in another process and return its exit code."""
    with started(target, *args) as process:
        process.join(WAIT_S)
        assert not process.is_alive(), f"{target.__name__} did not end within {WAIT_S} s"
        return process.exitcode


def wait_until(ready: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not ready():
        assert time.monotonic() < deadline, f"waited {WAIT_S} s for: {what}"
        time.sleep(0.01)


def footprint() -> dict[str, int]:
    """Return this process's resident bytes, descriptors, threads and mapped segments."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return {
        "rss": pages * os.sysconf("SC_PAGE_SIZE"),
        "fds": len(list(Path("/proc/self/fd").iterdir())),
        "threads": min(_threads() for _ in range(5)),
        "segments": sum("/dev/shm/weightsync-" in line for line in maps.splitlines()),
    }


def _threads() -> int:
    """A joined thread is listed until the kernel has removed it."""
    time.sleep(0.02)
    return len(list(Path("/proc/self/task").iterdir()))


class _Held:
    """One receiver in the host process, and its model."""

    def __init__(self, place: Place) -> None:
        self.model = models.make(place.model)
        if place.shard is not None:
            models.keep_columns(self.model, *place.shard)
        self.got: dict[str, torch.Tensor] = {}
        self._place = place
        self._hindered: tuple[float, int] = (place.delay_s, 0)
        sink: Any = ws.ModuleSink(self.model, cast=True) if place.cast else self.model
        self.receiver = ws.WeightReceiver(
            self._load if place.sink == "hook" else sink, apply=place.apply, lease_s=place.lease_s
        )

    def _load(self, pairs: Any) -> None:
        delay_s, failing_calls = self._hindered
        for name, tensor in pairs:
            self.got[name] = tensor.clone()
            if failing_calls:
                self._hindered = (delay_s, failing_calls - 1)
                raise ValueError(f"no room for {name}")
        time.sleep(delay_s)

    def hinder(self, how: tuple[float, int]) -> None:
        self._hindered = how

    def digests(self, _: object) -> dict[str, str]:
        hooked = self._place.sink == "hook"
        if self._place.shard is not None:
            return models.digests(
                (name, local_of(tensor)) for name, tensor in self.model.state_dict().items()
            )
        return models.digests(self.got.items() if hooked else self.model)

    def fetch(self, argument: tuple[Sequence[str], dict[str, Any]]) -> object:
        sources, options = argument
        return ws.fetch(self.receiver, sources, **options).to_dict()

    def sabotage(self, argument: tuple[sabotage.Step, sabotage.Act]) -> None:
        sabotage.arm(self.receiver, *argument)

    def reading(self, timeout_s: float) -> int:
        with self.receiver.reading(timeout_s=timeout_s) as version:
            return version


class _Served:
    """All receivers of the host process."""

    def __init__(self) -> None:
        self.held: dict[str, _Held] = {}
        self.on_make: Callable[[str, ws.WeightReceiver], None] = lambda *_: None

    def answer(self, name: str, what: str, argument: Any) -> object:
        if what == "make":
            self.held[name] = _Held(Place(**argument))
            self.on_make(name, self.held[name].receiver)
            return None
        if what == "footprint":
            return footprint()
        if what == "run":
            module, function, given = argument
            return getattr(importlib.import_module(module), function)(given)
        if what == "forget":
            while self.held:
                self.held.popitem()[1].receiver.close()
            return None
        held = self.held[name]
        if what == "handle":
            return held.receiver.handle(argument)
        if what == "status":
            return msgspec.to_builtins(held.receiver.status())
        return getattr(held, what)(argument)


def _serve(pipes: list[Connection], listener: socket.socket, apart: bool = False) -> None:
    from tests.e2e.serving import serve_http

    if apart:
        mount_own_shm()
        os.environ.update(NIXL_OVER_TCP)
    torch.set_num_threads(1)
    served = _Served()
    served.on_make, stop = serve_http(listener)
    threads = [threading.Thread(target=_answer, args=(pipe, served)) for pipe in pipes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stop()
    served.answer("", "forget", None)


def _answer(pipe: Connection, served: _Served) -> None:
    while True:
        try:
            name, what, argument = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            reply: dict[str, object] = {"result": served.answer(name, what, argument)}
        except Exception as exc:  # noqa: BLE001 # whatever it is, the parent raises it
            reply = {"problem": encode_problem(to_problem(exc)).decode()}
        pipe.send_bytes(json.dumps(reply).encode())


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
