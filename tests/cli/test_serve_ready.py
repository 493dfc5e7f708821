"""`weightsync serve --json`: what a program that starts a server reads."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import requests

from tests.serve.servers import END_S, environment
from tests.shm.processes import line_of

COMMAND = [sys.executable, "-m", "weightsync", "serve", "--model", "tiny", "--port", "0", "--json"]


def test_one_line_says_all() -> None:
    process = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, text=True, env=environment())
    try:
        ready = json.loads(line_of(process))
        assert set(ready) == {"url", "token", "pid", "model"}
        assert (ready["pid"], ready["model"]) == (process.pid, "tiny")
        headers = {"Authorization": f"Bearer {ready['token']}"}
        assert requests.post(f"{ready['url']}/resume", timeout=240).status_code == 401
        answer = requests.post(f"{ready['url']}/resume", headers=headers, timeout=240)
        assert answer.status_code == 200, answer.text
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=END_S)
        assert (rest, process.returncode) == ("", 0)
    finally:
        process.kill()
        process.wait(END_S)
        if process.stdout is not None:
            process.stdout.close()
