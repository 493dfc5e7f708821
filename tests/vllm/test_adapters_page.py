"""The blocks of docs/adapters.md, against a server that is started as the page says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import weightsync as ws
from tests.vllm.adapted import adapt, assert_serves, base_of
from tests.vllm.adapters_page import OFFLINE, send_request_and_unload, send_together
from tests.vllm.offline import offline_llm
from tests.vllm.served import Served, vllm_server
from tests.vllm.tiny import expected, make_model

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Any]]:
    folder = tmp_path_factory.mktemp("page")
    base = make_model(folder, tied=False)
    options = {"--enable-lora": "", "--max-lora-rank": "16", "--max-loras": "4"}
    with vllm_server(folder, folder / "server.log", options=options) as made:
        yield made, base


def test_what_the_page_does_with_a_server(served: tuple[Served, Any]) -> None:
    server, base = served
    model = adapt(base)
    send_request_and_unload(model, server.url)
    assert server.request("policy").status_code == 404
    send_together(model, server.url)
    assert_serves(server, "policy", expected(model))
    assert_serves(server, "tiny", base_of(model))


def test_what_the_page_does_without_a_server(tmp_path: Path) -> None:
    """The page's `LLM` is made by this test: in this process, and ended with it."""
    base = make_model(tmp_path, tied=False)
    (made,) = [line for line in OFFLINE.splitlines() if line.startswith("llm = LLM(")]
    assert "enable_lora=True, weight_transfer_config=" in made
    with offline_llm(tmp_path, enable_lora=True) as llm:
        names = {"model": adapt(base), "llm": llm, "ws": ws}
        exec(OFFLINE.replace(made, ""), names)
    (output,) = names["outputs"]
    assert output.outputs[0].token_ids
