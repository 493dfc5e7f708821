"""torch.distributed broadcasts over Gloo on loopback: a tensor at a time, or in flat buckets.

`per tensor`: all broadcasts start before the wait for the first, and arrive in the reader's own
parameters. `flat buckets`: two buckets of 64 MiB, allocated once; one is packed while the other is
sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.rivals.contract import WAIT_S, Job, Reader, Rival
from benchmarks.rivals.crew import Crew
from benchmarks.rivals.parameters import Parameters, as_bytes, parameters_of

BUCKET_NBYTES = 64 << 20
Chunk = list[torch.Tensor]


class Trainer(Rival):
    """Rank 0."""

    def setup(self, job: Job, module: nn.Module) -> None:
        store = str(Path(job.directory) / "store")
        size = job.readers + 1
        self._crew = Crew(job, Taker, [(store, rank, size) for rank in range(1, size)])
        _join(store, 0, size)
        self._crew.ready()
        self._bytes = {name: as_bytes(tensor) for name, tensor in parameters_of(module).items()}
        self._buckets = Buckets(self._bytes)

    def update(self, way: str) -> None:
        self._crew.tell("load", way, None)
        _take_part(way, self._bytes, self._buckets, sends=True)
        self._crew.hear()

    def held(self) -> list[Mapping[str, str]]:
        return self._crew.held()

    def close(self) -> None:
        if hasattr(self, "_crew"):
            self._crew.close()
        if dist.is_initialized():
            dist.destroy_process_group()


class Taker(Reader):
    """The other ranks."""

    def __init__(self, module: nn.Module, extra: Any) -> None:
        super().__init__(module, extra)
        _join(*extra)
        self._bytes = {name: as_bytes(tensor) for name, tensor in self.parameters.items()}
        self._buckets = Buckets(self._bytes)

    def load(self, way: str, message: Any) -> object:
        _take_part(way, self._bytes, self._buckets, sends=False)
        return None

    def close(self) -> None:
        dist.destroy_process_group()


class Buckets:
    """The parameters' bytes in chunks of a bucket's size, and two buckets."""

    def __init__(self, parameters: Parameters) -> None:
        self.chunks = list(_chunks(parameters))
        size = max(sum(map(len, chunk)) for chunk in self.chunks)
        self.memory = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]

    def views(self, number: int) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Return the bucket of a chunk, and pairs of a parameter's part and its place."""
        chunk = self.chunks[number]
        lengths = [len(piece) for piece in chunk]
        bucket = self.memory[number % 2][: sum(lengths)]
        return bucket, list(zip(chunk, torch.split(bucket, lengths), strict=True))


def _chunks(parameters: Parameters) -> Iterator[Chunk]:
    chunk: Chunk = []
    room = BUCKET_NBYTES
    for flat in parameters.values():
        left = flat
        while len(left):
            piece, left = left[:room], left[room:]
            chunk.append(piece)
            room -= len(piece)
            if not room:
                yield chunk
                chunk, room = [], BUCKET_NBYTES
    if chunk:
        yield chunk


def _join(store: str, rank: int, size: int) -> None:
    untyped: Any = dist  # torch types half of what it exports
    dist.init_process_group(
        "gloo",
        store=untyped.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=WAIT_S),
    )


def _take_part(way: str, parameters: Parameters, buckets: Buckets, *, sends: bool) -> None:
    if way == "per tensor":
        for wait in [_begin(flat) for flat in parameters.values()]:
            wait()
    elif sends:
        _send(buckets)
    else:
        _receive(buckets)


def _send(buckets: Buckets) -> None:
    waits: list[Callable[[], object]] = []
    for number in range(len(buckets.chunks)):
        if number >= 2:
            waits[number - 2]()
        bucket, views = buckets.views(number)
        for piece, place in views:
            place.copy_(piece)
        waits.append(_begin(bucket))
    for wait in waits[-2:]:
        wait()


def _receive(buckets: Buckets) -> None:
    waits = [_begin(buckets.views(number)[0]) for number in range(min(2, len(buckets.chunks)))]
    for number in range(len(buckets.chunks)):
        waits[number]()
        for piece, place in buckets.views(number)[1]:
            piece.copy_(place)
        if number + 2 < len(buckets.chunks):
            waits.append(_begin(buckets.views(number + 2)[0]))


def _begin(flat: torch.Tensor) -> Callable[[], object]:
    work: Any = dist.broadcast(flat, 0, async_op=True)
    wait: Callable[[], object] = work.wait
    return wait
