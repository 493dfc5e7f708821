"""The receiving process of the GPU benchmark, and the sender's end of its pipe."""

from __future__ import annotations

import gc
import json
import multiprocessing
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Literal

import msgspec
import torch
from torch import nn

import weightsync as ws
from benchmarks.gpu_device import Device, launches, watch_launches
from benchmarks.rivals.parameters import DTYPES, load, make_module, parameters_of
from benchmarks.shapes import Tensor
from weightsync.cuda.memory import OpenMemory
from weightsync.wire.offers import Handle

ANSWER_S = 600.0


def module_on(tensors: Sequence[Tensor], device: Device) -> nn.Module:
    """Return a module with these parameters on the device, all zero."""
    with device.torch:
        return make_module(tensors)


def fill(module: nn.Module, seed: int) -> None:
    """Overwrite every parameter with other bits."""
    for i, parameter in enumerate(module.parameters()):
        parameter.data.view(torch.uint8).random_().bitwise_xor_((seed + i) & 0xFF)


def sums(module: nn.Module) -> list[int]:
    """Return one number per parameter, different for different contents."""
    found = [_sum(parameter.data) for parameter in module.parameters()]
    return [int(n) for n in torch.stack(found).tolist()]


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    raw = tensor.view(-1).view(torch.uint8)
    whole = raw.numel() // 8 * 8
    words = raw[:whole].view(torch.int64)
    return words.sum() + 1000003 * words[::3].sum() + raw[whole:].sum(dtype=torch.int64)


class Peer:
    """Client of the receiving process; `handle` is the callback of `ws.connect`."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._turn = threading.Lock()
        self.handles: list[Mapping[str, Any]] = []

    def handle(self, message: Mapping[str, object]) -> object:
        self.handles += _cuda_handles(message)
        return self.ask("handle", message)

    def ask(self, what: str, argument: object = None) -> Any:
        """Return the reply as plain data. Raises RuntimeError for an error of the other process."""
        with self._turn:
            self._pipe.send_bytes(json.dumps([what, argument]).encode())
            if not self._pipe.poll(ANSWER_S):
                raise TimeoutError(f"the receiver did not answer {what} within {ANSWER_S:.0f} s")
            answer = json.loads(self._pipe.recv_bytes())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]


def _cuda_handles(value: object) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        if value.get("kind") == "cuda":
            yield value
        for part in value.values():
            yield from _cuda_handles(part)
    elif isinstance(value, list):
        for part in value:
            yield from _cuda_handles(part)


class _Receiving:
    """The requests that the receiving process handles."""

    def __init__(self, tensors: Sequence[Tensor], kind: str) -> None:
        self._device = Device(kind)
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._receiver: ws.WeightReceiver | None = None
        watch_launches()
        self._renew()

    def answers(self) -> Mapping[str, Callable[[Any], object]]:
        return {
            "handle": self._handle,
            "sums": lambda _: sums(self._module),
            "launches": lambda _: launches(),
            "begin_peak": lambda _: self._device.begin_peak(),
            "peak": lambda _: self._device.peak() - self._before,
            "chunk": self._take,
            "renew": self._renew,
        }

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = None

    def _renew(self, swap: Literal["auto", "pointer"] | None = None) -> None:
        """Start with a new module and a new receiver, whose commits are made in this way."""
        self.close()
        self._module = nn.Module()
        gc.collect()
        self._device.forget()
        self._before = self._device.allocated()
        self._module = module_on(list(self._tensors.values()), self._device)
        self._receiver = ws.WeightReceiver(ws.ModuleSink(self._module, swap=swap or "auto"))

    def _handle(self, message: Mapping[str, object]) -> object:
        if self._receiver is None:
            raise RuntimeError("there is no receiver")
        return self._receiver.handle(message)

    def _take(self, info: Mapping[str, Any]) -> None:
        """Map the buffer, clone it and load slices, as the re-enacted protocol does."""
        handle: Handle = msgspec.json.decode(info["handle"], type=Handle)
        with OpenMemory(handle) as memory:
            clone = memory.part(0, info["nbytes"]).clone()
            # The sender may overwrite its buffer when it has the reply.
            self._device.wait()
        pairs, at = [], 0
        for name in info["names"]:
            tensor = self._tensors[name]
            flat = clone[at : at + tensor.nbytes]
            if at % DTYPES[tensor.dtype].itemsize:
                flat = flat.clone()
            pairs.append((name, flat.view(DTYPES[tensor.dtype]).view(tensor.shape)))
            at += tensor.nbytes
        load(parameters_of(self._module), pairs)
        self._device.wait()


def serve(pipe: Connection, tensors: Sequence[Tensor], kind: str) -> None:
    """Run in the receiving process until the pipe closes."""
    torch.set_num_threads(1)
    receiving = _Receiving(tensors, kind)
    answers = receiving.answers()
    while True:
        try:
            what, argument = json.loads(pipe.recv_bytes())
        except EOFError:
            break
        try:
            answer: dict[str, object] = {"result": answers[what](argument)}
        except Exception as exc:  # noqa: BLE001 # the trainer raises it
            answer = {"error": f"{type(exc).__name__}: {exc}"}
        pipe.send_bytes(json.dumps(answer).encode())
    receiving.close()


@contextmanager
def receiving_process(tensors: Sequence[Tensor], kind: str) -> Iterator[Peer]:
    """Context manager: the receiving process, which ends with the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, tensors, kind), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Peer(ours)
    finally:
        ours.close()
        process.join(30)
        if process.is_alive():
            process.kill()
            process.join()
