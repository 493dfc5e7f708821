"""The sharded example under torchrun, as a user runs it."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
ENVIRONMENT = {
    **os.environ,
    "WEIGHTSYNC_TOKEN": "a-token-for-this-test",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
WAIT_S = 60.0


def torchrun(*arguments: str, example: str = "fsdp2_torchrun.py", ranks: int = 2) -> list[str]:
    """Run an example on several ranks; return what it printed. No process outlives this."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
        *(str(EXAMPLES / example), *arguments),
    ]
    process = subprocess.Popen(
        command,
        env=ENVIRONMENT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        said, errors = process.communicate(timeout=WAIT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(WAIT_S)
    assert process.returncode == 0, errors
    # Both ranks write to one pipe: the end of a line may come after the other's next line.
    return [line for line in re.split(r"\n|(?=rank \d: )", said) if line]


@contextmanager
def server(port: int) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, EXAMPLES / "receiver.py", str(port)], env=ENVIRONMENT
    )
    try:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline and process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.usefixtures("shm_clean")
@pytest.mark.parametrize(
    "ranks", [3, *(pytest.param(ranks, marks=pytest.mark.soak) for ranks in (2, 4))]
)
def test_to_a_receiver_of_its_own(ranks: int) -> None:
    """It says that nothing was gathered; of three ranks, some hold no row of the last layer."""
    *reports, answer, served = torchrun(ranks=ranks)
    assert sum("verified: held" in line for line in reports) == 5
    said = [line for line in reports if line.startswith("gathered: ")]
    assert len(said) == 5
    for line in said:
        gathered, _, sources = line.partition("; bytes read from each rank: ")
        assert gathered == "gathered: nothing"
        read = ast.literal_eval(sources)
        assert list(read) == list(range(ranks))
        assert sum(read.values()) == 4 * (4 * 8 + 8 + 8 * 2 + 2)
    trained = ast.literal_eval(answer.removeprefix("answer "))
    assert ast.literal_eval(served.removeprefix("served ")) == pytest.approx(trained, rel=1e-5)


@pytest.mark.soak
@pytest.mark.usefixtures("shm_clean")
def test_to_a_server() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    with server(port):
        *_, answer = torchrun(f"http://127.0.0.1:{port}")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/answer?x=0.5", timeout=5) as reply:
            after = json.load(reply)
    assert after["version"] == 5
    trained = ast.literal_eval(answer.removeprefix("answer "))
    assert after["answer"] == pytest.approx(trained, rel=1e-5)
