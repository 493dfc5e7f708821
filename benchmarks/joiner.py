"""What a receiver costs that joins a fleet, beside one that is connected and sent a full update.

    python -m benchmarks.joiner [--mib 512] [--rounds 5]

Processes of one host. In each round a new receiver is added to a sender that has another one, from
which it fetches the weights; a second new receiver is connected to a sender of its own, and sent
the model. Both touch all of their memory for the first time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch

import weightsync as ws
from benchmarks.nixl_read import module_of

LANES = 6
"""Messages to one receiver at a time: it is asked for its weights while it serves them."""


def serve(lanes: list[Connection], nbytes: int) -> None:
    """Answer messages until the lanes close."""
    torch.set_num_threads(1)
    receiver = ws.WeightReceiver(module_of(nbytes))

    def answer(lane: Connection) -> None:
        while (message := lane.recv()) is not None:
            try:
                lane.send((receiver.handle(message), None))
            except ws.WeightSyncError as exc:
                lane.send((None, exc))

    threads = [threading.Thread(target=answer, args=(lane,)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextmanager
def receiver(nbytes: int) -> Iterator[Callable[[Any], Any]]:
    """Start a receiver in a process; yield a target that reaches it."""
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(LANES)]
    lanes: queue.Queue[Connection] = queue.Queue()
    for ours, _ in pairs:
        lanes.put(ours)
    process = context.Process(target=serve, args=([theirs for _, theirs in pairs], nbytes))
    process.start()

    def reach(message: Any) -> Any:
        lane = lanes.get()
        lane.send(message)
        reply, error = lane.recv()
        lanes.put(lane)
        if error is not None:
            raise error
        return reply

    try:
        reach({"call": "weight_info", "body": {}})  # it has started
        yield reach
    finally:
        for ours, _ in pairs:
            ours.send(None)
        process.join()


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of a call, and its result."""
    begun = time.perf_counter()
    result = call()
    return time.perf_counter() - begun, result


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    nbytes = options.mib << 20
    torch.set_num_threads(1)
    model = module_of(nbytes)
    taken: dict[str, list[float]] = {}
    with receiver(nbytes) as first, ws.connect(model, to=first, delta="off") as sender:
        sender.send_weights()
        for _ in range(options.rounds):
            written = torch.ones(nbytes, dtype=torch.uint8)
            untouched = torch.empty(nbytes, dtype=torch.uint8)
            copy_s, _ = timed(partial(untouched.copy_, written))
            full_s, _ = timed(sender.send_weights)
            with receiver(nbytes) as joining:
                add_s, report = timed(partial(sender.add, joining))
                assert report.receivers[0].source, "the joiner did not fetch"
                sender.remove(sender.targets[-1])
            with receiver(nbytes) as new:
                connect_s, other = timed(partial(ws.connect, model, to=new, delta="off"))
                with other:
                    first_s, _ = timed(other.send_weights)
            for name, seconds in {
                "a copy into memory that is touched the first time": copy_s,
                "a full update of a receiver that has had one": full_s,
                "`connect`, then a full update of a new receiver": connect_s + first_s,
                "its full update alone": first_s,
                "`add`: a new receiver fetches, and is connected": add_s,
                "its fetch alone": report.seconds["total"],
            }.items():
                taken.setdefault(name, []).append(seconds)
    print("| | median |\n|---|---:|")
    for name, seconds in taken.items():
        print(f"| {name} | {statistics.median(seconds) * 1e3:.0f} ms |")


if __name__ == "__main__":
    main()
