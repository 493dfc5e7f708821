"""The packed protocol of CUDA-IPC weight transfer, re-enacted on shared memory.

From the public description of vLLM's protocol: tensors are packed into a buffer that is made for
this update (1 GiB by default), and one RPC carries its handle. The reader maps it, clones it and
loads slices; only then the next chunk is packed. Here the buffer of an update takes its chunks one
after the other and is mapped once, and the RPC is a POST of JSON on a kept-alive connection. On a
GPU a caching allocator makes a fresh buffer cheaper than fresh shared memory is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from benchmarks.rivals.contract import Job, Reader, Rival
from benchmarks.rivals.crew import Crew
from benchmarks.rivals.loopback import Clients, Server
from benchmarks.rivals.parameters import DTYPES, Parameters, as_bytes, load, parameters_of

BUCKET_NBYTES = 1 << 30


class Trainer(Rival):
    """Packs tensors and sends the RPCs."""

    def setup(self, job: Job, module: nn.Module) -> None:
        self._state = parameters_of(module)
        self._chunks = list(chunks_of(self._state, BUCKET_NBYTES))
        self._names = {tensor.name: tensor for tensor in job.tensors}
        self._file = Path(job.directory) / "buffer"
        self._crew = Crew(job, Taker, [None] * job.readers)
        self._clients = Clients(self._crew.ready())

    def update(self, way: str) -> None:
        self._file.unlink(missing_ok=True)
        room = max(sum(self._names[name].nbytes for name in chunk) for chunk in self._chunks)
        buffer = torch.from_file(str(self._file), shared=True, size=room, dtype=torch.uint8)
        for number, names in enumerate(self._chunks, start=1):
            flat = [as_bytes(self._state[name]) for name in names]
            sizes = [len(piece) for piece in flat]
            torch.cat(flat, out=buffer[: sum(sizes)])
            info = {
                "names": names,
                "dtype_names": [self._names[name].dtype for name in names],
                "shapes": [self._names[name].shape for name in names],
                "tensor_sizes": sizes,
                "buffer": str(self._file),
                "buffer_nbytes": room,
                "last": number == len(self._chunks),
            }
            body = json.dumps(info).encode()
            self._clients.post("/update_weights", body, len(body))

    def held(self) -> list[Mapping[str, str]]:
        return self._crew.held()

    def close(self) -> None:
        if hasattr(self, "_clients"):
            self._clients.close()
        if hasattr(self, "_crew"):
            self._crew.close()
        self._file.unlink(missing_ok=True)


def chunks_of(parameters: Parameters, room: int) -> Iterator[list[str]]:
    """Yield the names of each chunk: whole tensors, in order, as many as fit."""
    names: list[str] = []
    nbytes = 0
    for name, tensor in parameters.items():
        if names and nbytes + tensor.nbytes > room:
            yield names
            names, nbytes = [], 0
        names.append(name)
        nbytes += tensor.nbytes
    if names:
        yield names


class Taker(Reader):
    """Maps the buffer, clones it and loads slices."""

    def __init__(self, module: nn.Module, extra: Any) -> None:
        super().__init__(module, extra)
        self._mapped: torch.Tensor | None = None
        self._server = Server(self._take)

    def hello(self) -> object:
        return self._server.port

    def close(self) -> None:
        self._server.close()

    def _take(self, path: str, stream: BinaryIO, nbytes: int) -> None:
        info = json.loads(stream.read(nbytes))
        sizes = info["tensor_sizes"]
        if self._mapped is None:
            self._mapped = torch.from_file(
                info["buffer"], shared=True, size=info["buffer_nbytes"], dtype=torch.uint8
            )
        pieces = torch.split(self._mapped[: sum(sizes)].clone(), sizes)
        if info["last"]:
            self._mapped = None
        load(
            self.parameters,
            (
                (name, piece.view(DTYPES[dtype]).view(shape))
                for name, dtype, shape, piece in zip(
                    info["names"], info["dtype_names"], info["shapes"], pieces, strict=True
                )
            ),
        )
