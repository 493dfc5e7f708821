"""What each process of a server is started with, and where it begins.

The supervisor knows of the others only what is here: it loads neither transformers nor FastAPI,
which the processes that it starts are busy loading at that moment.
"""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable

import msgspec

from weightsync.queues.tensor_packets import TensorQueueHandle
from weightsync.serve.steps import ModelCard
from weightsync.update.lifecycle import ApplyChoice

Ready = Callable[[bytes], None]


class WorkerTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is started with; it is `rank` of `size` in replica `replica`.

    `folder` is private to this server: the workers of a replica meet in a file there.
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
    """What an engine core is started with; API servers send to `orders`, its workers to `gate`."""

    name: str
    replica: int
    workers: int
    orders: str
    gate: str
    tensor_ipc: str
    max_rows: int


class CoreAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where one engine core listens; `tensors` is None where tensors travel in messages."""

    orders: str
    tensors: TensorQueueHandle | None = None


class ApiTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What an API server is started with; `token` None guards nothing.

    `workers` are the addresses of all, those of one replica side by side. With `ssl_certfile` and
    `ssl_keyfile` it speaks TLS.
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
        """Name it, without its token."""
        return f"ApiTerms(name={self.name!r})"


def takes_images(card: ModelCard) -> bool:
    """Whether requests can bring tensors: else API servers and engine cores do without torch."""
    return card.image_token_id is not None


def frozen(ready: Ready) -> Ready:
    """Return `ready` after which no collection looks again at what there was until then.

    All of that stays for good, and a full collection of it would hold a step or an update for a
    tenth of a second.
    """

    def say(payload: bytes) -> None:
        gc.collect()
        gc.freeze()
        ready(payload)

    return say


def run_worker(ready: Ready, terms: WorkerTerms) -> None:
    """Be a worker until SIGTERM; `ready` takes the encoded ModelCard."""
    from weightsync.serve.worker import worker_main  # noqa: PLC0415 - see above

    worker_main(frozen(ready), terms)


def run_core(ready: Ready, terms: CoreTerms) -> None:
    """Be an engine core until SIGTERM; `ready` takes the encoded CoreAddress."""
    from weightsync.serve.core_process import core_main  # noqa: PLC0415 - see above

    core_main(frozen(ready), terms)


def run_api_server(ready: Ready, terms: ApiTerms, listener: socket.socket) -> None:
    """Serve on the shared `listener` until SIGTERM; `ready` is called when it does."""
    from weightsync.serve.api_server import api_main  # noqa: PLC0415 - see above

    api_main(frozen(ready), terms, listener)
