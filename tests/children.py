"""The context of child processes: forked from a server that has loaded torch and the like once.

A spawned child needs more than a second of computing for that.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from subprocess import TimeoutExpired
from types import ModuleType, TracebackType
from typing import Self

CONTEXT = multiprocessing.get_context("forkserver")
WARMED = "tests.warmed"
"""The last module that a fork server loads."""
_loaded: list[str] = []


def load_beforehand(*modules: str) -> None:
    """Add modules that the server loads. Called at import, before the first test starts the
    server."""
    _loaded.extend(modules)
    CONTEXT.set_forkserver_preload([*_loaded, WARMED])


# Apart from what they import themselves: what `connect`, and torch's optimizers, import when asked.
load_beforehand(
    "weightsync.sender",
    "weightsync.receiver",
    "weightsync.backends.tcp.backend",
    "weightsync.backends.ipc.backend",
    "weightsync.integrations.sglang.server",
    "weightsync.integrations.vllm.server",
    "weightsync.backends.ipc.landing",
    "weightsync.backends.ipc.lending",
    "weightsync.backends.ipc.receiver",
    "weightsync.backends.ipc.transfer",
    "weightsync.backends.tcp.receiver",
    "weightsync.backends.tcp.trainer",
    "weightsync.integrations.deepspeed",
    "weightsync.weights.sources.flat",
    "anyio.streams.memory",
    "anyio.streams.stapled",
    "anyio.streams.tls",
    "encodings.idna",
    "torch._dynamo",
    "torch.profiler",
    "torch.utils._cxx_pytree",
    "uvicorn.loops.asyncio",
    "uvicorn.protocols.http.httptools_impl",
)


class Program:
    """What `Popen([sys.executable, "-c", script, *arguments])` is, forked from the server.

    For scripts that need an interpreter of their own, and not one that has imported nothing. Its
    ends are text pipes; where `stderr` is None, that of the server is used. With `finalizes` the
    interpreter ends as that of such a command does, which takes a moment; else after the exit
    handlers.
    """

    def __init__(
        self,
        script: str,
        *arguments: object,
        env: Mapping[str, str] | None = None,
        stderr: int | None = None,
        finalizes: bool = False,
        make_process: Callable[..., BaseProcess] = CONTEXT.Process,
    ) -> None:
        their_in, our_in = os.pipe()
        our_out, their_out = os.pipe()
        ends = [their_in, their_out, os.dup(2 if stderr is None else stderr)]
        theirs = [Connection(end) for end in ends]  # which can be sent to another process
        environment = dict(os.environ if env is None else env)
        self._process = make_process(
            target=_run, args=(script, list(map(str, arguments)), theirs, environment, finalizes)
        )
        self._process.start()
        for end in theirs:
            end.close()
        self.pid = self._process.pid or 0
        self.stdin = os.fdopen(our_in, "w")
        self.stdout = os.fdopen(our_out)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        with suppress(BrokenPipeError):
            self.stdin.close()
        self.stdout.close()
        self._process.join()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise TimeoutExpired("a program", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        # The fork server may reap a process between the look at its exit code and the signal.
        if self._process.exitcode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(
    script: str,
    arguments: list[str],
    ends: list[Connection],
    environment: Mapping[str, str],
    finalizes: bool,
) -> None:
    """Be the program, and end as an interpreter does: `multiprocessing` calls no exit handlers."""
    for number, end in enumerate(ends):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    main = sys.modules["__main__"] = ModuleType("__main__")  # cleared when the interpreter ends
    code = 0
    try:
        exec(compile(script, "<string>", "exec"), main.__dict__)
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except BaseException:  # noqa: BLE001  # as the interpreter does
        traceback.print_exc()
        code = 1
    if finalizes:
        ctypes.pythonapi.Py_Exit(code)
    threading._shutdown()  # type: ignore[attr-defined]  # it waits for threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
