"""Cost of membarrier(2): `python -m benchmarks.membarrier`.

Packed updates of one model between two processes, in turns with and without the fence that aarch64
needs (WEIGHTSYNC_MEMBARRIER=1). x86-64 orders stores itself, so the difference is the call's cost.
Prints JSON: medians over the turns, and microseconds per chunk.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

from weightsync.backends.ring import HOST_BUCKET_NBYTES
from weightsync.shm.store_order import VARIABLE

TURNS = 5
NBYTES = 512 << 20


def measure(fence: str) -> tuple[float, float]:
    """Return seconds of an update without verification, and with it."""
    arguments = ["bench", "--packed", "--nbytes", str(NBYTES), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "weightsync", *arguments],
        env={**os.environ, VARIABLE: fence, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    figures = json.loads(done.stdout)
    return figures["seconds"]["total"], figures["seconds_verified"]


def main() -> None:
    """Measure in turns and print."""
    turns = [(measure("0"), measure("1")) for _ in range(TURNS)]
    chunks = NBYTES // HOST_BUCKET_NBYTES
    for at, name in enumerate(("plain", "verified")):
        without, with_fence = (statistics.median(turn[f][at] for turn in turns) for f in (0, 1))
        figures = {
            "update": name,
            "chunks": chunks,
            "seconds": round(without, 5),
            "seconds_with_fence": round(with_fence, 5),
            "ratio": round(with_fence / without, 3),
            "microseconds_a_chunk": round((with_fence - without) / chunks * 1e6, 1),
        }
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
