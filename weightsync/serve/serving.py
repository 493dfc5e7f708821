"""A whole server as a context: supervisor, workers, engine cores and API servers."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from weightsync.errors import ConfigError
from weightsync.queues.sockets import ipc_address
from weightsync.serve.child_process import ChildSpec
from weightsync.serve.messages import ModelCard
from weightsync.serve.model_files import check_choice
from weightsync.serve.process_terms import (
    ApiTerms,
    CoreAddress,
    CoreTerms,
    WorkerTerms,
    run_api_server,
    run_core,
    run_worker,
)
from weightsync.serve.scheduling import MAX_ROWS
from weightsync.serve.supervisor import Supervisor
from weightsync.update.lifecycle import ApplyChoice

LOAD_TIMEOUT_S = 600.0
START_TIMEOUT_S = 120.0
MAX_API_SERVERS = 64
MAX_WORKERS = 256

TensorIpc = Literal["direct_rpc", "torch_shm"]


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of a server: `api_servers` processes on one socket, `data_parallel` replicas.

    Each replica has an engine core and `tensor_parallel` workers with one shard of the model each.
    With `token` None, every client of the socket may change weights. `threads` are the torch
    threads of each worker; None divides the processors among workers, unless OMP_NUM_THREADS is
    set. `ssl_certfile` (PEM, with its chain) turns on HTTPS; its key, without passphrase, is in the
    same file or in `ssl_keyfile`.
    """

    model: str
    dtype: str = "float32"
    apply: ApplyChoice = "auto"
    api_servers: int = 1
    data_parallel: int = 1
    tensor_parallel: int = 1
    token: str | None = field(default=None, repr=False)
    tensor_ipc: TensorIpc = "torch_shm"
    max_rows: int = MAX_ROWS
    threads: int | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None

    def __post_init__(self) -> None:
        workers = self.data_parallel * self.tensor_parallel
        counts = {
            "api_servers": (self.api_servers, MAX_API_SERVERS),
            "data_parallel": (self.data_parallel, MAX_WORKERS),
            "tensor_parallel": (self.tensor_parallel, MAX_WORKERS),
            "data_parallel x tensor_parallel": (workers, MAX_WORKERS),
            "max_rows": (self.max_rows, 1 << 16),
            "threads": (1 if self.threads is None else self.threads, 1024),
        }
        for name, (count, most) in counts.items():
            if not 1 <= count <= most:
                raise ConfigError(f"{name} must be 1 to {most}, not {count}")


@contextmanager
def serving(options: ServeOptions, listener: socket.socket) -> Iterator[Supervisor]:
    """Start all processes of a server on `listener`, yield when it serves, and end it afterwards.

    Raises ConfigError, before any process is started, for an unknown model or one that does not
    divide among the workers; later the error of a process that failed, with its name in front.
    """
    check_choice(options.model, options.tensor_parallel)
    with Supervisor() as tree:
        replicas = range(options.data_parallel)
        ranks = range(options.tensor_parallel)
        addresses = _Addresses(tree, options)
        tree.launch(
            "workers",
            [_worker(options, addresses, replica, rank) for replica in replicas for rank in ranks],
        )
        tree.launch("engine cores", [_core(options, addresses, replica) for replica in replicas])
        cards = tree.await_ready("workers", timeout_s=LOAD_TIMEOUT_S)
        cores = tree.await_ready("engine cores", timeout_s=START_TIMEOUT_S)
        terms = ApiTerms(
            name="",
            cores=[msgspec.msgpack.decode(core, type=CoreAddress) for core in cores],
            workers=addresses.control,
            card=msgspec.msgpack.decode(cards[0], type=ModelCard),
            token=options.token,
            tensor_ipc=options.tensor_ipc,
            api_servers=options.api_servers,
            data_parallel=options.data_parallel,
            tensor_parallel=options.tensor_parallel,
            apply=options.apply,
            ssl_certfile=options.ssl_certfile,
            ssl_keyfile=options.ssl_keyfile,
        )
        specs = [_api_server(terms, index, listener) for index in range(options.api_servers)]
        tree.start("API servers", specs, timeout_s=START_TIMEOUT_S)
        yield tree


class _Addresses:
    """The addresses of a server's processes, in its private directory."""

    def __init__(self, tree: Supervisor, options: ServeOptions) -> None:
        replicas = range(options.data_parallel)
        self.folder = tree.directory
        self.orders = [ipc_address(self.folder) for _ in replicas]
        self.gates = [ipc_address(self.folder) for _ in replicas]
        workers = options.data_parallel * options.tensor_parallel
        self.control = [ipc_address(self.folder) for _ in range(workers)]


def _worker(options: ServeOptions, addresses: _Addresses, replica: int, rank: int) -> ChildSpec:
    name = f"worker {replica}.{rank}"
    terms = WorkerTerms(
        name=name,
        replica=replica,
        rank=rank,
        size=options.tensor_parallel,
        model=options.model,
        dtype=options.dtype,
        apply=options.apply,
        core_address=addresses.gates[replica],
        control_address=addresses.control[replica * options.tensor_parallel + rank],
        folder=str(addresses.folder),
    )
    return ChildSpec(name=name, target=run_worker, args=(terms,), env=_thread_variables(options))


def _core(options: ServeOptions, addresses: _Addresses, replica: int) -> ChildSpec:
    name = f"engine core {replica}"
    terms = CoreTerms(
        name=name,
        replica=replica,
        workers=options.tensor_parallel,
        orders=addresses.orders[replica],
        gate=addresses.gates[replica],
        tensor_ipc=options.tensor_ipc,
        max_rows=options.max_rows,
    )
    return ChildSpec(name=name, target=run_core, args=(terms,), env=_ONE_THREAD)


def _api_server(terms: ApiTerms, index: int, listener: socket.socket) -> ChildSpec:
    name = f"api server {index}"
    own = msgspec.structs.replace(terms, name=name)
    return ChildSpec(name=name, target=run_api_server, args=(own, listener), env=_ONE_THREAD)


_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Applies to torch as well, in processes that load it."""


def _thread_variables(options: ServeOptions) -> Mapping[str, str]:
    if options.threads is None and "OMP_NUM_THREADS" in os.environ:
        return {}
    workers = options.data_parallel * options.tensor_parallel
    share = max(1, (os.cpu_count() or 1) // (workers + 1))
    return {"OMP_NUM_THREADS": str(options.threads or share)}
