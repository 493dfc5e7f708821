"""The start arguments and main functions of the processes of a server.

The supervisor imports only this module of theirs, so it loads neither transformers nor FastAPI.
"""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable

import msgspec

from weightsync.queues.tensor_packets import TensorQueueHandle
from weightsync.serve.messages import ModelCard
from weightsync.update.lifecycle import ApplyChoice

Ready = Callable[[bytes], None]


class WorkerTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of a worker: rank `rank` of `size` in replica `replica`.

    `folder` is the private directory of the server. The rendezvous file of a replica is in it.
    """

    name: str
    replica: int
    rank: int
    size: int
    model: str
    dtype: str
    apply: ApplyChoice
    core_address: str
    control_address: str
    folder: str


class CoreTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of an engine core. API servers connect to `orders`, its workers to `gate`."""

    name: str
    replica: int
    workers: int
    orders: str
    gate: str
    tensor_ipc: str
    max_rows: int


class CoreAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The address of an engine core. `tensors` is None if messages carry the tensors."""

    orders: str
    tensors: TensorQueueHandle | None = None


class ApiTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of an API server. With `token` None, no call needs a token.

    `workers` are the addresses of all workers, ordered by replica and rank. With `ssl_certfile` and
    `ssl_keyfile` it uses TLS.
    """

    name: str
    cores: list[CoreAddress]
    workers: list[str]
    card: ModelCard
    token: str | None
    tensor_ipc: str
    api_servers: int
    data_parallel: int
    tensor_parallel: int
    apply: ApplyChoice
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None

    def __repr__(self) -> str:
        """Return the name, without the token."""
        return f"ApiTerms(name={self.name!r})"


def takes_images(card: ModelCard) -> bool:
    """Whether requests can have tensors. If not, API servers and engine cores need no torch."""
    return card.image_token_id is not None


def frozen(ready: Ready) -> Ready:
    """Return a `ready` that first excludes all existing objects from garbage collection.

    These objects live as long as the process. A full collection of them would delay a step or an
    update by 0.1 s.
    """

    def freeze_and_report(payload: bytes) -> None:
        gc.collect()
        gc.freeze()
        ready(payload)

    return freeze_and_report


def run_worker(ready: Ready, terms: WorkerTerms) -> None:
    """Run a worker until SIGTERM. Calls `ready` with the encoded ModelCard."""
    from weightsync.serve.worker import worker_main  # noqa: PLC0415 - see above

    worker_main(frozen(ready), terms)


def run_core(ready: Ready, terms: CoreTerms) -> None:
    """Run an engine core until SIGTERM. Calls `ready` with the encoded CoreAddress."""
    from weightsync.serve.core_process import core_main  # noqa: PLC0415 - see above

    core_main(frozen(ready), terms)


def run_api_server(ready: Ready, terms: ApiTerms, listener: socket.socket) -> None:
    """Run an API server on the shared `listener` until SIGTERM. Calls `ready` when it serves."""
    from weightsync.serve.api_server import api_main  # noqa: PLC0415 - see above

    api_main(frozen(ready), terms, listener)
