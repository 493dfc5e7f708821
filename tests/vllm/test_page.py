"""The `LLM` that docs/vllm.md shows, in a process of its own, as a user starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.vllm.test_migrating import DOCS
from tests.vllm.tiny import make_model

ROOT = DOCS.parent
SCRIPT = Path(__file__).with_name("page.py")


@pytest.mark.timeout(300)
def test_the_page_s_llm_is_updated(tmp_path: Path) -> None:
    make_model(tmp_path, tied=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_ALLOW_INSECURE_SERIALIZATION"):
        environment.pop(name, None)
    log = tmp_path / "page.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(tmp_path)],
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            code = process.wait(240)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
    said = log.read_text(errors="replace")
    assert code == 0, said[-4000:]
    assert "equal" in said.splitlines(), said[-4000:]
