"""The blocks of docs/adapters.md, against a server that is started as the page says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import weightsync as ws
from tests.vllm.adapted import adapt, train
from tests.vllm.offline import offline_llm
from tests.vllm.served import Served, vllm_server
from tests.vllm.test_migrating import DOCS
from tests.vllm.tiny import make_model

pytestmark = pytest.mark.timeout(400)

BLOCKS: list[str] = re.findall(
    r"^```python\n(.*?)^```", (DOCS / "adapters.md").read_text(), re.MULTILINE | re.DOTALL
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Any]]:
    folder = tmp_path_factory.mktemp("page")
    base = make_model(folder, tied=False)
    options = {"--enable-lora": "", "--max-lora-rank": "16", "--max-loras": "4"}
    with vllm_server(folder, folder / "server.log", options=options) as made:
        yield made, base


def test_the_page_has_these_blocks() -> None:
    assert len(BLOCKS) >= 4  # tests/serve/test_adapters_page.py runs the others


def test_what_the_page_does_with_a_server(served: tuple[Served, Any]) -> None:
    server, base = served
    names: dict[str, Any] = {
        "model": adapt(base),
        "url": server.url,
        "batches": (1, 2, 3),
        "train": train,
    }
    send, request, _, unload = BLOCKS[:4]
    exec(send, names)
    exec(request, names)
    assert (names["answer"]["model"], names["again"]["model"]) == ("policy", "policy@2")
    assert names["answer"]["choices"][0]["text"] != names["again"]["choices"][0]["text"]
    exec(unload, names)
    assert server.request("policy").status_code == 404


def test_what_the_page_does_without_a_server(tmp_path: Path) -> None:
    """The page's `LLM` is made by this test: in this process, and ended with it."""
    base = make_model(tmp_path, tied=False)
    code = BLOCKS[2]
    (made,) = [line for line in code.splitlines() if line.startswith("llm = LLM(")]
    assert "enable_lora=True, weight_transfer_config=" in made
    with offline_llm(tmp_path, enable_lora=True) as llm:
        names = {"model": adapt(base), "llm": llm, "ws": ws}
        exec(code.replace(made, ""), names)
    (output,) = names["outputs"]
    assert output.outputs[0].token_ids
