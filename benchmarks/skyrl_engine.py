"""An update by SkyRL's FSDP worker with our backend beside `weightsync.connect` of the same model.

`python -m benchmarks.skyrl_engine [--turns 4]`, where SkyRL is installed (`make test-skyrl` makes
such an environment in .venv-skyrl). Two ranks with a model of 110 MB, sharded, and SkyRL's server
on this machine. The two ways take turns: each connects, sends twice to be warm, and is timed five
times, of which all weights change before each. Prints medians of all, and their ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import torch

import weightsync as ws
from tests import crew as crews
from tests.crew import crew
from tests.skyrl import trainer
from tests.skyrl.configs import configuration
from tests.vllm import served
from tests.vllm.served import vllm_server
from tests.vllm.tiny import make_model

SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
WARM, TIMED = 2, 5


def changed(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().mul_(1.001)  # type: ignore[operator]  # a DTensor


def by_connect(rank: int, folder: Path, url: str) -> list[float]:
    """Return the seconds of each update by `connect`."""
    model = trainer.sharded(folder)
    seconds = []
    with ws.connect(model, to=url if rank == 0 else (), dtype=torch.float32) as sender:
        for _ in range(WARM + TIMED):
            changed(model)
            began = time.perf_counter()
            sender.send_weights()
            seconds.append(time.perf_counter() - began)
    return seconds[WARM:]


def by_skyrl(_rank: int) -> list[float]:
    """Return the seconds of each call of SkyRL's worker, which `trainer.start` has made."""
    worker, client, engines = (trainer.held[n] for n in ("worker", "client", "engines"))
    seconds = []

    async def run() -> None:
        for _ in range(WARM + TIMED):
            changed(worker.model.model)
            began = time.perf_counter()
            await worker.broadcast_to_inference_engines(client, engines)
            seconds.append(time.perf_counter() - began)

    asyncio.run(run())
    return seconds[WARM:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=4)
    turns = parser.parse_args().turns
    crews.WAIT_S = served.READY_S = 1200.0  # for the imports
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder, tied=False, **SIZES)
        cfg = configuration(folder)
        with (
            crew(2) as ranks,
            vllm_server(folder, folder / "log", module="tests.skyrl.server") as s,
        ):
            ranks.run(trainer.load)
            plain: list[float] = []
            through: list[float] = []
            for _ in range(turns):
                plain += ranks.run(by_connect, folder, s.url)[0]
                ranks.run(trainer.start, cfg, s.url)
                through += ranks.run(by_skyrl)[0]
                ranks.run(trainer.stop)
    ours, theirs = statistics.median(plain), statistics.median(through)
    print(f"connect() {ours * 1e3:.1f} ms ({min(plain) * 1e3:.1f} to {max(plain) * 1e3:.1f})")
    print(f"SkyRL     {theirs * 1e3:.1f} ms ({min(through) * 1e3:.1f} to {max(through) * 1e3:.1f})")
    print(f"{len(plain)} updates each; SkyRL / connect() {theirs / ours:.3f}")


if __name__ == "__main__":
    main()
