"""The stand-in for SGLang as a process, for tests and for the examples of docs/sglang.md."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import torch

ROOT = Path(__file__).parents[2]


class Served:
    """One of the servers of a stand-in's process."""

    def __init__(self, origin: str, name: str, version: str) -> None:
        self.url = f"{origin}/{name}/{version}"

    def state(self) -> dict[str, Any]:
        """Its weights, and the requests that it got."""
        with urlopen(f"{self.url}/_state", timeout=20) as answer:
            told: dict[str, Any] = json.load(answer)
            return told

    def next(self, **what: Any) -> None:
        """Plan its next behaviour; `reset=True` first makes a new server of it."""
        body = json.dumps(what).encode()
        request = Request(f"{self.url}/_next", body, {"Content-Type": "application/json"})
        with urlopen(request, timeout=20):
            pass

    def weights(self) -> dict[str, torch.Tensor]:
        """The tensors of its model."""
        return {name: torch.tensor(held) for name, held in self.state()["weights"].items()}


class StandInProcess:
    """A running stand-in."""

    def __init__(self, process: subprocess.Popen[str], origin: str) -> None:
        self.process = process
        self.origin = origin

    def server(self, version: str = "0.5.23", name: str = "a") -> Served:
        """Return one of its servers, just started."""
        served = Served(self.origin, name, version)
        served.next(reset=True)
        return served


@contextmanager
def stand_in(model_path: Path | str) -> Iterator[StandInProcess]:
    """Run the stand-in; its servers' own checkpoint is at `model_path`."""
    command = [sys.executable, "-m", "tests.integrations.sglang_stand_in", str(model_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        assert port.isdecimal(), "the stand-in did not start"
        yield StandInProcess(process, f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        process.wait(20)
        if process.stdout is not None:
            process.stdout.close()
