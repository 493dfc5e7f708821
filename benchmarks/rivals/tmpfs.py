"""The rival tmpfs: a safetensors file in /dev/shm, which every reader maps and copies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from benchmarks.rivals.contract import Job, Reader, Rival
from benchmarks.rivals.crew import Crew
from benchmarks.rivals.parameters import load, parameters_of


class Trainer(Rival):
    """Writes the file."""

    def setup(self, job: Job, module: nn.Module) -> None:
        self._state = parameters_of(module)
        self._file = Path(job.directory) / "model.safetensors"
        self._crew = Crew(job, Taker, [None] * job.readers)
        self._crew.ready()

    def update(self, way: str) -> None:
        save_file(self._state, self._file)
        self._crew.ask("load", way, str(self._file))

    def held(self) -> list[Mapping[str, str]]:
        return self._crew.held()

    def close(self) -> None:
        if hasattr(self, "_crew"):
            self._crew.close()
        self._file.unlink(missing_ok=True)


class Taker(Reader):
    """Maps the file; `get_tensor` copies nothing yet."""

    def load(self, way: str, message: Any) -> object:
        with safe_open(message, framework="pt") as file:
            names = file.keys()
            return len(load(self.parameters, ((name, file.get_tensor(name)) for name in names)))
