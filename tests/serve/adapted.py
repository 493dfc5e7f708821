"""PEFT models over the tiny model, what they generate, and a trainer that dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import requests

import weightsync as ws
from tests.children import CONTEXT
from tests.serve.servers import wait_until
from tests.vllm.adapted import Told, adapt, assert_told, train
from tests.vllm.tiny import PROMPT, TOKENS
from weightsync.serve.model import make_tiny_model
from weightsync.transports.http import HttpTransport
from weightsync.wire.messages import Reply, Request


def tiny_adapted(**config: Any) -> Any:
    """Return a PEFT model over the model that a server of `tiny` begins with."""
    return adapt(make_tiny_model().model, **config)


@dataclass(frozen=True)
class Served:
    """A server of `tiny`."""

    url: str
    token: str

    def connect(self, model: Any, name: str = "policy", **options: Any) -> ws.WeightSender:
        """Return a sender of an adapter."""
        source = ws.AdapterSource(model, name=name)
        return ws.connect(source, to=self.url, token=self.token, **options)

    def post(
        self, model: str, prompt: Sequence[int] = PROMPT, count: int = TOKENS
    ) -> requests.Response:
        """Request the likeliest tokens of a model."""
        body = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": count,
            "temperature": 0.0,
            "logprobs": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return requests.post(f"{self.url}/v1/completions", json=body, timeout=240)

    def choice(self, model: str, prompt: Sequence[int] = PROMPT, count: int = TOKENS) -> Any:
        """Return the one completion of a request."""
        answer = self.post(model, prompt, count)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == model
        (choice,) = answer.json()["choices"]
        return choice

    def assert_serves(
        self, model: str, wanted: Told, prompt: Sequence[int] = PROMPT, version: int | None = None
    ) -> None:
        """Assert that a model generates these tokens, of this version where one is given."""
        choice = self.choice(model, prompt, len(wanted[0]))
        assert_told(told(choice), wanted)
        (span,) = choice["weight_versions"]
        assert version in (None, span["version"])
        assert choice["prompt_version"] == span["version"]

    @property
    def models(self) -> list[str]:
        """The names that the server lists."""
        listed = requests.get(f"{self.url}/v1/models", timeout=60).json()
        return [model["id"] for model in listed["data"]]


def told(choice: Any) -> Told:
    """Return the tokens of a completion, and their log-probabilities."""
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


@contextmanager
def dying_before(call: type[Request], count: int = 1) -> Iterator[None]:
    """Kill this process when it would send its request `count` of this type."""
    left, sent = count, HttpTransport.call

    def counted(self: HttpTransport, request: Request, *, timeout_s: float) -> Reply:
        nonlocal left
        if isinstance(request, call):
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
        return sent(self, request, timeout_s=timeout_s)

    HttpTransport.call = counted  # type: ignore[method-assign]  # in this process alone
    try:
        yield
    finally:
        HttpTransport.call = sent  # type: ignore[method-assign]  # as above


def version_of_killed(send: Callable[..., None], *args: object) -> int:
    """Run a trainer that dies in a process of its own; return the version that it sent before.

    `send` gets `args`, and the end of a pipe on which it says that version.
    """
    ours, theirs = CONTEXT.Pipe()
    victim = CONTEXT.Process(target=send, args=(*args, theirs), daemon=True)
    victim.start()
    before = ours.recv() if ours.poll(120) else None
    victim.join(120)
    assert victim.exitcode == -signal.SIGKILL
    assert isinstance(before, int)
    return before


def wait_until_together(versions: Callable[[], Sequence[tuple[int, int]]], before: int) -> None:
    """Wait until both parts of each worker have the version `before`, or both the next one."""
    wait_until(
        lambda: all(one in ((before,) * 2, (before + 1,) * 2) for one in versions()),
        f"parts of two updates are in use: {versions()}",
    )


def send_until_killed(
    served: Served, call: type[Request], seed: int, pipe: Connection, name: str = "policy"
) -> None:
    """Send an adapter, and the next version of it; die before a request of this type of that."""
    model = tiny_adapted()
    with served.connect(model, name) as sender:
        train(model, seed)
        sender.send_weights()
        pipe.send(sender.version)
        train(model, seed + 1)
        with dying_before(call):
            sender.send_weights()
