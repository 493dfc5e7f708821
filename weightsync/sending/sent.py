"""What a sender last sent as a whole, so that it can be sent again."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from weightsync.errors import TransferError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LastVersion:
    """A version, and the fingerprints that its weights had; `layout` is that of the chunks."""

    version: int = 0
    label: str | None = None
    weights_id: str | None = None
    layout: str = ""
    digests: Sequence[str | None] = ()
    update_ids: set[str] = field(default_factory=set)

    def check_unchanged(self, digests: Sequence[str | None], layout: str) -> None:
        """What goes out again as a version must be what went out as that version before."""
        pairs = zip(self.digests, digests, strict=False)
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        if self.layout != layout or not known:
            logger.warning(
                "version %s is sent again unchecked: without fingerprints of the same layout it "
                "cannot be seen whether the weights have changed since",
                self.version,
            )
        elif any(a != b for a, b in known):
            raise TransferError(
                f"the weights have changed since version {self.version} was sent; "
                "send_weights() brings everyone up to date"
            )
