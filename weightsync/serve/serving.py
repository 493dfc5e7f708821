"""A whole server as a context: supervisor, workers, engine cores and API servers."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from weightsync.errors import NotReadyError
from weightsync.serve.child_process import ChildSpec
from weightsync.serve.messages import ModelCard
from weightsync.serve.model_files import check_model
from weightsync.serve.options import (
    Addresses,
    CoreAddress,
    ServeOptions,
    log_from,
    run_process,
)
from weightsync.serve.supervisor import Supervisor

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 600.0
START_TIMEOUT_S = 120.0


@contextmanager
def serving(options: ServeOptions, listener: socket.socket) -> Iterator[Supervisor]:
    """Start all processes of a server on `listener`, yield when it serves, and end it afterwards.

    Raises ConfigError, before any process is started, for an unknown model or one that does not
    divide among the workers; later the error of a process that failed, with its name in front.
    """
    check_model(options.model, options.tensor_parallel)
    if options.draft_model is not None:
        check_model(options.draft_model, 1)
    log_from(options)
    began = time.monotonic()
    workers = options.data_parallel * options.tensor_parallel
    logger.info("loading %s in %d worker%s", options.model, workers, "s" if workers > 1 else "")
    with Supervisor() as tree:
        shared = (options, Addresses.in_directory(tree.directory, options))
        replicas = range(options.data_parallel)
        tree.launch(
            "workers",
            [
                _process(f"worker {replica}.{rank}", "worker", *shared, replica, rank)
                for replica in replicas
                for rank in range(options.tensor_parallel)
            ],
        )
        tree.launch(
            "engine cores",
            [_process(f"engine core {i}", "engine_core", *shared, i) for i in replicas],
        )
        cards = tree.await_ready("workers", timeout_s=LOAD_TIMEOUT_S)
        cores = tree.await_ready("engine cores", timeout_s=START_TIMEOUT_S)
        found = (
            msgspec.msgpack.decode(cards[0], type=ModelCard),
            [msgspec.msgpack.decode(core, type=CoreAddress) for core in cores],
        )
        card = found[0]
        if len({msgspec.msgpack.decode(each, type=ModelCard).weights_id for each in cards}) > 1:
            raise NotReadyError(
                f"{' or '.join(options.weights_from)} replaced its weights while the workers "
                "fetched them; start again"
            )
        logger.info(
            "loaded in %.1f s: %s, %.3g M parameters, %s on %s",
            time.monotonic() - began,
            card.architecture,
            card.num_parameters / 1e6,
            card.dtype,
            card.device,
        )
        specs = [
            _process(f"api server {index}", "api_server", *shared, index, *found, listener)
            for index in range(options.api_servers)
        ]
        tree.start("API servers", specs, timeout_s=START_TIMEOUT_S)
        yield tree


def _process(name: str, module: str, options: ServeOptions, *args: Any) -> ChildSpec:
    env = _thread_variables(options) if module == "worker" else _ONE_THREAD
    args = (f"weightsync.serve.{module}", options, *args)
    return ChildSpec(name=name, target=run_process, args=args, env=env)


_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Applies to torch as well, in processes that load it."""


def _thread_variables(options: ServeOptions) -> Mapping[str, str]:
    if options.threads is None and "OMP_NUM_THREADS" in os.environ:
        return {}
    workers = options.data_parallel * options.tensor_parallel
    share = max(1, (os.cpu_count() or 1) // (workers + 1))
    return {"OMP_NUM_THREADS": str(options.threads or share)}
