"""The whole model as the body of one POST to the http.server of each reader.

`safetensors`: `safetensors.torch.save` makes the body, `load` reads it back. `streamed`: both sides
know the names; the tensors' own memory is sent and received into the parameters, without a copy on
either side: the limit of loopback TCP.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from safetensors.torch import load as load_bytes
from safetensors.torch import save
from torch import nn

from benchmarks.rivals.contract import Job, Reader, Rival, RivalError
from benchmarks.rivals.crew import Crew
from benchmarks.rivals.loopback import Clients, Server
from benchmarks.rivals.parameters import load, memory_of, parameters_of

# Small tensors are sent together.
SEND_NBYTES = 256 << 10


class Trainer(Rival):
    """Posts to every reader."""

    def setup(self, job: Job, module: nn.Module) -> None:
        self._state = parameters_of(module)
        self._nbytes = job.nbytes
        self._crew = Crew(job, self.reader(), [None] * job.readers)
        self._clients = Clients(self._crew.ready())

    def reader(self) -> type[Reader]:
        """Return the class that runs in the reader processes."""
        return Taker

    def update(self, way: str) -> None:
        if way == "streamed":
            self._clients.post("/streamed", self._parts, self._nbytes)
        else:
            body = save(self._state)
            self._clients.post("/safetensors", body, len(body))

    def held(self) -> list[Mapping[str, str]]:
        return self._crew.held()

    def close(self) -> None:
        if hasattr(self, "_clients"):
            self._clients.close()
        if hasattr(self, "_crew"):
            self._crew.close()

    def _parts(self) -> Iterator[Any]:
        small: list[memoryview] = []
        waiting = 0
        for tensor in self._state.values():
            part = memory_of(tensor)
            small.append(part)
            waiting += len(part)
            if waiting >= SEND_NBYTES:
                yield small[0] if len(small) == 1 else b"".join(small)
                small, waiting = [], 0
        if small:
            yield b"".join(small)


class Taker(Reader):
    """Reads bodies from the socket."""

    def __init__(self, module: nn.Module, extra: Any) -> None:
        super().__init__(module, extra)
        self._places = [memory_of(p) for p in self.parameters.values()]
        self._server = Server(self._take)

    def hello(self) -> object:
        return self._server.port

    def close(self) -> None:
        self._server.close()

    def _take(self, path: str, stream: BinaryIO, nbytes: int) -> None:
        if path == "/streamed":
            for place in self._places:
                _read_into(stream, place)
            return
        # The library takes only bytes, so they are new each time.
        load(self.parameters, load_bytes(stream.read(nbytes)).items())


def _read_into(stream: BinaryIO, place: memoryview) -> None:
    while len(place):
        got = stream.readinto(place)  # type: ignore[attr-defined] # BufferedReader has it
        if not got:
            raise RivalError("the body ended early")
        place = place[got:]
