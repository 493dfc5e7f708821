"""Updates whose abort came before their start: the start must not begin them any more."""

from __future__ import annotations

import time
from collections import OrderedDict

from weightsync.errors import UpdateConflictError

_KEPT = 256


class Overtaken:
    """Remembers for `keep_s` seconds which unknown updates were aborted."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._aborted: OrderedDict[str, float] = OrderedDict()

    def note(self, update_id: str) -> None:
        """An update that is not open was aborted."""
        self._aborted[update_id] = time.monotonic()
        while len(self._aborted) > _KEPT:
            self._aborted.popitem(last=False)

    def check(self, update_id: str) -> None:
        """Raise UpdateConflictError for an update that was aborted before it started."""
        noted = self._aborted.get(update_id)
        if noted is not None and time.monotonic() - noted < self._keep_s:
            raise UpdateConflictError(
                f"update {update_id} was aborted before its start arrived; start another one",
                state="ABORTED",
                update_id=update_id,
            )
