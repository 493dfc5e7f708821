"""The trainer of `weightsync demo`: its task, its steps and what it reports."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import util as import_util
from pathlib import Path
from typing import Any

import msgspec
import requests
import torch

import weightsync as ws
from weightsync.cli.answers import lacking
from weightsync.cli.child import take_stdout
from weightsync.errors import ConnectError, ProtocolError, WeightSyncError
from weightsync.serve.causal_model import end_token_ids
from weightsync.serve.model import LoadedModel, load_model
from weightsync.serve.requests import Completion, GenerateRequest, decode_response
from weightsync.weights.fingerprint import mix64, to_hex
from weightsync.weights.source import ModuleSource
from weightsync.wire.messages import CheckReply
from weightsync.wire.problem import raise_problem

MAX_GRAD_NORM = 1.0
_SPREAD_FLOOR = 1e-4  # a group whose rewards are all equal teaches nothing


@dataclass(frozen=True, kw_only=True)
class Task:
    """`prompts` are asked `group` times each; `share` of the characters is what is rewarded."""

    goal: str
    prompts: tuple[str, ...]
    rewarded: Callable[[str], bool]
    group: int
    max_new_tokens: int
    learning_rate: float
    chat: bool

    def reward(self, text: str) -> float:
        """Return the share of the characters of `text` that are rewarded, 0 to 1."""
        return sum(map(self.rewarded, text)) / len(text) if text else 0.0

    def encode(self, tokenizer: Any) -> list[list[int]]:
        """Return the token ids of each prompt, as a chat where the model knows chats."""
        texts = [self._chat(tokenizer, p) if self.chat else p for p in self.prompts]
        return [list(tokenizer(text)["input_ids"]) for text in texts]

    def _chat(self, tokenizer: Any, prompt: str) -> str:
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return str(text)


def is_digit(character: str) -> bool:
    """Tell whether a character is one of 0 to 9."""
    return character in "0123456789"


def is_lower(character: str) -> bool:
    """Tell whether a character is one of a to z."""
    return "a" <= character <= "z"


TASKS = {
    "smollm2": Task(
        goal="answer in digits: the reward is the share of characters that are digits",
        prompts=(
            "Count from 1 to 20.",
            "What is 17 times 23?",
            "List the years of the world cups.",
            "Tell me some prime numbers.",
        ),
        rewarded=is_digit,
        group=6,
        max_new_tokens=16,
        learning_rate=7e-5,
        chat=True,
    ),
    "tiny": Task(
        goal="write lower case: the reward is the share of characters from a to z",
        prompts=("The sea", "A cat", "Why?", "Say it."),
        rewarded=is_lower,
        group=16,
        max_new_tokens=16,
        learning_rate=1e-2,
        chat=False,
    ),
}


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Return how far each reward lies from its group's mean, in the group's spread.

    `rewards` and the result are float32[prompts, group]. This is the group-relative advantage of
    DeepSeekMath (Shao et al. 2024), which needs no value model.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (rewards.std(dim=1, keepdim=True) + _SPREAD_FLOOR)


def completion_logprobs(
    model: Any, prompts: Sequence[list[int]], completions: Sequence[Completion]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of every generated token, and the completion it belongs to.

    Both are of shape [generated tokens]; gradients flow through the first.
    """
    starts = [len(prompts[c.prompt_index]) for c in completions]
    sequences = [prompts[c.prompt_index] + c.token_ids for c in completions]
    ids = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = 1
    rows = torch.tensor([r for r, c in enumerate(completions) for _ in c.token_ids])
    places = [range(a, len(s)) for a, s in zip(starts, sequences, strict=True)]
    columns = torch.tensor([at for place in places for at in place])
    hidden = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
    # Only generated tokens need logits: over the whole vocabulary these outweigh the rest.
    logits = model.get_output_embeddings()(hidden[rows, columns - 1]).float()
    wanted = ids[rows, columns][:, None]
    return torch.log_softmax(logits, dim=-1).gather(1, wanted)[:, 0], rows


class Learner:
    """One policy-gradient step per batch of rollouts that the current weights made."""

    def __init__(self, model: Any, task: Task, prompts: list[list[int]]) -> None:
        self._model = model
        self._task = task
        self._prompts = prompts
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=task.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    def step(self, completions: Sequence[Completion]) -> tuple[float, float]:
        """Move the weights once; return the mean reward and the logprob gap.

        The gap is the largest difference between the server's log-probability of a token it made
        and the trainer's own: with equal weights on both sides it is rounding error.
        """
        rewards = torch.tensor([self._task.reward(c.text) for c in completions])
        weights = advantages(rewards.view(len(self._prompts), self._task.group))
        num_tokens = sum(len(c.token_ids) for c in completions)
        gap = 0.0
        for prompt, weight in enumerate(weights):
            group = [c for c in completions if c.prompt_index == prompt]
            logprobs, rows = completion_logprobs(self._model, self._prompts, group)
            # Group by group: the activations of all at once would outweigh the model.
            loss = -(logprobs * weight[rows]).sum() / num_tokens
            loss.backward()
            server = torch.tensor([p for c in group for p in c.logprobs or ()])
            gap = max(gap, float((logprobs.detach() - server).abs().max()))
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(rewards.mean()), gap


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """A line of JSON that the trainer process writes."""


class Ready(Event, frozen=True, kw_only=True, tag="ready"):
    """The model is loaded and the server is connected."""

    model: str
    params: int
    tensors: int
    goal: str


class Step(Event, frozen=True, kw_only=True, tag="step"):
    """One RL step: the reward of the server's rollouts, and the update sent after it."""

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


class Proof(Event, frozen=True, kw_only=True, tag="proof"):
    """Whether the server holds the trainer's weights at the end."""

    tensors_checked: int
    different: list[str]
    server_tokens: list[list[int]]
    trainer_tokens: list[list[int]]

    @property
    def holds(self) -> bool:
        """Every tensor has the same fingerprint on both sides, and so have the greedy tokens."""
        same_tokens = self.server_tokens == self.trainer_tokens
        return self.tensors_checked > 0 and not self.different and same_tokens


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `demo-report.json` holds."""

    model: str
    params: int
    goal: str
    verified: bool
    tensors_checked: int
    seconds: float
    steps: list[Step]


def encode_event(event: Event) -> bytes:
    """Return an event as one line, without its line break."""
    return msgspec.json.encode(event)


def decode_event(line: bytes) -> Ready | Step | Proof:
    """Return the event of a line. Raises msgspec.DecodeError when it is none."""
    return msgspec.json.decode(line, type=Ready | Step | Proof)


def write_report(report: DemoReport, file: Path) -> None:
    """Write the report as readable JSON."""
    file.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def check_plotting() -> None:
    """Raise BackendUnavailableError when `write_plot` would not work; called before the work."""
    if import_util.find_spec("matplotlib") is None:
        raise lacking("demo", "matplotlib")


def write_plot(steps: Sequence[Step], file: Path) -> None:
    """Draw reward and sync time by step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - slow to import
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    reward_axis = figure.add_subplot()
    sync_axis = reward_axis.twinx()
    numbers = range(1, len(steps) + 1)
    milliseconds = [step.sync_s * 1e3 for step in steps]
    sync_axis.bar(numbers, milliseconds, color="tab:gray", alpha=0.35, width=0.6)
    sync_axis.set_ylabel("weight sync (ms)")
    sync_axis.set_ylim(bottom=0)
    reward_axis.plot(numbers, [step.reward for step in steps], color="tab:blue", marker="o")
    reward_axis.set_xlabel("step")
    reward_axis.set_xticks(list(numbers))
    reward_axis.set_ylabel("reward", color="tab:blue")
    reward_axis.set_ylim(0, 1.05)
    reward_axis.set_zorder(sync_axis.get_zorder() + 1)
    reward_axis.patch.set_visible(False)
    reward_axis.set_title("Reward, and the time to send the weights after each step")
    figure.savefig(file, dpi=120)


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
    return Proof(
        tensors_checked=len(ours),
        different=sorted(different | (ours.keys() ^ theirs.keys())),
        server_tokens=[c.token_ids for c in server.generate(asked)],
        trainer_tokens=[_likeliest_tokens(loaded, prompt) for prompt in PROOF_PROMPTS],
    )


def _likeliest_tokens(loaded: LoadedModel, prompt: str) -> list[int]:
    """Return the completion at temperature 0, by the generation of transformers itself."""
    ids = torch.tensor([loaded.tokenizer(prompt)["input_ids"]])
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
    send = take_stdout()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(0)

    server = Server(options.server, os.environ.get(TOKEN_VARIABLE, ""))
    try:
        loaded = load_model(options.model)
        train(
            server,
            loaded,
            TASKS[options.model],
            steps=options.steps,
            emit=lambda e: send(encode_event(e)),
        )
    except WeightSyncError as exc:
        sys.exit(f"{type(exc).__name__}: {exc}")


if __name__ == "__main__":
    main()
