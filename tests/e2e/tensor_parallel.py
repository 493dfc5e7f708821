"""Tensor-parallel groups of receivers: one process a rank, each with its slice of one model.

transformers itself shards the model, with the plan that the model brings. Collectives run on Gloo
over the loopback interface, the ranks meet in a file.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import torch

import weightsync as ws
from tests.children import CONTEXT
from tests.e2e.models import digest
from tests.e2e.processes import WAIT_S, kill
from tests.gloo import as_rank
from weightsync.wire.problem import Problem, encode_problem, from_problem, to_problem

PROMPT = [3, 1, 4, 1, 5]
NEW_TOKENS = 4


class Rank:
    """The parent's end of one rank. As a callable it is a user's callback."""

    def __init__(self, rank: int, process: BaseProcess, pipe: Connection) -> None:
        self.process = process
        self._pipe = pipe
        self._turn = threading.Lock()
        self.__qualname__ = f"rank-{rank}"

    def __call__(self, message: Mapping[str, object]) -> object:
        return self.ask("handle", message)

    def ask(self, what: str, argument: object = None) -> Any:
        with self._turn:
            self._pipe.send_bytes(json.dumps([what, argument]).encode())
            assert self._pipe.poll(WAIT_S), f"{self.__qualname__} did not answer {what}"
            answer = json.loads(self._pipe.recv_bytes())
        if "problem" in answer:
            problem = msgspec.json.decode(answer["problem"], type=Problem)
            raise from_problem(problem, peer=self.__qualname__)
        return answer["result"]


class Group:
    """All ranks of one model."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self.ranks = ranks

    def ask(self, what: str, argument: object = None) -> list[Any]:
        """Call all ranks at once, because the work may be a collective."""
        with ThreadPoolExecutor(len(self.ranks)) as threads:
            return list(threads.map(lambda rank: rank.ask(what, argument), self.ranks))


@contextmanager
def group(size: int, folder: Path) -> Iterator[Group]:
    """Start `size` ranks that meet in `folder`; they end with the context."""
    with _ranks(size, folder) as ranks:
        yield Group(ranks)


@contextmanager
def _ranks(size: int, folder: Path) -> Iterator[list[Rank]]:
    ranks: list[Rank] = []
    pipes: list[Connection] = []
    try:
        for rank in range(size):
            parent, child = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(rank, size, str(folder), child))
            process.start()
            child.close()
            pipes.append(parent)
            ranks.append(Rank(rank, process, parent))
        yield ranks
    finally:
        for pipe in pipes:
            pipe.close()
        for made in ranks:
            made.process.join(WAIT_S)
            if made.process.is_alive():
                kill(made.process)


class _Served:
    """One rank: the receiving model, and a model loaded from a checkpoint."""

    def __init__(self) -> None:
        self.model: Any = None
        self.receiver: ws.WeightReceiver | None = None

    def load(self, argument: Any) -> None:
        """Make a receiver of the checkpoint's model."""
        self.close()
        self.model = _load(argument["path"])
        self.receiver = ws.WeightReceiver(self.model, apply=argument["apply"])

    def close(self, _: object = None) -> None:
        if self.receiver is not None:
            self.receiver.close()
        self.model = self.receiver = None

    def handle(self, message: Any) -> object:
        return self._receiving.handle(message)

    def status(self, _: object) -> object:
        return msgspec.to_builtins(self._receiving.status())

    def placements(self, _: object) -> dict[str, str]:
        return {
            name: str(list(tensor.placements))
            for name, tensor in self.model.named_parameters()
            if hasattr(tensor, "placements")
        }

    def compare(self, path: Any) -> dict[str, object]:
        """Compare the receiving model with the checkpoint at `path`, shard by shard."""
        with self._receiving.reading() as version:
            have, tokens, logits = _shards(self.model), *_greedy(self.model)
        reference = _load(path)
        want, wanted_tokens, wanted_logits = _shards(reference), *_greedy(reference)
        return {
            "version": version,
            "names": sorted(want) == sorted(have),
            "different": [name for name in want if have.get(name) != want[name]],
            "tokens": [tokens, wanted_tokens],
            "error": float((logits - wanted_logits).abs().max()),
        }

    @property
    def _receiving(self) -> ws.WeightReceiver:
        assert self.receiver is not None
        return self.receiver


def _load(path: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    plan = DistributedConfig(tp_plan="auto")
    return AutoModelForCausalLM.from_pretrained(path, distributed_config=plan)


def _shards(model: Any) -> dict[str, str]:
    state = model.state_dict().items()
    return {name: digest(getattr(tensor, "_local_tensor", tensor)) for name, tensor in state}


@torch.no_grad()
def _greedy(model: Any) -> tuple[list[int], torch.Tensor]:
    """Decode a few tokens; the tokens and the last logits."""
    tokens = list(PROMPT)
    for _ in range(NEW_TOKENS):
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens, logits


def _serve(rank: int, size: int, folder: str, pipe: Connection) -> None:
    with as_rank(rank, size, folder, WAIT_S):
        served = _Served()
        try:
            _answer(pipe, served)
        finally:
            served.close()


def _answer(pipe: Connection, served: _Served) -> None:
    while True:
        try:
            what, argument = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            reply: dict[str, object] = {"result": getattr(served, what)(argument)}
        except Exception as exc:  # noqa: BLE001 # whatever it is, the parent raises it
            reply = {"problem": encode_problem(to_problem(exc)).decode()}
        pipe.send_bytes(json.dumps(reply).encode())
