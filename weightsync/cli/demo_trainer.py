"""The demo's trainer process: rollouts from the server, a step, the weights to the server.

It writes one JSON event a line on its standard output; logs go to standard error.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence

import msgspec
import requests
import torch

import weightsync as ws
from weightsync.cli.demo_report import Event, Proof, Ready, Step, encode_event
from weightsync.cli.demo_task import TASKS, Learner, Task
from weightsync.errors import ConnectError, ProtocolError, WeightSyncError
from weightsync.serve.generation import Generator
from weightsync.serve.model import LoadedModel, load_model
from weightsync.serve.requests import (
    Completion,
    GenerateRequest,
    decode_response,
)
from weightsync.weights.fingerprint import mix64, to_hex
from weightsync.weights.source import ModuleSource
from weightsync.wire.messages import CheckReply
from weightsync.wire.problem import raise_problem

TOKEN_VARIABLE = "WEIGHTSYNC_TOKEN"  # noqa: S105 - the variable's name
REQUEST_TIMEOUT_S = 300.0
PROOF_TOKENS = 24
PROOF_PROMPTS = ("Once upon a time", "The sea is", "def main():", "1, 2, 3,")

Emit = Callable[[Event], None]


class Server:
    """The inference server, over HTTP."""

    def __init__(self, url: str, token: str) -> None:
        self.url, self.token = url, token
        self._session = requests.Session()
        self._session.headers["Authorization"] = f"Bearer {token}"

    def generate(self, request: GenerateRequest) -> list[Completion]:
        """Return the server's completions."""
        return decode_response(self._post("/generate", msgspec.json.encode(request))).completions

    def checksums(self) -> dict[str, str]:
        """Return the fingerprint of every tensor that the server generates with."""
        body = self._post("/weight_checker", b'{"action": "checksum"}')
        return msgspec.json.decode(body, type=CheckReply).checksums

    def _post(self, path: str, body: bytes) -> bytes:
        try:
            answer = self._session.post(self.url + path, data=body, timeout=REQUEST_TIMEOUT_S)
        except requests.RequestException as exc:
            raise ConnectError(f"POST {self.url}{path} failed: {exc}; is the server up?") from exc
        if not answer.ok:
            raise_problem(answer.content, status=answer.status_code, peer=self.url)
        return answer.content


def train(server: Server, loaded: LoadedModel, task: Task, *, steps: int, emit: Emit) -> None:
    """Run the RL loop; called by the trainer process only."""
    prompts = task.encode(loaded.tokenizer)
    with ws.connect(loaded.model, to=server.url, token=server.token) as sender:
        tensors = sum(1 for _ in loaded.model.parameters())
        params = loaded.num_parameters
        emit(Ready(model=loaded.name, params=params, tensors=tensors, goal=task.goal))
        learner = Learner(loaded.model, task, prompts)
        version: int | None = None
        for number in range(steps):
            step = _step(server, sender, learner, _request(task, prompts, number), version)
            version = step.version
            emit(step)
        emit(_prove(server, loaded))


def _request(task: Task, prompts: list[list[int]], seed: int) -> GenerateRequest:
    return GenerateRequest(
        prompts=list(prompts),
        n=task.group,
        max_new_tokens=task.max_new_tokens,
        seed=seed,
        logprobs=True,
    )


def _step(
    server: Server,
    sender: ws.WeightSender,
    learner: Learner,
    request: GenerateRequest,
    version: int | None,
) -> Step:
    started = time.perf_counter()
    completions = server.generate(request)
    _check_versions(completions, version)
    generated = time.perf_counter()
    reward, gap = learner.step(completions)
    trained = time.perf_counter()
    report = sender.send_weights()
    return Step(
        version=report.version,
        reward=reward,
        nbytes=report.nbytes,
        sync_s=report.seconds["total"],
        gbps=report.gbps,
        stall_s=report.stall_s,
        path=report.path,
        verified=report.verified,
        rollout_s=generated - started,
        train_s=trained - generated,
        logprob_gap=gap,
    )


def _check_versions(completions: Sequence[Completion], version: int | None) -> None:
    made_with = {span.version for c in completions for span in c.weight_versions}
    if version is not None and made_with != {version}:
        raise ProtocolError(
            f"the rollouts were made with versions {sorted(made_with)}, the version sent last is "
            f"{version}; another trainer is sending to this server: stop it"
        )


def _prove(server: Server, loaded: LoadedModel) -> Proof:
    ours, theirs = _checksums(ModuleSource(loaded.model)), server.checksums()
    different = {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}
    asked = GenerateRequest(prompts=list(PROOF_PROMPTS), temperature=0, max_new_tokens=PROOF_TOKENS)
    own = Generator(loaded.model, loaded.tokenizer).answer(asked).completions
    return Proof(
        tensors_checked=len(ours),
        different=sorted(different | (ours.keys() ^ theirs.keys())),
        server_tokens=[c.token_ids for c in server.generate(asked)],
        trainer_tokens=[c.token_ids for c in own],
    )


def _checksums(source: ModuleSource) -> dict[str, str]:
    found = {
        name: to_hex(mix64(tensor.detach().contiguous().flatten().view(torch.uint8)))
        for name, tensor in source.tensors()
    }
    # The server answers for the other names of tied tensors, too.
    aliases = source.manifest.aliases
    return found | {alias: found[name] for alias, name in aliases.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as the command line says; the token comes in the environment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(TASKS), required=True)
    parser.add_argument("--server", required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args(arguments)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(0)

    def emit(event: Event) -> None:
        sys.stdout.buffer.write(encode_event(event))
        sys.stdout.buffer.flush()

    server = Server(options.server, os.environ.get(TOKEN_VARIABLE, ""))
    try:
        loaded = load_model(options.model)
        train(server, loaded, TASKS[options.model], steps=options.steps, emit=emit)
    except WeightSyncError as exc:
        sys.exit(f"{type(exc).__name__}: {exc}")


if __name__ == "__main__":
    main()
