"""What a server's `/metrics` say of its updates."""

from __future__ import annotations

import re

import msgspec
import urllib3

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


def read_last_updates(url: str, timeout_s: float) -> LastUpdates:
    """Ask the server at `url`; one that serves no metrics has none, and that is no error."""
    try:
        with urllib3.PoolManager() as pool:
            answer = pool.request("GET", f"{url}/metrics", timeout=timeout_s, retries=False)
    except urllib3.exceptions.HTTPError:
        return LastUpdates()
    if answer.status != 200 or len(answer.data) > MAX_NBYTES:
        return LastUpdates()
    return parse(answer.data.decode("utf-8", "replace"))


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
