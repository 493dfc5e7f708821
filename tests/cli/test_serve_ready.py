"""`weightsync serve --json`: what a program that starts a server reads."""

from __future__ import annotations

import json
import signal

import requests

from tests.serve import forked
from tests.serve.servers import END_S, arguments, environment


def test_one_line_says_all() -> None:
    process = forked.program(arguments("--json"), env=environment())
    try:
        ready = json.loads(process.stdout.readline())
        assert set(ready) == {"url", "token", "pid", "model"}
        assert (ready["pid"], ready["model"]) == (process.pid, "tiny")
        headers = {"Authorization": f"Bearer {ready['token']}"}
        assert requests.post(f"{ready['url']}/resume", timeout=240).status_code == 401
        answer = requests.post(f"{ready['url']}/resume", headers=headers, timeout=240)
        assert answer.status_code == 200, answer.text
        process.send_signal(signal.SIGTERM)
        code = process.wait(END_S)
        assert (process.stdout.read(), code) == ("", 0)
    finally:
        process.kill()
        with process:
            pass
