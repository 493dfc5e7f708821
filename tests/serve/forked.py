"""`weightsync serve` whose processes are forked from a server that has loaded what they import.

For tests of what it does, not of how its processes start and end: those are not its children. A
fresh one computes for six seconds until it listens.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from multiprocessing.popen_forkserver import Popen
from typing import Any
from unittest import mock

from tests.children import CONTEXT, WARMED, Program
from weightsync.shm import spawning

_SERVER: Any = forkserver.ForkServer()
"""Apart from that of `tests.children`, whose processes need not have all this."""
_SERVER.set_forkserver_preload(
    [
        "tests.serve.forked",
        "weightsync.cli.app",
        "weightsync.cli.serve",
        "weightsync.serve.api_server",
        "weightsync.serve.engine_core",
        "weightsync.serve.hugging_face",
        "weightsync.serve.serving",
        "weightsync.serve.worker",
        "transformers.models.llama.modeling_llama",
        "transformers.generation",
        "uvicorn",
        WARMED,
    ]
)
_SCRIPT = "from tests.serve.forked import main; main()"


class _Forked(ForkServerProcess):
    """A process that is forked from `_SERVER`."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802  # multiprocessing's
        module: Any = forkserver
        with mock.patch.object(module, "connect_to_new_process", _SERVER.connect_to_new_process):
            return Popen(process_obj)


def program(
    arguments: Sequence[str], *, env: Mapping[str, str], stderr: int | None = None
) -> Program:
    """Run `weightsync ARGUMENTS`."""
    _SERVER.ensure_running()
    address = _SERVER._forkserver_address
    return Program(_SCRIPT, address, *arguments, env=env, stderr=stderr, make_process=_Forked)


class _Process(ForkServerProcess):
    """A process with the environment, stdout and stderr of the one that starts it."""

    def start(self) -> None:
        process: Any = self
        ends = [Connection(os.dup(number)) for number in (1, 2)]
        process._args = (dict(os.environ), ends, process._target, process._args)
        process._target = _run
        super().start()


class _Context:
    """What `weightsync.serve.child_process` uses of a context of multiprocessing."""

    Pipe = staticmethod(CONTEXT.Pipe)
    Process = _Process


def _run(
    environment: dict[str, str],
    ends: list[Connection],
    target: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    for number, end in enumerate(ends, 1):
        os.dup2(end.fileno(), number)
        end.close()
    os.environ.clear()
    os.environ.update(environment)
    _forget_the_fork()
    target(*args)


def _forget_the_fork() -> None:
    """Let this process have what a fork may not have: the server has no threads, locks or sockets
    of its own."""
    spawning._History.forked_from = None


def main() -> None:
    """Run the command line after the address of the server of all processes."""
    from weightsync.cli import main as run
    from weightsync.cli import serve
    from weightsync.serve import child_process

    _forget_the_fork()
    module: Any = child_process
    module._SPAWN = _Context
    command: Any = serve
    command._end_tracker = lambda: None  # that of the tests
    server: Any = forkserver._forkserver
    server._forkserver_address = sys.argv.pop(1)
    server.ensure_running = lambda: None  # else this process would start one of its own
    run()
