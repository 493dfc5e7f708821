"""Types of messages, prepared before threads decode them."""

from __future__ import annotations

import msgspec


def prepare(*kinds: object) -> None:
    """Make msgspec inspect the types that it will decode, in the thread that imports a module.

    msgspec inspects each type at its first use. With msgspec 0.22 a thread that decodes the same
    type meanwhile reads a null pointer, and the process crashes.
    """
    for kind in kinds:
        msgspec.json.Decoder(kind)
