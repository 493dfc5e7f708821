"""The blocks of docs/adapters.md, against `weightsync serve`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.test_huggingface import quiet_peft
from tests.serve.adapted import Served, tiny_adapted
from tests.serve.servers import server
from tests.vllm.adapted import train

DOCS = Path(__file__).parents[2] / "docs"
pytestmark = [pytest.mark.timeout(300), quiet_peft]

BLOCKS: list[str] = re.findall(
    r"^```python\n(.*?)^```", (DOCS / "adapters.md").read_text(), re.MULTILINE | re.DOTALL
)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with server("--no-auth", want_token=False) as (url, _, _process):
        yield Served(url, "")


def test_what_the_page_does_with_a_server(served: Served) -> None:
    names: dict[str, Any] = {
        "model": tiny_adapted(),
        "url": served.url,
        "batches": (1, 2, 3),
        "train": train,
    }
    send, request, _, unload = BLOCKS[:4]
    exec(send, names)
    exec(request, names)
    assert (names["answer"]["model"], names["again"]["model"]) == ("policy", "policy@2")
    assert names["answer"]["choices"][0]["text"] != names["again"]["choices"][0]["text"]
    exec(unload, names)
    assert served.post("policy").status_code == 404
