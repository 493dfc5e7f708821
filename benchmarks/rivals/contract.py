"""What every way of moving weights is asked to do; one file per way implements it.

A trainer process calls `setup`, then `update` once per round, then `close`. Readers are processes
of their own, each with its own parameters. `update` returns when the parameters of every reader
hold the sender's values: not views of them, and not a promise.
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
    """A rival could not do its work; becomes the reason in its row."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is moved: these tensors, to so many readers; `directory` is in shared memory."""

    tensors: tuple[Tensor, ...]
    readers: int
    directory: str

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


class Rival(ABC):
    """The trainer's side of one way. `option` is its entry's, from the registry."""

    def __init__(self, option: str) -> None:
        self.option = option

    @abstractmethod
    def setup(self, job: Job, module: nn.Module) -> None:
        """Start the readers and connect; allocate what lasts. `module` is the trainer's."""

    @abstractmethod
    def update(self, way: str) -> None:
        """Bring the values of the trainer's parameters to every reader's."""

    @abstractmethod
    def held(self) -> list[Mapping[str, str]]:
        """Return for each reader what `digests` says of its parameters."""

    @abstractmethod
    def close(self) -> None:
        """End the readers and free everything; also after a failure in `setup`."""


class Reader:
    """The reading process's side: made there, with parameters of its own.

    `hello` is sent to the trainer when it is ready; `load` answers each of the trainer's calls.
    """

    def __init__(self, module: nn.Module, extra: Any) -> None:
        self.module = module
        self.parameters: Parameters = parameters_of(module)

    def hello(self) -> object:
        """Return plain data that the trainer needs: an address, or nothing."""
        return None

    def load(self, way: str, message: Any) -> object:
        """Take one update; return when the parameters hold it."""
        raise NotImplementedError

    def held(self) -> Mapping[str, str]:
        """Return what `digests` says of the parameters."""
        return digests(self.parameters)

    def close(self) -> None:
        """Free what was made."""
