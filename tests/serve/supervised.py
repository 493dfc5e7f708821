"""The processes of the supervisor's tests, and programs that supervise some of them."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from weightsync.errors import ManifestMismatchError
from weightsync.serve.child_process import ChildSpec, Ready
from weightsync.serve.process_managers import APIServerProcessManager, ClientConfig
from weightsync.serve.supervisor import Supervisor
from weightsync.shm.segment import Segment

WAIT_S = 60.0
MARK = "WEIGHTSYNC_TEST_MARK"


def idle(ready: Ready) -> None:
    """Report ready with the process id, and serve until SIGTERM."""
    ready(str(os.getpid()).encode())
    while True:
        signal.pause()


def say_environment(ready: Ready, name: str) -> None:
    ready(os.environ.get(name, "").encode())
    signal.pause()


def say_interrupts(ready: Ready) -> None:
    """Report whether SIGINT is ignored and blocked here."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, set())
    ready(f"{ignored} {blocked}".encode())
    signal.pause()


def with_belongings(ready: Ready) -> None:
    """Make shared memory, and a child that survives its parent's SIGTERM and SIGKILL."""
    segment = Segment.create(4096)
    subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL)
    ready(segment.name.encode())
    while True:
        signal.pause()


def with_forked_child(ready: Ready) -> None:
    """Fork a child, which keeps all of this process's pipes open."""
    if not os.fork():
        time.sleep(WAIT_S)
        os._exit(0)
    ready()
    signal.pause()


def note_end(ready: Ready, log: Path) -> None:
    """On SIGTERM take a moment, then add this process's name to a log."""
    try:
        ready()
        signal.pause()
    finally:
        time.sleep(0.2)
        with log.open("a") as file:
            file.write(f"{multiprocessing.current_process().name}\n")


def stubborn(ready: Ready) -> None:
    """Ignore SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready()
    while True:
        signal.pause()


def never_ready(ready: Ready) -> None:
    signal.pause()


def fails_at_start(ready: Ready) -> None:
    raise ManifestMismatchError("two tensors are missing", missing=["a", "b"])


def fails_strangely(ready: Ready) -> None:
    raise KeyError("no such layer")


def leaves_at_start(ready: Ready, code: int) -> None:
    raise SystemExit(code)


def fails_later(ready: Ready) -> None:
    ready()
    raise ManifestMismatchError("the weights are gone")


def fails_alone() -> None:
    """End with an exit code of its own, as a process that no Child watches."""
    raise SystemExit(3)


def ends(ready: Ready, code: int) -> None:
    ready()
    time.sleep(0.5)  # the end of one that is not known to be ready is a failed start
    raise SystemExit(code)


def answer(ready: Ready, sock: socket.socket, config: ClientConfig, greeting: str) -> None:
    """Answer one connection after the other with this server's text."""
    ready()
    while True:
        client, _ = sock.accept()
        with client:
            told = [config.client_index, config.client_count, config.input_address]
            more = [config.output_address, config.stats_update_address, greeting]
            client.sendall(json.dumps([*told, *more]).encode())


def sleep(_ready: Ready, _sock: socket.socket, _config: ClientConfig) -> None:
    """Print the process id, then answer no connection."""
    print(os.getpid(), flush=True)
    time.sleep(WAIT_S * 10)


def sleep_with_gil(_ready: Ready, _sock: socket.socket, _config: ClientConfig) -> None:
    """Print the process id, then run native code that keeps the GIL."""
    print(os.getpid(), flush=True)
    ctypes.PyDLL(None).sleep(600)


def tree_of_three() -> dict[str, list[ChildSpec]]:
    """Return a worker with belongings, an engine core and an API server."""
    return {
        "workers": [ChildSpec(name="worker 0.0", target=with_belongings)],
        "engine cores": [ChildSpec(name="engine core 0", target=idle)],
        "API servers": [ChildSpec(name="api server 0", target=idle)],
    }


def start(tree: Supervisor, groups: dict[str, list[ChildSpec]]) -> list[bytes]:
    """Start groups next to each other, since each process takes seconds to load torch.

    Return the payloads of their `ready`.
    """
    for group, specs in groups.items():
        tree.launch(group, specs)
    return [payload for group in groups for payload in tree.await_ready(group, timeout_s=WAIT_S)]


def serve() -> None:
    """Run as a server: print the name of its worker's segment, its directory; then wait.

    For `program`.
    """
    with Supervisor() as tree:
        segment, *_ = start(tree, tree_of_three())
        print(segment.decode(), flush=True)
        print_and_wait(tree)
    print("closed", flush=True)


def print_and_wait(tree: Supervisor) -> None:
    """Print the directory of the sockets, then wait; Ctrl-C may come before `wait` has begun."""
    with suppress(KeyboardInterrupt):
        print(tree.directory, flush=True)
        tree.wait()


def run_api_server(target: Callable[..., None], *, fork: bool = False) -> None:
    """Run an API server without a supervisor, print its process id, then wait.

    With `fork`, fork a child first, which keeps all pipes of this process open.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        servers = APIServerProcessManager(
            target, listener, input_addresses=["ipc://in"], output_addresses=["ipc://out"]
        )
        try:
            if not fork or os.fork():
                print(servers.processes[0].pid, flush=True)
            time.sleep(WAIT_S)
        finally:
            servers.close()


def serve_asleep() -> None:
    """Run an API server that sleeps. For `program`."""
    run_api_server(sleep)


def serve_with_gil() -> None:
    """Run an API server that keeps the GIL. For `program`."""
    run_api_server(sleep_with_gil)


def serve_and_fork() -> None:
    """Run an API server in a process that then forks. For `program`."""
    run_api_server(sleep, fork=True)


def serve_stubborn() -> None:
    """Run as a server whose processes do not end by themselves. For `program`."""
    with Supervisor(grace_s=1, shutdown_s=2) as tree:
        tree.start("cores", [ChildSpec(name="core 0", target=stubborn)], timeout_s=WAIT_S)
        print_and_wait(tree)
        print("closing", flush=True)
    print("closed", flush=True)


def start_first() -> None:
    """Start the first child of a process that has no resource tracker yet. For `program`."""
    with Supervisor() as tree:
        tree.launch("cores", [ChildSpec(name="core 0", target=say_interrupts)])
        (said,) = tree.await_ready("cores", timeout_s=WAIT_S)
        print(said.decode(), flush=True)


def program(name: str, mark: str) -> subprocess.Popen[str]:
    """Run a function of this module as a program with a process group of its own."""
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", f"from tests.serve.supervised import {name}; {name}()"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), MARK: mark},
        start_new_session=True,
    )
