"""Updates of a server that slept, beside updates of one that was awake.

    python -m benchmarks.sleep [--model smollm2] [--rounds 7]

`weightsync serve` in bfloat16, staged. In each round: an update, a sleep of level 1 with
`send_weights(wake=True)`, and one of level 2. Seconds are those of the whole call, medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

os.environ["OMP_NUM_THREADS"] = "1"

import requests
import torch

import weightsync as ws
from tests.serve.servers import server
from weightsync.serve.model import load_model


def main() -> None:
    """Print the medians, and each as a multiple of the update alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    model = load_model(options.model, dtype=torch.bfloat16).model
    kinds = ("update", "level 1", "level 2")
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    with (
        server("--model", options.model, "--dtype", "bfloat16") as (url, token, _),
        ws.connect(model, to=url, token=token, delta="off") as sender,
    ):
        headers = {"Authorization": f"Bearer {token}"}
        for _ in range(3):
            sender.send_weights()
        for _ in range(options.rounds):
            for level, kind in enumerate(kinds):
                if level:
                    put = requests.post(f"{url}/sleep?level={level}", headers=headers, timeout=60)
                    put.raise_for_status()
                started = time.perf_counter()
                sender.send_weights(wake=level > 0)
                seconds[kind].append(time.perf_counter() - started)
    alone = statistics.median(seconds["update"])
    for kind in kinds:
        found = statistics.median(seconds[kind])
        print(f"{kind}: {found * 1e3:.1f} ms, {found / alone:.2f} x the update alone")


if __name__ == "__main__":
    main()
