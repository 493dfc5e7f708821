"""Known bytes that prove a path before anything depends on it."""

from __future__ import annotations

import hashlib

from weightsync.errors import HandleError
from weightsync.samehost.device_keys import pick
from weightsync.samehost.memory import OpenMemory
from weightsync.wire.offers import ProbeInfo

PROBE_NBYTES = 64


def probe_digest(content: bytes) -> str:
    """Return the digest by which a receiver knows the probe's bytes."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def check_probe(probe: ProbeInfo, keys: list[str]) -> None:
    """Open the probe and look at its bytes. Raises HandleError when they are not the known ones."""
    with OpenMemory(pick(probe.handle, keys)) as memory:
        found = bytes(memory.part(0, probe.nbytes).tolist())
    if probe_digest(found) != probe.digest:
        raise HandleError(
            "the probe opened, but holds other bytes than the sender wrote: this is the memory "
            "of another host or GPU with the same id"
        )
