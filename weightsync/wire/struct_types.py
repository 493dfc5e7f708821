"""Types of messages, prepared before threads decode them."""

from __future__ import annotations

import msgspec


def prepare(*kinds: object) -> None:
    """Have msgspec look at what it will decode, in the one thread that imports a module.

    It does so once for each type, at the first use: with msgspec 0.22 a thread that decodes the
    same type meanwhile reads a null pointer, and the process is gone.
    """
    for kind in kinds:
        msgspec.json.Decoder(kind)
