"""Processes that send tensors through a queue, started by spawn and controlled by a pipe."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import TypeVar

import torch

from weightsync.queues.tensor_packets import TensorIpcHandle, TensorQueueHandle
from weightsync.queues.tensor_queue import TensorIpcReceiver, TensorIpcSender

WAIT_S = 60.0
Wanted = TypeVar("Wanted")
SPAWN = multiprocessing.get_context("spawn")


def pattern(seed: int, nbytes: int) -> torch.Tensor:
    """Return `uint8[nbytes]` that no other seed yields."""
    period = torch.arange(251, dtype=torch.uint8) * 31 + (seed + 1) * 7 % 256
    return period.repeat(nbytes // 251 + 1)[:nbytes]


def any_of(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of random bytes 0 and 1, which are values of every dtype."""
    ones = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8)
    return ones.view(dtype).view(shape)


def comes_true(what: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not what():
        if time.monotonic() > deadline:
            return False
        gc.collect()
        time.sleep(0.01)
    return True


def send_on_demand(queue: TensorQueueHandle, pipe: Connection) -> None:
    """Send `pattern(seed, nbytes)` for each order, answering with the handle, until None."""
    torch.set_num_threads(1)
    with TensorIpcSender(queue, name=f"producer {os.getpid()}") as sender:
        while (order := pipe.recv()) is not None:
            seed, nbytes, request_id = order
            pipe.send(sender.send_tensor(pattern(seed, nbytes), request_id))


def receive_one_and_hold(pipe: Connection) -> None:
    """Run a receiver that takes one tensor and keeps it, until killed."""
    with TensorIpcReceiver() as receiver:
        pipe.send(receiver.handle)
        held = receiver.recv_any(WAIT_S)
        pipe.send(held.tensor.numel())
        signal.pause()


def receive_on_gpu(pipe: Connection) -> None:
    """Answer each handle with its tensor's device and sum, a request's name with its cleanup."""
    with TensorIpcReceiver() as receiver:
        pipe.send(receiver.handle)
        while (order := pipe.recv()) is not None:
            if isinstance(order, str):
                while not receiver.pending:
                    time.sleep(0.01)
                pipe.send(receiver.cleanup_request_tensors(order))
            else:
                tensor = receiver.recv_tensor(order, WAIT_S)
                pipe.send((str(tensor.device), int(tensor.sum())))
                del tensor


class Producer:
    """The test's end of a sending process."""

    def __init__(self, queue: TensorQueueHandle) -> None:
        self._pipe, child = SPAWN.Pipe()
        self.process = SPAWN.Process(target=send_on_demand, args=(queue, child))
        self.process.start()
        child.close()

    def order(self, seed: int, nbytes: int, request_id: str | None = None) -> None:
        self._pipe.send((seed, nbytes, request_id))

    def handle(self) -> TensorIpcHandle:
        return answer(self._pipe, TensorIpcHandle)

    def send(self, seed: int, nbytes: int, request_id: str | None = None) -> TensorIpcHandle:
        self.order(seed, nbytes, request_id)
        return self.handle()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(WAIT_S)

    def end(self) -> None:
        if self.process.is_alive():
            self._pipe.send(None)
        self.process.join(WAIT_S)
        self.kill()
        self._pipe.close()


def answer(pipe: Connection, kind: type[Wanted]) -> Wanted:
    assert pipe.poll(WAIT_S), "the process did not reply in time"
    said = pipe.recv()
    assert isinstance(said, kind)
    return said


@contextmanager
def producers(queue: TensorQueueHandle, count: int) -> Iterator[list[Producer]]:
    started = [Producer(queue) for _ in range(count)]
    try:
        yield started
    finally:
        for producer in started:
            producer.end()
