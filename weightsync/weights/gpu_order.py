"""Order between generation and updates on GPUs. Nothing here has run on a GPU yet."""

from __future__ import annotations

from collections.abc import Iterable

import torch


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
