"""weightsync as a checkpoint engine of verl, between a trainer and separate rollout workers.

    actor_rollout_ref.rollout.checkpoint_engine.backend=weightsync
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=weightsync.integrations.verl

Each rollout worker is a receiver with an HTTP endpoint of its own; the ranks of the trainer are one
sender. With tensors on a GPU this has never run.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
import torch
import torch.distributed as dist
import uvicorn
from fastapi import FastAPI

from weightsync.backends.registry import BackendChoice
from weightsync.errors import (
    BackendUnavailableError,
    ConfigError,
    ManifestMismatchError,
    ProtocolError,
    TransferError,
    TransferTimeout,
)
from weightsync.receiver import WeightReceiver
from weightsync.report import SyncReport
from weightsync.sender import DEFAULT_TIMEOUT_S, WeightSender, connect
from weightsync.server.listening import listen, url_of
from weightsync.server.router import weight_router
from weightsync.specs import Manifest
from weightsync.transports.http import HttpTransport
from weightsync.update.lifecycle import ApplyChoice
from weightsync.weights.sink import HookSink, LoadWeights

try:
    from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
except ImportError as exc:
    raise BackendUnavailableError(
        f"this needs a verl with checkpoint engines ({exc}); 0.9.1 is tested"
    ) from exc

BACKEND = "weightsync"

NamedTensor = tuple[str, torch.Tensor]
Endpoint = Mapping[str, str]
"""`url` and `token` of a rollout worker's receiver."""


@CheckpointEngineRegistry.register(BACKEND)
class WeightsyncCheckpointEngine(CheckpointEngine):  # type: ignore[misc]  # verl has no types here
    """verl makes one in each process of the trainer and of the rollout, and calls its methods.

    The options are those of `checkpoint_engine.engine_kwargs.weightsync`:

    - `timeout_s` bounds every wait for progress, also that of a rollout worker for the trainer.
    - `apply`: with `staged`, a worker is given tensors when all of them have arrived at all
      workers; this takes the memory of the model's bytes. `in_place` gives them as they come.
    - `packed`, `verify` and `on_failure` are those of `weightsync.connect`, `transfer_backend` is
      its `backend`.
    - `device` of the tensors that a rollout worker is given; by default the current GPU if torch
      has one.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        apply: ApplyChoice = "auto",
        device: str | None = None,
        transfer_backend: BackendChoice = "auto",
        **options: Any,
    ) -> None:
        unknown = sorted(options.keys() - {"packed", "verify", "on_failure"})
        if unknown:
            raise ConfigError(f"engine_kwargs.weightsync has no {', '.join(unknown)}")
        self.report: SyncReport | None = None
        self._bucket_nbytes = bucket_size
        self._timeout_s = timeout_s
        self._apply = apply
        self._device = device
        self._options = {**options, "backend": transfer_backend, "timeout_s": timeout_s}
        self._rollout: RolloutReceiver | None = None
        self._sends = False
        self._targets: Sequence[Endpoint] = ()
        self._sender: WeightSender | None = None
        self._source: GeneratedSource | None = None

    def prepare(self) -> Endpoint:
        """Return the endpoint of this process's receiver; empty on a rank of the trainer.

        A process does not know yet which it is when this is called first, so it opens a socket.
        """
        if self._sends:
            return {}
        if self._rollout is None:
            device = self._device or ("cuda" if torch.cuda.is_available() else "cpu")
            self._rollout = RolloutReceiver(device, self._apply, self._timeout_s)
        return self._rollout.endpoint

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[Endpoint]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of `init_process_group`: for the trainer's ranks all endpoints."""
        targets = list(metadata[actor_wg_world_size:])
        return (
            {"targets": [targets] * actor_wg_world_size},
            {"targets": [None] * rollout_world_size},
        )

    def init_process_group(self, targets: Sequence[Endpoint] | None) -> None:
        """Serve as a receiver, or note the endpoints to which this rank sends.

        The trainer stays connected from step to step, and connects anew where the workers changed.
        """
        if targets is None:
            if self._rollout is None:
                raise ProtocolError("verl has to call prepare() before init_process_group()")
            self._rollout.serve()
            return
        if self._rollout is not None:
            self._rollout.close()
            self._rollout, self._sends = None, True
        if targets != self._targets:
            self.close()
            self._targets = targets

    async def send_weights(
        self, weights: Iterable[NamedTensor], global_steps: int | None = None
    ) -> dict[str, float]:
        """Send full tensors to all rollout workers; return when these have loaded them.

        Every rank of the trainer calls it, and yields the same tensors. Returns the figures of
        `SyncReport.metrics`. Raises the errors of `WeightSender.send_weights`.
        """
        label = None if global_steps is None else f"step-{global_steps}"
        self.report = self._send(iter(weights), label)
        return self.report.metrics()

    def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[NamedTensor]:
        """Yield the tensors of the next update, verified, each valid until the next is asked for.

        Raises TransferTimeout where no update begins or continues within `timeout_s`, and
        TransferError where it is aborted. Where the consumer stops early, or asks for nothing for
        `timeout_s`, the update fails on the trainer too.
        """
        if self._rollout is None:
            raise ProtocolError("verl has to call init_process_group() before receive_weights()")
        return self._rollout.tensors()

    def finalize(self) -> None:
        """Do nothing: buffers and connection are used again by the next step."""

    def close(self) -> None:
        """End the connection of a rank of the trainer. Idempotent."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()

    def _send(self, given: Iterator[NamedTensor], label: str | None) -> SyncReport:
        if self._source is None:
            return self._send_first(given, label)
        if self._sender is None:
            self._sender = self._connect(self._source)
        self._source.given = given
        try:
            return self._sender.send_weights(label=label)
        except ManifestMismatchError:
            self._source = None  # the next step finds out what there is to send
            self.close()
            raise

    def _send_first(self, given: Iterator[NamedTensor], label: str | None) -> SyncReport:
        """Send in parts, since verl does not say beforehand which tensors there are."""
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
        return connect(source, targets, **self._options)


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """What a source says of one tensor; `shape` is that of the full tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class GeneratedSource:
    """A source of `connect` that yields what another iterator `given` yields in each update."""

    def __init__(self, described: list[TensorDescription]) -> None:
        self._described = described
        self.given: Iterator[NamedTensor] = iter(())

    def metadata(self) -> list[TensorDescription]:
        """Return the descriptions of all tensors, in order."""
        return self._described

    def __iter__(self) -> Iterator[NamedTensor]:
        given, self.given = self.given, iter(())
        return given


def parts_of(given: Iterator[NamedTensor], nbytes: int) -> Iterator[list[NamedTensor]]:
    """Yield lists of consecutive tensors of at least `nbytes` together, and the rest."""
    part: list[NamedTensor] = []
    held = 0
    for name, tensor in given:
        part.append((name, tensor.detach()))
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
    thread waits until the consumer has asked for the next tensor after its last one.
    """

    def __init__(self, device: str, apply: ApplyChoice, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._token = secrets.token_urlsafe(32)
        self._socket = listen(node_address(), 0)
        self._loads: deque[Load] = deque()
        self._wake: Callable[[], object] | None = None
        self._server: uvicorn.Server | None = None
        self.receiver = WeightReceiver(
            LendingSink(self._load, device),
            apply=apply,
            on_release=self._notify,
            lease_s=timeout_s,
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

    async def tensors(self) -> AsyncIterator[NamedTensor]:
        """Yield the tensors of the next update, as `receive_weights` says."""
        before = self.receiver.version
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        self._wake = partial(loop.call_soon_threadsafe, changed.set)
        try:
            while (load := await self._next(before, changed)) is not None:
                while load.pairs:
                    load.asked = time.monotonic()
                    yield load.pairs.popleft()
                load.done.set()
        finally:
            self._wake = None

    def close(self) -> None:
        """Close the endpoint."""
        if self._server is not None:
            self._server.should_exit = True
        self._socket.close()
        self.receiver.close()

    def _load(self, pairs: Iterable[NamedTensor]) -> None:
        """Hand tensors to the consumer; return when it is done. The receiver's hook."""
        load = Load(pairs)
        self._loads.append(load)
        self._notify()
        while not load.done.wait(_LOOK_S):
            waits = time.monotonic() - load.asked
            if waits > self._timeout_s or (load.taken and self._wake is None):
                load.refused = True
                raise TransferError("verl's server adapter did not take all weights")

    def _notify(self) -> None:
        wake = self._wake
        if wake is not None:
            wake()

    async def _next(self, before: int, changed: asyncio.Event) -> Load | None:
        """Return the next tensors, or None when the update is committed."""
        deadline = time.monotonic() + self._timeout_s
        began = False
        while True:
            changed.clear()
            while self._loads:
                load = self._loads.popleft()
                if not load.refused:
                    load.taken = True
                    return load
            if self.receiver.open_update is not None:
                began, deadline = True, time.monotonic() + self._timeout_s
            elif self.receiver.version != before:
                return None
            elif began:
                raise TransferError("the trainer's update was aborted")
            elif time.monotonic() > deadline:
                raise TransferTimeout(f"the trainer began no update within {self._timeout_s:g} s")
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), _LOOK_S)


def node_address() -> str:
    """Return the address of this node, as Ray's other nodes reach it."""
    address: Any = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray's
    return str(address).strip("[]")


class Load:
    """Tensors of one call of the hook. `done` is set when the consumer needs them no more.

    `asked` is when the consumer last asked for a tensor, of `time.monotonic()`.
    """

    def __init__(self, pairs: Iterable[NamedTensor]) -> None:
        self.pairs = deque(pairs)
        self.done = threading.Event()
        self.asked = time.monotonic()
        self.taken = self.refused = False


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
