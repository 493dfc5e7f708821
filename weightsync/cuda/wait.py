"""Waits of the host for work on GPUs: for a thread's current streams, and for decode steps."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Marks:
    """Events at the end of the last decode step on each stream; an update waits for them."""

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
            wait_for_stream(device)


def wait_for_stream(device: torch.device) -> None:
    """Wait on the host for the calling thread's current stream of this GPU."""
    torch.cuda.current_stream(device).synchronize()


def wait_for_all_streams(devices: Iterable[torch.device]) -> None:
    """Wait on the host for all work on each of these GPUs; ignores devices that are not GPUs."""
    for device in set(devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
