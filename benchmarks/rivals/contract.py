"""The contract of a rival, a method that moves weights; one file per rival.

A trainer process calls `setup`, then `update` once per round, then `close`. Readers are processes
of their own, each with its own parameters. `update` returns when the parameters of every reader
hold the sender's values: not views of them, and not later.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from benchmarks.rivals.parameters import Parameters, digests, parameters_of
from benchmarks.shapes import Tensor

WAIT_S = 300.0


class RivalError(RuntimeError):
    """The error of a rival; its text becomes the reason in the row."""


@dataclass(frozen=True, slots=True)
class Job:
    """A workload: tensors and a number of readers; `directory` is in shared memory."""

    tensors: tuple[Tensor, ...]
    readers: int
    directory: str

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


class Rival(ABC):
    """The trainer's side of a rival. `option` is that of its entry in the registry."""

    connect_s: float = 0.0
    """The part of `setup` that makes the connection, where a rival measures it."""
    sent_nbytes: int = 0
    """Bytes that the last update sent to each reader, where a rival counts them."""
    stall_s: float = 0.0
    """The longest pause of a reader in the last update, where a rival measures it."""

    def __init__(self, option: str) -> None:
        self.option = option

    @abstractmethod
    def setup(self, job: Job, module: nn.Module) -> None:
        """Start the readers, connect, and allocate lasting memory. `module` is the trainer's."""

    @abstractmethod
    def update(self, way: str) -> None:
        """Send the values of the trainer's parameters to the parameters of every reader."""

    @abstractmethod
    def held(self) -> list[Mapping[str, str]]:
        """Return `digests` of each reader's parameters."""

    @abstractmethod
    def close(self) -> None:
        """End the readers and free everything; also after a failure in `setup`."""


class Reader:
    """The reader's side of a rival, in its own process, with its own parameters.

    `hello` is sent to the trainer when it is ready; `load` answers each of the trainer's calls.
    """

    def __init__(self, module: nn.Module, extra: Any) -> None:
        self.module = module
        self.parameters: Parameters = parameters_of(module)

    def hello(self) -> object:
        """Return plain data for the trainer: an address, or None."""
        return None

    def load(self, way: str, message: Any) -> object:
        """Receive one update; return when the parameters hold it."""
        raise NotImplementedError

    def held(self) -> Mapping[str, str]:
        """Return `digests` of the parameters."""
        return digests(self.parameters)

    def close(self) -> None:
        """Free all memory."""
