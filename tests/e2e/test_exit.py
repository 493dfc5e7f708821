"""Interpreter exit waits for no peer, and tells those that live that the sender leaves.

It aborts no process whose threads are inside torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Client
from pathlib import Path

import pytest

import weightsync as ws
from tests.children import Program
from tests.e2e import models, processes
from tests.e2e.processes import wait_until

TRAINER = """
import logging, os, signal, sys, threading, time
import torch
import weightsync as ws
from tests.e2e import models

logging.basicConfig(level=logging.WARNING)
pid, stopped, *living = sys.argv[1:]
model = models.make("plain", seed=1)
ws.send_weights(model, living)
sender = ws.connect(model, to=stopped, timeout_s=600)
os.kill(int(pid), signal.SIGSTOP)
sending = threading.Thread(target=sender.send_weights, daemon=True)
sending.start()
while not any(flight for flight in sender._coordinator.fleet._flights._flying):
    time.sleep(0.01)
print("leaves", flush=True)
"""

BOTH = """
import weightsync as ws
from tests.e2e import models

receiver = ws.WeightReceiver(models.make("plain", seed=2))
sender = ws.connect(
    models.make("plain", seed=1), to=receiver.handle, backend="tcp", timeout_s=600
)
sender.send_weights()
print("leaves", flush=True)
"""
SENDING = """
import contextlib, os, signal, sys, threading, time
import weightsync as ws
from tests.e2e import models

url, pid, stops = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
sender = ws.connect(
    models.make("plain", seed=1),
    to=url,
    backend="tcp",
    timeout_s=600,
    bucket_nbytes=256,
    num_buckets=2,
)

def send():
    with contextlib.suppress(ws.WeightSyncError):  # the connection ended first, perhaps
        sender.send_weights()

sending = threading.Thread(target=send, daemon=True)
sending.start()
while not any(thread.name == "weightsync-uplink" for thread in threading.enumerate()):
    time.sleep(0.001)
if stops:
    os.kill(pid, signal.SIGSTOP)
print("leaves", sending.is_alive(), flush=True)
"""
SENDING_AGAIN = """
sent = threading.Event()

def send():
    with contextlib.suppress(ws.WeightSyncError):
        while True:
            sender.send_weights()
            sent.set()

threading.Thread(target=send, daemon=True).start()
assert sent.wait(60)
time.sleep(float(sys.argv[-1]))
print("leaves", flush=True)
"""
"""The end of a program: a daemon thread sends again and again; the last argument is a moment."""
AGAIN = """
import contextlib, sys, threading, time
import torch
import weightsync as ws

model = {"w": torch.zeros(1 << 20), "half": torch.zeros(1 << 20, dtype=torch.bfloat16)}
sender = ws.connect(model, to=sys.argv[1], dtype="float32")
"""
WITHIN = """
import contextlib, sys, threading, time
import torch
import weightsync as ws

model = {"w": torch.zeros(1 << 21), "half": torch.zeros(1 << 21, dtype=torch.bfloat16)}
kept = {}

def hook(pairs):
    for name, tensor in pairs:
        kept[name] = tensor.clone()

sender = ws.connect(model, to=ws.WeightReceiver(hook, apply="in_place"), dtype="float32")
"""
FREEING = """
import contextlib, math, sys, threading, time
import numpy as np
import torch
import weightsync as ws

how = sys.argv[1]
leaves = threading.Event()

class Slow(bytearray):
    def __del__(self):
        if how == "while an error is raised":
            leaves.set()
        time.sleep(0.2)  # torch, which frees this memory, waits for the interpreter

def source():
    yield "first", torch.zeros(64)
    value = 0.0 if sender is None or how == "while it waits" else math.nan
    memory = Slow(np.full(1 << 14, value, np.float32).tobytes())
    yield "second", torch.from_numpy(np.frombuffer(memory, np.float32))

def hook(pairs):
    for _ in pairs:
        if how == "while it waits":
            leaves.set()
            time.sleep(0.1)

def send():
    with contextlib.suppress(ws.WeightSyncError):
        sender.send_weights()

sender = None
sender = ws.connect(
    source,
    to=ws.WeightReceiver(hook, apply="in_place"),
    bucket_nbytes=256,
    num_buckets=2,
    check_finite="raise",
)
leaves.clear()
threading.Thread(target=send, daemon=True).start()
assert leaves.wait(60)
print("leaves", flush=True)
"""
RANK = """
import contextlib, sys, threading, time
import torch
import torch.distributed as dist
import weightsync as ws

rank, store, url = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
model = {"w": torch.zeros(1 << 20), "half": torch.zeros(1 << 20, dtype=torch.bfloat16)}
sender = ws.connect(model, to=url, dtype="float32")
"""
WAITING = """
import atexit, contextlib, sys, threading, time
import torch
import torch.distributed as dist
import weightsync as ws

rank, store, url, closes = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4] == "True"
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
sender = ws.connect({"w": torch.zeros(64)}, to=url, timeout_s=600)
sender.send_weights()
if rank:
    time.sleep(600)  # it does not come to the next call
if closes:
    atexit.register(sender.close)

def send():
    with contextlib.suppress(ws.WeightSyncError):
        sender.send_weights()

threading.Thread(target=send, daemon=True).start()
time.sleep(0.5)
print("leaves", flush=True)
"""
CLOSING = """
import atexit, contextlib, os, signal, sys, threading
import weightsync as ws
from tests.e2e import models

url, pid, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
sender = ws.connect(models.make("plain", seed=1), to=url, packed=True, timeout_s=600)
sender.send_weights() if how == "thread" else sender.send_async().result()
atexit.register(sender.close)
os.kill(pid, signal.SIGSTOP)

def send():
    with contextlib.suppress(ws.WeightSyncError):
        sender.send_weights()

if how == "thread":
    threading.Thread(target=send, daemon=True).start()
else:
    sender.send_async()
while not any(flight for flight in sender._coordinator.fleet._flights._flying):
    threading.Event().wait(0.01)
print("leaves", flush=True)
"""
ONE_CALL = """
import contextlib, json, os, signal, sys, threading, time, urllib.request
import torch
import weightsync as ws

url, pid, stops, *living = sys.argv[1:]
weights = {"w": torch.zeros(64)}
ws.send_weights(weights, to=living)

def send():
    with contextlib.suppress(ws.WeightSyncError):
        ws.send_weights(weights, to=url, timeout_s=600)

threading.Thread(target=send, daemon=True).start()
while not json.load(urllib.request.urlopen(url + "/weight_info")).get("busy"):
    time.sleep(0.01)
if stops == "True":
    os.kill(int(pid), signal.SIGSTOP)
print("leaves", flush=True)
"""
"""The end of a program: a daemon thread is in the one-call `send_weights`, whose hook works."""
AT_WORK = """
import asyncio, sys, threading
import torch
import weightsync as ws

entered = threading.Event()

class Slow:  # a receiver in which a call is at work for ever
    def handle(self, message):
        entered.set()
        threading.Event().wait()

    def status(self):
        return self.handle({})

    dispatch = report = handle

def workers():
    from weightsync.server.workers import Workers
    Workers({"first": Slow(), "second": Slow()}).status()

def actor():
    class Rollout(ws.ray.WeightSyncActor):
        async def generate(self): ...

    rollout = Rollout()
    rollout.weightsync_receiver = Slow()
    asyncio.run(ws.ray._AsyncVerbs.weight_checker(rollout))

def coroutine():
    async def send():
        sender = ws.connect({"w": torch.zeros(8)}, to=ws.WeightReceiver(Slow().handle))
        await sender.asend_weights()

    asyncio.run(send())

threading.Thread(target=globals()[sys.argv[1]], daemon=True).start()
assert entered.wait(60)
print("leaves", flush=True)
"""
RECEIVER = """
from multiprocessing.connection import Listener
import weightsync as ws
from tests.e2e import models

with Listener(("127.0.0.1", 0)) as listener:
    print(listener.address[1], flush=True)
    pipe = listener.accept()
receiver = ws.WeightReceiver(models.make("plain", seed=2))
while (message := pipe.recv()) is not None:
    pipe.send(receiver.handle(message))
print("leaves", flush=True)
"""
READING = """
import os, signal, sys, threading
from multiprocessing.connection import Client
import weightsync as ws

begun = threading.Event()
sender = int(sys.argv[1])

def hook(pairs):
    for _ in pairs:
        pass
    begun.set()
    threading.Event().wait()

def serve():
    with Client(("127.0.0.1", int(sys.argv[2]))) as pipe:
        while True:
            pipe.send(receiver.handle(pipe.recv()))

receiver = ws.WeightReceiver(hook, apply="in_place")
threading.Thread(target=serve, daemon=True).start()
assert begun.wait(60)
os.kill(sender, signal.SIGSTOP)
threading.Event().wait(0.5)  # its relay waits for the next chunk
print("leaves", flush=True)
"""
STOPPED = """
from multiprocessing.connection import Listener
import weightsync as ws
from tests.e2e import models

with Listener(("127.0.0.1", 0)) as listener:
    print(listener.address[1], flush=True)
    pipe = listener.accept()

def carry(message):
    pipe.send(dict(message))
    return pipe.recv()

ws.connect(
    models.make("plain", seed=1), to=carry, backend="tcp", timeout_s=600
).send_weights()
"""
EXIT_S = 30.0
THREADS_S = 2.0
"""What docs/guarantees.md gives the threads of connections."""


@dataclass(frozen=True)
class Ended:
    """How a program ended, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


class Running:
    """A program whose interpreter ends as that of a command does. It need not import torch anew."""

    def __init__(self, source: str, *arguments: str) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # `program` closes it
        self._process = Program(source, *arguments, stderr=self._errors.fileno(), finalizes=True)
        self.pid = self._process.pid

    def readline(self) -> str:
        """Return the next line of its stdout."""
        return self._process.stdout.readline()

    def end(self, timeout: float = processes.WAIT_S) -> Ended:
        """Wait for its end, and return what it has written since."""
        code = self._process.wait(timeout)
        self._errors.seek(0)
        return Ended(code, self._process.stdout.read(), self._errors.read())

    def close(self) -> None:
        """Kill it, if it has not ended."""
        self._process.kill()
        with self._errors, self._process:
            pass


@contextmanager
def program(source: str, *arguments: str) -> Iterator[Running]:
    """Run a program that is killed, if it has not ended, when the block does."""
    running = Running(source, *arguments)
    try:
        yield running
    finally:
        running.close()


def run(source: str, *arguments: str) -> Ended:
    """Run a program to its end."""
    with program(source, *arguments) as running:
        return running.end(2 * processes.WAIT_S)


def test_a_call_in_flight_and_two_that_live() -> None:
    with processes.host() as one, processes.host() as other:
        gone = one.receiver("http", model="plain")
        living = [other.receiver("http", model="plain") for _ in range(2)]
        assert one.process.pid is not None
        try:
            urls = [receiver.url for receiver in living]
            done = run(TRAINER, str(one.process.pid), gone.url, *urls)
        finally:
            os.kill(one.process.pid, signal.SIGCONT)
        assert (done.returncode, done.stdout) == (0, "leaves\n"), done.stderr
        assert not done.stderr
        wait_until(
            lambda: not any(receiver.status().get("senders") for receiver in living),
            "the sender to leave",
        )


def test_both_ends_of_the_path_tcp_in_one_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BOTH],
        timeout=processes.WAIT_S * 2,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaves\n", "")


@pytest.mark.parametrize("stops", [False, True])
def test_an_update_at_work_on_the_path_tcp(stops: bool) -> None:
    with processes.host() as host:
        receiver = host.receiver("http", model="plain", sink="hook", delay_s=0.02)
        arguments = [receiver.url, str(host.process.pid), str(stops)]
        with program(SENDING, *arguments) as trainer:
            assert host.process.pid is not None
            try:
                said = trainer.readline()
                begin = time.monotonic()
                ended = trainer.end()
                took_s = time.monotonic() - begin
            finally:
                os.kill(host.process.pid, signal.SIGCONT)
        assert (said, ended) == ("leaves True\n", Ended(0, "", ""))
        assert took_s < EXIT_S
        with ws.connect(models.make("plain", seed=3), to=receiver.url) as successor:
            successor.send_weights()


def test_a_thread_that_sends_again_and_again() -> None:
    """A thread that was inside torch when the interpreter exits aborted the process."""
    with processes.host() as host:
        receiver = host.receiver("http", sink="hook", apply="in_place")
        for moment in (0, 2):
            done = run(AGAIN + SENDING_AGAIN, receiver.url, str(0.01 * moment))
            assert done == Ended(0, "leaves\n", "")


def test_a_sender_and_its_receiver_in_one_process() -> None:
    for moment in (0, 2, 5):
        assert run(WITHIN + SENDING_AGAIN, str(0.01 * moment)) == Ended(0, "leaves\n", "")


@pytest.mark.parametrize("when", ["while it waits", "while an error is raised"])
def test_a_thread_that_frees_tensors_late(when: str) -> None:
    assert run(FREEING, when) == Ended(0, "leaves\n", "")


def test_two_ranks_that_send_again_and_again(tmp_path: Path) -> None:
    with processes.host() as host:
        receiver = host.receiver("http", sink="hook", apply="in_place")
        for number in range(2):
            with ExitStack() as stack:
                arguments = [str(tmp_path / str(number)), receiver.url, "0"]
                ranks = [
                    stack.enter_context(program(RANK + SENDING_AGAIN, str(rank), *arguments))
                    for rank in range(2)
                ]
                ended = [rank.end() for rank in ranks]
            assert [(rank.returncode, rank.stdout) for rank in ended] == [(0, "leaves\n")] * 2, (
                ended
            )


@pytest.mark.parametrize("closes", [False, True])
def test_a_rank_waits_for_no_other_that_does_not_come(tmp_path: Path, closes: bool) -> None:
    with processes.host() as host:
        receiver = host.receiver("http", sink="hook", apply="in_place")
        arguments = [str(tmp_path / "store"), receiver.url, str(closes)]
        with program(WAITING, "1", *arguments), program(WAITING, "0", *arguments) as first:
            said = first.readline()
            begin = time.monotonic()
            ended = first.end()
            took_s = time.monotonic() - begin
    assert (said, ended) == ("leaves\n", Ended(0, "", ""))
    assert took_s < EXIT_S


@pytest.mark.parametrize("how", ["thread", "send_async"])
def test_a_close_at_exit_waits_for_no_receiver_that_is_stopped(how: str) -> None:
    with processes.host() as host:
        receiver = host.receiver("http", model="plain")
        with program(CLOSING, receiver.url, str(host.process.pid), how) as trainer:
            assert host.process.pid is not None
            try:
                said = trainer.readline()
                begin = time.monotonic()
                ended = trainer.end()
                took_s = time.monotonic() - begin
            finally:
                os.kill(host.process.pid, signal.SIGCONT)
    assert (said, ended) == ("leaves\n", Ended(0, "", ""))
    assert took_s < EXIT_S


@pytest.mark.parametrize("where", ["workers", "actor", "coroutine"])
def test_a_hook_at_work_in_a_thread_of_ours(where: str) -> None:
    """The threads of an executor would be waited for, as long as the hook works."""
    if where == "actor":
        pytest.importorskip("ray")
    with program(AT_WORK, where) as process:
        said = process.readline()
        ended = process.end()
    assert (said, ended) == ("leaves\n", Ended(0, "", ""))


@pytest.mark.parametrize("stops", [False, True])
def test_a_call_without_a_sender_at_work(stops: bool) -> None:
    """Its connection is closed like that of a sender: without waiting for the hook."""
    with processes.host() as host, processes.host() as other:
        busy = host.receiver("http", sink="hook", delay_s=2 * EXIT_S)
        living = other.receiver("http", sink="hook")
        arguments = [busy.url, str(host.process.pid), str(stops), living.url]
        try:
            with program(ONE_CALL, *arguments) as trainer:
                said = trainer.readline()
                begin = time.monotonic()
                ended = trainer.end(2 * processes.WAIT_S)
                took_s = time.monotonic() - begin
        finally:
            host.kill()
        assert (said, ended) == ("leaves\n", Ended(0, "", ""))
        assert took_s < EXIT_S
        wait_until(lambda: not living.status().get("senders"), "the sender to leave")


def test_a_receiver_at_work_whose_sender_is_stopped() -> None:
    """Its relay waits for a chunk, which the sender would have minutes to send."""
    with program(STOPPED) as trainer:
        port = trainer.readline().strip()
        with program(READING, str(trainer.pid), port) as receiver:
            said = receiver.readline()
            begin = time.monotonic()
            ended = receiver.end()
            took_s = time.monotonic() - begin
    assert (said, ended) == ("leaves\n", Ended(0, "", ""))
    assert took_s < THREADS_S + 15


def test_a_receiver_whose_sender_leaves_while_it_exits() -> None:
    over = False
    with program(RECEIVER) as process, Client(("127.0.0.1", int(process.readline()))) as pipe:

        def carry(message: Mapping[str, object]) -> object:
            if over:
                raise ConnectionError("the receiver has left")
            pipe.send(dict(message))
            return pipe.recv()

        weights = models.make("plain", seed=1)
        with ws.connect(weights, to=carry, backend="tcp") as sender:
            sender.send_weights()
            pipe.send(None)
            assert process.readline() == "leaves\n"
            over = True
        ended = process.end()
    assert ended == Ended(0, "", "")
