"""A certificate of a server's updates: after each it equals one that loaded the same checkpoint.

Compared are the fingerprints of every parameter and buffer that the engine can name, greedy tokens,
and their log-probabilities.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from weightsync.errors import (
    ConfigError,
    ProcessLostError,
    ProtocolError,
    TransportError,
    TransportTimeout,
)
from weightsync.integrations.engine_control import EngineClient
from weightsync.runtime.processes import end_with
from weightsync.sender import connect
from weightsync.transports.factory import TransportFactory
from weightsync.transports.tokens import (
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
)
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
    """Fingerprints of a server's tensors by name, and its greedy tokens after each prompt."""

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
        if not checksums:
            raise ProtocolError(f"{self.url} names no tensor that it holds")
        answers = [self._complete(prompt) for prompt in PROMPTS]
        return Snapshot(
            version,
            checksums,
            [tokens for tokens, _ in answers],
            [logprobs for _, logprobs in answers],
        )

    def model(self) -> tuple[str, str]:
        """Return the name of the served model, and the directory from which it was loaded or ""."""
        with _reading(self.url, "v1/models"):
            listed = self.request("v1/models")["data"][0]
            return str(listed["id"]), listed.get("root") or ""

    def check(self, source: object, *, timeout_s: float) -> None:
        """Raise ManifestMismatchError where a checkpoint does not fit. Nothing is sent."""
        connect(source, self.url, token=self.token, timeout_s=timeout_s).close()

    def send(self, source: object, *, timeout_s: float) -> float:
        """Send a checkpoint; return the seconds of the update."""
        with connect(source, self.url, token=self.token, timeout_s=timeout_s) as sender:
            return sender.send_weights().seconds["total"]

    def request(
        self, path: str, body: dict[str, Any] | None = None, timeout_s: float = _CALL_S
    ) -> dict[str, Any]:
        """Return the JSON object of an answer. Raises the errors of its transport."""
        with closing(self._client()) as client:
            return client.request(path, body, timeout_s)

    def is_healthy(self) -> bool:
        """Whether `/health` answers well. Raises RemoteError or AuthError where it never will."""
        with closing(self._client()) as client:
            status, _ = client.get("health", timeout_s=5.0)
        if 400 <= status < 500:
            self.request("health", timeout_s=5.0)
        return status < 400

    def _client(self) -> EngineClient:
        return EngineClient(self.url.removeprefix("vllm+"), self.token)

    def _complete(self, prompt: Sequence[int]) -> tuple[list[str], list[float]]:
        """Return the greedy tokens after a prompt, and their log-probabilities."""
        name, _ = self.model()
        body = {
            "model": name,
            "prompt": list(prompt),
            "max_tokens": TOKENS,
            "temperature": 0,
            "logprobs": 1,
            "ignore_eos": True,
        }
        with _reading(self.url, "v1/completions"):
            told = self.request("v1/completions", body)["choices"][0]["logprobs"]
            logprobs = [math.nan if p is None else float(p) for p in told["token_logprobs"]]
            return [str(token) for token in told["tokens"]], logprobs


@contextmanager
def _reading(url: str, path: str) -> Iterator[None]:
    """Raise ProtocolError where an answer lacks what the block reads."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError) as exc:
        raise ProtocolError(
            f"{url}/{path} answers something else than an inference server"
        ) from exc


def fresh(server: Server) -> Snapshot:
    """Return what a server holds. Raises ConfigError where it has had updates."""
    began = server.look()
    if began.version:
        raise ConfigError(
            f"{server.url} holds version {began.version}, not what it loaded when it was started; "
            "start it again"
        )
    return began


def certify(
    server: Server,
    began: Snapshot,
    cold: Snapshot,
    *,
    first: object,
    second: object,
    timeout_s: float,
) -> list[Step]:
    """Send `second`, `first`, `second` and `first`; return how the server differs after each.

    `began` is what it held when it was started with the checkpoint `first`: later updates with
    `first` are compared with it. `cold` is of a server that was started with `second`. After an
    error the server may hold either.
    """
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
    for prompt, tokens in enumerate(zip(warm.tokens, cold.tokens, strict=True)):
        logprobs = warm.logprobs[prompt], cold.logprobs[prompt]
        for place in range(max(map(len, tokens))):
            ours, theirs = (_said(*told, place) for told in zip(tokens, logprobs, strict=True))
            if ours[0] != theirs[0] or not abs(ours[1] - theirs[1]) <= TOLERANCE:  # also for NaN
                found.append(
                    f"prompt {prompt}, token {place}: {ours[0]} ({ours[1]:.4f}) in the warm "
                    f"server, {theirs[0]} ({theirs[1]:.4f}) in the cold one"
                )
                break
        if not any(tokens):
            found.append(f"prompt {prompt}: neither server generates a token")
    return found


def _said(tokens: list[str], logprobs: list[float], place: int) -> tuple[str, float]:
    """Return a token and its log-probability; "nothing" after the last one."""
    return (repr(tokens[place]), logprobs[place]) if place < len(tokens) else ("nothing", math.nan)


def vllm_command(server: Server) -> str:
    """Return the command of a cold vLLM like the warm one, in this Python's environment.

    Raises ConfigError where the warm one has options that this does not repeat.
    """
    path = "server_info?config_format=json"
    with _reading(server.url, path):
        config = server.request(path)["vllm_config"]
        model, parallel, cache = (config[f"{of}_config"] for of in ("model", "parallel", "cache"))
        unlike = [name for name in ("speculative_config", "lora_config") if config.get(name)]
        unlike += ["data_parallel_size"] if parallel["data_parallel_size"] > 1 else []
        if unlike:
            raise ConfigError(f"{server.url} runs with {unlike[0]}: give --cold, its command")
        given = {
            "--dtype": str(model["dtype"]).removeprefix("torch."),
            "--max-model-len": model["max_model_len"],
            "--quantization": model["quantization"],
            "--hf-overrides": json.dumps(model["hf_overrides"]) if model["hf_overrides"] else None,
            "--kv-cache-dtype": cache["cache_dtype"],
            "--gpu-memory-utilization": cache["gpu_memory_utilization"],
            "--load-format": config["load_config"]["load_format"],
            "--tensor-parallel-size": parallel["tensor_parallel_size"],
            "--pipeline-parallel-size": parallel["pipeline_parallel_size"],
            "--weight-transfer-config": json.dumps({"backend": "weightsync"}),
        }
        flags = {
            "--enforce-eager": model["enforce_eager"],
            "--trust-remote-code": model["trust_remote_code"],
            "--enable-expert-parallel": parallel["enable_expert_parallel"],
        }
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    words += ["--model", "{checkpoint}", "--host", "127.0.0.1", "--port", "{port}"]
    words += [str(word) for pair in given.items() if pair[1] is not None for word in pair]
    return shlex.join(words + [flag for flag, is_set in flags.items() if is_set])


@contextmanager
def cold_server(command: str, checkpoint: str, token: str | None) -> Iterator[Server]:
    """Start a server by a command with `{checkpoint}` and `{port}`, and end it afterwards.

    It has the token as WEIGHTSYNC_TOKEN, and ends with this process. Raises ConfigError for a
    command that cannot be started, ProcessLostError with its last lines where it ends,
    TransportTimeout where it does not answer `/health` within 15 minutes, and RemoteError or
    AuthError where it refuses to.
    """
    words = _words(command)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = Server(f"http://127.0.0.1:{port}", token)
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}
    if token is not None:
        environment.pop(TOKEN_FILE_VARIABLE, None)
        environment[TOKEN_VARIABLE] = token
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                [w.replace("{checkpoint}", checkpoint).replace("{port}", str(port)) for w in words],
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                preexec_fn=partial(end_with, os.getpid()),  # noqa: PLW1509  # kernel calls alone
            )
        except (OSError, ValueError) as exc:
            raise ConfigError(f"the cold server cannot be started: {exc}") from exc
        try:
            _await(server, process, log)
            yield server
        finally:
            _end(process)


def _words(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as exc:
        raise ConfigError(f"--cold cannot be read: {exc}") from exc
    for needed in ("{checkpoint}", "{port}"):
        if not any(needed in word for word in words):
            raise ConfigError(f"--cold has no {needed}, in whose place the value is put")
    return words


def _await(server: Server, process: subprocess.Popen[bytes], log: Any) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        healthy = False
        with suppress(TransportError):
            healthy = server.is_healthy()
        if process.poll() is not None:
            log.seek(0)
            last = log.read().decode(errors="replace").strip().splitlines()[-3:]
            raise ProcessLostError(
                f"the cold server ended with status {process.returncode}: {' / '.join(last)}"
            )
        if healthy:
            return
        time.sleep(0.5)
    raise TransportTimeout(f"the cold server did not answer within {_START_S:.0f} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server and all that it started, also where a second Ctrl-C comes meanwhile."""
    try:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
