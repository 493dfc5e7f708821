"""A process at the other end of a wire: rank 1, which does what it is told, and may be killed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Literal

import torch
from torch._C._distributed_c10d import TCPStore

from tests.backends.exact_wire import in_place_of_nccl
from tests.children import CONTEXT
from weightsync.backends import nccl_wire
from weightsync.backends.nccl_wire import Flight, Wire

WAIT_S = 60.0
Edge = Literal["stand-in", "nccl"]


def device_of(edge: Edge, rank: int) -> torch.device:
    return torch.device("cpu") if edge == "stand-in" else torch.device("cuda", rank)


def content(nbytes: int) -> torch.Tensor:
    """Known bytes, others for every size."""
    return (torch.arange(nbytes) * 31 + nbytes).to(torch.uint8)


def wait_for(flight: Flight, timeout_s: float = WAIT_S) -> bool:
    """Whether it lands in time."""
    for _ in range(int(timeout_s / 0.01)):
        if flight.landed():
            return True
        time.sleep(0.01)
    return False


@contextmanager
def wires(edge: Edge) -> Iterator[tuple[Wire, Connection, BaseProcess]]:
    """Rank 0's wire in this process, the pipe that commands rank 1, and its process."""
    pipe, child = CONTEXT.Pipe()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    process = CONTEXT.Process(target=_serve, args=(child, store.port, edge), daemon=True)
    process.start()
    child.close()
    try:
        wire = nccl_wire.connect(store, 0, 2, device_of(edge, 0))
        try:
            yield wire, pipe, process
        finally:
            wire.abort()
    finally:
        pipe.close()
        process.join(WAIT_S / 4)
        if process.is_alive():
            process.kill()
            process.join(WAIT_S)


def ask(pipe: Connection, nbytes: int) -> None:
    """Have rank 1 receive that many bytes."""
    pipe.send_bytes(json.dumps(nbytes).encode())


def answer(pipe: Connection) -> list[int] | str:
    """What it received, or why it did not."""
    assert pipe.poll(WAIT_S)
    told: list[int] | str = json.loads(pipe.recv_bytes())
    return told


def _serve(pipe: Connection, port: int, edge: Edge) -> None:
    torch.set_num_threads(1)
    if edge == "nccl":
        _receive(pipe, port, edge)
        return
    with in_place_of_nccl():
        _receive(pipe, port, edge)


def _receive(pipe: Connection, port: int, edge: Edge) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False)
    wire = nccl_wire.connect(store, 1, 2, device_of(edge, 1))
    while True:
        try:
            nbytes = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            wire.abort()
            return
        told: object
        try:
            stage, got = wire.memory(nbytes), torch.zeros(nbytes, dtype=torch.uint8)
            assert wait_for(wire.receive(stage, 0))
            wire.copy(stage, got)
            told = got.tolist()
        except Exception as exc:  # noqa: BLE001 # whatever it is, the test looks at it
            told = str(exc)
        pipe.send_bytes(json.dumps(told).encode())
