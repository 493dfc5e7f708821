"""UCX's log, which has what NIXL does not tell: the transport of a read, and reasons of errors."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from weightsync.errors import BackendUnavailableError, WeightSyncError

_FAULT = re.compile(r" UCX +(?:WARN|ERROR) +(.*)")
_ANY_SIZE = re.compile(r"\| *\d+\.\.inf *\| *([^|]+?) *\| *([^|]+?) *\|")
"""A row of the table of UCX_PROTO_INFO: sizes, protocol, transport and device."""


class UcxLog:
    """The log of this process in memory. Made before UCX is loaded, which opens it then."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("ucx-log")
        path = f"/proc/self/fd/{self._descriptor}"
        os.environ.update(UCX_LOG_FILE=path, UCX_LOG_LEVEL="info", UCX_PROTO_INFO="y")

    def _text(self) -> str:
        ctypes.CDLL(None).fflush(None)  # UCX writes by a C stream
        nbytes = os.fstat(self._descriptor).st_size
        return os.pread(self._descriptor, nbytes, 0).decode(errors="replace")

    def taken(self) -> str:
        """Return ` (protocol, transport/device)` of large reads, "" where the log lacks them."""
        table = self._text().rpartition("remote memory read by")[2]
        found = _ANY_SIZE.search(table)
        return f" ({found[1]}, {found[2]})" if found else ""

    def faults(self) -> str:
        """Return the texts of warnings and errors."""
        return "; ".join(_FAULT.findall(self._text()))


@contextmanager
def ucx_log() -> Iterator[UcxLog]:
    """Yield the log; an error of the block gets UCX's reasons, if there are any."""
    log = UcxLog()
    try:
        yield log
    except WeightSyncError as exc:
        if not (faults := log.faults()):
            raise
        raise BackendUnavailableError(f"{exc}; UCX: {faults}") from exc
