"""What every process of a server does before it says that it is ready."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from tests.serve.servers import members, server

BEGIN = """
import gc
from weightsync.serve import process_terms
from weightsync.serve import {module}

def main(ready, terms, *more):
    assert gc.get_freeze_count() == 0
    ready(b"card")

{module}.{main} = main
said = []
process_terms.{run}(lambda payload: said.append((payload, gc.get_freeze_count())), None{more})
((payload, frozen),) = said
assert payload == b"card"
print(frozen)
"""


@pytest.mark.parametrize(
    ("module", "main", "run", "more"),
    [
        ("worker", "worker_main", "run_worker", ""),
        ("core_process", "core_main", "run_core", ""),
        ("api_server", "api_main", "run_api_server", ", None"),
    ],
)
def test_what_it_starts_with_is_left_out_of_collections(
    module: str, main: str, run: str, more: str
) -> None:
    code = BEGIN.format(module=module, main=main, run=run, more=more)
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 10_000


def test_of_a_model_of_text_only_the_workers_load_torch() -> None:
    """It would cost every other process two seconds of start-up and 200 MB."""
    with server("--no-auth", want_token=False) as (_, _, process):
        whole = {"serve": psutil.Process(process.pid), **members(process)}
        loaded = {
            name
            for name, one in whole.items()
            if any("libtorch" in mapped.path for mapped in one.memory_maps())
        }
    assert {"engine core 0", "api server 0"} <= set(whole)
    assert loaded == {"worker 0.0"}
