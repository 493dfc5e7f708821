"""Whoever starts next removes what dead owners left behind, and only that."""

from __future__ import annotations

import logging

from weightsync.errors import SegmentError, shorten
from weightsync.samehost.segment import remove_leftovers

logger = logging.getLogger(__name__)


def cleanup_stale() -> None:
    """Remove leftovers, and say so; a start never fails for it."""
    try:
        removed = remove_leftovers()
    except SegmentError as exc:
        logger.warning("leftover segments could not be looked for: %s", exc)
        return
    if removed:
        nbytes = sum(leftover.nbytes for leftover in removed)
        names = shorten(leftover.name for leftover in removed)
        logger.info("removed what dead owners left: %d bytes in %s", nbytes, names)
