"""What docs/migrating-from-vllm.md says of vLLM: the names of its trainer API."""

from __future__ import annotations

import ast
import copy
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import weightsync as ws
from tests.vllm.served import Served, vllm_server
from tests.vllm.tiny import change, make_model
from weightsync import IPCWeightTransferEngine

DOCS = Path(__file__).parents[2] / "docs"


def block(page: str, word: str) -> str:
    """Return the first Python block of a page that has `word` in it."""
    found: list[str] = re.findall(
        r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL
    )
    return next(code for code in found if word in code)


def test_vllms_trainer_api_is_called_so() -> None:
    code = block("migrating-from-vllm.md", "WeightTransferTrainerFactory")
    imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    assert len(imports) == 2
    for node in imports:
        module = importlib.import_module(node.module or "")
        assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
    made = importlib.import_module("vllm.distributed.weight_transfer.ipc_engine")
    assert made.IPCTrainerInitInfo(rank=0, packed=True).backend == "ipc"


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Served, Any]]:
    folder = tmp_path_factory.mktemp("served")
    model = make_model(folder, tied=request.param)
    with vllm_server(folder, folder / "server.log") as made:
        yield made, model


def test_the_known_names_send_to_a_server(served: tuple[Served, Any]) -> None:
    server, model = served
    for seed in (1, 2):
        change(model, seed)
        names = {"url": server.url, "token": "", "model": model}
        exec(block("migrating-from-vllm.md", 'send_mode="http"'), names)
        server.assert_computes(model)


def test_messages_that_cut_what_vllm_fuses_go_in_right_or_are_refused(
    served: tuple[Served, Any],
) -> None:
    server, model = served
    before = copy.deepcopy(model)
    given = {"send_mode": "http", "url": server.url, "packed": True}
    given |= {"packed_buffer_size_bytes": 1 << 15}
    change(model, 3)
    server.post("init_weight_transfer_engine", {"init_info": {}}).raise_for_status()
    server.post("start_weight_update").raise_for_status()
    parts = [(name, p) for name, p in model.named_parameters() if "1.self_attn.k_proj" not in name]
    IPCWeightTransferEngine.trainer_send_weights(parts, given)
    refused = server.post("finish_weight_update")
    assert refused.status_code == 500
    assert "self_attn.k_proj" in refused.text
    server.assert_computes(before)
    with ws.connect(model, to=server.url) as sender:
        sender.send_weights()
    server.assert_computes(model)
    change(model, 4)
    server.post("start_weight_update").raise_for_status()
    IPCWeightTransferEngine.trainer_send_weights(model.named_parameters(), given)
    server.post("finish_weight_update").raise_for_status()
    server.post("reset_prefix_cache").raise_for_status()
    server.assert_computes(model)
    with pytest.raises(ws.RemoteError, match="start_weight_update must be called before"):
        IPCWeightTransferEngine.trainer_send_weights(model.named_parameters(), given)
