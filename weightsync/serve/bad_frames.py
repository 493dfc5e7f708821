"""What cannot be read between the processes of a server is dropped, and ends none of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

logger = logging.getLogger(__name__)


@contextmanager
def dropped(sender: str) -> Iterator[None]:
    """Log and swallow the error of a block that reads one message of `sender`, and only reads."""
    try:
        yield
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        logger.warning("a message of %s cannot be read and is dropped: %s", sender, exc)
