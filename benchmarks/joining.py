"""Time of an update while another receiver fetches from one of its receivers.

    python -m benchmarks.joining [--rate 100mbit] [--rounds 5]

Four hosts are network namespaces of this machine, with links that `tc` limits: a trainer, two
receivers of its updates, the second of which reads from the first, and one that fetches from either
of these from shortly before each update on. 16.8 MB of float32. Needs root.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from contextlib import ExitStack

os.environ["OMP_NUM_THREADS"] = "1"

from tests.e2e.processes import Remote
from tests.e2e.test_hosts_chain import Chain
from tests.hosts.namespaces import host_network

BEFORE_S = 0.15
TIMEOUT_S = 60.0


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate", default="100mbit", help="of every link, as tc writes it")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with host_network(4) as network, ExitStack() as stack:
        chain = Chain(network, stack)
        *present, joining = chain.receivers
        chain.receivers = present
        chain.connect(timeout_s=TIMEOUT_S)
        chain.trainer.send(seed=1)
        network.limit(options.rate)
        stack.callback(network.unlimit)
        print("| a receiver fetches from | update | of the undisturbed one | its fetch |")
        print("|---|---|---|---|")
        alone = 0.0
        for name, source in {"nobody": None, "first": present[0], "last": present[1]}.items():
            rounds = [measure(chain, joining, source) for _ in range(options.rounds)]
            update, fetch = (statistics.median(column) for column in zip(*rounds, strict=True))
            alone = alone or update
            print(f"| {name} | {update:.2f} s | {update / alone:.2f} | {fetch:.2f} s |", flush=True)


def measure(chain: Chain, joining: Remote, source: Remote | None) -> tuple[float, float]:
    """Return the seconds of one update, and of a fetch that begins before it (0 for none)."""
    took = [0.0]

    def fetch(url: str) -> None:
        begun = time.perf_counter()
        joining.fetch([url], timeout_s=TIMEOUT_S)
        took.append(time.perf_counter() - begun)

    thread = None
    if source is not None:
        thread = threading.Thread(target=fetch, args=(source.url,))
        thread.start()
        time.sleep(BEFORE_S)
    begun = time.perf_counter()
    chain.trainer.send(seed=int(time.time() * 1000) % 1_000_000)
    update_s = time.perf_counter() - begun
    if thread is not None:
        thread.join()
    return update_s, took[-1]


if __name__ == "__main__":
    main()
