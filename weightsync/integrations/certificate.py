"""A certificate of a server's updates: after each it equals one that loaded the same checkpoint.

Compared are the fingerprints of every parameter and buffer that the engine can name, greedy tokens,
and their log-probabilities.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from weightsync.errors import (
    ConfigError,
    ProcessLostError,
    ProtocolError,
    RemoteError,
    TransportTimeout,
)
from weightsync.sender import connect
from weightsync.transports.factory import TransportFactory
from weightsync.transports.tokens import token_from_environment
from weightsync.wire.messages import CheckReply, CheckRequest

PROMPTS = [[(7 * i * i + 13 * j + 5) % 200 + 1 for j in range(3 + 5 * i)] for i in range(6)]
"""Prompts of token ids, which every vocabulary has."""
TOKENS = 16
TOLERANCE = 1e-3
"""Of log-probabilities; those of other weights differ by far more."""
_START_S = 900.0
_CALL_S = 120.0
_END_S = 20.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a server holds and computes: fingerprints by name, and greedy tokens of each prompt."""

    version: int
    checksums: dict[str, str]
    tokens: list[list[str]]
    logprobs: list[list[float]]


@dataclass(frozen=True, slots=True)
class Step:
    """One update: the checkpoint, the version, and how the server differs from a cold one."""

    update: int
    checkpoint: str
    version: int
    seconds: float
    checked: int
    differences: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Server:
    """A server at a URL; `token` None is that of the environment."""

    url: str
    token: str | None = None

    def look(self) -> Snapshot:
        """Return what the server holds and computes now. Raises the errors of its transport."""
        checksums: dict[str, str] = {}
        with ExitStack() as stack:
            workers = TransportFactory(self.token).every(self.url)
            for worker in workers:
                stack.enter_context(closing(worker))
            version = 0
            for rank, worker in enumerate(workers):
                reply = worker.call(CheckRequest(), timeout_s=_CALL_S)
                if not isinstance(reply, CheckReply):
                    raise ProtocolError(f"{self.url} does not say what it holds")
                version = reply.version
                prefix = f"worker {rank}: " if len(workers) > 1 else ""
                checksums |= {prefix + name: held for name, held in reply.checksums.items()}
        answers = [self._complete(prompt) for prompt in PROMPTS]
        return Snapshot(
            version,
            checksums,
            [answer["tokens"] for answer in answers],
            [answer["token_logprobs"] for answer in answers],
        )

    def model(self) -> tuple[str, str]:
        """Return the name of the served model, and the directory from which it was loaded."""
        listed = self.request("v1/models")["data"][0]
        return listed["id"], listed.get("root") or ""

    def send(self, source: object, *, timeout_s: float) -> float:
        """Send a checkpoint; return the seconds of the update."""
        with connect(source, self.url, token=self.token, timeout_s=timeout_s) as sender:
            return sender.send_weights().seconds["total"]

    def request(self, path: str, body: object | None = None, timeout_s: float = _CALL_S) -> Any:
        """Return the JSON of an answer. Raises RemoteError for an error of the server."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        token = token_from_environment() if self.token is None else self.token
        if token:
            headers["Authorization"] = f"Bearer {token}"
        plain = self.url.removeprefix("vllm+").rstrip("/")
        request = urllib.request.Request(f"{plain}/{path}", data, headers)  # noqa: S310  # a user's URL
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=timeout_s) as answer:
                text = answer.read()
                return json.loads(text) if text else {}
        except (urllib.error.URLError, TimeoutError, ValueError) as exc:
            raise RemoteError(
                f"{self.url}/{path}: {exc}", remote_type=type(exc).__name__, remote_message=str(exc)
            ) from exc

    def _complete(self, prompt: Sequence[int]) -> Any:
        name, _ = self.model()
        body = {
            "model": name,
            "prompt": list(prompt),
            "max_tokens": TOKENS,
            "temperature": 0,
            "logprobs": 1,
        }
        return self.request("v1/completions", body)["choices"][0]["logprobs"]


def certify(
    server: Server, cold: Snapshot, *, first: object, second: object, timeout_s: float
) -> list[Step]:
    """Send `second`, `first`, `second` and `first`; return how the server differs after each.

    `server` was started with the checkpoint `first` and has had no update: what it holds now is
    what later updates with `first` are compared with. `cold` is of a server that was started with
    `second`. Raises ConfigError for a server that has had updates.
    """
    began = server.look()
    if began.version:
        raise ConfigError(
            f"{server.url} holds version {began.version}, not what it loaded when it was started; "
            "start it again"
        )
    steps = []
    turns = (("B", second, cold), ("A", first, began)) * 2
    for number, (name, source, wanted) in enumerate(turns, 1):
        seconds = server.send(source, timeout_s=timeout_s)
        held = server.look()
        found = differences(held, wanted)
        steps.append(Step(number, name, held.version, seconds, len(wanted.checksums), found))
    return steps


def differences(warm: Snapshot, cold: Snapshot) -> list[str]:
    """Return how two snapshots differ: tensors by name, then the first token of each prompt."""
    found = [f"{name}: only in the cold server" for name in cold.checksums.keys() - warm.checksums]
    found += [f"{name}: only in the warm server" for name in warm.checksums.keys() - cold.checksums]
    found += [
        f"{name}: {held} in the warm server, {cold.checksums[name]} in the cold one"
        for name, held in warm.checksums.items()
        if cold.checksums.get(name, held) != held
    ]
    for prompt, (ours, theirs) in enumerate(zip(warm.tokens, cold.tokens, strict=True)):
        pairs = zip(ours, theirs, warm.logprobs[prompt], cold.logprobs[prompt], strict=False)
        for place, (token, wanted, logprob, other) in enumerate(pairs):
            if token != wanted or abs(logprob - other) > TOLERANCE:
                found.append(
                    f"prompt {prompt}, token {place}: {token!r} ({logprob:.4f}) in the warm "
                    f"server, {wanted!r} ({other:.4f}) in the cold one"
                )
                break
    return found


def vllm_command(server: Server) -> str:
    """Return the command of a cold vLLM like the warm one, in this Python's environment."""
    config = server.request("server_info?config_format=json")["vllm_config"]
    model, parallel = config["model_config"], config["parallel_config"]
    arguments = {
        "--dtype": str(model["dtype"]).removeprefix("torch."),
        "--max-model-len": model["max_model_len"],
        "--tensor-parallel-size": parallel["tensor_parallel_size"],
        "--weight-transfer-config": json.dumps({"backend": "weightsync"}),
    }
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    words += ["--model", "{checkpoint}", "--host", "127.0.0.1", "--port", "{port}"]
    words += [word for pair in arguments.items() for word in map(str, pair)]
    return shlex.join(words + (["--enforce-eager"] if model.get("enforce_eager") else []))


@contextmanager
def cold_server(command: str, checkpoint: str, environment: dict[str, str]) -> Iterator[Server]:
    """Start a server by a command with `{checkpoint}` and `{port}`, and end it afterwards.

    Raises ConfigError for a command that cannot be started, ProcessLostError with its last lines
    where it ends, and TransportTimeout where it does not answer within 15 minutes.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [
        word.replace("{checkpoint}", checkpoint).replace("{port}", str(port))
        for word in shlex.split(command)
    ]
    server = Server(f"http://127.0.0.1:{port}")
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                words, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        except OSError as exc:
            raise ConfigError(f"the cold server cannot be started: {exc}") from exc
        try:
            _await(server, process, log)
            yield server
        finally:
            _end(process)


def _await(server: Server, process: subprocess.Popen[bytes], log: Any) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            log.seek(0)
            last = log.read().decode(errors="replace").strip().splitlines()[-3:]
            raise ProcessLostError(
                f"the cold server ended with status {process.returncode}: {' / '.join(last)}"
            )
        with suppress(RemoteError):
            server.request("health", timeout_s=5.0)
            return
        time.sleep(0.5)
    raise TransportTimeout(f"the cold server did not answer within {_START_S:.0f} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server and all that it started."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sent)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
