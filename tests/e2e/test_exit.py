"""Interpreter exit waits for no peer, and tells those that live that the sender leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.e2e import processes
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
while not any(flight for flight in sender._lead.fleet._flights._flying):
    time.sleep(0.01)
print("leaves", flush=True)
"""


def test_a_call_in_flight_and_two_that_live() -> None:
    with processes.host() as one, processes.host() as other:
        gone = one.receiver("http", model="plain")
        living = [other.receiver("http", model="plain") for _ in range(2)]
        assert one.process.pid is not None
        try:
            done = subprocess.run(
                [
                    sys.executable,
                    "-c",
                    TRAINER,
                    str(one.process.pid),
                    gone.url,
                    *(receiver.url for receiver in living),
                ],
                timeout=processes.WAIT_S * 2,
                capture_output=True,
                text=True,
                check=False,
            )
        finally:
            os.kill(one.process.pid, signal.SIGCONT)
        assert (done.returncode, done.stdout) == (0, "leaves\n"), done.stderr
        assert not done.stderr
        wait_until(
            lambda: not any(receiver.status().get("senders") for receiver in living),
            "the sender to leave",
        )
