"""A WeightReceiver in a process of its own, and the callback that carries messages to it."""

from __future__ import annotations

import gc
import hashlib
import json
import multiprocessing
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from tests.children import CONTEXT, load_beforehand

load_beforehand("tests.gpu.receiver_process")

WAIT_S = 60.0
# Calls may be in flight together (an abort during an update), each on a pipe of its own.
PIPES = 4

DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
SHAPES: Sequence[tuple[int, ...]] = ((257, 33), (1,), (), (64, 64), (100_003,))


class EveryDtype(nn.Module):
    """A tensor of every shape in every dtype; the same names and layout for every seed."""

    def __init__(self, device: str) -> None:
        super().__init__()
        for dtype in DTYPES:
            for i, shape in enumerate(SHAPES):
                name = f"{str(dtype).removeprefix('torch.')}_{i}"
                self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=device))
        self.inner = nn.Linear(96, 32, bias=False, device=device, dtype=torch.bfloat16)
        self.tied = nn.Linear(96, 32, bias=False, device=device, dtype=torch.bfloat16)
        self.tied.weight = self.inner.weight


def fill(model: nn.Module, seed: int) -> None:
    """Overwrite every tensor in place with its own bits, NaNs and denormals among them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            top = 2 if tensor.dtype is torch.bool else 256
            nbytes = tensor.numel() * tensor.element_size()
            bits = torch.randint(top, (nbytes,), dtype=torch.uint8, generator=generator)
            as_bytes(tensor).copy_(bits)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def digests(model: nn.Module) -> dict[str, str]:
    """Return a SHA-256 of the bytes of each tensor."""
    return {
        name: hashlib.sha256(as_bytes(tensor).cpu().numpy().tobytes()).hexdigest()
        for name, tensor in model.state_dict().items()
    }


def footprint() -> dict[str, int]:
    """Return the resources of this process: GPU memory, file descriptors, mapped segments."""
    gc.collect()  # memory of earlier tests must not be freed in the middle of this one
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    held = {
        "fds": len(list(Path("/proc/self/fd").iterdir())),
        "segments": sum("/dev/shm/weightsync-" in line for line in maps.splitlines()),
        "gpu_allocated": 0,
        "gpu_reserved": 0,
    }
    if torch.cuda.is_available() and torch.cuda.memory_reserved():
        torch.cuda.synchronize()
        held["gpu_allocated"] = torch.cuda.memory_allocated()
        held["gpu_reserved"] = torch.cuda.memory_reserved()
    return held


class ReceiverProcess:
    """The parent's end, which is also a user's callback."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._free: queue.Queue[Connection] = queue.Queue()
        for pipe in pipes:
            self._free.put(pipe)

    def __call__(self, message: Mapping[str, object]) -> object:
        return self._ask("handle", message)

    def digests(self) -> dict[str, str]:
        return dict(self._ask("digests"))

    def footprint(self) -> dict[str, int]:
        return dict(self._ask("footprint"))

    def _ask(self, what: str, argument: object = None) -> Any:
        pipe = self._free.get(timeout=WAIT_S)
        try:
            pipe.send_bytes(json.dumps([what, argument]).encode())
            assert pipe.poll(WAIT_S), f"the receiver did not answer {what} within {WAIT_S} s"
            answer = json.loads(pipe.recv_bytes())
        finally:
            self._free.put(pipe)
        if "problem" in answer:
            raise _error(answer["problem"])
        return answer["result"]


@contextmanager
def receiver_process(
    device: str,
    *,
    apply: Literal["staged", "in_place"] = "staged",
    before: Callable[[], None] | None = None,
) -> Iterator[ReceiverProcess]:
    """Start a receiver of an EveryDtype model on `device`; it ends with the context.

    `before`, a module's function, is called there first.
    """
    # A process of a fork server has torch already; on a GPU each loads it for itself.
    context: Any = CONTEXT if device == "cpu" else multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(PIPES)]
    process = context.Process(
        target=_serve, args=([child for _, child in pairs], device, apply, before), daemon=True
    )
    process.start()
    for _, child in pairs:
        child.close()
    try:
        yield ReceiverProcess([parent for parent, _ in pairs])
    finally:
        for parent, _ in pairs:
            parent.close()
        process.join(WAIT_S)
        if process.is_alive():
            process.kill()
            process.join(WAIT_S)
    assert process.exitcode == 0, f"the receiver ended with {process.exitcode}"


def _serve(
    pipes: list[Connection],
    device: str,
    apply: Literal["staged", "in_place"],
    before: Callable[[], None] | None,
) -> None:
    import weightsync as ws

    if before is not None:
        before()
    torch.set_num_threads(1)
    model = EveryDtype(device)
    receiver = ws.WeightReceiver(model, apply=apply)
    answers = {
        "handle": receiver.handle,
        "digests": lambda _: digests(model),
        "footprint": lambda _: footprint(),
    }
    threads = [threading.Thread(target=_answer, args=(pipe, answers)) for pipe in pipes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    receiver.close()


def _answer(pipe: Connection, answers: Mapping[str, Any]) -> None:
    from weightsync.wire.problem import encode_problem, to_problem

    while True:
        try:
            what, argument = json.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            return
        try:
            reply = {"result": answers[what](argument)}
        except Exception as exc:  # noqa: BLE001 # whatever it is, the parent raises it
            reply = {"problem": encode_problem(to_problem(exc)).decode()}
        pipe.send_bytes(json.dumps(reply).encode())


def _error(problem: str) -> Exception:
    import msgspec

    from weightsync.wire.problem import Problem, from_problem

    return from_problem(msgspec.json.decode(problem, type=Problem), peer="receiver")
