"""Order between streams of one GPU: interprocess events, fences of writers and readers, marks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, Protocol, cast

import torch

from weightsync.cuda import handles
from weightsync.errors import ConfigError, HandleError, TransferError, TransferTimeout
from weightsync.shm.ring import Control, wait_until
from weightsync.wire.offers import KeyedHandle, ReadyEvents

EVENT_NBYTES = 64
"""Of a cudaIpcEventHandle_t."""


class OwnEvent(Protocol):
    """The writer's event; others can use it for as long as this lives."""

    def record(self) -> None:
        """Put it behind what the caller's stream has been given so far, in place of its last.

        Raises TransferError where the driver cannot.
        """

    def handle(self) -> bytes:
        """Return what another process opens, any number of them: `EVENT_NBYTES` bytes.

        Raises HandleError where the driver cannot.
        """


class OpenEvent(Protocol):
    """The same event in a reader's process."""

    def passed(self) -> bool:
        """Whether all before the last record is done. Never waits.

        Called after the writer has said, in host memory, that it recorded. Raises TransferError
        where the driver cannot tell.
        """


class Edge(Protocol):
    """What is asked of the driver."""

    def key(self, device: torch.device) -> str:
        """Return the device key that goes with the handles."""

    def make(self, device: torch.device) -> OwnEvent:
        """Make an event on `device`. Raises HandleError where the driver cannot."""

    def open(self, key: str, handle: bytes) -> OpenEvent:
        """Open a handle, checked before. Raises HandleError where the driver cannot."""


class CudaEdge:
    """CUDA's own, through torch."""

    def key(self, device: torch.device) -> str:
        """Return the GPU's key."""
        return handles.gpu_key(device)

    def make(self, device: torch.device) -> OwnEvent:
        """Make an event that exists on this GPU from here on; see the contract."""
        with _driver_errors("making an interprocess event"):
            return _CudaOwn(device)

    def open(self, key: str, handle: bytes) -> OpenEvent:
        """Open on this process's ordinal of the same GPU; see the contract."""
        ordinal = handles.local_gpu_keys().get(key)
        if ordinal is None:
            raise HandleError(f"the ready events are of GPU {key[:128]}, which is not seen here")
        with _driver_errors("opening an interprocess event"):
            return _CudaOpen(torch.device("cuda", ordinal), handle)


CUDA = CudaEdge()


def check_handles(key: str, handles: list[bytes], *, memory_key: str) -> None:
    """Raise HandleError unless these could be the events of memory on the GPU `memory_key`."""
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
    def __init__(self, device: torch.device) -> None:
        self._device = device
        event: Callable[..., torch.cuda.Event] = torch.cuda.Event
        # Timing cannot be shared. torch makes the event when it is first recorded or exported, and
        # then on the current device, so it is recorded here once: nothing waits for that.
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
    try:
        yield
    except (RuntimeError, AssertionError, TypeError, ValueError) as exc:
        first_line = str(exc).partition("\n")[0]
        raise error(f"{what} failed: {first_line}") from exc


logger = logging.getLogger(__name__)

Fence = Literal["host", "event"]
FENCE_VARIABLE = "WEIGHTSYNC_GPU_FENCE"


def fence_from_environment() -> Fence:
    """Return what WEIGHTSYNC_GPU_FENCE says. Raises ConfigError for what is no fence."""
    said = os.environ.get(FENCE_VARIABLE) or "host"
    if said not in {"host", "event"}:
        raise ConfigError(f"{FENCE_VARIABLE} is {said!r}; it may be host (the default) or event")
    return cast(Fence, said)


class WriterFence:
    """A sender's side: one event for each of `count` slots, or one for registered memory.

    Without a `device` of the kind that has events, or where the driver makes none (one warning), it
    stays with the host. Close it after the readers have closed theirs.
    """

    recorded: ClassVar[int] = 0
    """Events recorded in this process, ever; for whoever looks on."""

    def __init__(
        self, control: Control, device: torch.device | None, count: int, *, packed: bool, edge: Edge
    ) -> None:
        self._control = control
        self._packed = packed
        self._events: list[OwnEvent] = []
        self._offer: ReadyEvents | None = None
        self._numbers: dict[int, int] = {}
        if device is None:
            return
        try:
            self._events = [edge.make(device) for _ in range(count)]
            handles = [event.handle() for event in self._events]
        except HandleError as exc:
            self._events = []
            logger.warning("%s; the sender waits for its GPU on the host instead", exc)
            return
        registered = None if packed else handles.pop()
        self._offer = ReadyEvents(device=edge.key(device), slots=handles, registered=registered)

    def offer(self, reader: int, number: int) -> ReadyEvents | None:
        """Return what whoever reads at place `reader` from now on needs to wait.

        `number` tells this offer from earlier ones: who had the place before may have taken it up.
        """
        self._numbers[reader] = number
        return self._offer

    def left_to(self, readers: Sequence[int], *, verify: bool, packed: bool) -> bool:
        """Whether these readers, all of them, wait for events in an update of this kind."""
        if not self._events or verify or packed != self._packed or not readers:
            return False
        numbers = [self._numbers.get(reader, 0) for reader in readers]
        return all(numbers) and numbers == [self._control.takes_events(r) for r in readers]

    def record(self, index: int = 0) -> None:
        """Put the event of a slot behind what the caller's stream was given; then publish.

        All readers have released the slot, so that whoever waits for it means this record. Raises
        TransferError.
        """
        self._events[index].record()
        WriterFence.recorded += 1

    def close(self) -> None:
        """Destroy the events."""
        self._events.clear()
        self._offer = None


class OpenFence:
    """A reader's side: the events of one sender, opened, by slot; None is registered memory."""

    def __init__(self, offer: ReadyEvents, edge: Edge) -> None:
        handles: dict[int | None, bytes] = dict(enumerate(offer.slots))
        if offer.registered is not None:
            handles[None] = offer.registered
        self._events = {slot: edge.open(offer.device, h) for slot, h in handles.items()}

    def arrive(
        self,
        slot: int | None,
        *,
        check: Callable[[], None],
        beat: Callable[[], int],
        timeout_s: float,
    ) -> None:
        """Return when what was published in `slot` is in place; nothing was enqueued for it.

        Patient while the sender beats. Of memory without an event the sender has waited itself.
        Raises TransferTimeout, TransferError where the driver fails, and what `check` does.
        """
        if not wait_until(
            lambda: self._passed(slot),
            check=check,
            timeout_s=timeout_s,
            progress=lambda: (0, beat()),
        ):
            raise TransferTimeout(
                f"the sender published bytes that its GPU did not bring for {timeout_s:g} s; "
                "the update is given up"
            )

    def close(self) -> None:
        """Let go of the events, whoever still refers to this: the error of an update may."""
        self._events.clear()

    def _passed(self, slot: int | None) -> bool:
        event = self._events.get(slot)
        return event is None or event.passed()


def open_fence(
    offer: ReadyEvents | None,
    memory: KeyedHandle,
    keys: list[str],
    *,
    slots: int,
    edge: Edge = CUDA,
) -> OpenFence | None:
    """Open what a sender offered; None where it did not, or the driver cannot (one warning).

    `memory` are handles of what the events are for. Raises HandleError for events that cannot be
    of that memory, naming both.
    """
    if offer is None:
        return None
    found = next((key for key in keys if key in memory), "no memory that this process opens")
    handles = [*offer.slots, *([] if offer.registered is None else [offer.registered])]
    check_handles(offer.device, handles, memory_key=found)
    if offer.slots and len(offer.slots) != slots:
        raise HandleError(f"{len(offer.slots)} ready events were offered for {slots} slots")
    try:
        return OpenFence(offer, edge)
    except HandleError as exc:
        logger.warning("%s; the sender waits for its GPU on the host instead", exc)
        return None


class Marks:
    """What streams had been given when a decode step ended: the last event behind it, by stream."""

    def __init__(self) -> None:
        self._events: dict[tuple[torch.device, int], torch.cuda.Event] = {}

    def put(self, devices: Iterable[torch.device]) -> None:
        """Record an event on the calling thread's current stream of each of these GPUs.

        Not while that stream is captured into a graph: the replays count, not the capture.
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
        """Whether everything before the events is done; forgets those that are. Never waits."""
        for key, event in list(self._events.items()):
            if event.query():  # type: ignore[no-untyped-call]  # torch's
                del self._events[key]
        return not self._events


def wait_for(devices: Iterable[torch.device]) -> None:
    """Return when the calling thread's current streams of these devices are done.

    Other streams, such as generation's, are not waited for. Devices that are no GPUs are left out.
    """
    for device in set(devices):
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
