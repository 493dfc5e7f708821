"""The options and addresses of a server, and the start of each of its processes.

A process imports the module of its own kind, after this one. So the supervisor loads no torch, and
an engine core and a worker load no FastAPI.
"""

from __future__ import annotations

import gc
import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from weightsync.errors import ConfigError
from weightsync.queues.sockets import ipc_address
from weightsync.queues.tensor_packets import TensorQueueHandle
from weightsync.serve.messages import ModelCard
from weightsync.serve.scheduling import MAX_ROWS

MAX_API_SERVERS = 64
MAX_WORKERS = 256
DRAFT_PATH = "draft"
"""The path of the draft model's receivers below a server's URL."""

Ready = Callable[[bytes], None]
TensorIpc = Literal["direct_rpc", "torch_shm"]
Device = Literal["auto", "cuda", "cpu"]
LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of a server: `api_servers` processes on one socket, `data_parallel` replicas.

    Each replica has an engine core and `tensor_parallel` workers with one shard of the model each.
    With `token` None, every client of the socket may change weights. `threads` are the torch
    threads of each worker; None divides the processors among workers, unless OMP_NUM_THREADS is
    set. With `device` cuda each worker has a GPU of its own, by its place among all workers (never
    run on a GPU); auto is cuda where there is one. Processes log to stderr from `log_level` on, a
    line for each update, and with `access_log` every request to stdout. `ssl_certfile` (PEM, with
    its chain) turns on HTTPS; its key, without passphrase, is in the same file or in `ssl_keyfile`.
    The workers fetch their weights from the first of `weights_from`, URLs of servers, that can send
    them. `adapter_versions` of each adapter stay for requests to come. A `draft_model` is loaded
    beside the model in each worker, and proposes `num_speculative_tokens` a step; shards have none.
    """

    model: str
    dtype: str = "float32"
    device: Device = "auto"
    apply: Literal["auto", "staged", "in_place"] = "auto"
    api_servers: int = 1
    data_parallel: int = 1
    tensor_parallel: int = 1
    token: str | None = field(default=None, repr=False)
    tensor_ipc: TensorIpc = "torch_shm"
    max_rows: int = MAX_ROWS
    threads: int | None = None
    log_level: LogLevel = "info"
    access_log: bool = False
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    weights_from: tuple[str, ...] = ()
    adapter_versions: int = 2
    draft_model: str | None = None
    num_speculative_tokens: int = 3

    def __post_init__(self) -> None:
        workers = self.data_parallel * self.tensor_parallel
        counts = {
            "api_servers": (self.api_servers, MAX_API_SERVERS),
            "data_parallel": (self.data_parallel, MAX_WORKERS),
            "tensor_parallel": (self.tensor_parallel, MAX_WORKERS),
            "data_parallel x tensor_parallel": (workers, MAX_WORKERS),
            "max_rows": (self.max_rows, 1 << 16),
            "adapter_versions": (self.adapter_versions, 1 << 20),
            "num_speculative_tokens": (self.num_speculative_tokens, 64),
            "threads": (1 if self.threads is None else self.threads, 1024),
        }
        for name, (count, most) in counts.items():
            if not 1 <= count <= most:
                raise ConfigError(f"{name} must be 1 to {most}, not {count}")
        if self.draft_model is not None and self.tensor_parallel > 1:
            raise ConfigError(
                f"--draft-model with --tensor-parallel {self.tensor_parallel} is not supported: "
                "use whole models (--data-parallel), or leave the draft out"
            )


class Addresses(msgspec.Struct, frozen=True, kw_only=True):
    """The sockets of a server's processes, in its private directory `folder`.

    API servers connect to `cores`, one of each engine core, and to `workers`, ordered by replica
    and rank. The workers of a replica connect to its address in `core_workers`.
    """

    folder: str
    cores: list[str]
    core_workers: list[str]
    workers: list[str]

    @classmethod
    def in_directory(cls, folder: Path, options: ServeOptions) -> Self:
        """Choose the addresses of all processes."""
        replicas = options.data_parallel
        return cls(
            folder=str(folder),
            cores=[ipc_address(folder) for _ in range(replicas)],
            core_workers=[ipc_address(folder) for _ in range(replicas)],
            workers=[ipc_address(folder) for _ in range(replicas * options.tensor_parallel)],
        )


class CoreAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The address of an engine core. `tensors` is None if messages carry the tensors."""

    socket: str
    tensors: TensorQueueHandle | None = None


def takes_images(card: ModelCard) -> bool:
    """Whether requests can have tensors. If not, API servers and engine cores need no torch."""
    return card.image_token_id is not None


def log_from(options: ServeOptions) -> None:
    """Log weightsync's messages from `log_level` on. Called in each process of a server."""
    logging.getLogger("weightsync").setLevel(options.log_level.upper())


def run_process(ready: Ready, module: str, options: ServeOptions, *args: Any) -> None:
    """Run `main(ready, options, *args)` of a module in a process of its own, until SIGTERM.

    When the process is ready, all existing objects are excluded from garbage collection: they live
    as long as the process, and a full collection of them would delay a step or an update by 0.1 s.
    """

    def freeze_and_report(payload: bytes) -> None:
        gc.collect()
        gc.freeze()
        ready(payload)

    log_from(options)
    importlib.import_module(module).main(freeze_and_report, options, *args)
