"""Checkpoint engines of frameworks: ranks of a trainer, and rollout workers that are receivers.

Each rollout worker is a receiver with an HTTP endpoint of its own; the ranks of the trainer are one
sender. It needs the extra server, and Ray.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
import ray
import torch
import torch.distributed as dist
import uvicorn
from fastapi import FastAPI

from weightsync.arguments import MAX_TIMEOUT_S
from weightsync.backends.registry import choose_backends
from weightsync.cuda import devices
from weightsync.errors import (
    ConfigError,
    ManifestMismatchError,
    ProtocolError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from weightsync.receiver import WeightReceiver
from weightsync.report import SyncReport
from weightsync.sender import DEFAULT_TIMEOUT_S, WeightSender, check_settings, connect
from weightsync.server.listening import listen, url_of
from weightsync.server.router import weight_router
from weightsync.specs import Manifest
from weightsync.transports.http import HttpTransport
from weightsync.update.coordinator import OnFailure
from weightsync.update.lifecycle import ApplyChoice
from weightsync.weights.sinks.base import HookSink, LoadWeights
from weightsync.wire.messages import OpenUpdate

T = TypeVar("T")

NamedTensor = tuple[str, torch.Tensor]
Endpoint = Mapping[str, str]
"""`url` and `token` of a rollout worker's receiver."""


class EngineSides:
    """Both sides of a checkpoint engine: a rank of the trainer sends, a rollout worker receives.

    A framework makes one in each process of the trainer and of the rollout. `bucket_size`: bytes of
    the parts of a first send. `of` names the options in errors, `system` is the framework's name.
    """

    def __init__(
        self, bucket_size: int, options: Mapping[str, object], *, of: str, system: str
    ) -> None:
        self.report: SyncReport | None = None
        self._bucket_nbytes = bucket_size
        self._options = options_of(options, of=of, system=system)
        self._system = system
        self._rollout: RolloutReceiver | None = None
        self._sends = False
        self._targets: Sequence[Endpoint] = ()
        self._sender: WeightSender | None = None
        self._source: GeneratedSource | None = None
        self._step = asyncio.Lock()

    def prepare(self) -> Endpoint:
        """Return the endpoint of this process's receiver; empty on a rank of the trainer.

        A process does not know yet which it is when this is called first, so it opens a socket.
        """
        if self._sends:
            return {}
        if self._rollout is None:
            self._rollout = RolloutReceiver(self._options)
        return self._rollout.endpoint

    def serve(self) -> None:
        """Be a rollout worker: answer the trainer from now on."""
        if self._rollout is None:
            raise ProtocolError(f"{self._system} has to call prepare() before its process group")
        self._rollout.serve()

    def send_to(self, targets: Sequence[Endpoint]) -> None:
        """Be a rank of the trainer: note the endpoints to which it sends.

        It stays connected from step to step, and connects anew where the workers changed.
        """
        if self._rollout is not None:
            self._rollout.close()
            self._rollout, self._sends = None, True
        if targets != self._targets:
            self.close()
            self._targets = targets

    async def send(self, weights: Iterable[NamedTensor], label: str | None) -> SyncReport:
        """Send full tensors to all rollout workers; return when these have loaded them.

        Every rank of the trainer calls it, and yields the same tensors. The event loop goes on
        meanwhile: another thread takes the tensors, on the device and the stream of the caller. A
        cancellation returns when it takes no more. Raises the errors of
        `WeightSender.send_weights`.
        """
        stop = threading.Event()
        given = taken_as_here(weights, stop)
        # A framework raises the first error of a step: a worker's may come before this has ended.
        async with self._step:
            source = self._source
            if source is None:
                self.report = await in_thread(lambda: self._send_first(given, label), stop)
                return self.report
            if self._sender is None:
                self._sender = await in_thread(lambda: self._connect(source), stop)
            source.given = given
            try:
                self.report = await self._sender.asend_weights(label=label)
            except ManifestMismatchError:
                self._source = None  # the next step finds out what there is to send
                await in_thread(self.close, stop)
                raise
            return self.report

    def receive(self, label: str | None) -> AsyncIterator[NamedTensor]:
        """Yield the tensors of the next update, verified, each valid until the next is asked for.

        Raises TransferTimeout where no update begins or continues within `timeout_s`, and
        TransferError where it is aborted. Where the consumer stops early, or asks for nothing for
        `timeout_s`, the update fails on the trainer too.
        """
        if self._rollout is None:
            raise ProtocolError(
                f"{self._system} has to make its process group before weights are received"
            )
        return self._rollout.tensors(label)

    def close(self) -> None:
        """End the connection of a rank of the trainer. Idempotent."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()

    def _send_first(self, given: Iterator[NamedTensor], label: str | None) -> SyncReport:
        """Send in parts, since the framework does not say beforehand which tensors there are."""
        described: list[TensorDescription] = []
        with self._connect({}) as sender, sender.update(label=label) as update:
            for part in parts_of(given, self._bucket_nbytes):
                described += [TensorDescription(n, t.dtype, tuple(t.shape)) for n, t in part]
                update.send(part)
                del part
        self._source = GeneratedSource(described)
        if update.last_report is None:
            raise AssertionError("an update that ended well has a report")
        return update.last_report

    def _connect(self, source: object) -> WeightSender:
        leads = not dist.is_initialized() or dist.get_rank() == 0
        targets = [HttpTransport(t["url"], t["token"]) for t in self._targets] if leads else ()
        options = self._options
        return connect(
            source,
            targets,
            backend=options.transfer_backend,
            packed=options.packed,
            verify=options.verify,
            on_failure=options.on_failure,
            timeout_s=options.timeout_s,
            **options.settings,
        )


async def in_thread(call: Callable[[], T], stop: threading.Event) -> T:
    """Return what `call` returns in another thread, for which interpreter exit does not wait.

    A cancellation sets `stop`, and returns when the call has ended.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as exc:  # noqa: BLE001  # raised by the future
            future.set_exception(exc)

    threading.Thread(target=run, name="weightsync-engine", daemon=True).start()
    ended = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(ended)
    except asyncio.CancelledError:
        stop.set()
        while not ended.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([ended])
        ended.exception()  # seen
        raise


def taken_as_here(weights: Iterable[NamedTensor], stop: threading.Event) -> Iterator[NamedTensor]:
    """Return an iterator that yields `weights`, in whichever thread, as in this one.

    What torch keeps for each thread, device, stream and grad mode, is that of this thread. Raises
    TransferCancelled once `stop` is set.
    """
    gradients = torch.is_grad_enabled()
    use_stream = devices.carried_stream()

    def taken() -> Iterator[NamedTensor]:
        torch.set_grad_enabled(gradients)  # for the rest of a thread of one send
        use_stream()
        for pair in weights:
            if stop.is_set():
                raise TransferCancelled("the step was cancelled")
            yield pair

    return taken()


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of the engine, as its docstring lists them."""

    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_TIMEOUT_S)] = DEFAULT_TIMEOUT_S
    apply: ApplyChoice = "auto"
    device: str | None = None
    packed: bool | None = None
    verify: bool = True
    on_failure: OnFailure = "abort"
    transfer_backend: str = "auto"
    settings: dict[str, Any] = {}


_OWN = tuple(name for name in Options.__struct_fields__ if name != "settings")
_NOT_TAKEN: Mapping[str, str] = {
    "backend": "its name is transfer_backend here",
    "dtype": "{system}'s trainer says which tensors there are",
    "rename": "{system}'s trainer says which tensors there are",
    "quantize": "{system}'s trainer says which tensors there are",
    "token": "each worker makes its own",
    "verify_tls": "each worker makes its own endpoint",
    "process_group": "the ranks are those of {system}'s default group",
    "at": "{system} sends the model itself",
}


def options_of(given: Mapping[str, object], *, of: str, system: str) -> Options:
    """Check the settings of an engine, which `of` names in errors. Raises ConfigError."""
    without = {name: why.format(system=system) for name, why in _NOT_TAKEN.items()}
    settings = {name: value for name, value in given.items() if name not in _OWN}
    check_settings(settings, of=of, own=_OWN, without=without)
    own = {name: value for name, value in given.items() if name in _OWN}
    try:
        options = msgspec.convert({**own, "settings": settings}, Options)
        torch.device(options.device or "cpu")
        choose_backends(options.transfer_backend)
    except (msgspec.ValidationError, RuntimeError, ConfigError) as exc:
        raise ConfigError(f"{of}: {exc}") from exc
    return options


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """Name, dtype and shape of one tensor of a source; `shape` is that of the full tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class GeneratedSource:
    """A source of `connect` that yields what another iterator `given` yields in each update.

    There is none at `connect`, so that no rank can look there which parts it holds.
    """

    is_given_once = True

    def __init__(self, described: list[TensorDescription]) -> None:
        self._described = described
        self.given: Iterator[NamedTensor] = iter(())

    def metadata(self) -> list[TensorDescription]:
        """Return the descriptions of all tensors, in order."""
        return self._described

    def __iter__(self) -> Iterator[NamedTensor]:
        given, self.given = self.given, iter(())
        return given


def parts_of(given: Iterator[tuple[object, object]], nbytes: int) -> Iterator[list[NamedTensor]]:
    """Yield copies of consecutive tensors, at least `nbytes` at a time, and the rest.

    A generator may use one buffer for all of its tensors. Raises ConfigError for a name that comes
    twice, and for what is no tensor.
    """
    part: list[NamedTensor] = []
    held = 0
    seen: set[str] = set()
    for name, tensor in given:
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"the trainer gave {name!r} with a {type(tensor).__name__}")
        if name in seen:
            raise ConfigError(f"the trainer gave {name} twice")
        seen.add(name)
        part.append((name, tensor.detach().clone()))
        held += tensor.nbytes
        if held >= nbytes:
            yield part
            part, held = [], 0
    if part:
        yield part


_LOOK_S = 0.2


class RolloutReceiver:
    """The receiver of one rollout worker, with an HTTP endpoint on this node's address.

    A thread of the server loads tensors; `tensors` yields them in the worker's event loop. The
    thread waits until the consumer has asked for the next tensor after its last one. Weights go to
    the consumer that called last, and for one update: never to one that a failed step has left.
    """

    def __init__(self, options: Options) -> None:
        device = options.device or str(devices.default())
        self._timeout_s = options.timeout_s
        self._token = secrets.token_urlsafe(32)
        self._socket = listen(node_address(), 0)
        self._turn: Turn | None = None
        self._offered: Load | None = None
        self._server: uvicorn.Server | None = None
        self.receiver = WeightReceiver(
            LendingSink(self._load, device),
            apply=options.apply,
            on_release=self._notify,
            lease_s=options.timeout_s,
        )

    @property
    def endpoint(self) -> Endpoint:
        """Where the trainer reaches the receiver."""
        return {"url": url_of(self._socket), "token": self._token}

    def serve(self) -> None:
        """Answer the trainer in a thread, from now on. Idempotent."""
        if self._server is not None:
            return
        app = FastAPI()
        app.include_router(weight_router(self.receiver, token=self._token))
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True
        ).start()

    def tensors(self, label: str | None) -> AsyncIterator[NamedTensor]:
        """Yield the tensors of the next update with this label, as `receive_weights` says.

        A former call ends with this one: its consumer takes nothing more.
        """
        turn = Turn(label, self.receiver.version)
        former, self._turn = self._turn, turn
        if former is not None:
            former.end()
        return self._tensors(turn)

    def close(self) -> None:
        """Close the endpoint."""
        if self._server is not None:
            self._server.should_exit = True  # it closes the socket
        else:
            self._socket.close()
        self.receiver.close()

    async def _tensors(self, turn: Turn) -> AsyncIterator[NamedTensor]:
        turn.begin()
        try:
            while (load := await self._next(turn)) is not None:
                while not load.refused and not turn.ended:
                    load.asked = time.monotonic()
                    if not load.pairs:
                        load.done.set()
                        break
                    yield load.pairs.popleft()
                else:
                    raise TransferError("these weights were not taken in time")
        finally:
            turn.end()

    def _load(self, pairs: Iterable[NamedTensor]) -> None:
        """Hand tensors to the consumer; return when it is done. The receiver's hook."""
        update = self.receiver.open_update
        if update is None:
            raise AssertionError("tensors are loaded in an update")
        load = self._offered = Load(pairs, update)
        self._notify()
        while not load.done.wait(_LOOK_S):
            left = load.turn is not None and load.turn.ended
            if left or time.monotonic() - load.asked > self._timeout_s:
                load.refused, self._offered = True, None
                raise TransferError("the rollout worker's consumer did not take all weights")

    def _notify(self) -> None:
        if self._turn is not None:
            self._turn.wake()

    async def _next(self, turn: Turn) -> Load | None:
        """Return the next tensors, or None when the update is committed."""
        deadline = time.monotonic() + self._timeout_s
        while not turn.ended:
            turn.changed.clear()
            load, opened = self._offered, self.receiver.open_update
            if load is not None and turn.takes(load.update):
                self._offered, load.turn = None, turn
                return load
            if opened is not None and turn.takes(opened):
                deadline = time.monotonic() + self._timeout_s
            elif turn.update is not None:
                if self.receiver.version == turn.update.version:
                    return None
                raise TransferError("the trainer's update was aborted")
            elif self.receiver.version != turn.before:
                return None
            elif time.monotonic() > deadline:
                raise TransferTimeout(f"the trainer began no update within {self._timeout_s:g} s")
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await turn.changed.wait()
        raise TransferError("a later call of receive_weights took the place of this one")


def node_address() -> str:
    """Return the address of this node, as Ray's other nodes reach it."""
    address: Any = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray's
    return str(address).strip("[]")


class Turn:
    """One call of `receive_weights`, and the update whose tensors it takes."""

    def __init__(self, label: str | None, before: int) -> None:
        self.before = before
        self.update: OpenUpdate | None = None
        self.changed = asyncio.Event()
        self.ended = False
        self._label = label
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self) -> None:
        """Note the event loop in which the consumer waits."""
        self._loop = asyncio.get_running_loop()

    def takes(self, update: OpenUpdate) -> bool:
        """Whether an update is that of this turn: the first one with its label."""
        if self.update is None and self._label in (None, update.label):
            self.update = update
        return self.update is not None and self.update.update_id == update.update_id

    def wake(self) -> None:
        """Make the consumer look again. Called by any thread."""
        with suppress(RuntimeError):  # a loop that is closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self.changed.set)

    def end(self) -> None:
        """Take nothing more."""
        self.ended = True
        self.wake()


class Load:
    """Tensors of one call of the hook. `done` is set when the consumer needs them no more.

    `asked` is when the consumer last asked for a tensor, of `time.monotonic()`.
    """

    def __init__(self, pairs: Iterable[NamedTensor], update: OpenUpdate) -> None:
        self.pairs = deque(pairs)
        self.update = update
        self.done = threading.Event()
        self.asked = time.monotonic()
        self.turn: Turn | None = None
        self.refused = False


class LendingSink(HookSink):
    """A HookSink whose consumer may keep its last view, in a loop variable, and not use it.

    `HookSink(keeps_views=True)` would copy every tensor.
    """

    def __init__(self, load_weights: LoadWeights, device: str) -> None:
        super().__init__(load_weights, keeps_views=True, device=device)

    def call(self, pairs: Sequence[NamedTensor]) -> set[str] | None:
        """Call the hook with views."""
        self.load_weights(list(pairs))
        return None

    def cloned_nbytes(self, manifest: Manifest) -> int:
        """Return 0: nothing is cloned."""
        return 0
