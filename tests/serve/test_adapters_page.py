"""The blocks of docs/adapters.md, against `weightsync serve`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import weightsync as ws
from tests.integrations.test_huggingface import quiet_peft
from tests.serve.adapted import Served, tiny_adapted
from tests.serve.servers import server
from tests.vllm.adapted import train
from tests.vllm.tiny import expected

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


def test_base_and_adapter_together(served: Served) -> None:
    model = tiny_adapted()
    base = model.get_base_model().state_dict
    names: dict[str, Any] = {
        "ws": ws,
        "base": lambda: {
            name.replace(".base_layer", ""): tensor
            for name, tensor in base().items()
            if "lora_" not in name
        },
        "model": model,
        "url": served.url,
        "batches": (1, 2),
        "train": train,
    }
    exec(BLOCKS[4], names)
    versions = {report.version for report in names["reports"]}
    assert len(versions) == 1
    served.assert_serves("policy", expected(model), version=versions.pop())
