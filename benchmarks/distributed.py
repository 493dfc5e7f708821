"""Speed of updates of workers on another host, beside one raw broadcast of the same bytes.

    python -m benchmarks.distributed [--mib 512] [--tensors 300] [--rounds 7]

Both ends run on this machine over loopback, one thread each. The raw broadcast moves one flat
tensor between the same two processes; an update is the whole path: tensors packed into the sender's
ring, down the chain, into the ring of the other host, and from there into each worker's model.
Medians, as ratios to the broadcast of the same run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import nn
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import ProcessGroupGloo

import weightsync as ws
from weightsync.backends.base import TransferOptions
from weightsync.backends.gloo.payload import GlooInit, HostRing, RelayedUpdate
from weightsync.backends.gloo.receiver import init_of
from weightsync.backends.gloo.sender import Chain, RingFeed
from weightsync.backends.gloo.trainer import ring_shape
from weightsync.backends.ipc.sender import MAX_READERS, IpcTrainerEngine
from weightsync.weights.source import ModuleSource
from weightsync.wire import codec
from weightsync.wire.messages import (
    PROTOCOL,
    FinishRequest,
    InitReply,
    InitRequest,
    RegisteredUpdate,
    Reply,
    Request,
    StartTerms,
    UpdateRequest,
)
from weightsync.wire.offers import InitInfo

SENDER = "sender"
PLACE = MAX_READERS - 1
TIMEOUT_S = 60.0
ADDRESS = "127.0.0.1"
WARM_UPS = 2


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The workload of a run."""

    nbytes: int
    tensors: int

    def model(self, value: float) -> nn.ParameterList:
        """Tensors of bf16, all of one size."""
        elements = self.nbytes // self.tensors // 2
        return nn.ParameterList(
            nn.Parameter(torch.full((elements,), value, dtype=torch.bfloat16), requires_grad=False)
            for _ in range(self.tensors)
        )


class Worker:
    """The parent's end of a worker process."""

    def __init__(self, shape: Shape) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, child = context.Pipe()
        self.process = context.Process(target=_work, args=(child, shape))
        self.process.start()

    def ask(self, what: str, argument: object = None) -> object:
        """Call the worker and wait for its reply."""
        self.pipe.send_bytes(json.dumps([what, argument]).encode())
        if not self.pipe.poll(TIMEOUT_S):
            raise TimeoutError(f"no answer to {what}")
        return json.loads(self.pipe.recv_bytes())

    def handle(self, request: Request) -> Reply:
        """Send a control message."""
        plain = codec.to_plain(request)
        body = json.dumps(self.ask("handle", plain)).encode()
        return codec.decode_reply(str(plain["call"]), body)

    def end(self) -> None:
        """Stop the process."""
        self.pipe.send_bytes(b"null")
        self.process.join(TIMEOUT_S)


class Trial:
    """A sender in this process and `workers` on one other host, with one size of bucket."""

    def __init__(
        self, model: nn.Module, workers: Sequence[Worker], *, bucket_nbytes: int, num_buckets: int
    ) -> None:
        self.workers = workers
        self.engine = IpcTrainerEngine(
            ModuleSource(model),
            TransferOptions(packed=True, bucket_nbytes=bucket_nbytes, num_buckets=num_buckets),
        )
        self.chain = Chain(ADDRESS, ["worker"], epoch=1, timeout_s=TIMEOUT_S)
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(self.chain.join)
            shape = ring_shape(self.engine.offer(PLACE, 1))
            member = GlooInit(group=self.chain.info(1), shape=shape)
            reply = workers[0].handle(self._init(member))
            joined.result()
        assert isinstance(reply, InitReply)
        ring = codec.decode_payload(reply.payload, HostRing)
        for place, worker in enumerate(workers[1:], 1):
            worker.handle(self._init(GlooInit(ring=init_of(ring, shape, place))))
        self._updates = 0

    def _init(self, payload: GlooInit) -> InitRequest:
        info = InitInfo(
            backend="gloo",
            path="gloo",
            protocol_min=PROTOCOL,
            protocol_max=PROTOCOL,
            sender=SENDER,
            manifest=codec.manifest_to_wire(self.engine.manifest),
            lease_s=TIMEOUT_S,
            generation=1,
            payload=payload,
        )
        return InitRequest(init_info=info)

    def update(self, workers: int) -> float:
        """Send to that many workers; return the seconds until the last worker has all bytes."""
        self._updates += 1
        name = f"update-{time.monotonic_ns()}"
        chosen = self.workers[:workers]
        started = time.perf_counter()
        message = self.engine.begin([PLACE], verify=False)
        self.chain.start(RingFeed(self.engine, PLACE))
        for place, worker in enumerate(chosen):
            readers = [] if place else list(range(workers))
            update = RelayedUpdate(
                epoch=message.epoch, base=message.base, packed=True, readers=readers
            )
            info = RegisteredUpdate(
                sender=SENDER,
                epoch=self._updates,
                verify=False,
                payload=update,
                registered=True,
            )
            request = UpdateRequest(
                update_info=info, update_id=name, start=StartTerms(), prepare=True
            )
            worker.pipe.send_bytes(json.dumps(["handle", codec.to_plain(request)]).encode())
        self.engine.transfer(self.chain.check)
        self.chain.finish(lambda: None)
        for worker in chosen:
            worker.pipe.recv_bytes()
        took = time.perf_counter() - started
        self.engine.end()
        for worker in chosen:
            worker.handle(FinishRequest(update_id=name))
        return took

    def close(self) -> None:
        """End the group and the ring."""
        self.chain.close()
        self.engine.close()


class Broadcast:
    """Broadcast of torch: one flat tensor, between this process and a worker."""

    def __init__(self, nbytes: int, worker: Worker) -> None:
        store = TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False)
        worker.pipe.send_bytes(json.dumps(["join", store.port]).encode())
        self._group = _group(store, 0)
        worker.pipe.recv_bytes()
        self._worker = worker
        self._flat = torch.ones(nbytes, dtype=torch.uint8)

    def run(self) -> float:
        """Return the seconds of one broadcast."""
        self._worker.pipe.send_bytes(json.dumps(["broadcast", self._flat.numel()]).encode())
        self._group.broadcast(self._flat, 0).wait()  # both processes have joined now
        started = time.perf_counter()
        self._group.broadcast(self._flat, 0).wait()
        self._worker.pipe.recv_bytes()
        return time.perf_counter() - started


def _group(store: Store, rank: int) -> Any:  # torch's type stubs lack broadcast
    return ProcessGroupGloo(store, rank, 2, timedelta(seconds=TIMEOUT_S))


def _work(pipe: Connection, shape: Shape) -> None:
    torch.set_num_threads(1)
    receiver = ws.WeightReceiver(shape.model(0.0))
    kept: dict[str, Any] = {}

    def join(port: int) -> None:
        store = TCPStore(ADDRESS, port, is_master=False)
        kept["group"] = _group(store, 1)

    def broadcast(nbytes: int) -> None:
        flat = kept.setdefault("flat", torch.zeros(nbytes, dtype=torch.uint8))
        for _ in range(2):
            kept["group"].broadcast(flat, 0).wait()

    calls: dict[str, Callable[..., object]] = {
        "handle": receiver.handle,
        "join": join,
        "broadcast": broadcast,
    }
    while (turn := json.loads(pipe.recv_bytes())) is not None:
        pipe.send_bytes(json.dumps(calls[turn[0]](turn[1])).encode())
    receiver.close()


def measure(shape: Shape, rounds: int, bucket_nbytes: int, num_buckets: int) -> dict[str, float]:
    """Return median seconds of the broadcast and of updates of one and two workers."""
    workers = [Worker(shape), Worker(shape)]
    try:
        broadcast = Broadcast(shape.nbytes, workers[0])
        trial = Trial(
            shape.model(0.5), workers, bucket_nbytes=bucket_nbytes, num_buckets=num_buckets
        )
        ways: dict[str, Callable[[], float]] = {
            "broadcast": broadcast.run,
            "one worker": lambda: trial.update(1),
            "two workers": lambda: trial.update(2),
        }
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(WARM_UPS + rounds):
            for name, way in ways.items():
                seconds = way()
                if turn >= WARM_UPS:
                    taken[name].append(seconds)
        trial.close()
    finally:
        for worker in workers:
            worker.end()
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def main() -> None:
    """Print one row for each size of bucket."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bucket-mib", type=int, nargs="+", default=[16])
    parser.add_argument("--buckets", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = Shape(nbytes=options.mib << 20, tensors=options.tensors)
    print("bucket  broadcast   one worker       two workers")
    for mib in options.bucket_mib:
        got = measure(shape, options.rounds, mib << 20, options.buckets)
        flat, one, two = got["broadcast"], got["one worker"], got["two workers"]
        print(
            f"{mib:3} MiB  {flat * 1e3:6.0f} ms  {one * 1e3:6.0f} ms {one / flat:5.2f}x  "
            f"{two * 1e3:6.0f} ms {two / one:5.2f}x of one",
            flush=True,
        )


if __name__ == "__main__":
    main()
