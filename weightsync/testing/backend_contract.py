"""The contract of backends as pytest tests: subclass BackendContract, name a backend, run pytest.

Updates go through `weightsync.connect` to real receivers. Where a process is killed or stopped, it
is a child of this one. Children import the backend's class by the name of its module.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import msgspec
import pytest
import torch
from torch import nn

from weightsync.backends.base import Backend, TrainerWeightTransferEngine, WeightTransferEngine
from weightsync.backends.registry import get_backend, register_backend
from weightsync.errors import (
    ConfigError,
    ConnectError,
    ProtocolError,
    TransportTimeout,
    VerificationError,
    WeightSyncError,
)
from weightsync.receiver import WeightReceiver
from weightsync.sender import WeightSender, connect
from weightsync.shm.segment import cleanup_stale
from weightsync.tensors import TORCH_DTYPES, contiguous_bytes
from weightsync.transports.base import BaseTransport
from weightsync.update.lifecycle import ApplyChoice
from weightsync.weights.layout import StreamLayout
from weightsync.weights.module_sink import ModuleSink
from weightsync.weights.sink import Apply, LoadTarget
from weightsync.wire import codec
from weightsync.wire.messages import CALL_OF, Reply, Request
from weightsync.wire.problem import Problem, from_problem, to_problem

BackendOfTest = str | Backend | type[Backend]

BUCKET_NBYTES = 64 << 10
_SLACK_S = 4.0
_CHILD_S = 60.0
_MIB = 1 << 20
Bits = dict[str, bytes]


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


class BackendContract:
    """What every backend keeps to. A subclass whose name begins with Test names the `backend`.

    - `backend`: a registered name, a Backend class, or an instance that can be pickled.
    - `options`: further arguments of every `connect`, for instance `{"packed": True}`.
    - `timeout_s`: the timeout of every sender; a failure is noticed within 1.2 times this.
    - `streams`: whether the trainer's engine reads a source that makes its tensors while receivers
      wait (in `transfer`), and not before they are told (in `begin`).
    - `context`: how child processes are started.
    - `corrupt(monkeypatch)` flips a bit of a tensor on its way, in every update.
    """

    backend: ClassVar[BackendOfTest]
    options: ClassVar[Mapping[str, Any]] = {}
    timeout_s: ClassVar[float] = 3.0
    streams: ClassVar[bool] = True
    context: ClassVar[BaseContext] = multiprocessing.get_context("spawn")

    def corrupt(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Flip a bit of a tensor on its way, after the trainer made its fingerprint.

        In every update until `monkeypatch` is undone; the source itself must not change.
        """
        raise NotImplementedError(f"{type(self).__name__} has to say how a bit is flipped")

    def connect(self, source: object, to: object, **more: Any) -> WeightSender:
        """Return a sender of `source` by this backend."""
        return _connect(self.backend, source, to, self._options(more))

    # Whole models

    def test_every_dtype_arrives_bit_for_bit(self) -> None:
        sent = _every_dtype(seed=1)
        held = _Buffers(_every_dtype(seed=2))
        with _receiving(held) as receiver, self.connect(sent, receiver.handle) as sender:
            assert _bits(held) != _bits(sent)
            sender.send_weights()
            assert _bits(held) == _bits(sent)

    @pytest.mark.parametrize("apply", ["staged", "in_place"])
    @pytest.mark.parametrize("kind", ["module", "hook"])
    def test_updates_follow_each_other(self, kind: str, apply: ApplyChoice) -> None:
        model = ContractModel(1)
        with ExitStack() as stack:
            seat = stack.enter_context(_Seat.taken(kind, apply))
            sender = stack.enter_context(self.connect(model, seat.receiver.handle))
            for version in (1, 2, 3):
                report = sender.send_weights()
                assert seat.holds(model)
                assert seat.receiver.version == version
                assert report.verified in ("arrived", "held")
                assert report.apply == apply
                assert report.nbytes == sum(p.nbytes for p in model.parameters())
                model.step()

    def test_tensors_are_cast_on_the_way(self) -> None:
        model = ContractModel(1)
        with _Seat.taken("hook", "staged") as seat:
            with self.connect(model, seat.receiver.handle, dtype=torch.bfloat16) as sender:
                sender.send_weights()
            assert seat.bits == _bits(model.to(torch.bfloat16))

    def test_several_receivers_hold_the_same(self) -> None:
        model = ContractModel(1)
        with ExitStack() as stack:
            kinds: list[tuple[str, ApplyChoice]] = [
                ("module", "staged"),
                ("module", "in_place"),
                ("hook", "staged"),
            ]
            seats = [stack.enter_context(_Seat.taken(*kind)) for kind in kinds]
            handles = [seat.receiver.handle for seat in seats]
            sender = stack.enter_context(self.connect(model, handles))
            for _ in range(2):
                report = sender.send_weights()
                assert len(report.receivers) == len(seats)
                assert all(seat.holds(model) for seat in seats)
                model.step()

    def test_receivers_join_and_leave(self) -> None:
        model = ContractModel(1)
        with ExitStack() as stack:
            first, second = (stack.enter_context(_Seat.taken()) for _ in range(2))
            sender = stack.enter_context(self.connect(model, first.receiver.handle))
            sender.send_weights()
            sender.add(second.receiver.handle)
            assert second.holds(model)
            model.step()
            sender.send_weights()
            assert first.holds(model)
            assert second.holds(model)
            old = _bits(model)
            sender.remove(sender.targets[0])
            model.step()
            sender.send_weights()
            assert first.bits == old
            assert second.holds(model)

    def test_memory_is_released_and_made_again(self) -> None:
        model = ContractModel(1)
        with _Seat.taken() as seat, self.connect(model, seat.receiver.handle) as sender:
            sender.send_weights()
            sender.release()
            model.step()
            sender.send_weights()
            assert seat.holds(model)

    # Parts of models

    def test_a_subset_changes_nothing_else(self) -> None:
        model, change = ContractModel(1), torch.full((64, 64), 7.0)
        with _Seat.taken() as seat, self.connect(model, seat.receiver.handle) as sender:
            sender.send_weights()
            with sender.update(partial=True) as update:
                update.send([("layers.3", change)])
            with torch.no_grad():
                model.layers[3].copy_(change)
            assert seat.holds(model)
            assert seat.receiver.version == 2
            model.step()
            sender.send_weights()
            assert seat.holds(model)

    def test_a_model_in_several_messages(self) -> None:
        model = ContractModel(1)
        with ExitStack() as stack:
            seats = [stack.enter_context(_Seat.taken(kind)) for kind in ("module", "hook")]
            handles = [seat.receiver.handle for seat in seats]
            sender = stack.enter_context(self.connect(model, handles))
            sender.send_weights()
            model.step()
            pairs = [(name, tensor.detach()) for name, tensor in model.named_parameters()]
            old = [seat.bits for seat in seats]
            with sender.update() as update:
                for start in range(0, len(pairs), 8):
                    update.send(pairs[start : start + 8])
                assert [seat.bits for seat in seats] == old
            assert all(seat.holds(model) for seat in seats)

    # Aborts

    def test_a_source_that_fails_in_the_middle(self) -> None:
        source = _Source(ContractModel(1))
        with ExitStack() as stack:
            seat = stack.enter_context(_Seat.taken())
            # Only the abort can end the wait of the receiver's engine in time.
            patient = self.connect(source, seat.receiver.handle, timeout_s=10 * self.timeout_s)
            sender = stack.enter_context(patient)
            sender.send_weights()
            old = seat.bits
            source.model.step()
            source.act = _fail
            with _within(self.timeout_s), pytest.raises(_PlantedError):
                sender.send_weights()
            _await_ready(seat.receiver, self.timeout_s)
            assert seat.bits == old
            sender.send_weights()
            assert seat.holds(source.model)

    def test_a_block_that_fails_in_the_middle(self) -> None:
        model = ContractModel(1)
        with _Seat.taken() as seat, self.connect(model, seat.receiver.handle) as sender:
            sender.send_weights()
            old = seat.bits
            with _within(self.timeout_s), pytest.raises(_PlantedError):
                _send_and_fail(sender)
            _await_ready(seat.receiver, self.timeout_s)
            assert seat.bits == old
            model.step()
            sender.send_weights()
            assert seat.holds(model)

    def test_a_receiver_that_aborts_does_not_wait_for_the_rest(self) -> None:
        """The source stands still in the middle; the receiver is told to give the update up."""
        source = _Source(ContractModel(1))
        states: list[str] = []
        with ExitStack() as stack:
            seat = stack.enter_context(_Seat.taken())
            # Only the abort can end the wait of the receiver's engine in time.
            patient = self.connect(source, seat.receiver.handle, timeout_s=10 * self.timeout_s)
            sender = stack.enter_context(patient)
            sender.send_weights()
            old = seat.bits

            def abort() -> None:
                deadline = time.monotonic() + 1.0
                while time.monotonic() < deadline and not seat.receiver.status().busy:
                    time.sleep(0.01)
                status = seat.receiver.status()
                states.append(status.state)
                message = {"call": "abort_weight_update", "body": {"update_id": status.update_id}}
                reply = seat.receiver.handle(message) if status.update_id else {"state": "READY"}
                states.append(str(reply["state"]))

            source.act = abort
            source.model.step()
            if self.streams:
                with _within(self.timeout_s), pytest.raises(WeightSyncError):
                    sender.send_weights()
                assert states == ["UPDATING", "READY"]
                assert seat.bits == old
            else:
                sender.send_weights()
                assert states == ["READY", "READY"], "no update was open; set streams = True"
            sender.send_weights()
            assert seat.holds(source.model)

    # Verification

    @pytest.mark.parametrize("kind", ["module", "hook"])
    def test_a_flipped_bit_is_found(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        model = ContractModel(1)
        with _Seat.taken(kind) as seat, self.connect(model, seat.receiver.handle) as sender:
            sender.send_weights()
            old = seat.bits
            model.step()
            with monkeypatch.context() as patch:
                self.corrupt(patch)
                with pytest.raises(VerificationError) as caught:
                    sender.send_weights()
                assert set(caught.value.names) <= set(old)
                assert caught.value.names
                assert seat.bits == old
                # The fault is real: unverified it reaches the weights in use.
                sender.verify = False
                assert sender.send_weights().verified == "none"
                assert seat.bits.keys() == old.keys()
                assert not seat.holds(model), "corrupt() flips no bit"
            sender.verify = True
            sender.send_weights()
            assert seat.holds(model)

    def test_a_hook_is_given_no_flipped_bit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A hook that loads in place cannot take the weights back."""
        model = ContractModel(1)
        with ExitStack() as stack:
            seat = stack.enter_context(_Seat.taken("hook", "in_place"))
            sender = stack.enter_context(self.connect(model, seat.receiver.handle))
            with monkeypatch.context() as patch:
                self.corrupt(patch)
                with pytest.raises(VerificationError):
                    sender.send_weights()
            sent = _bits(model)
            assert {name: sent[name] for name in seat.bits} == seat.bits
            sender.send_weights()
            assert seat.holds(model)

    # Processes that die or stand still

    @pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
    def test_a_receiver_is_lost_in_the_middle(self, end: signal.Signals) -> None:
        model = ContractModel(1)
        with ExitStack() as stack:
            victim = stack.enter_context(self._child(_receive, end=end))
            living = stack.enter_context(_Seat.taken())
            to = [_SocketTransport(victim.address, "victim"), living.receiver.handle]
            sender = stack.enter_context(self.connect(model, to))
            sender.send_weights()
            old = living.bits
            model.step()
            with _within(1.2 * self.timeout_s), pytest.raises(WeightSyncError):
                sender.send_weights()
            assert victim.has_met(end)
            assert living.bits == old
            with _within(2.4 * self.timeout_s):
                sender.remove("victim")
                sender.send_weights()
            assert living.holds(model)

    @pytest.mark.parametrize(
        ("end", "while_"),
        [
            (signal.SIGKILL, "it sends"),
            (signal.SIGKILL, "the receiver loads"),
            (signal.SIGSTOP, "it sends"),
        ],
    )
    def test_a_trainer_is_lost_in_the_middle(self, end: signal.Signals, while_: str) -> None:
        model = ContractModel(3)
        with ExitStack() as stack:
            sink = _EndingSink(ContractModel(2))
            receiver = stack.enter_context(_receiving(sink))
            address = stack.enter_context(_serving(receiver))
            own = end if while_ == "it sends" else None
            trainer = stack.enter_context(self._child(_train, end=own, to=address))
            if own is None:
                sink.end = lambda: trainer.send(end)
            trainer.await_end(end)
            if end == signal.SIGSTOP:  # it lives: only the deadline ends the wait for it
                _await_ready(receiver, 1.2 * self.timeout_s + _SLACK_S)
            assert receiver.version == 1
            assert _bits(sink.module) == _bits(ContractModel(1))
            takes_over = end == signal.SIGSTOP
            with (
                _within(1.2 * self.timeout_s),
                self.connect(model, receiver.handle, takeover=takes_over) as sender,
            ):
                sender.send_weights()
            assert _bits(sink.module) == _bits(model)
            assert receiver.status().state == "READY"

    # What is left

    def test_nothing_is_left_after_200_updates(self) -> None:
        with self._child(_measure) as child:
            grown = child.result()
        assert grown == {"shm": [], "fds": 0, "threads": 0, "rss_mib": 0}

    def test_ends_may_come_twice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, made = ContractModel(1), _watch_engines(monkeypatch, _known(self.backend))
        with _Seat.taken() as seat:
            sender = self.connect(model, seat.receiver.handle)
            sender.send_weights()
            sender.close()
            sender.close()
            seat.receiver.close()
            seat.receiver.close()
            trainers = [e for e in made if isinstance(e, TrainerWeightTransferEngine)]
            receivers = [e for e in made if isinstance(e, WeightTransferEngine)]
            assert trainers
            assert receivers
            for engine in trainers:
                engine.close()
            for receiving in receivers:
                receiving.shutdown()
                assert not receiving.sender_alive()
            fresh = _known(self.backend).receiver_engine(seat.receiver.status().device_keys)
            fresh.shutdown()
            fresh.shutdown()
            assert not fresh.sender_alive()
            assert seat.holds(model)

    def test_a_payload_from_elsewhere_is_refused(self) -> None:
        """A damaged message is a ProtocolError, and leaves nothing open."""
        offers: list[Any] = []
        with _Seat.taken() as seat:

            def listen(message: Mapping[str, Any]) -> object:
                if (message["body"].get("init_info") or {}).get("backend"):
                    offers.append(message)
                return seat.receiver.handle(message)

            sender = self.connect(ContractModel(1), listen)
            sender.close()
            offered = offers[-1]["body"]["init_info"]
            fields = offered["payload"] if isinstance(offered["payload"], dict) else {}
            damaged = [{**fields, name: [{}]} for name in fields]
            for payload in [7, *damaged] if offered["payload"] is not None else []:
                info = {**offered, "payload": payload, "sender": "other"}
                with pytest.raises(ProtocolError):
                    seat.receiver.handle({**offers[-1], "body": {"init_info": info}})
            assert "other" not in seat.receiver.status().senders

    def _options(self, more: Mapping[str, Any]) -> dict[str, Any]:
        defaults = {
            "timeout_s": self.timeout_s,
            "bucket_nbytes": BUCKET_NBYTES,
            "num_buckets": 2,
        }
        return {**defaults, **self.options, **more}

    def _child(
        self, work: Callable[[Pipe, Task], None], *, end: int | None = None, to: str = ""
    ) -> _Child:
        _known(self.backend)  # by receivers of this process, too
        return _Child(self.context, work, Task(self.backend, self._options({}), end, to))


# Receivers


class _Seat:
    """A receiver in this process, and what it holds: a module, or tensors that a hook was given."""

    def __init__(self, kind: str, apply: ApplyChoice) -> None:
        self.module = ContractModel(2)
        self._given: Bits = {}
        self._is_hook = kind == "hook"
        self.receiver = WeightReceiver(
            self._load if self._is_hook else self.module, apply=apply, lease_s=_CHILD_S
        )

    @classmethod
    @contextmanager
    def taken(cls, kind: str = "module", apply: ApplyChoice = "staged") -> Iterator[_Seat]:
        """Around the use of one."""
        seat = cls(kind, apply)
        with closing(seat.receiver):
            yield seat

    def _load(self, pairs: Any) -> None:
        self._given.update(_bits(dict(pairs)))

    @property
    def bits(self) -> Bits:
        """The bytes of the weights in use."""
        return dict(self._given) if self._is_hook else _bits(self.module)

    def holds(self, model: nn.Module) -> bool:
        """Whether the weights in use equal the model's, bit for bit."""
        return self.bits == _bits(model)


class _EndingSink(ModuleSink):
    """A sink in which an update that an engine has begun to load calls `end`, once, the second."""

    def __init__(self, module: nn.Module, end: Callable[[], None] = lambda: None) -> None:
        super().__init__(module)
        self.module = module
        self.end = end
        self._updates = 0

    def open_target(self, plan: StreamLayout, apply: Apply) -> LoadTarget:
        """Return ModuleSink's, whose `begin` is watched."""
        target = super().open_target(plan, apply)
        begin = target.begin

        def begin_and_end() -> None:
            begin()
            self._updates += 1
            if self._updates == 2:
                self.end()

        target.begin = begin_and_end  # type: ignore[method-assign]  # for this target alone
        return target


@contextmanager
def _receiving(sink: Any) -> Iterator[WeightReceiver]:
    with closing(WeightReceiver(sink, apply="staged", lease_s=_CHILD_S)) as receiver:
        yield receiver


def _await_ready(receiver: WeightReceiver, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while receiver.status().state != "READY" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert receiver.status().state == "READY"


# Sources


class _PlantedError(Exception):
    """Raised by a source, or a block, of a test."""


def _fail() -> None:
    raise _PlantedError


def _send_and_fail(sender: WeightSender) -> None:
    with sender.update() as update:
        update.send([("layers.0", torch.zeros(64, 64))])
        raise _PlantedError


class _Source:
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


class _Buffers(nn.Module):
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def _every_dtype(seed: int) -> dict[str, torch.Tensor]:
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


def _bits(tensors: nn.Module | Mapping[str, torch.Tensor]) -> Bits:
    """The bytes of every tensor: NaN equals itself, and 0.0 differs from -0.0."""
    state = tensors.state_dict() if isinstance(tensors, nn.Module) else tensors
    return {name: contiguous_bytes(tensor).numpy().tobytes() for name, tensor in state.items()}


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Fail a block that takes longer, with some seconds to spare for a busy machine."""
    started = time.monotonic()
    yield
    took = time.monotonic() - started
    assert took < seconds + _SLACK_S, f"took {took:.1f} s of {seconds:.1f} s"


# Backends


def _known(backend: BackendOfTest) -> Backend:
    """Return the backend, known in this process: receivers look for it by its name."""
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


def _connect(
    backend: BackendOfTest, source: object, to: Any, options: Mapping[str, Any]
) -> WeightSender:
    return connect(source, to, backend=_known(backend).name, **options)


def _watch_engines(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> list[object]:
    """Return a list of all engines that a backend makes from now on."""
    made: list[object] = []
    for method in ("trainer_engine", "receiver_engine"):
        genuine = getattr(backend, method)

        def make(*args: Any, genuine: Callable[..., object] = genuine) -> object:
            made.append(genuine(*args))
            return made[-1]

        monkeypatch.setattr(backend, method, make)
    return made


# Child processes


class _SocketTransport(BaseTransport):
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
def _serving(receiver: WeightReceiver) -> Iterator[str]:
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
    """What a child process does it with.

    The signal `end` ends or stops it in the middle of its second update; None leaves it alone. `to`
    is the address of the receiver that it sends to.
    """

    backend: BackendOfTest
    options: Mapping[str, Any]
    end: int | None
    to: str


class _Child:
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
        cleanup_stale()  # as the next sender, or receiver, does

    @property
    def address(self) -> str:
        """Where its receiver is served."""
        self._address = self._address or str(self.result())
        return self._address

    def result(self) -> Any:
        """Return what the child sent."""
        assert self._pipe.poll(_CHILD_S), "the child process sent nothing"
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
        deadline = time.monotonic() + _CHILD_S
        while not self.has_met(end):
            assert time.monotonic() < deadline, "the child process was not ended"
            assert self._process.is_alive(), f"the child ended with {self._process.exitcode}"
            time.sleep(0.02)


def _run(
    work: Callable[[Pipe, Task], None], pipe: Pipe, task: Task, environment: dict[str, str]
) -> None:
    os.environ.update(environment)  # a fork server has that of an earlier test
    work(pipe, task)


def _end_here(end: int) -> None:
    os.kill(os.getpid(), end)


def _receive(pipe: Pipe, task: Task) -> None:
    """A process that receives."""
    _known(task.backend)
    sink = _EndingSink(ContractModel(2), partial(_end_here, task.end or 0))
    with _receiving(sink) as receiver, _serving(receiver) as address:
        pipe.send_bytes(msgspec.json.encode(address))
        time.sleep(10 * _CHILD_S)


def _train(pipe: Pipe, task: Task) -> None:
    """A process that trains."""
    source, to = _Source(ContractModel(1)), _SocketTransport(task.to, "receiver")
    with pipe, _connect(task.backend, source, to, task.options) as sender:
        sender.send_weights()
        source.model.step()
        if task.end is not None:
            source.act = partial(_end_here, task.end)
        sender.send_weights()
    time.sleep(_CHILD_S)


def _measure(pipe: Pipe, task: Task) -> None:
    """A process that sends what it has after 200 updates and had not before."""
    model = ContractModel(1)
    with _Seat.taken("module") as one, _Seat.taken("hook") as other:
        to = [one.receiver.handle, other.receiver.handle]

        def send(updates: int) -> None:
            with _connect(task.backend, model, to, task.options) as sender:
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
        before = _Held.now()
        for _ in range(4):
            send(50)
        grown = _Held.now().since(before)
        assert one.holds(model)
    pipe.send_bytes(msgspec.json.encode(grown))


class _Held:
    """What a process has: names in /dev/shm, descriptors, threads, memory."""

    def __init__(self) -> None:
        gc.collect()
        with suppress(AttributeError):  # glibc's: freed memory that it keeps is no leak
            ctypes.CDLL(None).malloc_trim(0)
        self.shm = {path.name for path in Path("/dev/shm").iterdir()}
        self.fds = sum(1 for _ in Path("/proc/self/fd").iterdir())
        self.threads = sum(1 for _ in Path("/proc/self/task").iterdir())
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
        self.rss_nbytes = pages * os.sysconf("SC_PAGE_SIZE")

    @classmethod
    def now(cls) -> _Held:
        """Return what there is when it stays the same for a moment: threads take one to end."""
        held = cls()
        for _ in range(50):
            time.sleep(0.1)
            again = cls()
            if (again.fds, again.threads) == (held.fds, held.threads):
                return again
            held = again
        return held

    def since(self, before: _Held) -> dict[str, object]:
        """Return what has come since: memory in steps of 8 MiB, names that no other has open."""
        new = {name for name in self.shm - before.shm if not _used_elsewhere(name)}
        return {
            "shm": sorted(new),
            "fds": max(self.fds - before.fds, 0),
            "threads": max(self.threads - before.threads, 0),
            "rss_mib": max(self.rss_nbytes - before.rss_nbytes, 0) // (8 * _MIB) * 8,
        }


def _used_elsewhere(name: str) -> bool:
    """Whether another process has a file of /dev/shm open or mapped, or it is gone by now."""
    path = Path("/dev/shm", name)
    for _ in range(20):
        if not path.exists():
            return True
        for process in Path("/proc").glob("[0-9]*"):
            if process.name == str(os.getpid()):
                continue
            with suppress(OSError):
                if str(path) in (process / "maps").read_text(encoding="utf-8"):
                    return True
                if any(fd.readlink() == path for fd in (process / "fd").iterdir()):
                    return True
        time.sleep(0.1)
    return False


__all__ = ["BUCKET_NBYTES", "BackendContract", "ContractModel"]
