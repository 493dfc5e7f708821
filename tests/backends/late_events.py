"""Ready events of a driver without a GPU: the bytes are not there yet when an event is recorded.

A record of an event removes the bytes before it; they return a moment later, and only then the
event has passed. A reader that does not wait reads other bytes. Events are words of a file, so that
another process can open them.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from weightsync.backends.ipc import receiver
from weightsync.cuda.events import EVENT_NBYTES, OpenFence, WriterFence, open_fence
from weightsync.errors import HandleError, TransferError
from weightsync.shm.host_keys import host_key
from weightsync.shm.ring import Control

if TYPE_CHECKING:
    from weightsync.wire.offers import KeyedHandle, ReadyEvents

LATE_S = 0.02
WAIT_S = 20.0
WORDS = 64
SPOILED = 0x5A


class LateEvents:
    """The driver. `before(index)` returns the memory with late bytes; `refuses` are its calls that
    fail."""

    def __init__(self, path: Path, *, refuses: Sequence[str] = ()) -> None:
        if not path.exists():
            path.write_bytes(bytes(16 * WORDS))
        self.path = path
        self.refuses = refuses
        self.before: Callable[[int], Sequence[torch.Tensor]] = lambda _: ()
        self.made = 0
        with path.open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
        self._coming: list[threading.Thread] = []

    def key(self, device: torch.device) -> str:
        return host_key()

    def make(self, device: torch.device) -> LateOwn:
        self._refuse("make")
        self.made += 1
        return LateOwn(self, self.made - 1)

    def open(self, key: str, handle: bytes) -> LateOpen:
        self._refuse("open")
        return LateOpen(self, int.from_bytes(handle, "little"))

    def make_fence(
        self, control: Control, device: torch.device | None, count: int, *, packed: bool
    ) -> WriterFence:
        """The `make_fence` of an engine: its host memory counts as a GPU's."""
        return WriterFence(control, torch.device("cpu"), count, packed=packed, driver=self)

    def recorded(self, index: int) -> int:
        return self._words[2 * index]

    def passed(self, index: int) -> int:
        return self._words[2 * index + 1]

    def record(self, index: int) -> None:
        lying = self.before(index)
        held = [tensor.clone() for tensor in lying]
        for tensor in lying:
            tensor.fill_(SPOILED)
        self._words[2 * index] += 1
        coming = threading.Thread(target=self._come, args=(index, lying, held))
        self._coming.append(coming)
        coming.start()

    def close(self) -> None:
        for coming in self._coming:
            coming.join(WAIT_S)

    def _come(
        self, index: int, lying: Sequence[torch.Tensor], held: Sequence[torch.Tensor]
    ) -> None:
        time.sleep(LATE_S)
        for tensor, content in zip(lying, held, strict=True):
            tensor.copy_(content)
        self._words[2 * index + 1] += 1

    def _refuse(self, call: str) -> None:
        if call in self.refuses:
            raise HandleError(f"the driver does not {call} events")


class LateOwn:
    def __init__(self, driver: LateEvents, index: int) -> None:
        self._driver = driver
        self._index = index

    def record(self) -> None:
        self._driver.record(self._index)

    def handle(self) -> bytes:
        return self._index.to_bytes(EVENT_NBYTES, "little")


class LateOpen:
    def __init__(self, driver: LateEvents, index: int) -> None:
        self._driver = driver
        self._index = index

    def passed(self) -> bool:
        return self._driver.passed(self._index) >= self._driver.recorded(self._index)


class GivenUp(LateEvents):
    """A driver whose events fail when they are queried before they have passed."""

    def open(self, key: str, handle: bytes) -> LateOpen:
        return FailingOpen(self, int.from_bytes(handle, "little"))


class FailingOpen(LateOpen):
    def passed(self) -> bool:
        if not super().passed():
            raise TransferError("asking an event failed")
        return True


def open_late(path: Path) -> None:
    """Make this process open events of the file."""
    setattr(receiver, "open_fence", partial(open_fence, driver=LateEvents(path)))  # noqa: B010  # not its export


def ignore_events(
    offer: ReadyEvents | None, memory: KeyedHandle, keys: list[str], *, num_buckets: int
) -> OpenFence | None:
    """Open events as a receiver does that ignores the field."""
    return None
