"""The parts of vLLM's `load_weights` that write past the weight loaders, found in its sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import vllm

_WRITES = {"copy_", "fill_", "zero_", "set_", "index_copy_", "mul_", "add_", "div_", "sub_"}
Functions = dict[tuple[str, str], ast.FunctionDef]


def found() -> dict[str, list[str]]:
    """Return the code of the writes, by `module.Class.function`, of the installed vLLM.

    A function counts if a `load_weights` of its module calls it, by name, over any number of calls.
    """
    root = Path(vllm.__path__[0], "model_executor", "models")
    return {
        f"{'.'.join(file.relative_to(root).with_suffix('').parts)}.{owner}.{name}": lines
        for file in sorted(root.rglob("*.py"))
        for (owner, name), lines in _in_module(ast.parse(file.read_bytes())).items()
    }


def _in_module(tree: ast.Module) -> dict[tuple[str, str], list[str]]:
    functions = _functions(tree)
    reached = {key for key in functions if key[1] == "load_weights"}
    queue = list(reached)
    while queue:
        for name in _called(functions[queue.pop()]):
            new = {key for key in functions if key[1] == name} - reached
            reached |= new
            queue += new
    writes = {key: list(_writes(functions[key])) for key in sorted(reached)}
    return {key: lines for key, lines in writes.items() if lines}


def _functions(tree: ast.Module) -> Functions:
    """Return the methods of all classes, and the functions of the module with no class."""
    owners = [("", tree.body)]
    owners += [(node.name, node.body) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {
        (owner, node.name): node
        for owner, body in owners
        for node in body
        if isinstance(node, ast.FunctionDef)
    }


_NOT_FOLLOWED = {"__init__", "__call__", "forward", "weight_loader"}
"""A new layer has no weights yet, and a weight loader is what the reload sees."""


def _called(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name not in _NOT_FOLLOWED:
                yield name


def _writes(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr in _WRITES:
                yield ast.unparse(node)
        elif isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(map(_is_data, targets)):
                yield ast.unparse(node)


def _is_data(target: ast.expr) -> bool:
    """Whether an assignment is to `….data`, to a part of it, or to a part of a `param`."""
    if isinstance(target, ast.Subscript):
        return _is_data(target.value) or getattr(target.value, "id", "").endswith("param")
    return isinstance(target, ast.Attribute) and target.attr == "data"
