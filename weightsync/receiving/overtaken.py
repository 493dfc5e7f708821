"""Updates that were aborted or given up: a late or repeated start must not begin them."""

from __future__ import annotations

import time
from collections import OrderedDict

from weightsync.errors import UpdateConflictError

_KEPT = 256


class AbortedUpdates:
    """Remembers for `keep_s` seconds which updates ended without a commit. Callers hold a lock."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._ended: OrderedDict[str, float] = OrderedDict()

    def note(self, update_id: str) -> None:
        """An update was aborted or given up, whether it had begun or not."""
        self._ended[update_id] = time.monotonic()
        self._ended.move_to_end(update_id)
        while len(self._ended) > _KEPT:
            self._ended.popitem(last=False)

    def check(self, update_id: str) -> None:
        """Raise UpdateConflictError for an update that ended already."""
        noted = self._ended.get(update_id)
        if noted is not None and time.monotonic() - noted < self._keep_s:
            raise UpdateConflictError(
                f"update {update_id} was aborted or given up before this start arrived; start "
                "another one, under another update_id",
                state="ABORTED",
                update_id=update_id,
            )
