"""The blocks of docs/adapters.md, and what those for any server do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import weightsync as ws
from tests.vllm.adapted import train
from tests.vllm.victims import plain_state

DOCS = Path(__file__).parents[2] / "docs"
BLOCKS: list[str] = re.findall(
    r"^```python\n(.*?)^```", (DOCS / "adapters.md").read_text(), re.MULTILINE | re.DOTALL
)
SEND, REQUEST, OFFLINE, UNLOAD, TOGETHER = BLOCKS


def send_request_and_unload(model: Any, url: str) -> None:
    """Run the blocks that send three versions of an adapter, request two, and unload it."""
    names: dict[str, Any] = {"model": model, "url": url, "batches": (1, 2, 3), "train": train}
    exec(SEND, names)
    exec(REQUEST, names)
    assert (names["answer"]["model"], names["again"]["model"]) == ("policy", "policy@2")
    assert names["answer"]["choices"][0]["text"] != names["again"]["choices"][0]["text"]
    exec(UNLOAD, names)


def send_together(model: Any, url: str) -> int:
    """Run the block that sends base and adapter twice; return the version of both."""
    names: dict[str, Any] = {
        "ws": ws,
        "base": lambda: plain_state(model),
        "model": model,
        "url": url,
        "batches": (1, 2),
        "train": train,
    }
    exec(TOGETHER, names)
    (version,) = {report.version for report in names["reports"]}
    return int(version)
