"""Write sglang_contract.json: the facts in SGLang's source about the endpoints that we call.

    python tests/integrations/extract_sglang_contract.py DIR... > …/sglang_contract.json

Each DIR is an unpacked wheel of one version (`pip download --no-deps sglang==…`, `unzip`). Nothing
is imported: the facts are read from the syntax trees of io_struct.py and http_server.py.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

REQUESTS = (
    "UpdateWeightFromDiskReqInput",
    "PauseGenerationReqInput",
    "ContinueGenerationReqInput",
    "UpdateWeightVersionReqInput",
)
ROUTES = (
    "/model_info",
    "/get_model_info",
    "/server_info",
    "/get_server_info",
    "/flush_cache",
    "/update_weights_from_disk",
    "/update_weight_version",
    "/pause_generation",
    "/continue_generation",
)
_METHODS = {"get": ["GET"], "post": ["POST"]}


def fields(tree: ast.Module, name: str) -> dict[str, str] | None:
    """Return the fields of a request, each with its annotation and default as source."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return {
                field.target.id: ast.unparse(field.annotation)
                + (f" = {ast.unparse(field.value)}" if field.value else "")
                for field in node.body
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            }
    return None


def decorated(tree: ast.Module) -> Iterator[tuple[str, list[str], ast.AsyncFunctionDef]]:
    """Yield the path, methods and function of every route."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.AsyncFunctionDef):
            continue
        for call in function.decorator_list:
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            if not call.args or not isinstance(call.args[0], ast.Constant):
                continue
            methods = _METHODS.get(call.func.attr)
            for keyword in call.keywords:
                if keyword.arg == "methods":
                    methods = ast.literal_eval(keyword.value)
            if methods:
                yield str(call.args[0].value), methods, function


def keys(function: ast.AsyncFunctionDef) -> list[str]:
    """Return the keys of the dicts that a route builds by itself."""
    found = [
        key.value
        for node in ast.walk(function)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    ]
    return sorted(set(found))


def body_of(function: ast.AsyncFunctionDef) -> str | None:
    """Return the type of a route's body, None where it takes none."""
    for argument in function.args.args:
        if argument.arg == "obj" and argument.annotation is not None:
            return ast.unparse(argument.annotation).removeprefix("Annotated[").split(",")[0]
    return None


def messages(root: Path) -> list[str]:
    """Return the first words of the messages of refused updates, if the source still has them."""
    known = (
        "Failed to get model loader",
        "Failed to get weights iterator",
        "Failed to update weights",
        "Rolling back to original weights",
        "Succeeded to update model weights",
        "Weights were updated, but the cache was not flushed",
        "Cache flush failed after updating weights",
    )
    text = "".join(file.read_text() for file in sorted(root.rglob("*.py")))
    return [message for message in known if message in text]


def contract(directory: Path) -> dict[str, object]:
    """Return the facts of one version."""
    source = directory / "sglang" / "srt"
    requests = ast.parse((source / "managers" / "io_struct.py").read_text())
    server = ast.parse((source / "entrypoints" / "http_server.py").read_text())
    scheduler = (source / "managers" / "scheduler.py").read_text()
    routes = {
        path: {"methods": methods, "body": body_of(function), "keys": keys(function)}
        for path, methods, function in decorated(server)
        if path in ROUTES
    }
    return {
        "requests": {name: fields(requests, name) for name in REQUESTS},
        "routes": dict(sorted(routes.items())),
        "messages": messages(source / "managers") + messages(source / "model_executor"),
        "flush_ignores_requests_taken_back": "ignore_waiting=self._engine_paused" in scheduler,
    }


def main(directories: list[str]) -> None:
    """Print the contract of every version."""
    told = {Path(directory).name: contract(Path(directory)) for directory in directories}
    json.dump(told, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main(sys.argv[1:])
