"""Cost of a message, small and of 16 MiB, with one reader and with two.

    python -m benchmarks.message_queue [--vllm-python /path/to/venv/bin/python] [--json]

With the python of an environment that has vLLM (the CPU build will do), vLLM's own queue is
measured in turn with ours, and the ratios are printed; `--rounds` takes the best of several turns,
for a machine with other work. "paced" is the time from sending to receiving, at the median, of
messages two milliseconds apart, and the reader's processor time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np

LARGE_NBYTES = 16 << 20
PACE_S = 0.002
WAIT_S = 120.0
SMALL = {"step": 7, "requests": ["a", "b"], "tokens": [1, 2, 3, 4]}


def open_writer(kind: str, readers: int) -> Any:
    if kind == "vllm":
        from vllm.distributed.device_communicators.shm_broadcast import (  # noqa: PLC0415
            MessageQueue as Theirs,
        )

        return Theirs(readers, readers)
    from weightsync.queues.message_queue import MessageQueue  # noqa: PLC0415

    return MessageQueue(readers, readers)


def open_reader(kind: str, handle: Any, rank: int) -> Any:
    if kind == "vllm":
        from vllm.distributed.device_communicators.shm_broadcast import (  # noqa: PLC0415
            MessageQueue as Theirs,
        )

        return Theirs.create_from_handle(handle, rank)
    from weightsync.queues.message_queue import MessageQueue  # noqa: PLC0415

    return MessageQueue.create_from_handle(handle, rank)


def receive_all(queue: Any, how: str, count: int) -> None:
    if how == "read":
        for _ in range(count):
            with queue.read() as message:
                assert message is not None
    else:
        for _ in range(count):
            queue.dequeue()


def receive_paced(queue: Any, count: int) -> tuple[float, float]:
    """Return the median delay and the processor time of a message, in microseconds."""
    started = time.process_time()
    delays = []
    for _ in range(count):
        sent_ns = queue.dequeue()
        delays.append(time.monotonic_ns() - sent_ns)
    return statistics.median(delays) / 1e3, (time.process_time() - started) / count * 1e6


def reader_main(kind: str, rank: int, pipe: Any) -> None:
    queue = open_reader(kind, pipe.recv(), rank)
    queue.wait_until_ready()
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        how, count = order
        if how == "paced":
            pipe.send(receive_paced(queue, count))
        else:
            receive_all(queue, how, count)
            pipe.send(None)
    if hasattr(queue, "close"):
        queue.close()


def send_all(queue: Any, message: Any, count: int) -> None:
    for _ in range(count):
        queue.enqueue(message)


def send_paced(queue: Any, _: Any, count: int) -> None:
    for _ in range(count):
        time.sleep(PACE_S)
        queue.enqueue(time.monotonic_ns())


class Bench:
    """A writer and its reader processes, for some measurements."""

    def __init__(self, kind: str, readers: int, stack: ExitStack) -> None:
        context = mp.get_context("spawn")
        self._queue = open_writer(kind, readers)
        if hasattr(self._queue, "close"):
            stack.callback(self._queue.close)
        self._pipes = []
        for rank in range(readers):
            mine, its = context.Pipe()
            process = context.Process(target=reader_main, args=(kind, rank, its), daemon=True)
            process.start()
            stack.callback(process.join, WAIT_S)
            mine.send(self._queue.export_handle())
            self._pipes.append(mine)
        self._queue.wait_until_ready()
        self._answers()
        stack.callback(self._tell, None)

    def seconds(self, how: str, message: Any, count: int) -> float:
        """Return the time from the first send to the last read of all readers."""
        self._tell((how, count))
        started = time.perf_counter()
        send_all(self._queue, message, count)
        self._answers()
        return time.perf_counter() - started

    def paced(self, count: int) -> tuple[float, float]:
        """Return delay and processor time of a message, in microseconds; worst of the readers."""
        self._tell(("paced", count))
        send_paced(self._queue, None, count)
        delays, busy = zip(*self._answers(), strict=True)
        return max(delays), max(busy)

    def _tell(self, order: Any) -> None:
        for pipe in self._pipes:
            pipe.send(order)

    def _answers(self) -> list[Any]:
        answers = []
        for pipe in self._pipes:
            if not pipe.poll(WAIT_S):
                raise TimeoutError("a reader of the benchmark did not reply in time")
            answers.append(pipe.recv())
        return answers


def median_of(runs: int, measure: Callable[[], float]) -> float:
    return statistics.median(measure() for _ in range(runs))


def measure(kind: str, readers: int, *, small: int, large: int, runs: int) -> dict[str, float]:
    """Return microseconds per small message and GB/s of large ones, for each kind of reading."""
    with ExitStack() as stack:
        bench = Bench(kind, readers, stack)
        array = np.random.default_rng(0).integers(0, 255, LARGE_NBYTES, dtype=np.uint8)
        bench.seconds("dequeue", SMALL, small // 10)
        found = {
            "small_us": median_of(runs, lambda: bench.seconds("dequeue", SMALL, small))
            / small
            * 1e6
        }
        for how in ("dequeue", "read") if kind == "ours" else ("dequeue",):
            bench.seconds(how, array, 10)
            seconds = median_of(runs, lambda how=how: bench.seconds(how, array, large))  # type: ignore[misc]
            found[f"large_{how}_gbps"] = LARGE_NBYTES * large / seconds / 1e9
        found["paced_us"], found["paced_cpu_us"] = bench.paced(max(10, small // 100))
        return found


def memcpy_gbps() -> float:
    source = np.ones(LARGE_NBYTES, dtype=np.uint8)
    target = np.ones((10, LARGE_NBYTES), dtype=np.uint8)
    started = time.perf_counter()
    for i in range(50):
        np.copyto(target[i % 10], source)
    return 50 * LARGE_NBYTES / (time.perf_counter() - started) / 1e9


def elsewhere(python: str, kind: str, readers: int, args: argparse.Namespace) -> dict[str, float]:
    """Measure in a process of another Python, which may lack weightsync's packages."""
    sizes = [f"--{name}={getattr(args, name)}" for name in ("small", "large", "runs")]
    command = [python, __file__, f"--one={kind}", f"--readers={readers}", *sizes]
    root = str(Path(__file__).resolve().parent.parent)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=WAIT_S * 4,
        check=False,
        env={**os.environ, "PYTHONPATH": root},
    )
    if done.returncode:
        raise RuntimeError(f"{kind} failed:\n{done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def keep_best(results: dict[str, dict[str, float]], label: str, found: dict[str, float]) -> None:
    """Keep the highest rate and the lowest time of each figure."""
    kept = results.setdefault(label, found)
    for name, value in found.items():
        kept[name] = (max if name.endswith("gbps") else min)(kept[name], value)


def show(results: dict[str, dict[str, float]]) -> None:
    for label, found in results.items():
        print(f"{label:18}" + "  ".join(f"{name} {value:8.2f}" for name, value in found.items()))


def ratios(results: dict[str, dict[str, float]], readers: int) -> str:
    ours, theirs = results[f"ours, {readers}"], results[f"vllm, {readers}"]
    small = theirs["small_us"] / ours["small_us"]
    read = ours["large_read_gbps"] / theirs["large_dequeue_gbps"]
    copied = ours["large_dequeue_gbps"] / theirs["large_dequeue_gbps"]
    return (
        f"{readers} readers: small messages {small:.2f} x vLLM's rate, "
        f"16 MiB {read:.2f} x read in place, {copied:.2f} x copied out"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vllm-python", help="python of an environment with vLLM")
    parser.add_argument("--small", type=int, default=20000, help="small messages a run")
    parser.add_argument("--large", type=int, default=60, help="large messages a run")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1, help="turns; the best one counts")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", choices=("ours", "vllm"), help=argparse.SUPPRESS)
    parser.add_argument("--readers", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        sizes = {"small": args.small, "large": args.large, "runs": args.runs}
        print(json.dumps(measure(args.one, args.readers, **sizes)))
        return
    results: dict[str, dict[str, float]] = {}
    for _ in range(args.rounds):
        for readers in (1, 2):
            keep_best(results, f"ours, {readers}", elsewhere(sys.executable, "ours", readers, args))
            if args.vllm_python:
                found = elsewhere(args.vllm_python, "vllm", readers, args)
                keep_best(results, f"vllm, {readers}", found)
    if args.json:
        print(json.dumps({"memcpy_gbps": memcpy_gbps(), **results}))
        return
    show(results)
    print(f"memcpy of 16 MiB, ten targets in turn: {memcpy_gbps():.1f} GB/s")
    if args.vllm_python:
        for readers in (1, 2):
            print(ratios(results, readers))


if __name__ == "__main__":
    main()
