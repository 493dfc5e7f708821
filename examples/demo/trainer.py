"""The trainer process of the demo: its task, its steps, and the events that it writes.

`python -m examples.demo.trainer MODEL URL STEPS DEVICE`, with the token in the environment.
"""

from __future__ import annotations

import os
import string
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import torch

import weightsync as ws
from weightsync.cli.child import take_stdout
from weightsync.errors import ProtocolError, WeightSyncError
from weightsync.serve.model import LoadedModel, end_token_ids, load_model
from weightsync.serve.requests import Completion, GenerateRequest, decode_response
from weightsync.transports.http import HttpTransport
from weightsync.transports.tokens import TOKEN_VARIABLE
from weightsync.weights.sinks.module_sink import ModuleSink
from weightsync.wire.messages import CheckReply, CheckRequest

MAX_GRAD_NORM = 1.0
_SPREAD_FLOOR = 1e-4  # for a group whose rewards are all equal
REQUEST_TIMEOUT_S = 300.0
PROOF_TOKENS = 24
PROOF_PROMPTS = ("Once upon a time", "The sea is", "def main():", "1, 2, 3,")


@dataclass(frozen=True, kw_only=True)
class Task:
    """A reward that the model learns to maximise, with `group` completions per prompt and step.

    The reward is the share of characters of a completion that are in `rewarded`.
    """

    goal: str
    prompts: tuple[str, ...]
    rewarded: str
    group: int
    max_new_tokens: int
    learning_rate: float
    chat: bool

    def reward(self, text: str) -> float:
        """Return the share of the characters of `text` that are rewarded, 0 to 1."""
        return sum(c in self.rewarded for c in text) / len(text) if text else 0.0

    def encode(self, tokenizer: Any) -> list[list[int]]:
        """Return the token ids of each prompt, by the chat template if `chat` is true."""
        texts = [self._chat(tokenizer, p) if self.chat else p for p in self.prompts]
        return [list(tokenizer(text)["input_ids"]) for text in texts]

    def _chat(self, tokenizer: Any, prompt: str) -> str:
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return str(text)


TASKS = {
    "smollm2": Task(
        goal="answer in digits: the reward is the share of characters that are digits",
        prompts=(
            "Count from 1 to 20.",
            "What is 17 times 23?",
            "List the years of the world cups.",
            "Tell me some prime numbers.",
        ),
        rewarded=string.digits,
        group=6,
        max_new_tokens=16,
        learning_rate=7e-5,
        chat=True,
    ),
    "tiny": Task(
        goal="write lower case: the reward is the share of characters from a to z",
        prompts=("The sea", "A cat", "Why?", "Say it."),
        rewarded=string.ascii_lowercase,
        group=16,
        max_new_tokens=16,
        learning_rate=1e-2,
        chat=False,
    ),
}


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Return each reward minus the mean of its group, divided by the group's standard deviation.

    `rewards` and the result are float32[prompts, group]. This is the group-relative advantage of
    DeepSeekMath (Shao et al. 2024), which needs no value model.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (rewards.std(dim=1, keepdim=True) + _SPREAD_FLOOR)


def completion_logprobs(
    model: Any, prompts: Sequence[list[int]], completions: Sequence[Completion]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of every generated token, and the index of its completion.

    The results are float32[tokens], through which gradients flow, and int64[tokens], both on the
    model's device.
    """
    starts = [len(prompts[c.prompt_index]) for c in completions]
    sequences = [prompts[c.prompt_index] + c.token_ids for c in completions]
    ids = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = 1
    rows = torch.tensor([r for r, c in enumerate(completions) for _ in c.token_ids])
    spans = [range(a, len(s)) for a, s in zip(starts, sequences, strict=True)]
    columns = torch.tensor([column for span in spans for column in span])
    ids, mask, rows, columns = (t.to(model.device) for t in (ids, mask, rows, columns))
    hidden = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
    # Only for generated tokens: logits over the vocabulary take more memory than the rest.
    logits = model.get_output_embeddings()(hidden[rows, columns - 1]).float()
    wanted = ids[rows, columns][:, None]
    return torch.log_softmax(logits, dim=-1).gather(1, wanted)[:, 0], rows


class Learner:
    """Makes one policy-gradient step per batch of rollouts, which the current weights generated."""

    def __init__(self, model: Any, task: Task, prompts: list[list[int]]) -> None:
        self._model = model
        self._task = task
        self._prompts = prompts
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=task.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    def step(self, completions: Sequence[Completion]) -> tuple[float, float]:
        """Update the weights once; return the mean reward and the logprob gap.

        The gap is the largest difference between the server's and the trainer's log-probability of
        a generated token. With equal weights on both sides it is rounding error.
        """
        rewards = torch.tensor([self._task.reward(c.text) for c in completions])
        weights = advantages(rewards.view(len(self._prompts), self._task.group))
        weights = weights.to(self._model.device)
        num_tokens = sum(len(c.token_ids) for c in completions)
        gap = 0.0
        for prompt, weight in enumerate(weights):
            group = [c for c in completions if c.prompt_index == prompt]
            logprobs, rows = completion_logprobs(self._model, self._prompts, group)
            # One group at a time: activations of all groups take more memory than the model.
            loss = -(logprobs * weight[rows]).sum() / num_tokens
            loss.backward()
            server = torch.tensor([p for c in group for p in c.logprobs or ()])
            gap = max(gap, float((logprobs.detach().cpu() - server).abs().max()))
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(rewards.mean()), gap


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """A line of JSON that the trainer process writes to stdout."""


class Ready(Event, frozen=True, kw_only=True, tag="ready"):
    """The model is loaded and the server is connected."""

    model: str
    params: int
    tensors: int
    goal: str


class Step(Event, frozen=True, kw_only=True, tag="step"):
    """One RL step: the reward of the server's rollouts, and the update that followed."""

    version: int
    reward: float
    nbytes: int
    sync_s: float
    gbps: float
    stall_s: float
    path: str
    verified: str
    rollout_s: float
    train_s: float
    logprob_gap: float
    delta: ws.DeltaReport = ws.DeltaReport()


class Proof(Event, frozen=True, kw_only=True, tag="proof"):
    """The comparison of server and trainer at the end."""

    tensors_checked: int
    different: list[str]
    server_tokens: list[list[int]]
    trainer_tokens: list[list[int]]

    @property
    def holds(self) -> bool:
        """Whether fingerprints of all tensors, and greedy tokens, are equal on both sides."""
        same_tokens = self.server_tokens == self.trainer_tokens
        return self.tensors_checked > 0 and not self.different and same_tokens


def decode_event(line: bytes) -> Ready | Step | Proof:
    """Return the event of a line. Raises msgspec.DecodeError for any other line."""
    return msgspec.json.decode(line, type=Ready | Step | Proof)


Emit = Callable[[Event], None]


class Server(HttpTransport):
    """Client of the inference server."""

    def __init__(self, url: str, token: str) -> None:
        super().__init__(url, token)
        self.url, self.token = url, token

    def generate(self, request: GenerateRequest) -> list[Completion]:
        """Return the completions that the server generates for a request."""
        body = msgspec.json.encode(request)
        status, answer = self._exchange("generate", body, REQUEST_TIMEOUT_S)
        if status != 200:
            raise self._error("generate", status, answer)
        return decode_response(answer).completions

    def checksums(self) -> dict[str, str]:
        """Return the fingerprint of every tensor in the server, by name."""
        reply = self.call(CheckRequest(action="checksum"), timeout_s=REQUEST_TIMEOUT_S)
        return cast(CheckReply, reply).checksums


def train(server: Server, loaded: LoadedModel, task: Task, steps: int, emit: Emit) -> None:
    """Run `steps` RL steps and the final comparison; `emit` is called with every event."""
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
        emit(_compare(server, loaded))


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
        delta=report.delta or ws.DeltaReport(),
    )


def _check_versions(completions: Sequence[Completion], version: int | None) -> None:
    versions = {span.version for c in completions for span in c.weight_versions}
    if version is not None and versions != {version}:
        raise ProtocolError(
            f"the rollouts were generated with versions {sorted(versions)}, and the last version "
            f"sent is {version}; another trainer sends to this server: stop it"
        )


def _compare(server: Server, loaded: LoadedModel) -> Proof:
    ours, theirs = ModuleSink(loaded.model).checksums(), server.checksums()
    different = {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}
    request = GenerateRequest(
        prompts=list(PROOF_PROMPTS), temperature=0, max_new_tokens=PROOF_TOKENS
    )
    return Proof(
        tensors_checked=len(ours),
        different=sorted(different | (ours.keys() ^ theirs.keys())),
        server_tokens=[c.token_ids for c in server.generate(request)],
        trainer_tokens=[_likeliest_tokens(loaded, prompt) for prompt in PROOF_PROMPTS],
    )


def _likeliest_tokens(loaded: LoadedModel, prompt: str) -> list[int]:
    """Return the completion at temperature 0, generated by transformers."""
    ids = torch.tensor([loaded.tokenizer(prompt)["input_ids"]], device=loaded.model.device)
    found = loaded.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=PROOF_TOKENS,
        eos_token_id=sorted(end_token_ids(loaded.model, loaded.tokenizer)) or None,
        pad_token_id=0,
    )
    tokens: list[int] = found[0, ids.shape[1] :].tolist()
    return tokens


def main() -> None:
    """Train the model as the command line says: the server, the steps, and the device."""
    model, url, steps, device = sys.argv[1:]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(0)
    send = take_stdout()

    def emit(event: Event) -> None:
        send(msgspec.json.encode(event))

    try:
        server = Server(url, os.environ[TOKEN_VARIABLE])
        loaded = load_model(model)
        loaded.model.to(device)
        train(server, loaded, TASKS[model], int(steps), emit)
    except WeightSyncError as exc:
        sys.exit(f"{type(exc).__name__}: {exc}")


if __name__ == "__main__":
    main()
