"""A sender in this process, and hosts of workers in others, which read from each other on loopback.

Every worker is a process of its own with a real WeightReceiver; the first of each host is the
member. Control messages travel over pipes as JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch

import weightsync as ws
from tests.children import CONTEXT, load_beforehand
from tests.e2e.models import digests
from tests.offers import next_number, offered, registered
from weightsync.backends.base import Reader, Replies, TransferOptions
from weightsync.backends.ipc.sender import IpcTrainerEngine
from weightsync.backends.tcp.payload import RelayedUpdate
from weightsync.backends.tcp.trainer import TcpTrainerEngine
from weightsync.shm.segment import live_segments, remove_leftovers
from weightsync.shm.wait import Heartbeat
from weightsync.weights.sources.base import ModuleSource, NamedTensors
from weightsync.wire import codec
from weightsync.wire.messages import (
    AbortRequest,
    FinishRequest,
    InitReply,
    InitRequest,
    Reply,
    Request,
    StartTerms,
    UpdateRequest,
)
from weightsync.wire.problem import Problem, encode_problem, from_problem, to_problem

WAIT_S = 60.0
SENDER = "sender"
BUCKET_NBYTES = 64 << 10

load_beforehand("tests.backends.hosts")


class Model(torch.nn.Module):
    """Small tensors, one larger than a bucket, a scalar and an empty one."""

    def __init__(self, layers: int = 24) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 80) for _ in range(layers))
        self.large = torch.nn.Parameter(torch.zeros(301, 211))
        self.scale = torch.nn.Parameter(torch.zeros(()))
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("counts", torch.zeros(77, dtype=torch.int16))

    def fill(self, seed: int) -> Model:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                tensor.copy_(torch.rand(tensor.shape, generator=generator) * 1000)
        return self

    def content(self) -> dict[str, str]:
        """A digest of each tensor."""
        return digests(self)


class Worker:
    """The parent's end of one worker process; calls may be in flight together."""

    def __init__(self, name: str, process: BaseProcess, pipe: Connection) -> None:
        self.name = name
        self.process = process
        self._pipe = pipe
        self._lock = threading.Lock()
        self._turns = 0
        self._waiting: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._gone = False
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, what: str, argument: object = None) -> Any:
        answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        with self._lock:
            if self._gone:
                raise ws.ConnectError(f"{self.name}: the process is gone")
            self._turns += 1
            self._waiting[self._turns] = answers
            try:
                self._pipe.send_bytes(json.dumps([self._turns, what, argument]).encode())
            except OSError as exc:
                raise ws.ConnectError(f"{self.name}: the process is gone") from exc
        answer = answers.get(timeout=WAIT_S)
        if not answer:
            raise ws.ConnectError(f"{self.name}: the process is gone")
        if "problem" in answer:
            problem = msgspec.json.decode(answer["problem"], type=Problem)
            raise from_problem(problem, peer=self.name)
        return answer["result"]

    def _read(self) -> None:
        while True:
            try:
                turn, answer = json.loads(self._pipe.recv_bytes())
            except (EOFError, OSError):
                break
            self._waiting.pop(turn).put(answer)
        with self._lock:
            self._gone = True
        for waiting in self._waiting.values():
            waiting.put({})

    def handle(self, request: Request) -> Reply:
        plain = codec.to_plain(request)
        return codec.decode_reply(
            str(plain["call"]), json.dumps(self.ask("handle", plain)).encode()
        )

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


class _Flowing(ModuleSource):
    """A source whose tensors can be read once for each update."""

    def stable_tensors(self) -> None:
        return None


class Party:
    """A sender and its hosts. `hosts[i]` are the workers of host i, the member first.

    Calls the two engines as the core does. `failed` of an update are errors by worker, and the
    sender's own.
    """

    def __init__(
        self,
        hosts: Sequence[Sequence[Worker]],
        *,
        timeout_s: float = WAIT_S / 2,
        num_buckets: int = 4,
        address: str = "127.0.0.1",
        is_stable: bool = True,
    ) -> None:
        self.hosts = [list(host) for host in hosts]
        self.model = Model()
        self.source = ModuleSource(self.model) if is_stable else _Flowing(self.model)
        self._timeout_s = timeout_s
        self._route = f"http://[{address}]:1" if ":" in address else f"http://{address}:1"
        options = TransferOptions(
            packed=True, bucket_nbytes=BUCKET_NBYTES, num_buckets=num_buckets, timeout_s=timeout_s
        )
        self.ring = IpcTrainerEngine(self.source, options)
        self.engine = TcpTrainerEngine(self.source, self.ring, options)
        self._readers: dict[Worker, Reader] = {}
        self._indices = itertools.count()
        self.updates = 0
        self.inits = 0

    @property
    def workers(self) -> list[Worker]:
        return [worker for host in self.hosts for worker in host]

    def connect(self, workers: Sequence[Worker]) -> None:
        """Connect workers, again those that are connected. Raises the first error of a worker."""
        for worker in workers:
            (host,) = [i for i, host in enumerate(self.hosts) if worker in host]
            known = self._readers.get(worker)
            self._readers[worker] = Reader(
                index=next(self._indices) if known is None else known.index,
                target=worker.name,
                keys=[f"HOST-{host}-{id(self)}"],
                route=self._route,
            )
        number = next_number()
        steps = self.engine.handshake([self._readers[worker] for worker in workers], number)
        by_index = {self._readers[worker].index: worker for worker in workers}
        failures: list[BaseException] = []
        with ThreadPoolExecutor(len(workers)) as pool, suppress(StopIteration):
            step = next(steps)
            while True:
                asked = {
                    index: pool.submit(by_index[index].handle, self._init(payload, number))
                    for index, payload in step.messages.items()
                }
                self.inits += len(asked)
                raised = {index: reply.exception() for index, reply in asked.items()}
                failed = {index: error for index, error in raised.items() if error is not None}
                failures += failed.values()
                payloads = {i: _payload(r.result()) for i, r in asked.items() if i not in failed}
                step = steps.send(Replies(payloads=payloads, failed=list(failed)))
        if failures:
            raise failures[0]

    def _init(self, payload: object, generation: int) -> InitRequest:
        return InitRequest(
            init_info=offered(
                self.ring,
                payload,
                backend="tcp",
                sender=SENDER,
                lease_s=self._timeout_s,
                generation=generation,
            )
        )

    def remove(self, worker: Worker) -> None:
        """Forget a worker that left."""
        self.hosts = [[w for w in host if w is not worker] for host in self.hosts]
        self.hosts = [host for host in self.hosts if host]
        self.engine.remove_reader(self._readers.pop(worker).index)

    def send(
        self,
        *,
        pairs: NamedTensors | None = None,
        verify: bool = True,
        on_chunk: Callable[[int], None] = lambda _: None,
        on_data: Callable[[int, memoryview], None] = lambda *_: None,
        only: Sequence[Worker] = (),
        silent: Sequence[Worker] = (),
        stops: Sequence[Worker] = (),
        drops: bool = False,
        in_rounds: bool = False,
    ) -> dict[str, BaseException]:
        """Update all workers. After a failure abort everywhere, or with `drops` only there.

        `in_rounds` no worker hears of an abort before all have answered, as the workers of an
        engine of vLLM.

        `on_chunk` and `on_data` are called before a chunk is served. `silent` workers get no
        message. Workers in `stops` are dropped and continued when all others have answered.
        Returns the failures.
        """
        readers = {self._readers[worker].index: worker for worker in only or self.workers}
        if unready := self.engine.unready(list(readers)):
            self.connect([readers[index] for index in unready])
        self.updates += 1
        update_id = f"update-{self.updates}"
        part = None if pairs is None else ws.StateDictSource(dict(pairs))
        source = self.source if part is None else part
        self.ring.begin(self.engine.base_readers(list(readers)), verify=verify, source=part)
        messages = self.engine.begin(list(readers), verify=verify, source=source)
        manifest = None if part is None else codec.manifest_to_wire(part.manifest)
        terms = StartTerms(partial=pairs is not None)
        failed: dict[str, BaseException] = {}

        def ask(worker: Worker, update: RelayedUpdate) -> None:
            info = msgspec.structs.replace(
                registered(update, sender=SENDER, verify=verify), manifest=manifest
            )
            request = UpdateRequest(
                update_info=info, update_id=update_id, start=terms, prepare=True
            )
            try:
                worker.handle(request)
            except ws.WeightSyncError as exc:
                failed[worker.name] = exc

        deadline = time.monotonic() + WAIT_S

        def check() -> None:
            self.engine.check()
            if failed and not drops:
                raise ws.TransferError("a receiver failed")
            if time.monotonic() > deadline:
                raise ws.TransferTimeout("the update takes too long")

        with (
            self._watched(on_chunk, on_data),
            ThreadPoolExecutor(len(readers)) as pool,
            closing(Heartbeat(self.ring.beat)),
        ):
            asked = {
                worker: pool.submit(ask, worker, messages[index])
                for index, worker in readers.items()
                if worker not in silent
            }
            needed = [asked[worker] for worker in asked if worker not in stops]
            try:
                self.ring.transfer(check)
                self.engine.transfer(check)
                while wait(needed, timeout=0.02).not_done:
                    check()
            except ws.WeightSyncError as exc:
                failed[SENDER] = exc
                self.engine.cancel()
                self.ring.cancel()
                wait(asked.values() if in_rounds else (), timeout=WAIT_S)
                self._conclude(list(readers.values()), update_id, AbortRequest)
            for worker in stops:
                worker.signal(signal.SIGCONT)
                worker.handle(AbortRequest(update_id=update_id))
        self.engine.end()
        self.ring.end()
        well = not failed or (drops and SENDER not in failed)
        without = [*failed, *(worker.name for worker in [*silent, *stops])]
        kind = FinishRequest if well else AbortRequest
        self._conclude(list(readers.values()), update_id, kind, without)
        return failed

    @contextmanager
    def _watched(
        self, on_chunk: Callable[[int], None], on_data: Callable[[int, memoryview], None]
    ) -> Iterator[None]:
        """Call back for each chunk, before it is served."""
        window = self.engine._window
        assert window is not None
        genuine = window.offer

        def offer(chunk: int, data: memoryview, fingerprints: Sequence[int]) -> None:
            on_chunk(chunk)
            on_data(chunk, data)
            genuine(chunk, data, fingerprints)

        with mock.patch.object(window, "offer", offer):
            yield

    def _conclude(
        self,
        workers: Sequence[Worker],
        update_id: str,
        kind: type[FinishRequest | AbortRequest],
        without: Container[str] = (),
    ) -> None:
        for worker in workers:
            ends = AbortRequest if worker.name in without else kind
            with suppress(ws.ConnectError):
                worker.handle(ends(update_id=update_id))

    def close(self) -> None:
        self.engine.close()
        self.ring.close()


def _payload(reply: Reply) -> object:
    assert isinstance(reply, InitReply)
    return reply.payload


@contextmanager
def workers(*hosts: int, hook: bool = False) -> Iterator[list[list[Worker]]]:
    """Start `hosts[i]` workers for each host; all end with the block."""
    with ExitStack() as stack:
        yield [
            [stack.enter_context(_worker(f"h{i}w{k}", hook=hook)) for k in range(count)]
            for i, count in enumerate(hosts)
        ]


@contextmanager
def strangers(*hosts: int, hook: bool = False, **options: Any) -> Iterator[Party]:
    """Workers on `len(hosts)` hosts, and a sender that has not connected them."""
    with workers(*hosts, hook=hook) as started:
        made = Party(started, **options)
        try:
            yield made
        finally:
            made.close()
    remove_leftovers()  # of workers that a test killed


@contextmanager
def party(*hosts: int, **options: Any) -> Iterator[Party]:
    """The same, connected."""
    with strangers(*hosts, **options) as made:
        made.connect(made.workers)
        yield made


@contextmanager
def _worker(name: str, *, hook: bool) -> Iterator[Worker]:
    parent, child = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_work, args=(child, hook), name=name)
    process.start()
    child.close()
    try:
        yield Worker(name, process, parent)
    finally:
        with suppress(OSError):
            parent.send_bytes(b"null")
        process.join(WAIT_S / 4)
        if process.is_alive():
            process.kill()
            process.join(WAIT_S)
            raise AssertionError(f"{name} did not end")
        parent.close()


class _Work:
    """The worker inside its process: a model, or a hook that can be slow or raise."""

    def __init__(self, *, hook: bool) -> None:
        self.model = Model()
        self.delay_s = 0.0
        self.delay_at = -1
        self.raise_at = -1
        self.calls = 0
        self.receiver = ws.WeightReceiver(
            self._load if hook else self.model,
            apply="in_place" if hook else "staged",
            lease_s=WAIT_S / 2,
        )

    def _load(self, pairs: Any) -> None:
        self.calls += 1
        if self.calls == self.raise_at:
            raise RuntimeError("the hook does not want this")
        if self.delay_at in (-1, self.calls):
            threading.Event().wait(self.delay_s)
        state = self.model.state_dict()
        for name, tensor in pairs:
            state[name].copy_(tensor)

    def behave(self, argument: dict[str, float]) -> None:
        self.calls = 0
        self.delay_s = argument.get("delay_s", 0.0)
        self.delay_at = int(argument.get("delay_at", -1))
        self.raise_at = int(argument.get("raise_at", -1))

    def answer(self, what: str, argument: Any) -> object:  # a line each
        match what:
            case "handle":
                return self.receiver.handle(argument)
            case "content":
                return self.model.content()
            case "version":
                return self.receiver.version
            case "footprint":
                return footprint()
            case "mapped":
                return mapped()
            case "behave":
                self.behave(argument)
                return None
            case "alive":
                return self.receiver._session.senders.alive(argument)
            case _:
                raise AssertionError(what)


def mapped() -> list[str]:
    """The names of the segments that this process holds."""
    return sorted({segment.name for segment in live_segments()})


def footprint() -> dict[str, int]:
    """Descriptors, threads and mapped segments of this process, without those that just end."""
    samples = [_footprint()]
    for _ in range(10):
        time.sleep(0.02)
        samples.append(_footprint())
    return {kind: min(sample[kind] for sample in samples) for kind in samples[0]}


def _footprint() -> dict[str, int]:
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return {
        "fds": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "segments": sum("/dev/shm/weightsync-" in line for line in maps.splitlines()),
    }


def _work(pipe: Connection, hook: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    _serve(pipe, _Work(hook=hook))


def _serve(pipe: Connection, work: _Work) -> None:
    lock = threading.Lock()

    def answer(turn: Any) -> None:
        number, what, argument = turn
        try:
            reply: dict[str, object] = {"result": work.answer(what, argument)}
        except Exception as exc:  # noqa: BLE001 # the parent raises it
            reply = {"problem": encode_problem(to_problem(exc)).decode()}
        with lock:
            pipe.send_bytes(json.dumps([number, reply]).encode())

    while True:
        try:
            turn = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            break
        if turn is None:
            break
        threading.Thread(target=answer, args=(turn,), daemon=True).start()
    work.receiver.close()
