"""What changed, as the body of one POST to the http.server of each reader, coded as others do it.

The codings of TRL, NeMo RL, PULSE and SkyRL (benchmarks/peer_codings.py), re-enacted on one host:
the trainer keeps a second copy of the model, finds what differs from it, and codes that; readers
decode it and write it into their parameters. A thread writes it into the copy after the update:
between updates readers of weightsync copy too.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO

import numpy as np
from torch import nn

from benchmarks.peer_codings import PEERS, Flat, Pair
from benchmarks.rivals import http_body
from benchmarks.rivals.contract import Job, Reader
from benchmarks.rivals.parameters import Parameters, as_bytes, parameters_of

WHOLE = "streamed"
CODINGS = {peer.name: peer for peer in PEERS}


class Trainer(http_body.Trainer):
    """Finds, codes and posts the changes."""

    def setup(self, job: Job, module: nn.Module) -> None:
        self._thread = ThreadPoolExecutor(1)
        super().setup(job, module)
        super().update(WHOLE)
        self._tensors = flat_of(parameters_of(module))
        self._copies = [Flat(bits.copy(), columns) for bits, columns in self._tensors]
        self._copied: Future[None] | None = None

    def reader(self) -> type[Reader]:
        return Taker

    def update(self, way: str) -> None:
        if self._copied is not None:
            self._copied.result()
        coding = CODINGS[way]
        body = coding.encode(self._pairs())
        self._clients.post(f"/{list(CODINGS).index(way)}", body, len(body))
        self.sent_nbytes = len(body)
        self._copied = self._thread.submit(coding.apply, body, self._copies)

    def close(self) -> None:
        self._thread.shutdown()
        super().close()

    def _pairs(self) -> Iterator[Pair]:
        for copy, tensor in zip(self._copies, self._tensors, strict=True):
            yield Pair(copy, tensor.bits)


class Taker(http_body.Taker):
    """Decodes bodies into its parameters."""

    def __init__(self, module: nn.Module, extra: Any) -> None:
        super().__init__(module, extra)
        self._tensors = flat_of(self.parameters)

    def _take(self, path: str, stream: BinaryIO, nbytes: int) -> None:
        if path == f"/{WHOLE}":
            super()._take(path, stream, nbytes)
        else:
            coding = list(CODINGS.values())[int(path[1:])]
            coding.apply(stream.read(nbytes), self._tensors)


def flat_of(parameters: Parameters) -> list[Flat]:
    """Return views of the parameters' bits."""
    return [
        Flat(as_bytes(tensor).numpy().view(np.uint16), tensor.shape[-1])
        for tensor in parameters.values()
    ]
