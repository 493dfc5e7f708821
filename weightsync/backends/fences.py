"""How readers on a GPU know that bytes are in place: the writer waits on the host, or they do.

`host`: the sender waits for its stream, then publishes. `event`: it records an interprocess event
and publishes at once; readers look at that event until it has passed, and only then copy. Never
neither: a sender leaves the wait to its readers only in an update all of whose readers have said,
in the control segment, that they opened the events. A verified update is fenced by the host, since
its sender waits anyway: what it publishes holds the fingerprints of what was copied.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, cast

import torch

from weightsync.errors import ConfigError, HandleError, TransferTimeout
from weightsync.samehost.ready_event import CUDA, Edge, OwnEvent, check_handles
from weightsync.samehost.ring import Control, wait_until
from weightsync.wire.offers import KeyedHandle, ReadyEvents

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
