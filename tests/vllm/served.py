"""A real vLLM server, as a user starts it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import requests
import torch

from tests.vllm.tiny import LARGEST_DIFFERENCE, PROMPT, TOKENS, expected, largest_difference

READY_S = 480.0
ANSWER_S = 60.0
_NOT_INHERITED = (
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_ALLOW_INSECURE_SERIALIZATION",  # not needed, as the docs promise
    "WEIGHTSYNC_VLLM_APPLY",
)


class Served:
    """Client of the server at a URL."""

    def __init__(self, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.url = url
        self.process = process
        self.log = log

    def get(self, path: str) -> Any:
        answer = requests.get(f"{self.url}/{path}", timeout=ANSWER_S)
        answer.raise_for_status()
        return answer.json()

    def post(self, path: str, body: dict[str, Any] | None = None) -> requests.Response:
        return requests.post(f"{self.url}/{path}", json=body, timeout=ANSWER_S)

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
            text = requests.get(f"{self.url}/metrics", timeout=ANSWER_S).text
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
) -> Iterator[Served]:
    """Start a server on the model in `folder`, and end it with everything it started.

    `apply` is the value of its variable for the kind of update; None leaves it unset. Without
    `backend` it has no engine for weights. `port` is for one that was started before. `options` are
    further ones of the command line, and `variables` of its environment. `module` is another
    program that takes the same command line, and `python` the interpreter of another environment.
    """
    port = port or _free_port()
    arguments = {
        "--model": str(folder),
        "--served-model-name": "tiny",
        "--host": "127.0.0.1",
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
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            served = Served(f"http://127.0.0.1:{port}", process, log)
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
            if requests.get(f"{served.url}/health", timeout=5).status_code == 200:
                return
        except requests.ConnectionError:
            time.sleep(0.5)
    raise RuntimeError(f"vLLM did not start:\n{served.log.read_text(errors='replace')[-3000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
