"""What every process of a server does before it says that it is ready."""

from __future__ import annotations

import subprocess
import sys

import pytest

BEGIN = """
import gc
from weightsync.serve import options
from weightsync.serve import {module}

def main(ready, *more):
    assert gc.get_freeze_count() == 0
    ready(b"card")

{module}.main = main
said = []
options.run_process(
    lambda payload: said.append((payload, gc.get_freeze_count())),
    "weightsync.serve.{module}",
    options.ServeOptions(model="tiny"),
)
((payload, frozen),) = said
assert payload == b"card"
print(frozen)
"""


@pytest.mark.parametrize("module", ["worker", "engine_core", "api_server"])
def test_what_it_starts_with_is_left_out_of_collections(module: str) -> None:
    code = BEGIN.format(module=module)
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 10_000


UPDATE = """
from weightsync.server.router import describe_body
from weightsync.wire.codec import decode_request

handles = b'{"names": [], "dtype_names": [], "shapes": [], "ipc_handles": []}'
describe_body("update_weights")
decode_request("update_weights", b'{"update_info": %s}' % handles)
"""
"""What an API server of several workers does with messages of vLLM's shape."""


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("worker", {"fastapi", "uvicorn", "prometheus_client", "torch.distributed.tensor"}),
        ("engine_core", {"torch", "transformers", "fastapi"}),
        ("api_server", {"torch"}),
        ("serving", {"torch", "fastapi"}),
    ],
)
def test_a_process_loads_what_it_needs_alone(module: str, absent: set[str]) -> None:
    """Each package that is not loaded is memory and a part of the start of every such process."""
    then = UPDATE if module == "api_server" else ""
    code = f"import sys, weightsync.serve.{module}\n{then}\n"
    code += f"print(sorted({absent} & set(sys.modules)))"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    assert ended.stdout == "[]\n"
