"""A real vLLM server, as a user starts it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import requests
import torch

from tests.hosts.namespaces import Host
from tests.vllm.tiny import LARGEST_DIFFERENCE, PROMPT, TOKENS, expected, largest_difference

READY_S = 480.0
ANSWER_S = 60.0
_NOT_INHERITED = (
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_ALLOW_INSECURE_SERIALIZATION",  # not needed, as the docs promise
    "WEIGHTSYNC_VLLM_APPLY",
)


class Served:
    """Client of the server at a URL, which only `host` may reach."""

    def __init__(
        self, url: str, process: subprocess.Popen[Any], log: Path, host: Host | None = None
    ) -> None:
        self.url = url
        self.process = process
        self.log = log
        self._host = host

    def get(self, path: str) -> Any:
        answer = self.ask("GET", path)
        answer.raise_for_status()
        return answer.json()

    def post(self, path: str, body: dict[str, Any] | None = None) -> requests.Response:
        return self.ask("POST", path, json=body)

    def ask(self, method: str, path: str, **given: Any) -> requests.Response:
        """Return the answer to a request, made on the server's host."""

        def call() -> requests.Response:
            return requests.request(method, f"{self.url}/{path}", **{"timeout": ANSWER_S, **given})

        return call() if self._host is None else self._host.call(call)

    def request(
        self, model: str, prompt: Sequence[int] = PROMPT, tokens: int = TOKENS
    ) -> requests.Response:
        """Return the answer to a request for a greedy continuation."""
        return self.post(
            "v1/completions",
            {
                "model": model,
                "prompt": list(prompt),
                "max_tokens": tokens,
                "temperature": 0,
                "logprobs": 1,
                "ignore_eos": True,
                "return_token_ids": True,
            },
        )

    def complete(
        self, tokens: int = TOKENS, *, model: str = "tiny", prompt: Sequence[int] = PROMPT
    ) -> tuple[list[int], list[float]]:
        """Return a model's greedy continuation of a prompt, and each token's log-probability."""
        answer = self.request(model, prompt, tokens)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    def assert_computes(self, model: torch.nn.Module, prompt: Sequence[int] = PROMPT) -> None:
        """Assert that the server generates as transformers does with these weights."""
        tokens, logprobs = self.complete(prompt=prompt)
        wanted, wanted_logprobs = expected(model, prompt)
        assert tokens == wanted
        assert largest_difference(logprobs, wanted_logprobs) < LARGEST_DIFFERENCE

    def cached(self, queried: int = 0) -> tuple[int, int]:
        """Return how many tokens vLLM looked for in its prefix cache, and how many it found.

        Waits until it counts at least `queried`: it may count a request after its answer.
        """
        deadline = time.monotonic() + ANSWER_S
        while True:
            text = self.ask("GET", "metrics").text
            looked_for, found = (
                int(sum(map(float, re.findall(rf"(?m)^vllm:{name}_total\{{.*\}} (\S+)$", text))))
                for name in ("prefix_cache_queries", "prefix_cache_hits")
            )
            if looked_for >= queried:
                return looked_for, found
            assert time.monotonic() < deadline, f"{looked_for} of {queried} tokens are counted"
            time.sleep(0.05)

    @property
    def is_paused(self) -> bool:
        return bool(self.get("is_paused")["is_paused"])


@contextmanager
def vllm_server(
    folder: Path,
    log: Path,
    *,
    workers: int = 1,
    backend: str | None = "weightsync",
    dev_mode: bool = True,
    apply: str | None = None,
    port: int | None = None,
    options: Mapping[str, str] | None = None,
    variables: Mapping[str, str] | None = None,
    module: str = "vllm.entrypoints.openai.api_server",
    python: str = sys.executable,
    host: Host | None = None,
) -> Iterator[Served]:
    """Start a server on the model in `folder`, and end it with everything it started.

    `apply` is the value of its variable for the kind of update; None leaves it unset. Without
    `backend` it has no engine for weights. `port` is for one that was started before. `options` are
    further ones of the command line, and `variables` of its environment. `module` is another
    program that takes the same command line, and `python` the interpreter of another environment.
    It is on `host`, or on this machine's loopback interface.
    """
    port = port or _free_port()
    address = "127.0.0.1" if host is None else host.address
    arguments = {
        "--model": str(folder),
        "--served-model-name": "tiny",
        "--host": address,
        "--port": str(port),
        "--gpu-memory-utilization": "0.5",  # of the host; vLLM wants that much free
        "--dtype": "float32",
        "--max-model-len": "256",
        "--max-num-seqs": "8",
        "--max-num-batched-tokens": "256",
        "--tensor-parallel-size": str(workers),
    }
    if backend is not None:
        arguments["--weight-transfer-config"] = f'{{"backend":"{backend}"}}'
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1" if dev_mode else "0"}
    for name in _NOT_INHERITED:
        environment.pop(name, None)
    environment |= variables or {}
    if apply is not None:
        environment["WEIGHTSYNC_VLLM_APPLY"] = apply
    if workers > 1:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(n) for n in range(workers))
    command = [python, "-m", module, "--enforce-eager"]
    arguments |= options or {}
    command += [word for pair in arguments.items() for word in pair if word]
    with log.open("wb") as output:
        start: Callable[..., subprocess.Popen[Any]]
        start = subprocess.Popen if host is None else host.popen
        process = start(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            served = Served(f"http://{address}:{port}", process, log, host)
            _await_ready(served)
            yield served
        finally:
            _end(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await_ready(served: Served) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if served.process.poll() is not None:
            break
        try:
            if served.ask("GET", "health", timeout=5).status_code == 200:
                return
        except requests.ConnectionError:
            time.sleep(0.5)
    raise RuntimeError(f"vLLM did not start:\n{served.log.read_text(errors='replace')[-3000:]}")


def _end(process: subprocess.Popen[Any]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
