"""Whole updates by the backend `nixl`, beside bare reads of NIXL of the same bytes.

    python -m benchmarks.nixl_read [--mib 256] [--rounds 5] [--transports tcp,self:tcp,sm,self]

Two processes on loopback. The receiving process reads the trainer's memory by bare READs, with
NIXL's own settings: alone, and while a thread of it copies as many bytes, as loading them does.
Then it receives updates without verification, which are read chunk by chunk, loaded into a
module and committed. UCX reads its settings once for each process, so each choice of transports has
processes of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

TENSORS = 300
CHUNK_NBYTES = 4 << 20
WAIT_S = 120.0


def module_of(nbytes: int) -> nn.Module:
    """Return a module of equal bf16 parameters."""
    return nn.ParameterList(
        nn.Parameter(torch.ones(nbytes // TENSORS // 2, dtype=torch.bfloat16), requires_grad=False)
        for _ in range(TENSORS)
    )


def make_agent(name: str) -> Any:
    """Return an agent as NIXL makes it by default."""
    from nixl._api import nixl_agent, nixl_agent_config  # noqa: PLC0415  # reads UCX_TLS

    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


def receive(pipe: Connection, nbytes: int) -> None:
    """Answer messages, and read on demand."""
    import weightsync as ws  # noqa: PLC0415  # as above

    torch.set_num_threads(1)
    receiver = ws.WeightReceiver(module_of(nbytes))
    memory, loaded = torch.zeros(2, nbytes, dtype=torch.uint8)
    agent: Any = None
    peer = b""

    def load() -> None:
        for start in range(0, nbytes, CHUNK_NBYTES):
            part = slice(start, start + CHUNK_NBYTES)
            loaded[part].copy_(memory[part])

    while True:
        what, argument = pipe.recv()
        if what == "end":
            return
        if what == "handle":
            pipe.send(receiver.handle(argument))
        elif what == "begin":  # so that no thread of NIXL's runs beside an update
            agent = make_agent("bare-reader")
            agent.register_memory(memory)
            peer = agent.add_remote_agent(argument)
            pipe.send(None)
        elif what == "stop":
            agent = None
            pipe.send(None)
        else:
            address, loads = argument
            loading = threading.Thread(target=load if loads else int)
            began = time.perf_counter()
            loading.start()
            local = agent.get_xfer_descs([(memory.data_ptr(), nbytes, 0)], mem_type="DRAM")
            remote = agent.get_xfer_descs([(address, nbytes, 0)], mem_type="DRAM")
            handle = agent.initialize_xfer("READ", local, remote, peer)
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            agent.release_xfer_handle(handle)
            loading.join()
            pipe.send((state, time.perf_counter() - began))


def measure(nbytes: int, rounds: int) -> dict[str, float]:
    """Return medians in seconds, of all ways."""
    import weightsync as ws  # noqa: PLC0415  # as above

    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    other = context.Process(target=receive, args=(theirs, nbytes), daemon=True)
    other.start()

    def ask(what: str, argument: object = None) -> Any:
        pipe.send((what, argument))
        if not pipe.poll(WAIT_S):
            raise TimeoutError(what)
        return pipe.recv()

    began = time.perf_counter()
    agent = make_agent("bare-writer")
    memory = torch.ones(nbytes, dtype=torch.uint8)
    agent.register_memory(memory)
    ask("begin", agent.get_agent_metadata())
    bare_connect_s = time.perf_counter() - began
    bare: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds + 2):
        for loads, found in bare.items():
            state, seconds = ask("read", (memory.data_ptr(), loads))
            if state != "DONE":
                raise RuntimeError(state)
            found.append(seconds)
    ask("stop")
    del agent
    began = time.perf_counter()
    updates = []
    with ws.connect(
        module_of(nbytes),
        to=lambda message: ask("handle", message),
        backend="nixl",
        verify=False,
        delta="off",
        timeout_s=WAIT_S,
    ) as sender:
        connect_s = time.perf_counter() - began
        for _ in range(rounds + 2):
            began = time.perf_counter()
            sender.send_weights()
            updates.append(time.perf_counter() - began)
    pipe.send(("end", None))
    other.join(WAIT_S)
    return {
        "bare_s": statistics.median(bare[False][2:]),
        "beside_s": statistics.median(bare[True][2:]),
        "update_s": statistics.median(updates[2:]),
        "bare_connect_s": bare_connect_s,
        "connect_s": connect_s,
    }


def main() -> None:
    """Measure each choice of transports in a process of its own; print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--transports", default="tcp,self:tcp,sm,self")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    nbytes = (options.mib << 20) // TENSORS // 2 * TENSORS * 2
    if options.one:
        print("FOUND " + json.dumps(measure(nbytes, options.rounds)))
        return
    columns = ["bare read, GB/s", "beside a copy", "update", "update / bare", "/ beside a copy"]
    print(f"| UCX_TLS | {' | '.join(columns)} | connect, s | bare, s |")
    print("|---" + "|---:" * (len(columns) + 2) + "|")
    sizes = ["--mib", str(options.mib), "--rounds", str(options.rounds)]
    for transports in options.transports.split(":"):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.nixl_read", "--one", *sizes],
            env={**os.environ, "UCX_TLS": transports, "UCX_LOG_LEVEL": "error"},
            capture_output=True,
            text=True,
            check=False,
        )
        if "FOUND " not in done.stdout:
            raise SystemExit(done.stderr)
        found = json.loads(done.stdout.partition("FOUND ")[2].splitlines()[0])
        bare, beside, update = (
            nbytes / found[key] / 1e9 for key in ("bare_s", "beside_s", "update_s")
        )
        print(
            f"| {transports} | {bare:.2f} | {beside:.2f} | {update:.2f} | {update / bare:.2f} "
            f"| {update / beside:.2f} | {found['connect_s']:.2f} | {found['bare_connect_s']:.2f} |"
        )


if __name__ == "__main__":
    main()
