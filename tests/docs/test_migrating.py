"""docs/migrating-from-*.md: the code after each move runs; what it replaces is still called so."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.server.live import TOKEN, make_app, serving
from weightsync.testing import TinyModel

DOCS = Path(__file__).parents[2] / "docs"
BEFORE = {
    "docs/migrating-from-vllm.md": 1,
    "docs/migrating-from-trl.md": 1,
}
"""How many blocks of each page show what there was, and are not run."""


@dataclass(frozen=True, slots=True)
class Block:
    """Code of a page; `before` says that it stands below a heading "Before"."""

    code: str
    before: bool


def blocks(page: str) -> list[Block]:
    found, heading = [], ""
    pattern = re.compile(
        r"^#+ (?P<heading>[^\n]+)$|^```python\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL
    )
    for match in pattern.finditer((DOCS.parent / page).read_text(encoding="utf-8")):
        heading = match["heading"] or heading
        if match["code"]:
            found.append(Block(match["code"], heading == "Before"))
    return found


def run(code: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(code, "a page of docs/", "exec"), names)
    return names


def train(model: nn.Module, amount: float = 1.0) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(amount)


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.fixture
def held() -> Iterator[tuple[TinyModel, ws.WeightReceiver]]:
    """A model that is served, and its receiver."""
    served = TinyModel()
    receiver = ws.WeightReceiver(served)
    yield served, receiver
    receiver.close()


@pytest.fixture
def url(
    held: tuple[TinyModel, ws.WeightReceiver], monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", TOKEN)
    with serving(make_app(held[1])) as address:
        yield address


@pytest.mark.parametrize("page", BEFORE)
def test_what_there_was_is_marked_and_can_be_parsed(page: str) -> None:
    before = [block for block in blocks(page) if block.before]
    assert len(before) == BEFORE[page]
    for block in before:
        ast.parse(block.code)


def test_what_trl_had_is_called_so() -> None:
    (before,) = [block for block in blocks("docs/migrating-from-trl.md") if block.before]
    client = pytest.importorskip("trl.generation.vllm_client").VLLMClient
    called = re.findall(r"client\.(\w+)\(", before.code)
    assert [name for name in called if not hasattr(client, name)] == []
    assert len(called) == 4


@pytest.mark.parametrize("page", ["docs/migrating-from-vllm.md", "docs/migrating-from-trl.md"])
def test_the_loop_after_it_keeps_the_server_in_step(
    page: str, url: str, held: tuple[TinyModel, ws.WeightReceiver]
) -> None:
    loops = [block for block in blocks(page) if not block.before and "ws.connect" in block.code]
    assert loops
    served, receiver = held
    model = TinyModel()
    for loop in loops:
        train(model, 2.0)
        version = receiver.version
        run(
            loop.code,
            {"model": model, "url": url, "batches": range(3), "train": lambda m, _: train(m)},
        )
        assert receiver.version == version + 3
        assert same(model, served)
    assert receiver.label == ("step-2" if len(loops) > 1 else None)


def test_the_names_that_are_kept_do_what_they_did(
    url: str, held: tuple[TinyModel, ws.WeightReceiver]
) -> None:
    served, receiver = held
    model = TinyModel()
    train(model, 3.0)
    (block,) = [b for b in blocks("docs/migrating-from-vllm.md") if "control(" in b.code]
    run(block.code, {"model": model, "url": url, "token": TOKEN})
    assert receiver.version == 1
    assert same(model, served)


def test_the_names_that_are_kept_send_by_a_callable(
    held: tuple[TinyModel, ws.WeightReceiver],
) -> None:
    served, receiver = held
    model = TinyModel()
    train(model, 3.0)

    class Engine:
        """The verbs of vLLM's LLM; tests/vllm runs the same lines with a real one."""

        def __getattr__(self, call: str) -> Any:
            return lambda body=None: receiver.handle({"call": call, "body": body or {}})

    (block,) = [b for b in blocks("docs/migrating-from-vllm.md") if "llm.update" in b.code]
    run(block.code, {"model": model, "llm": Engine()})
    assert receiver.version == 1
    assert same(model, served)
