"""What a server's `/metrics` say of its updates."""

from __future__ import annotations

import re

import msgspec

from weightsync.errors import WeightSyncError
from weightsync.transports.http import HttpTransport

MAX_NBYTES = 4 << 20

_LINE = re.compile(
    r'weightsync_(?P<name>\w+?)(?:\{\w+="(?P<label>[^"]*)"\})? (?P<value>[-+.0-9eE]+)'
)


class LastUpdates(msgspec.Struct, kw_only=True):
    """How many updates ended how, and the last one that was committed; empty where unknown."""

    ended: dict[str, int] = {}
    seconds: dict[str, float] = {}
    nbytes: int | None = None
    stall_s: float | None = None


def read_last_updates(url: str, timeout_s: float, trusted: bool | str = True) -> LastUpdates:
    """Ask the server at `url`; one that serves no metrics has none, and that is no error."""
    return parse(_get(url, "metrics", timeout_s, trusted).decode("utf-8", "replace"))


def read_server_info(
    url: str, timeout_s: float, trusted: bool | str = True
) -> dict[str, object] | None:
    """Return what `weightsync serve` says of itself; None for servers that do not."""
    try:
        answer = _get(url, "server_info", timeout_s, trusted)
        return msgspec.json.decode(answer, type=dict[str, object])
    except msgspec.DecodeError:
        return None


def _get(url: str, path: str, timeout_s: float, trusted: bool | str) -> bytes:
    try:
        transport = HttpTransport(url, "", verify_tls=trusted)
        try:
            status, answer = transport.get(path, timeout_s=timeout_s, max_nbytes=MAX_NBYTES)
        finally:
            transport.close()
    except WeightSyncError:
        return b""
    return answer if status == 200 else b""


def parse(text: str) -> LastUpdates:
    """Read the lines of Prometheus' text format that are of weightsync's updates."""
    updates = LastUpdates()
    for line in text.splitlines():
        if (found := _LINE.fullmatch(line.strip())) is None:
            continue
        label, value = found["label"] or "", float(found["value"])
        if found["name"] == "updates_total":
            updates.ended[label] = int(value)
        elif found["name"] == "last_update_seconds":
            updates.seconds[label] = value
        elif found["name"] == "last_update_bytes":
            updates.nbytes = int(value)
        elif found["name"] == "last_update_stall_seconds":
            updates.stall_s = value
    return updates
