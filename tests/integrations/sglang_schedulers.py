"""Stand-ins for the scheduler processes of one SGLang server, with our receivers, and its routes.

Each rank is a thread. Like SGLang's, all of them get every control request in the same order, and
rank 0 answers. A rank's model takes its half of the rows of `up` and `gate` into one parameter.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler
from typing import Any

import torch
from torch import nn

from tests.integrations.vllm_workers import Served
from weightsync.errors import ConfigError
from weightsync.integrations.sglang.memory import ROUND
from weightsync.integrations.sglang.receiving import SchedulerReceiver

HIDDEN = 8


class TinyForCausalLM(nn.Module):
    """A model whose loader fuses and cuts, skips names that it does not know, and returns none."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(16, HIDDEN))
        self.gate_up = nn.Parameter(torch.zeros(2 * HIDDEN // world, HIDDEN))
        self.rank, self.world = rank, world
        self.fails: Exception | None = None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        rows = HIDDEN // self.world
        for name, tensor in weights:
            if name == "embed":
                assert self.embed.shape == tensor.shape, f"{name} has another shape"
                self.embed.data.copy_(tensor)
            elif name in ("gate", "up"):
                at = rows if name == "up" else 0
                part = tensor.narrow(0, self.rank * rows, rows)
                self.gate_up.data.narrow(0, at, rows).copy_(part)
            if self.fails is not None and self.embed.data.any():
                raise self.fails


class Trained(nn.Module):
    """The trainer's model, with the names of the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(16, HIDDEN))
        self.gate = nn.Parameter(torch.zeros(HIDDEN, HIDDEN))
        self.up = nn.Parameter(torch.zeros(HIDDEN, HIDDEN))

    def step(self, seed: int) -> None:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_()


class Rank:
    """The engine of one rank."""

    def __init__(self, server: Schedulers, rank: int) -> None:
        self.rank, self.world = rank, server.world
        self.model = TinyForCausalLM(rank, server.world)
        self.paused = False
        self.log: list[str] = []
        self.flushes = True
        self.refuses: str | None = None
        self._server = server

    def check(self) -> None:
        if self.refuses:
            raise ConfigError(self.refuses)

    def gather(self, text: bytes) -> list[bytes]:
        return self._server.gather(self.rank, text)

    def stop(self) -> None:
        self.paused = True
        self.log.append("stop")

    def start(self) -> None:
        self.paused = False
        self.log.append("start")

    def flush_cache(self) -> bool:
        self.log.append("flush")
        return self.flushes

    def load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        assert self.paused
        self.log.append("load")
        self.model.load_weights(pairs)

    def holds(self, trained: Trained) -> bool:
        """Whether it holds its part of these weights."""
        rows = slice(self.rank * HIDDEN // self.world, (self.rank + 1) * HIDDEN // self.world)
        fused = torch.cat([trained.gate[rows], trained.up[rows]])
        return torch.equal(self.model.embed, trained.embed) and torch.equal(
            self.model.gate_up, fused
        )


class Schedulers(Served):
    """One server of `world` ranks, with the routes of SGLang that a sender in memory calls."""

    def __init__(self, world: int, *, replicas: int = 1) -> None:
        self.world = world
        self.replicas = replicas
        self.version = "default"
        self.keeps = False
        self.calls: list[str] = []
        self.before: Callable[[str], None] = lambda _: None
        self._texts: list[bytes] = [b""] * world
        self._barrier = threading.Barrier(world)
        self._pool = ThreadPoolExecutor(world)
        self._loop = threading.Lock()
        self.ranks = [Rank(self, rank) for rank in range(world)]
        self.receivers = [SchedulerReceiver(rank, "cpu") for rank in self.ranks]
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                answer = server.answer(self.path.strip("/"), self.rfile.read(length) or b"{}")
                body = json.dumps(answer).encode()
                with suppress(OSError):
                    self.send_response(404 if answer is None else 200)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(Handler)

    def gather(self, rank: int, text: bytes) -> list[bytes]:
        self._barrier.wait(20)
        self._texts[rank] = text
        self._barrier.wait(20)
        return list(self._texts)

    def answer(self, call: str, body: bytes) -> dict[str, Any] | None:
        given = json.loads(body)
        with self._loop:  # the loops of all ranks handle one request after the other
            self.calls.append(call)
            if call == "model_info":
                known = {"model_path": "/nowhere", "tokenizer_path": "", "is_generation": True}
                return {**known, "weight_version": self.version}
            if call == "server_info":
                states = [{"weightsync": True}] * self.replicas
                return {"version": "0.5.23", "internal_states": states}
            if call == "weights_checker":
                return {"success": True, "message": self._answer_round(given["action"])}
            if call == "update_weight_version":
                self.version = given["new_version"]
            elif call.endswith("_memory_occupation"):
                self._memory(call == "release_memory_occupation", given.get("tags"))
            elif call.endswith("_generation"):
                self._pause(call == "pause_generation")
            elif call != "flush_cache":
                return None
            return {"success": True}

    def _pause(self, pauses: bool) -> None:
        for rank, receiver in zip(self.ranks, self.receivers, strict=True):
            if pauses or receiver.note_start():
                rank.paused = pauses

    def _memory(self, releases: bool, tags: list[str] | None) -> None:
        """As SGLang's memory saver does, which overwrites nothing: the pages are other ones."""

        def lose(rank: Rank) -> None:
            with torch.no_grad():
                for parameter in rank.model.parameters():
                    parameter.fill_(float("nan"))

        def nothing() -> None:
            pass

        for rank, receiver in zip(self.ranks, self.receivers, strict=True):
            if not releases:
                receiver.resume(nothing, tags)
            elif tags and "weights" not in tags:
                receiver.release(nothing, tags, keeps=self.keeps)
            else:
                gone = nothing if self.keeps else partial(lose, rank)
                receiver.release(gone, tags, keeps=self.keeps)

    def _answer_round(self, action: str) -> str:
        assert action.startswith(ROUND)
        text = action.removeprefix(ROUND)
        self.before(text)
        answers = {*self._pool.map(lambda receiver: receiver.answer(text), self.receivers)}
        (answer,) = map(str, answers)  # all ranks know all answers
        return answer

    def holds(self, trained: Trained) -> bool:
        """Whether every rank holds its part of these weights."""
        return all(rank.holds(trained) for rank in self.ranks)

    def close(self) -> None:
        super().close()
        self._pool.shutdown()
        for receiver in self.receivers:
            receiver.receiver.close()
