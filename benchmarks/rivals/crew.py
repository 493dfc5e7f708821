"""Reader processes of this machine, each controlled by a pipe."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Self

import torch

from benchmarks.rivals.contract import WAIT_S, Job, Reader, RivalError
from benchmarks.rivals.parameters import make_module
from benchmarks.shapes import Tensor

CONTEXT = multiprocessing.get_context("forkserver")
END_S = 10.0


class Crew:
    """The reader processes of a job; `extras` are further arguments of each Reader.

    `ready` waits for them. It is a separate call, because some rivals connect during construction.
    """

    def __init__(self, job: Job, reader: type[Reader], extras: Sequence[Any]) -> None:
        self._pipes: list[Connection] = []
        self._processes = []
        for extra in extras:
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=serve, args=(theirs, reader, job.tensors, extra), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    @classmethod
    def preload(cls, module: str) -> None:
        """Import this module in the fork server of readers; call it before the first crew."""
        CONTEXT.set_forkserver_preload([__name__, module])

    def ready(self) -> list[Any]:
        """Return the `hello` of each reader."""
        return self.hear()

    def tell(self, *call: object) -> None:
        """Send one call to every reader: `load` with way and message, or `held`."""
        said = json.dumps(call).encode()
        for pipe in self._pipes:
            pipe.send_bytes(said)

    def hear(self) -> list[Any]:
        """Return each reader's reply. Raises RivalError for a failure or a timeout.

        All replies are read first: the next call would otherwise read a reply of this one.
        """
        heard = [self._hear(pipe) for pipe in self._pipes]
        for answer in heard:
            if isinstance(answer, RivalError):
                raise answer
        return heard

    def ask(self, *call: object) -> list[Any]:
        """Call all readers, and return their replies."""
        self.tell(*call)
        return self.hear()

    def held(self) -> list[Mapping[str, str]]:
        """Return the digests of each reader's parameters."""
        return self.ask("held")

    def close(self) -> None:
        """End all readers; those that do not end are killed."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(END_S)
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hear(self, pipe: Connection) -> Any:
        if not pipe.poll(WAIT_S):
            return RivalError(f"a reader was silent for {WAIT_S:g} s")
        try:
            answer = json.loads(pipe.recv_bytes())
        except EOFError:
            return RivalError("a reader ended")
        if "error" in answer:
            return RivalError(f"a reader failed: {answer['error']}")
        return answer["answer"]


def serve(pipe: Connection, role: type[Reader], tensors: Sequence[Tensor], extra: Any) -> None:
    """Run in a reader process until the trainer closes the pipe."""
    torch.set_num_threads(1)
    reader: Reader | None = None

    def start() -> object:
        nonlocal reader
        reader = role(make_module(tensors), extra)
        gc.collect()
        gc.freeze()  # as weightsync serve does, for all rivals: a full collection takes 0.1 s
        return reader.hello()

    with contextlib.suppress(EOFError, BrokenPipeError):
        if _answer(pipe, start):
            while True:
                name, *arguments = json.loads(pipe.recv_bytes())
                work = reader.load if name == "load" else reader.held  # type: ignore[union-attr]
                _answer(pipe, lambda: work(*arguments))  # noqa: B023 # called at once
    if reader is not None:
        reader.close()


def _answer(pipe: Connection, work: Callable[[], object]) -> bool:
    try:
        answer: dict[str, object] = {"answer": work()}
    except Exception as exc:  # noqa: BLE001 # the trainer raises it
        answer = {"error": f"{type(exc).__name__}: {exc}"}
    pipe.send_bytes(json.dumps(answer).encode())
    return "error" not in answer
