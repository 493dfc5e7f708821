"""Every example of docs/sglang.md, run against the stand-in, and its table of requests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.docs.pages import blocks
from tests.integrations.sglang_process import stand_in
from tests.integrations.sglang_stand_in import CONTRACT, Tiny

PAGE = "docs/sglang.md"


@pytest.mark.usefixtures("shm_clean")
def test_the_examples(tmp_path: Path) -> None:
    found = [block for block in blocks(PAGE) if block.language == "python"]
    assert len(found) == 2

    def train(module: nn.Module, batch: float) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(batch)

    with stand_in("Qwen/Qwen3-0.6B") as process:
        servers = [process.server(name=name) for name in "ab"]
        namespace: dict[str, Any] = {"ws": ws, "torch": torch, "model": Tiny(), "train": train}
        namespace |= {"batches": [0.5, 1.0], "shared": str(tmp_path)}
        for block in found:
            code = block.text.replace("http://127.0.0.1:30000", servers[0].url)
            code = code.replace("http://127.0.0.1:30001", servers[1].url)
            exec(compile(code, PAGE, "exec"), namespace)
        assert namespace["report"].path == "safetensors_file"
        assert servers[0].state()["weight_version"] == "4"
        assert servers[1].state()["weight_version"] == "3"
    assert list(tmp_path.iterdir()) == []


def test_the_versions_that_it_names_are_those_of_the_contract() -> None:
    text = (Path(__file__).parents[2] / PAGE).read_text()
    (named,) = re.findall(r"source of versions ([\d., and]+) by", text)
    assert re.findall(r"\d+\.\d+\.\d+", named) == list(CONTRACT)
