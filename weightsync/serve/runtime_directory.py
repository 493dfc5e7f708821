"""A private directory for the sockets of one server."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from weightsync.queues.sockets import IPC_PATH_LIMIT

PREFIX = "weightsync-"
_LONGEST_NAME = 64
"""Room for this directory's name and a socket's in it."""


def make_runtime_directory(parent: Path | None = None) -> Path:
    """Make a directory of mode 0700 in `parent`, which its maker removes.

    By default in XDG_RUNTIME_DIR if that is a directory of this user with a path short enough for
    sockets, else in the temporary one. Raises OSError.
    """
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent or _runtime_parent()))


def _runtime_parent() -> Path | None:
    named = os.environ.get("XDG_RUNTIME_DIR", "")
    if not named or len(os.fsencode(named)) > IPC_PATH_LIMIT - _LONGEST_NAME:
        return None
    path = Path(named)
    try:
        found = path.stat()
    except OSError:
        return None
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return path if ours and path.is_absolute() and os.access(path, os.W_OK | os.X_OK) else None
