"""A sender in this process, and hosts of workers in others, joined by a private group on loopback.

Every worker is a process of its own with a real WeightReceiver; the first of each host is the
member. Control messages travel over pipes as JSON.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import torch

import weightsync as ws
from tests.children import CONTEXT, load_beforehand
from tests.e2e.models import digests
from tests.offers import next_number, offered, registered
from weightsync.backends.base import TransferOptions
from weightsync.backends.gloo.payload import GlooInit, HostRing, RelayedUpdate
from weightsync.backends.gloo.receiver import init_of
from weightsync.backends.gloo.sender import Chain, RingFeed
from weightsync.backends.gloo.trainer import ring_shape
from weightsync.backends.ipc.sender import MAX_READERS, IpcTrainerEngine
from weightsync.shm.segment import live_segments, remove_leftovers
from weightsync.shm.wait import Heartbeat
from weightsync.weights.source import ModuleSource, NamedTensors
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
from weightsync.wire.offers import InitInfo
from weightsync.wire.problem import Problem, encode_problem, from_problem, to_problem

WAIT_S = 60.0
SENDER = "sender"
FEED_READER = MAX_READERS - 1
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


class Party:
    """A sender and its hosts. `hosts[i]` are the workers of host i, the member first."""

    def __init__(
        self,
        hosts: Sequence[Sequence[Worker]],
        *,
        timeout_s: float = WAIT_S / 2,
        num_buckets: int = 4,
        address: str = "127.0.0.1",
    ) -> None:
        self.hosts = [list(host) for host in hosts]
        self.model = Model()
        self._timeout_s = timeout_s
        self._address = address
        self.engine = IpcTrainerEngine(
            ModuleSource(self.model),
            TransferOptions(
                packed=True,
                bucket_nbytes=BUCKET_NBYTES,
                num_buckets=num_buckets,
                timeout_s=timeout_s,
            ),
        )
        self.epoch = 0
        self.updates = 0
        self.chain: Chain | None = None

    @property
    def workers(self) -> list[Worker]:
        return [worker for host in self.hosts for worker in host]

    def build(self, *, absent: Sequence[str] = ()) -> None:
        """Make the group anew, without messages to the members in `absent`."""
        if self.chain is not None:
            self.chain.close()
        self.epoch += 1
        self._number = next_number()
        self._shape = ring_shape(self.engine.offer(FEED_READER, self._number))
        names = [host[0].name for host in self.hosts]
        chain = Chain(
            self._address,
            names,
            epoch=self.epoch,
            timeout_s=self._timeout_s,
        )
        self.chain = chain
        members = [host[0] for host in self.hosts]
        with ThreadPoolExecutor(len(members) + 1) as pool:
            joined = pool.submit(chain.join)
            asked = [
                pool.submit(member.handle, InitRequest(init_info=self.offer(rank)))
                for rank, member in enumerate(members, 1)
                if member.name not in absent
            ]
            joined.result()
            replies = [reply.result() for reply in asked]
        for host, reply in zip(self.hosts, replies, strict=True):
            assert isinstance(reply, InitReply)
            ring = codec.decode_payload(reply.payload, HostRing)
            for place, worker in enumerate(host[1:], 1):
                theirs = GlooInit(ring=init_of(ring, self._shape, place))
                worker.handle(InitRequest(init_info=self._offered(theirs)))

    def offer(self, rank: int) -> InitInfo:
        assert self.chain is not None
        return self._offered(GlooInit(group=self.chain.info(rank), shape=self._shape))

    def _offered(self, payload: GlooInit) -> InitInfo:
        return offered(
            self.engine,
            payload,
            place=FEED_READER,
            backend="gloo",
            sender=SENDER,
            lease_s=self._timeout_s,
            generation=self._number,
        )

    def send(
        self,
        *,
        pairs: NamedTensors | None = None,
        verify: bool = True,
        on_chunk: Callable[[int], None] = lambda _: None,
        on_data: Callable[[int, torch.Tensor], None] = lambda *_: None,
        silent: Sequence[Worker] = (),
        stop_after_s: float = WAIT_S,
        on_failure: Callable[[], None] = lambda: None,
    ) -> list[BaseException]:
        """Update all workers; abort everywhere after a failure. Returns the failures."""
        chain = self.chain
        assert chain is not None
        self.updates += 1
        update_id = f"update-{self.updates}"
        part = None if pairs is None else ws.StateDictSource(dict(pairs))
        message = self.engine.begin([FEED_READER], verify=verify, source=part)
        manifest = None if part is None else codec.manifest_to_wire(part.manifest)
        terms = StartTerms(partial=pairs is not None)
        failed: list[BaseException] = []
        lock = threading.Lock()

        def ask(worker: Worker, readers: list[int] | None) -> None:
            update = RelayedUpdate(
                epoch=message.epoch, base=message.base, packed=True, readers=readers or []
            )
            info = msgspec.structs.replace(
                registered(update, sender=SENDER, verify=verify), manifest=manifest
            )
            request = UpdateRequest(
                update_info=info, update_id=update_id, start=terms, prepare=True
            )
            try:
                worker.handle(request)
            except ws.WeightSyncError as exc:
                with lock:
                    failed.append(exc)

        deadline = time.monotonic() + stop_after_s

        def check() -> None:
            chain.check()  # first, since receivers may answer before that its error aborted them
            with lock:
                over = bool(failed) or time.monotonic() > deadline
            if over:
                raise ws.TransferError("a receiver failed, or the sender changed its mind")

        feed = _Watched(self.engine, on_chunk, on_data)
        asked: list[Future[None]] = []
        with (
            ThreadPoolExecutor(len(self.workers)) as pool,
            closing(Heartbeat(self.engine.beat)),
        ):
            for host in self.hosts:
                for place, worker in enumerate(host):
                    if worker not in silent:
                        readers = list(range(len(host))) if place == 0 else None
                        asked.append(pool.submit(ask, worker, readers))
            try:
                chain.start(feed)
                self.engine.transfer(check)
                chain.finish(check)
                while wait(asked, timeout=0.02).not_done:
                    check()
            except ws.WeightSyncError as exc:
                with lock:
                    failed.append(exc)
                chain.stop()
                on_failure()
                self._conclude(update_id, well=False)
        self.engine.end()
        self._conclude(update_id, well=not failed)
        return failed

    def _conclude(self, update_id: str, *, well: bool) -> None:
        kind = FinishRequest if well else AbortRequest
        self._each(lambda worker: worker.handle(kind(update_id=update_id)))

    def _each(self, call: Callable[[Worker], object]) -> None:
        for worker in self.workers:
            try:
                call(worker)
            except ws.ConnectError:
                continue

    def close(self) -> None:
        if self.chain is not None:
            self.chain.close()
        self.engine.close()


class _Watched(RingFeed):
    """A feed that calls back before it takes a chunk, and shows the chunk before it is sent."""

    def __init__(
        self,
        engine: IpcTrainerEngine,
        on_chunk: Callable[[int], None],
        on_data: Callable[[int, torch.Tensor], None],
    ) -> None:
        super().__init__(engine, FEED_READER)
        self._on_data = on_data
        self._on_chunk = on_chunk

    def take(self, j: int, check: Callable[[], None]) -> tuple[torch.Tensor, list[int]]:
        self._on_chunk(j)
        data, fingerprints = super().take(j, check)
        self._on_data(j, data)
        return data, fingerprints


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
    """Workers on `len(hosts)` hosts, and a sender that has not built a group with them."""
    with workers(*hosts, hook=hook) as started:
        made = Party(started, **options)
        try:
            yield made
        finally:
            made.close()
    remove_leftovers()  # of workers that a test killed


@contextmanager
def party(*hosts: int, **options: Any) -> Iterator[Party]:
    """The same with a group of all workers."""
    with strangers(*hosts, **options) as made:
        made.build()
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
        threading.Event().wait(self.delay_s)
        state = self.model.state_dict()
        for name, tensor in pairs:
            state[name].copy_(tensor)

    def behave(self, argument: dict[str, float]) -> None:
        self.calls = 0
        self.delay_s = argument.get("delay_s", 0.0)
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
    """Descriptors, threads and mapped segments of this process."""
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
