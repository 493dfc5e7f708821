"""Fixtures of BackendContract: receivers, sources, and child processes.

Children import the backend's class by the name of its module.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from multiprocessing.connection import Client, Connection, Listener
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self, cast

import msgspec
import pytest
import torch
from torch import nn

from weightsync.backends.base import Backend
from weightsync.backends.registry import get_backend, register_backend
from weightsync.errors import (
    ConfigError,
    ConnectError,
    TransportTimeout,
    WeightSyncError,
)
from weightsync.receiver import WeightReceiver
from weightsync.sender import WeightSender, connect
from weightsync.shm.segment import cleanup_stale
from weightsync.tensors import TORCH_DTYPES, contiguous_bytes
from weightsync.testing.held import Held
from weightsync.transports.base import BaseTransport
from weightsync.update.lifecycle import ApplyChoice
from weightsync.weights.copying.layout import StreamLayout
from weightsync.weights.sinks.base import Apply, LoadTarget
from weightsync.weights.sinks.module_sink import ModuleSink
from weightsync.wire import codec
from weightsync.wire.messages import CALL_OF, Reply, Request
from weightsync.wire.problem import Problem, from_problem, to_problem

BackendOfTest = str | Backend | type[Backend]

BUCKET_NBYTES = 64 << 10
SLACK_S = 4.0
CHILD_S = 60.0
_MIB = 1 << 20
Bits = dict[str, str]


class ContractModel(nn.Module):
    """A module of 1.3 MB in 22 tensors, one of them larger than a bucket of the tests."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(seed)
        self.layers = nn.ParameterList(
            nn.Parameter(torch.randn(64, 64, generator=made)) for _ in range(20)
        )
        self.large = nn.Parameter(torch.randn(1 << 18, generator=made))
        self.scale = nn.Parameter(torch.randn((), generator=made))

    def step(self) -> None:
        """Change every tensor, as an optimizer does."""
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.5).add_(1.0)


# Receivers


class ReceiverUnderTest:
    """A receiver in this process, with its module or the tensors that its hook received."""

    def __init__(self, kind: str, apply: ApplyChoice) -> None:
        self.module = ContractModel(2)
        self._given: Bits = {}
        self._is_hook = kind == "hook"
        self.receiver = WeightReceiver(
            self._load if self._is_hook else self.module, apply=apply, lease_s=CHILD_S
        )

    @classmethod
    @contextmanager
    def taken(
        cls, kind: str = "module", apply: ApplyChoice = "staged"
    ) -> Iterator[ReceiverUnderTest]:
        """Context manager of one, which is closed at the end."""
        target = cls(kind, apply)
        with closing(target.receiver):
            yield target

    def _load(self, pairs: Any) -> None:
        self._given.update(bits(dict(pairs)))

    @property
    def bits(self) -> Bits:
        """The hashes of the weights in use."""
        return dict(self._given) if self._is_hook else bits(self.module)

    def holds(self, model: nn.Module) -> bool:
        """Whether the weights in use equal the model's, bit for bit."""
        return self.bits == bits(model)


class EndingSink(ModuleSink):
    """A ModuleSink that calls `end` when an engine begins to load the second update."""

    def __init__(self, module: nn.Module, end: Callable[[], None] = lambda: None) -> None:
        super().__init__(module)
        self.module = module
        self.end = end
        self._updates = 0

    def open_target(self, layout: StreamLayout, apply: Apply) -> LoadTarget:
        """Return the load target of ModuleSink, with a `begin` that counts updates."""
        target = super().open_target(layout, apply)
        begin = target.begin

        def begin_and_end() -> None:
            begin()
            self._updates += 1
            if self._updates == 2:
                self.end()

        target.begin = begin_and_end  # type: ignore[method-assign]  # for this target alone
        return target


@contextmanager
def receiving(sink: Any) -> Iterator[WeightReceiver]:
    """Context manager of a receiver that stages."""
    with closing(WeightReceiver(sink, apply="staged", lease_s=CHILD_S)) as receiver:
        yield receiver


def await_ready(receiver: WeightReceiver, timeout_s: float) -> None:
    """Return when no update is open; fail after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while receiver.status().state != "READY" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert receiver.status().state == "READY"


# Sources


class PlantedError(Exception):
    """The error that a test's source, or block, raises."""


def fail() -> None:
    """Raise PlantedError."""
    raise PlantedError


def send_and_fail(sender: WeightSender) -> None:
    """Raise PlantedError inside an update, after one tensor was sent."""
    with sender.update() as update:
        update.send([("layers.0", torch.zeros(64, 64))])
        raise PlantedError


class Source:
    """A callable source that, in the middle of one update, calls `act` once."""

    def __init__(self, model: ContractModel) -> None:
        self.model = model
        self.act: Callable[[], None] | None = None

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, (name, tensor) in enumerate(self.model.named_parameters()):
            act, self.act = (self.act, None) if index == 12 else (None, self.act)
            if act is not None:
                act()
            yield name, tensor.detach()


class Buffers(nn.Module):
    """A module of these tensors, as buffers."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def every_dtype(seed: int) -> dict[str, torch.Tensor]:
    """Tensors of four shapes of every dtype, of random bytes."""
    made = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, dtype in TORCH_DTYPES.items():
        for shape in ((), (0, 3), (3, 5), (129,)):
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            high = 2 if dtype is torch.bool else 256
            flat = torch.randint(high, (nbytes,), dtype=torch.uint8, generator=made)
            tensors[f"{name}_{len(tensors)}"] = flat.view(dtype).view(shape)
    return tensors


def bits(tensors: nn.Module | Mapping[str, torch.Tensor]) -> Bits:
    """The SHA-256 of every tensor's bytes: NaN equals itself, and 0.0 differs from -0.0.

    Where two differ, pytest names the tensors; a diff of their bytes would take it minutes.
    """
    state = tensors.state_dict() if isinstance(tensors, nn.Module) else tensors
    return {
        name: sha256(contiguous_bytes(tensor).numpy().data).hexdigest()
        for name, tensor in state.items()
    }


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fail a block that takes more than `seconds` and some slack for a busy machine."""
    started = time.monotonic()
    yield
    took = time.monotonic() - started
    assert took < seconds + SLACK_S, f"took {took:.1f} s of {seconds:.1f} s"


# Backends


def known_backend(backend: BackendOfTest) -> Backend:
    """Register the backend in this process, where receivers find it by name, and return it."""
    if isinstance(backend, str):
        return get_backend(backend)
    try:
        known = get_backend(backend.name)
    except ConfigError:
        register_backend(backend)
        return get_backend(backend.name)
    kind = backend if isinstance(backend, type) else type(backend)
    assert type(known) is kind, f"another backend is called {backend.name!r}: {known}"
    return known


def connect_by(
    backend: BackendOfTest, source: object, to: Any, options: Mapping[str, Any]
) -> WeightSender:
    """Return a sender of `source` by a backend, which is registered first."""
    return connect(source, to, backend=known_backend(backend).name, **options)


def watch_engines(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> list[object]:
    """Return a list that collects all engines that a backend makes from now on."""
    made: list[object] = []
    for method in ("trainer_engine", "receiver_engine"):
        genuine = getattr(backend, method)

        def make(*args: Any, genuine: Callable[..., object] = genuine) -> object:
            made.append(genuine(*args))
            return made[-1]

        monkeypatch.setattr(backend, method, make)
    return made


# Child processes


class SocketTransport(BaseTransport):
    """Carries calls to a receiver in another process, each by a connection of its own."""

    def __init__(self, address: str, target: str) -> None:
        super().__init__(target)
        self._address = address

    def call(self, request: Request, *, timeout_s: float) -> Reply:
        """Send one request; see Transport.call."""
        self._check_open()
        call = CALL_OF[type(request)]
        body = msgspec.json.encode(codec.to_plain(request))
        self._count(len(body))
        try:
            with Client(self._address, family="AF_UNIX") as connection:
                connection.send_bytes(body)
                if not connection.poll(timeout_s):
                    raise TransportTimeout(f"{self.target}: no answer to {call}")
                answer = connection.recv_bytes()
        except (EOFError, OSError) as exc:
            if isinstance(exc, WeightSyncError):
                raise
            raise ConnectError(f"{self.target}: {call}: {exc!r}") from exc
        if answer[:1] == b"!":
            raise from_problem(msgspec.json.decode(answer[1:], type=Problem), peer=self.target)
        return codec.reply_from_plain(call, msgspec.json.decode(answer))


@contextmanager
def serving(receiver: WeightReceiver) -> Iterator[str]:
    """Serve a receiver's calls at an address, which is yielded."""
    directory = tempfile.mkdtemp(prefix="weightsync-contract-")
    address = str(Path(directory, "calls"))
    listener = Listener(address, family="AF_UNIX", backlog=64)
    done = threading.Event()
    threading.Thread(target=_accept, args=(listener, receiver, done), daemon=True).start()
    try:
        yield address
    finally:
        done.set()
        with suppress(OSError):  # the thread that accepts must see it
            Client(address, family="AF_UNIX").close()
        listener.close()
        shutil.rmtree(directory, ignore_errors=True)


def _accept(listener: Listener, receiver: WeightReceiver, done: threading.Event) -> None:
    while not done.is_set():
        try:
            connection = cast("Connection[bytes, bytes]", listener.accept())
        except OSError:
            return
        threading.Thread(target=_answer, args=(connection, receiver), daemon=True).start()


def _answer(connection: Connection[bytes, bytes], receiver: WeightReceiver) -> None:
    with connection, suppress(EOFError, OSError):
        message = msgspec.json.decode(connection.recv_bytes())
        try:
            answer = msgspec.json.encode(receiver.handle(message))
        except Exception as exc:  # noqa: BLE001  # raised where the call was made
            answer = b"!" + msgspec.json.encode(to_problem(exc))
        connection.send_bytes(answer)


Pipe = Any


@dataclass(frozen=True)
class Task:
    """The arguments of a child process.

    The signal `end` ends or stops it in the middle of its second update; None leaves it alone. `to`
    is the address of the receiver that it sends to.
    """

    backend: BackendOfTest
    options: Mapping[str, Any]
    end: int | None
    to: str


class Child:
    """A child process at `work`, which is given a pipe; killed at the end of the block."""

    def __init__(
        self, context: BaseContext, work: Callable[[Pipe, Task], None], task: Task
    ) -> None:
        self._pipe, theirs = context.Pipe()
        made: Any = context
        self._process: BaseProcess = made.Process(
            target=_run, args=(work, theirs, task, dict(os.environ)), daemon=True
        )
        self._process.start()
        theirs.close()
        self._address = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()
        cleanup_stale()  # as the next sender or receiver does

    @property
    def address(self) -> str:
        """The address of its receiver."""
        self._address = self._address or str(self.result())
        return self._address

    def result(self) -> Any:
        """Return the result that the child sent."""
        assert self._pipe.poll(CHILD_S), "the child process sent nothing"
        return msgspec.json.decode(self._pipe.recv_bytes())

    def send(self, end: int) -> None:
        """Send it a signal."""
        os.kill(self._process.pid or 0, end)

    def has_met(self, end: int) -> bool:
        """Whether the signal has ended or stopped it."""
        if end == signal.SIGKILL:
            self._process.join(1.0)
            return self._process.exitcode == -end
        stat = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf-8")
        return stat.rpartition(")")[2].split()[0] == "T"

    def await_end(self, end: int) -> None:
        """Return when the signal has ended or stopped it."""
        deadline = time.monotonic() + CHILD_S
        while not self.has_met(end):
            assert time.monotonic() < deadline, "the child process was not ended"
            assert self._process.is_alive(), f"the child ended with {self._process.exitcode}"
            time.sleep(0.02)


def _run(
    work: Callable[[Pipe, Task], None], pipe: Pipe, task: Task, environment: dict[str, str]
) -> None:
    os.environ.update(environment)  # a fork server has that of an earlier test
    work(pipe, task)


_SIGNAL_S = 10.0
"""Wait of a process for its own signal, which another thread of the process may receive."""


def _end_here(end: int) -> None:
    if end:
        os.kill(os.getpid(), end)
        time.sleep(_SIGNAL_S)


def run_receiver(pipe: Pipe, task: Task) -> None:
    """The work of a receiving process."""
    known_backend(task.backend)
    sink = EndingSink(ContractModel(2), partial(_end_here, task.end or 0))
    with receiving(sink) as receiver, serving(receiver) as address:
        pipe.send_bytes(msgspec.json.encode(address))
        time.sleep(10 * CHILD_S)


def run_trainer(pipe: Pipe, task: Task) -> None:
    """The work of a trainer process."""
    source, to = Source(ContractModel(1)), SocketTransport(task.to, "receiver")
    with pipe, connect_by(task.backend, source, to, task.options) as sender:
        sender.send_weights()
        source.model.step()
        if task.end is not None:
            source.act = partial(_end_here, task.end)
        sender.send_weights()
    time.sleep(CHILD_S)


def run_measurement(pipe: Pipe, task: Task) -> None:
    """The work of a process that reports the resources it gained during 200 updates."""
    with suppress(AttributeError):  # glibc's: of one arena alone, all freed memory can be trimmed
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    model = ContractModel(1)
    with ReceiverUnderTest.taken("module") as one, ReceiverUnderTest.taken("hook") as other:
        to = [one.receiver.handle, other.receiver.handle]

        def send(updates: int) -> None:
            with connect_by(task.backend, model, to, task.options) as sender:
                for number in range(updates):
                    model.step()
                    if number % 10 < 9:
                        sender.send_weights()
                    else:
                        with sender.update(partial=True) as update:
                            update.send([("large", model.large.detach())])
                sender.send_weights()

        for _ in range(2):
            send(50)
        before = Held.now()
        for _ in range(CONNECTIONS):
            send(200 // CONNECTIONS)
        grown = Held.now().since(before, names=CONNECTIONS)
        assert one.holds(model)
    pipe.send_bytes(msgspec.json.encode(grown))


_M_ARENA_MAX = -8
CONNECTIONS = 4
"""Connections that a process makes while its resources are measured."""
