"""Order between streams of one GPU: interprocess events, fences of writers and readers, marks.

With a fence, a sender records an event after its copies and does not wait for them; its receivers
wait for that event. Marks make an update wait for the kernels of the last decode step. Never run on
a GPU: the tests use events of their own.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, Protocol, cast

import torch

from weightsync.cuda import handles
from weightsync.errors import ConfigError, HandleError, TransferError
from weightsync.shm.ring import Control
from weightsync.shm.wait import wait_until
from weightsync.wire.offers import KeyedHandle, ReadyEvents

logger = logging.getLogger(__name__)

Fence = Literal["host", "event"]
"""Which side waits for the sender's GPU: the sender's host, or the receivers with an event."""
FENCE_VARIABLE = "WEIGHTSYNC_GPU_FENCE"
EVENT_NBYTES = 64
"""Size of a cudaIpcEventHandle_t."""


class OwnEvent(Protocol):
    """A writer's interprocess event. Other processes can use it while this object is alive."""

    def record(self) -> None:
        """Record the event after all work now on the caller's current stream; does not wait.

        Replaces the previous record. Raises TransferError where the driver fails.
        """

    def handle(self) -> bytes:
        """Return the event's handle (`EVENT_NBYTES` bytes), which any number of processes can open.

        Raises HandleError where the driver fails.
        """


class OpenEvent(Protocol):
    """The writer's event in a reader's process."""

    def passed(self) -> bool:
        """Whether all work before the last record is complete. Never waits.

        Called after the writer published in host memory that it recorded the event. Raises
        TransferError where the driver fails.
        """


class EventDriver(Protocol):
    """The calls of a CUDA driver that make and open interprocess events."""

    def key(self, device: torch.device) -> str:
        """Return the device key that belongs to the handles of `device`."""

    def make(self, device: torch.device) -> OwnEvent:
        """Make an event on `device`. Raises HandleError where the driver fails."""

    def open(self, key: str, handle: bytes) -> OpenEvent:
        """Open a handle of the GPU `key`, checked before. Raises HandleError on failure."""


class CudaEventDriver:
    """Interprocess events of CUDA, through torch. Never run on a GPU."""

    def key(self, device: torch.device) -> str:
        """Return the GPU's key."""
        return handles.gpu_key(device)

    def make(self, device: torch.device) -> OwnEvent:
        """Make an event and record it once, so that it exists on this GPU."""
        with _driver_errors("making an interprocess event"):
            return _CudaOwn(device)

    def open(self, key: str, handle: bytes) -> OpenEvent:
        """Open a handle on this process's ordinal of the same GPU."""
        ordinal = handles.local_gpu_keys().get(key)
        if ordinal is None:
            raise HandleError(
                f"the ready events are of GPU {key[:128]}, which this process does not see"
            )
        with _driver_errors("opening an interprocess event"):
            return _CudaOpen(torch.device("cuda", ordinal), handle)


CUDA = CudaEventDriver()


def check_handles(key: str, handles: list[bytes], *, memory_key: str) -> None:
    """Raise HandleError unless the handles can be of events for memory on the GPU `memory_key`."""
    if key != memory_key:
        raise HandleError(
            f"the ready events are of GPU {key[:128]}, the memory that they are for is on "
            f"{memory_key[:128]}; a sender makes both on one GPU, so the init_info is damaged"
        )
    wrong = next((handle for handle in handles if len(handle) != EVENT_NBYTES), None)
    if wrong is not None:
        raise HandleError(
            f"malformed ready event: an event handle has {EVENT_NBYTES} bytes, this has "
            f"{len(wrong)}; both sides need torch 2.11 to 2.13"
        )


class _CudaOwn:
    """An interprocess event made by this process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        event: Callable[..., torch.cuda.Event] = torch.cuda.Event
        # An interprocess event has no timing. torch creates it at its first record or export, on
        # the device that is current then; recorded here, it is on the right one.
        self._event = event(interprocess=True)
        self._record()

    def record(self) -> None:
        with _driver_errors("recording an interprocess event", TransferError):
            self._record()

    def _record(self) -> None:
        with torch.cuda.device(self._device):
            self._event.record(torch.cuda.current_stream(self._device))

    def handle(self) -> bytes:
        ipc_handle: Callable[[], bytes] = self._event.ipc_handle
        with _driver_errors("exporting an interprocess event"), torch.cuda.device(self._device):
            return ipc_handle()


class _CudaOpen:
    """An interprocess event opened from a handle."""

    def __init__(self, device: torch.device, handle: bytes) -> None:
        from_handle: Any = torch.cuda.Event.from_ipc_handle
        with torch.cuda.device(device):
            self._event: torch.cuda.Event = from_handle(device, handle)

    def passed(self) -> bool:
        query: Callable[[], bool] = self._event.query
        with _driver_errors("asking an interprocess event", TransferError):
            return query()


@contextmanager
def _driver_errors(what: str, error: type[TransferError] = HandleError) -> Iterator[None]:
    """Raise errors of torch and the driver as `error`; `what` names the call."""
    try:
        yield
    except (RuntimeError, AssertionError, TypeError, ValueError) as exc:
        first_line = str(exc).partition("\n")[0]
        raise error(f"{what} failed: {first_line}") from exc


def fence_from_environment() -> Fence:
    """Return WEIGHTSYNC_GPU_FENCE, `host` by default. Raises ConfigError for other values."""
    said = os.environ.get(FENCE_VARIABLE) or "host"
    if said not in {"host", "event"}:
        raise ConfigError(f"{FENCE_VARIABLE} is {said!r}; it may be host (the default) or event")
    return cast(Fence, said)


class WriterFence:
    """The events of a sender: one for each of `count` buckets (`packed`), or for registered memory.

    `device` is the GPU of that memory, None for host memory. Without a device, or where the driver
    makes no events (one warning), the fence has none, and the sender waits for its GPU itself.
    Close it after the readers have closed theirs.
    """

    recorded: ClassVar[int] = 0
    """Events recorded by this process so far; for tests and benchmarks."""

    def __init__(
        self,
        control: Control,
        device: torch.device | None,
        count: int,
        *,
        packed: bool,
        driver: EventDriver,
    ) -> None:
        self._control = control
        self._packed = packed
        self._events: list[OwnEvent] = []
        self._offer: ReadyEvents | None = None
        self._generations: dict[int, int] = {}
        if device is None:
            return
        try:
            self._events = [driver.make(device) for _ in range(count)]
            handles = [event.handle() for event in self._events]
        except HandleError as exc:
            self._events = []
            logger.warning("%s; the sender waits for its GPU on the host instead", exc)
            return
        registered = None if packed else handles.pop()
        self._offer = ReadyEvents(device=driver.key(device), buckets=handles, registered=registered)

    def offer(self, reader: int, generation: int) -> ReadyEvents | None:
        """Return the handles with which the reader of index `reader` can wait; None without events.

        `generation` is that of this offer: an earlier reader of this index may have accepted
        an earlier one.
        """
        self._generations[reader] = generation
        return self._offer

    def left_to(self, readers: Sequence[int], *, verify: bool, packed: bool) -> bool:
        """Whether all these readers wait for events in such an update, so that the sender need not.

        False with `verify`, and for the other path than the one that the events are for.
        """
        if not self._events or verify or packed != self._packed or not readers:
            return False
        numbers = [self._generations.get(reader, 0) for reader in readers]
        return all(numbers) and numbers == [self._control.takes_events(r) for r in readers]

    def record(self, index: int = 0) -> None:
        """Record the event of a bucket after all work now on the caller's current stream.

        The caller publishes the bucket afterwards. All readers have released it before, so a reader
        that waits for the event waits for this record. Raises TransferError.
        """
        self._events[index].record()
        WriterFence.recorded += 1

    def close(self) -> None:
        """Destroy the events."""
        self._events.clear()
        self._offer = None


class OpenFence:
    """The opened events of one sender in a receiver, by bucket; key None is registered memory.

    Raises HandleError where an event cannot be opened.
    """

    def __init__(self, offer: ReadyEvents, driver: EventDriver) -> None:
        handles: dict[int | None, bytes] = dict(enumerate(offer.buckets))
        if offer.registered is not None:
            handles[None] = offer.registered
        self._events = {bucket: driver.open(offer.device, h) for bucket, h in handles.items()}

    def arrive(
        self,
        bucket: int | None,
        *,
        check: Callable[[], None],
        beat: Callable[[], int],
        timeout_s: float,
    ) -> None:
        """Wait on the host until the bytes published in `bucket` are in place.

        Nothing is enqueued on a stream. For memory without an event it returns at once, because the
        sender waited itself. `beat` returns the sender's heartbeat: `timeout_s` is the time without
        a change of it. Raises TransferTimeout, TransferError where the driver fails, and the errors
        of `check`.
        """
        wait_until(
            lambda: self._passed(bucket),
            f"the sender published bytes that its GPU did not copy within {timeout_s:g} s; the "
            "update is aborted",
            check=check,
            timeout_s=timeout_s,
            progress=lambda: (0, beat()),
        )

    def close(self) -> None:
        """Drop the events, so that they are freed while an error still refers to this object."""
        self._events.clear()

    def _passed(self, bucket: int | None) -> bool:
        event = self._events.get(bucket)
        return event is None or event.passed()


def open_fence(
    offer: ReadyEvents | None,
    memory: KeyedHandle,
    keys: list[str],
    *,
    num_buckets: int,
    driver: EventDriver = CUDA,
) -> OpenFence | None:
    """Open the events that a sender offered; None without an offer, or where the driver fails.

    A driver that fails is one warning: the sender then waits for its GPU itself. `memory` are the
    handles of the memory that the events are for, and `keys` the device keys of this process.
    Raises HandleError for events that cannot be for that memory, naming both.
    """
    if offer is None:
        return None
    found = next((key for key in keys if key in memory), "no device that this process opens")
    handles = [*offer.buckets, *([] if offer.registered is None else [offer.registered])]
    check_handles(offer.device, handles, memory_key=found)
    if offer.buckets and len(offer.buckets) != num_buckets:
        raise HandleError(
            f"{len(offer.buckets)} ready events were offered for {num_buckets} buckets"
        )
    try:
        return OpenFence(offer, driver)
    except HandleError as exc:
        logger.warning("%s; the sender waits for its GPU on the host instead", exc)
        return None


class Marks:
    """Events at the end of the last decode step on each stream; an update waits for them.

    Never run on a GPU.
    """

    def __init__(self) -> None:
        self._events: dict[tuple[torch.device, int], torch.cuda.Event] = {}

    def put(self, devices: Iterable[torch.device]) -> None:
        """Record an event on the calling thread's current stream of each of these GPUs.

        Not on a stream that is captured into a graph, because a capture executes nothing.
        """
        for device in devices:
            with torch.cuda.device(device):
                if torch.cuda.is_current_stream_capturing():
                    continue
                stream = torch.cuda.current_stream(device)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
                event.record(stream)
            self._events[device, stream.cuda_stream] = event

    def passed(self) -> bool:
        """Whether all work before the events is complete; drops those that passed. Never waits."""
        for key, event in list(self._events.items()):
            if event.query():  # type: ignore[no-untyped-call]  # torch's
                del self._events[key]
        return not self._events


def wait_for(devices: Iterable[torch.device]) -> None:
    """Wait on the host for the calling thread's current stream of each of these GPUs.

    Does not wait for other streams, such as those of generation. Ignores devices that are not GPUs.
    """
    for device in set(devices):
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
