"""What docs/migrating-from-*.md say of vLLM: the names of its trainer API, and of its engines."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM

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


def test_what_openrlhfs_actors_hand_on_fits_vllms_engine() -> None:
    names: dict[str, Any] = {}
    exec(block("migrating-from-openrlhf.md", "collective_rpc"), names)
    methods = inspect.getmembers(names["WeightSyncMethods"], inspect.iscoroutinefunction)
    assert len(methods) == 6
    for name, method in methods:
        engines = inspect.signature(getattr(AsyncLLM, name))
        (call,) = [
            node
            for node in ast.walk(ast.parse(source_of(name)))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == f"self.llm.{name}"
        ]
        keywords = {keyword.arg or "": None for keyword in call.keywords}
        engines.bind(None, *([None] * len(call.args)), **keywords)
        assert inspect.iscoroutinefunction(method)


def source_of(method: str) -> str:
    """Return the lines of one method of the page's class."""
    tree = ast.parse(block("migrating-from-openrlhf.md", "collective_rpc"))
    (found,) = [
        n for n in ast.walk(tree) if isinstance(n, ast.AsyncFunctionDef) and n.name == method
    ]
    return ast.unparse(found)
