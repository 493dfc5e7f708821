"""The messages of a sender that has engines and no transport."""

from __future__ import annotations

import itertools
from typing import Any

from weightsync.backends.ipc.sender import IpcTrainerEngine
from weightsync.wire.codec import manifest_to_wire
from weightsync.wire.messages import PROTOCOL, RegisteredUpdate
from weightsync.wire.offers import InitInfo

_generations = itertools.count(1)
_epochs = itertools.count(1)


def next_number() -> int:
    """A number above those of all offers so far."""
    return next(_generations)


def offered(
    engine: IpcTrainerEngine,
    payload: Any = None,
    *,
    backend: str = "ipc",
    sender: str = "sender",
    lease_s: float = 60.0,
    generation: int | None = None,
) -> InitInfo:
    """Return the offer for reader 0 of the engine's ring; `payload` replaces the ring's own."""
    generation = next_number() if generation is None else generation
    ring = engine.offer(0, generation)
    return InitInfo(
        backend=backend,
        path="shared_memory" if backend == "ipc" else backend,
        protocol_min=PROTOCOL,
        protocol_max=PROTOCOL,
        sender=sender,
        manifest=manifest_to_wire(engine.manifest),
        lease_s=lease_s,
        generation=generation,
        payload=ring if payload is None else payload,
    )


def registered(payload: Any, *, sender: str = "sender", verify: bool = True) -> RegisteredUpdate:
    """Return the update info of an update that an engine began."""
    return RegisteredUpdate(
        sender=sender, epoch=next(_epochs), verify=verify, payload=payload, registered=True
    )
