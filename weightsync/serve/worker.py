"""The process of a worker: its receiver, its model runner, and its links to other processes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import msgspec
import torch
import torch.distributed as dist
import zmq
import zmq.asyncio

from weightsync import WeightReceiver, fetch
from weightsync.cuda import devices
from weightsync.errors import (
    ConfigError,
    NotReadyError,
    PeerLostError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
    WeightSyncError,
)
from weightsync.integrations.adapter_paths import adapter_of
from weightsync.integrations.module_adapters import AdaptedModule, ModuleAdapters
from weightsync.queues.message_queue import MessageQueue, QueueHandle
from weightsync.serve import links
from weightsync.serve.links import end_process
from weightsync.serve.messages import (
    READS,
    Action,
    AdapterVersion,
    CoreMessage,
    Done,
    Forget,
    Hello,
    ModelCard,
    PauseMode,
    PauseState,
    Step,
    WorkerCall,
    WorkerMessage,
    WorkerState,
)
from weightsync.serve.model import LoadedModel, load_for_worker, worker_device
from weightsync.serve.model_runner import ModelRunner
from weightsync.serve.options import DRAFT_PATH, Addresses, Ready, ServeOptions
from weightsync.serve.worker_group import step_codec, step_queue, worker_identity
from weightsync.wire.messages import UNLOAD_CALL, UpdateRecord
from weightsync.wire.problem import decode_error, encode_error

logger = logging.getLogger(__name__)

STATE_POLL_S = 0.25
"""How often a worker checks whether its state has changed, because a sender died for instance."""
HEARTBEAT_S = 1.0
"""How often a worker sends its state in any case, as a heartbeat."""
PAUSE_TIMEOUT_S = 660.0
MAX_LOADS = 64
MAX_SHORT_CALLS = 16
"""Threads for calls that interrupt loads, and as many for calls that only read."""
CALL_TIMEOUT_S = 30.0

_INTERRUPTS = frozenset({"abort_weight_update", "resume"})

_message_decoder: msgspec.msgpack.Decoder[CoreMessage] = msgspec.msgpack.Decoder(CoreMessage)

Handle = Callable[[str, bytes], bytes]
"""Replies to one call of an API server. Errors are sent back as problem documents."""
ReadState = Callable[[], WorkerState]


class WorkerLink:
    """The sockets of a worker to its core and to the API servers, served by one thread.

    Call `hello`, then `serve` when the receiver exists. The methods that wait may be called by any
    thread but the link's own.
    """

    def __init__(self, rank: int, *, core_address: str, control_address: str) -> None:
        self._rank = rank
        self._core_address = core_address
        self._control_address = control_address
        self._calls: dict[int, asyncio.Future[Done]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._next_call = 0
        self._sent_state: WorkerState | None = None
        self._sent_at = 0.0
        self._read_state: ReadState = _not_served
        self._on_paused: Callable[[bool], None] = _not_served
        self._on_forget: Callable[[Sequence[str]], None] = _not_served
        self._loads = ThreadPoolExecutor(MAX_LOADS, thread_name_prefix="load")
        self._interrupts = ThreadPoolExecutor(MAX_SHORT_CALLS, thread_name_prefix="interrupt")
        self._reads = ThreadPoolExecutor(MAX_SHORT_CALLS, thread_name_prefix="read")
        opened: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=self._run, args=(opened,), name="worker link", daemon=True
        )
        self._thread.start()
        opened.result()

    def hello(self, card: ModelCard, results: QueueHandle, timeout_s: float) -> QueueHandle:
        """Register this worker at its core; return the queue of its steps.

        Raises TransferTimeout when the core does not reply.
        """
        work = self._call(lambda call: Hello(call=call, card=card, results=results))
        steps: QueueHandle | None = self._wait(work, timeout_s, "hello").steps
        assert steps is not None
        return steps

    def serve(
        self,
        handle: Handle,
        read_state: ReadState,
        on_paused: Callable[[bool], None],
        on_forget: Callable[[Sequence[str]], None] = lambda _: None,
    ) -> None:
        """Start to handle calls of API servers, and to send the worker's state to the core.

        `read_state()` is sent when it changes. `on_paused` gets whether the replica is paused,
        `on_forget` the keys of versions of adapters that no request uses any more.
        """
        self._read_state, self._on_paused, self._on_forget = read_state, on_paused, on_forget
        self._wait(self._begin(handle), 10.0, "serve")

    def hold(self, timeout_s: float) -> None:
        """Stop the core from starting steps; return when no step is in progress.

        Called by the receiver before weights in use change. Raises TransferTimeout, after it has
        released the hold, which the core may have received.
        """
        try:
            self._ask("hold", timeout_s)
        except BaseException:
            self.release(msgspec.structs.replace(self._read_state(), released=True))
            raise

    def clear_cache(self) -> None:
        """Make the core drop the prompts that older weights have read."""
        self._ask("clear_cache", CALL_TIMEOUT_S)

    def release(self, state: WorkerState) -> None:
        """Release the hold. Called when the weights are complete, or never will be."""
        self._loop.call_soon_threadsafe(self._send_state, state)

    def pause(self, mode: str) -> None:
        """Pause the whole replica; return when the pause is in effect."""
        self._ask("pause", PAUSE_TIMEOUT_S, cast(PauseMode, mode))

    def resume(self) -> None:
        """Resume the whole replica."""
        self._ask("resume", PAUSE_TIMEOUT_S)

    def close(self) -> None:
        """Close both sockets. Calls in progress raise TransferError."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(5.0)
        for pool in (self._loads, self._interrupts, self._reads):
            pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, action: Action, timeout_s: float, mode: PauseMode = "abort") -> None:
        work = self._call(lambda call: WorkerCall(call=call, action=action, mode=mode))
        self._wait(work, timeout_s, action)

    def _wait(self, work: Any, timeout_s: float, what: str) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            answer = future.result(timeout_s)
        except concurrent.futures.CancelledError:
            raise TransferError(
                f"worker {self._rank} is shutting down; {what} was cancelled"
            ) from None
        except TimeoutError:
            future.cancel()
            raise TransferTimeout(
                f"worker {self._rank}: the engine core did not answer {what} within {timeout_s:g} s"
            ) from None
        if isinstance(answer, Done) and answer.problem is not None:
            raise decode_error(answer.problem, peer="engine core")
        return answer

    def _run(self, opened: concurrent.futures.Future[None]) -> None:
        try:
            asyncio.run(self._serve_sockets(opened))
        except BaseException as exc:
            if opened.done():
                raise
            opened.set_exception(exc)

    async def _serve_sockets(self, opened: concurrent.futures.Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        context = zmq.asyncio.Context()
        try:
            self._core = context.socket(zmq.DEALER)
            self._core.setsockopt(zmq.IDENTITY, worker_identity(self._rank))
            self._core.connect(self._core_address)
            self._control = context.socket(zmq.ROUTER)
            self._control.bind(self._control_address)
            self._spawn(self._listen_to_core())
            opened.set_result(None)
            await self._closing.wait()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            context.destroy(linger=100)

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        """Run a task whose failure ends the process."""
        task = self._keep(work)
        task.add_done_callback(end_process)
        return task

    def _keep(self, work: Any) -> asyncio.Task[None]:
        """Run a task and keep a reference to it: the loop has weak references only."""
        task: asyncio.Task[None] = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _begin(self, handle: Handle) -> None:
        self._spawn(self._listen_to_api(handle))
        self._spawn(self._send_states())

    async def _call(self, make: Callable[[int], WorkerMessage]) -> Done:
        self._next_call += 1
        call = self._next_call
        answer: asyncio.Future[Done] = self._loop.create_future()
        self._calls[call] = answer
        try:
            await self._send(make(call))
            return await answer
        finally:
            del self._calls[call]

    async def _send(self, message: WorkerMessage) -> None:
        await self._core.send(msgspec.msgpack.encode(message))

    async def _listen_to_core(self) -> None:
        while True:
            frame = await self._core.recv()
            with links.dropped("the engine core"):
                self._take(_message_decoder.decode(frame))

    def _take(self, message: CoreMessage) -> None:
        if isinstance(message, PauseState):
            self._on_paused(message.paused)
        elif isinstance(message, Forget):
            self._on_forget(message.keys)
        elif message.call in self._calls and not self._calls[message.call].done():
            self._calls[message.call].set_result(message)

    async def _listen_to_api(self, handle: Handle) -> None:
        while True:
            frames = await self._control.recv_multipart()
            with links.dropped("an API server"):
                owner, call, name, body = frames
                self._keep(self._answer(handle, owner, call, name.decode(), body))

    async def _answer(
        self, handle: Handle, owner: bytes, call: bytes, name: str, body: bytes
    ) -> None:
        try:
            kind, reply = (
                b"reply",
                await self._loop.run_in_executor(self._pool_of(name), handle, name, body),
            )
        except Exception as exc:  # noqa: BLE001  # the edge: each error becomes a document
            kind, reply = b"problem", encode_error(exc)
        await self._send_state_if_changed()  # before the reply: the core knows the state first
        await self._control.send_multipart([owner, call, kind, reply])

    def _pool_of(self, call: str) -> ThreadPoolExecutor:
        """Return the threads of a call, so that loads do not block aborts, resumes and reads."""
        call = call.rpartition("/")[2]  # of an adapter's receiver
        if call in _INTERRUPTS:
            return self._interrupts
        return self._reads if call in READS else self._loads

    async def _send_states(self) -> None:
        while True:
            await asyncio.sleep(STATE_POLL_S)
            await self._send_state_if_changed()
            if self._loop.time() - self._sent_at > HEARTBEAT_S:
                await self._send_state(self._read_state())

    async def _send_state_if_changed(self) -> None:
        state = self._read_state()
        if state != self._sent_state:
            await self._send_state(state)

    def _send_state(self, state: WorkerState) -> asyncio.Task[None]:
        """Send a state. States are sent in the order of the calls, awaited or not."""
        self._sent_at = self._loop.time()
        self._sent_state = msgspec.structs.replace(state, released=False)
        return self._spawn(self._send(state))


def _not_served(*_: object) -> Any:
    raise TransferError("this worker has no receiver yet; serve() was not called")


_OF_UPDATES = frozenset(
    {
        "init_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "prepare_weight_update",
        "finish_weight_update",
    }
)


def _committed(update: UpdateRecord) -> str:
    """Return the line of an update that is committed."""
    named = f" ({update.label})" if update.label else ""
    part = " in the lines that changed" if update.delta else ""
    seconds = ", ".join(f"{name} {s * 1e3:.0f} ms" for name, s in update.seconds.items())
    return (
        f"version {update.version}{named}: {update.nbytes / 1e6:.1f} MB, {update.apply}, verified: "
        f"{update.verified}{part}, stall {update.stall_s * 1e3:.1f} ms; {seconds}"
    )


HELLO_TIMEOUT_S = 600.0
COLLECTIVE_TIMEOUT_S = 120.0


class Worker:
    """A worker: makes the steps of its engine core until `stop`."""

    def __init__(
        self,
        loaded: LoadedModel,
        options: ServeOptions,
        rank: int,
        *,
        core_address: str,
        control_address: str,
        name: str = "",
        draft: LoadedModel | None = None,
    ) -> None:
        self._is_first = rank == 0
        self._name = name
        self._token = options.token
        self._cancel = threading.Event()
        self._link = WorkerLink(rank, core_address=core_address, control_address=control_address)
        self.receiver = WeightReceiver(
            loaded.model,
            apply=options.apply,
            on_pause=self._link.pause,
            on_resume=self._link.resume,
            on_clear_cache=self._link.clear_cache,
            on_hold=self._link.hold,
            on_release=self._release,
            on_sleep=self._fall_asleep,
            on_wake=self._wake_up,
        )
        self.card = loaded.card(options.model)
        self._adapters = WorkerAdapters(
            loaded.model,
            self.receiver,
            taken=(self.card.name, options.model),
            shards=options.tensor_parallel,
        )
        self._draft = None
        self._in_use = 0, 0
        if draft is not None:
            self._draft = WeightReceiver(draft.model, apply=options.apply, beside=self.receiver)
        self._runner = ModelRunner(
            loaded.model,
            samples=rank == 0,
            adapters=self._adapters,
            draft=None if draft is None else draft.model,
            num_speculative_tokens=options.num_speculative_tokens,
        )
        self._results = step_queue(1)
        steps = self._link.hello(self.card, self._results.export_handle(), HELLO_TIMEOUT_S)
        self._steps = MessageQueue.create_from_handle(steps, rank, codec=step_codec())
        self._link.serve(
            self._handle, self._state, self.receiver.show_paused, self._adapters.forget
        )

    def fetch(self, sources: Sequence[str]) -> None:
        """Take the weights of the first of these servers that can send them, if there are any."""
        if sources:
            self._log(f"fetching the weights from {' or '.join(sources)}")
            report = fetch(self.receiver, sources, token=self._token)
            held = self.receiver.status().weights_id or ""
            self.card = msgspec.structs.replace(self.card, weights_id=held)
            self._log(f"the weights of {report.receivers[0].source}: {report}")

    def run(self) -> None:
        """Make steps until `stop`. Raises PeerLostError when the engine core has died."""
        with suppress(TransferCancelled):
            while True:
                step: Step = self._steps.dequeue(cancel=self._cancel, indefinite=True)
                # No update changes weights during a step: it first holds the core, which waits.
                result = self._runner.execute(step, self.receiver.version)
                self._results.enqueue(result, cancel=self._cancel)

    def stop(self) -> None:
        """Make `run` return. Safe in a signal handler."""
        self._cancel.set()

    def close(self) -> None:
        """Close the link, the receiver and the queues."""
        self._link.close()  # first, to end an update that waits for the core
        self.receiver.close()
        if self._draft is not None:
            self._draft.close()
        self._adapters.close()
        self._steps.close()
        self._results.close()

    def _handle(self, call: str, body: bytes) -> bytes:
        """Handle a call to the model's receiver, to that of an adapter or of the draft model.

        Their calls are `adapters/NAME/call` and `draft/call`.
        """
        path, _, call = call.rpartition("/")
        if not path:
            return self._handle_one(self.receiver, "", call, body)
        if path == DRAFT_PATH:
            if self._draft is None:
                raise ConfigError("this server has no draft model; start it with --draft-model")
            return self._handle_one(self._draft, "draft: ", call, body)
        name = adapter_of(path)
        if call == UNLOAD_CALL:
            self._adapters.unload(name)
            self._log(f"adapter {name} is unloaded")
            return b"{}"
        return self._handle_one(self._adapters.receiver(name), f"{name}: ", call, body)

    def _handle_one(self, receiver: WeightReceiver, name: str, call: str, body: bytes) -> bytes:
        before = receiver.open_update
        try:
            reply = receiver.handle_json(call, body)
        except WeightSyncError as exc:
            if call in _OF_UPDATES:
                self._log(f"{name}{call} failed: {exc}", logging.WARNING)
            raise
        if call == "finish_weight_update":
            self._log(name + _committed(receiver.recent_updates[-1]))
        elif call == "abort_weight_update" and before and receiver.open_update is None:
            self._log(f"{name}update {before.update_id} is aborted; version {receiver.version}")
        return reply

    def _log(self, text: str, level: int = logging.INFO) -> None:
        """Log a line of an update, on the first worker of each replica."""
        if self._is_first:
            logger.log(level, "%s%s", self._name, text)

    def _fall_asleep(self, level: int) -> None:
        """Free the KV cache, of which no request is in flight, and put the draft model to sleep."""
        self._link.clear_cache()
        self._runner.free_caches()
        if self._draft is not None:
            self._draft.sleep(level)
        kept = "are kept" if level == 1 else "are discarded"
        self._log(f"sleeps at level {level}: its weights {kept}, its KV cache is empty")

    def _wake_up(self, tags: Sequence[str]) -> None:
        if self._draft is not None:
            self._draft.wake_up(tags)
        self._log(f"awake: {', '.join(tags)}")

    def _release(self) -> None:
        self._link.release(msgspec.structs.replace(self._state(), released=True))

    def _state(self) -> WorkerState:
        status = self.receiver.status()
        state = WorkerState(
            version=status.version,
            weights_id=status.weights_id or "",
            state=status.state,
            why_not="" if status.may_generate else status.detail or status.state,
            adapters=self._adapters.held(),
        )
        return state if self._draft is None else self._with_draft(state, self._draft)

    def _with_draft(self, state: WorkerState, draft: WeightReceiver) -> WorkerState:
        # A commit of both changes one version after the other, and sends a state at its end.
        with suppress(NotReadyError), self.receiver.reading(timeout_s=0.0):
            self._in_use = self.receiver.version, draft.version
        version, draft_version = self._in_use
        found = msgspec.structs.replace(state, version=version, draft_version=draft_version)
        status = draft.status()
        if found.why_not or status.may_generate:
            return found
        why_not = f"draft model: {status.detail or status.state}"
        return msgspec.structs.replace(found, state=status.state, why_not=why_not)


class WorkerAdapters:
    """The adapters of one worker: their receivers, and the versions that its steps compute with.

    `base` is the receiver of the model, and `taken` are its names. A shard of a model (`shards`
    above 1) takes none.
    """

    def __init__(
        self, model: torch.nn.Module, base: WeightReceiver, *, taken: Sequence[str], shards: int
    ) -> None:
        self._versions = ModuleAdapters(model, taken=taken, beside=base)
        self._module = AdaptedModule(model)
        self._shards = shards
        self.unload = self._versions.unload
        self.forget = self._versions.forget
        self.close = self._versions.close

    def receiver(self, name: str) -> WeightReceiver:
        """Return the receiver of an adapter. Raises ConfigError for one that cannot be."""
        if self._shards > 1:
            raise ConfigError(
                f"a server with --tensor-parallel {self._shards} takes no adapter: start it with "
                "whole models (--data-parallel), or send the merged model, with MergedSource"
            )
        return self._versions.receiver(name)

    def held(self) -> list[AdapterVersion]:
        """Return the versions that are held, in the order of their commits."""
        return [
            AdapterVersion(name=one.name, version=one.version, key=one.key, retired=one.retired)
            for one in self._versions.held()
        ]

    def using(self, key: str) -> AbstractContextManager[object]:
        """Compute with a version inside the block; see model_runner.Adapters."""
        return self._module.using(self._versions.get(key))


def main(
    ready: Ready, options: ServeOptions, addresses: Addresses, replica: int, rank: int
) -> None:
    """Run a worker until SIGTERM. Calls `ready` with the encoded ModelCard."""
    size = options.tensor_parallel
    device = worker_device(options.device, replica * size + rank)
    if device.type == "cuda":
        devices.use(device)
    store = f"{addresses.folder}/replica-{replica}"
    with _process_group(rank, size, store, "nccl" if device.type == "cuda" else "gloo"):
        load = partial(
            load_for_worker,
            dtype=getattr(torch, options.dtype),
            shards=size,
            folder=Path(addresses.folder) / f"model-{replica}",
            device=device,
        )
        loaded, draft = load(options.model), None
        if options.draft_model is not None:
            draft = load(options.draft_model)
            _check_vocabulary(draft.card(options.draft_model), loaded.card(options.model))
        worker = Worker(
            loaded,
            options,
            rank,
            core_address=addresses.core_workers[replica],
            control_address=addresses.workers[replica * size + rank],
            name=f"replica {replica}: " if options.data_parallel > 1 else "",
            draft=draft,
        )

        try:  # SIGTERM ends the process until it is ready
            worker.fetch(options.weights_from)
        except BaseException:
            worker.close()
            raise

        def on_term(_signal: int, _frame: FrameType | None) -> None:
            worker.stop()

        signal.signal(signal.SIGTERM, on_term)
        try:
            ready(msgspec.msgpack.encode(worker.card))
            worker.run()
        except PeerLostError as exc:
            # The supervisor reports the process that died first; this one only follows.
            logger.debug("worker %d.%d ends: %s", replica, rank, exc)
            raise SystemExit(1) from None
        finally:
            worker.close()


def _check_vocabulary(draft: ModelCard, model: ModelCard) -> None:
    if draft.vocab_size != model.vocab_size:
        raise ConfigError(
            f"{draft.directory} has a vocabulary of {draft.vocab_size} tokens, and "
            f"{model.directory} one of {model.vocab_size}; give a --draft-model with the same one"
        )


@contextmanager
def _process_group(rank: int, size: int, file: str, backend: str) -> Iterator[None]:
    """Set up the process group of a tensor-parallel replica: on loopback, with a file as store."""
    if size == 1:
        yield
        return
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), GLOO_SOCKET_IFNAME="lo"
    )
    dist.init_process_group(
        backend,
        init_method=f"file://{file}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
