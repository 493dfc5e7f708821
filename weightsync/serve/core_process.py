"""The process of an engine core."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import msgspec
import zmq

from weightsync.serve.engine_core import EngineCore
from weightsync.serve.process_terms import CoreAddress, CoreTerms, Ready, takes_images
from weightsync.serve.scheduling import Scheduler
from weightsync.serve.worker_group import WorkerGroup

if TYPE_CHECKING:
    from weightsync.queues.tensor_queue import TensorIpcReceiver

GATHER_TIMEOUT_S = 600.0


def core_main(ready: Ready, terms: CoreTerms) -> None:
    """Run an engine core until SIGTERM. Calls `ready` with the encoded CoreAddress."""
    with _sockets(terms.orders, terms.gate) as (orders, gate):
        workers = WorkerGroup.gather(gate, terms.workers, timeout_s=GATHER_TIMEOUT_S)
        tensors = _tensor_queue(terms) if takes_images(workers.card) else None
        try:
            scheduler = Scheduler(workers.card, max_rows=terms.max_rows)
            core = EngineCore(orders, workers, tensors=tensors, scheduler=scheduler)

            def on_term(_signal: int, _frame: FrameType | None) -> None:
                core.stop()

            signal.signal(signal.SIGTERM, on_term)
            handle = tensors.handle if tensors else None
            ready(msgspec.msgpack.encode(CoreAddress(orders=terms.orders, tensors=handle)))
            core.run()
        finally:
            if tensors is not None:
                tensors.close()
            workers.close()


def _tensor_queue(terms: CoreTerms) -> TensorIpcReceiver | None:
    # It loads torch, which the core of a text-only model does not need.
    from weightsync.queues.tensor_queue import TensorIpcReceiver  # noqa: PLC0415 - see above

    return TensorIpcReceiver() if terms.tensor_ipc == "torch_shm" else None


@contextmanager
def _sockets(*addresses: str) -> Iterator[list[zmq.Socket[bytes]]]:
    context = zmq.Context()
    try:
        sockets = []
        for address in addresses:
            socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
            socket.setsockopt(zmq.LINGER, 200)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.bind(address)
            sockets.append(socket)
        yield sockets
    finally:
        context.destroy(linger=200)
