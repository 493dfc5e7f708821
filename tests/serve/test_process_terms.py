"""What every process of a server does before it says that it is ready."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
