"""GRPO with completions from `weightsync serve`: the weights that made them are the newest."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import weightsync as ws
from examples.demo.trainer import Server
from tests.integrations.tiny_trl import (
    LORA,
    PROMPTS,
    grpo,
    grpo_trainer,
    lower,
    prompts,
    sft,
    texts,
)
from tests.serve.servers import forked_server
from weightsync.integrations.trl import ServedRollouts, WeightSyncCallback
from weightsync.integrations.trl_rollouts import _batches, _groups
from weightsync.serve.model import make_tiny_model

pytestmark = [
    # TRL and peft ask transformers for names that transformers gives up.
    pytest.mark.filterwarnings(
        "ignore::FutureWarning",
        "ignore:You are using 'rollout_func':UserWarning",
    ),
    pytest.mark.usefixtures("shm_clean"),
]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "trl.md"
BLOCKS = dict(
    re.findall(
        r"^## ([^\n]+)\n(?:(?!^## ).)*?```python\n(.*?)```",
        PAGE.read_text(),
        re.MULTILINE | re.DOTALL,
    )
)


@pytest.fixture(scope="module")
def served() -> Iterator[Server]:
    with forked_server() as (url, token):
        yield Server(url, token)


def test_grpo_learns_from_what_the_server_made_by_the_newest_weights(
    served: Server, tmp_path: Path
) -> None:
    asked: list[Any] = []

    def reward(completions: list[str], **given: Any) -> list[float]:
        asked.append((given["weight_versions"], given["prompt_version"]))
        return lower(completions)

    sync = WeightSyncCallback(served.url, token=served.token)
    with sync, ServedRollouts(served.url, token=served.token) as rollouts:
        trainer = grpo_trainer(tmp_path, rollouts, steps=3, callbacks=[sync], reward=reward)
        before = copy.deepcopy(trainer.model)
        trainer.train()
    first = sync.version - 3  # of at_start, whatever the server was sent before
    assert asked == [([[v]] * 8, [v] * 8) for v in range(first, first + 3)]
    assert set(rollouts.made_by) == {first, first + 1, first + 2}
    logged = [e["sync/version"] for e in trainer.state.log_history if "reward" in e]
    assert logged == [first + 1, first + 2, first + 3]
    assert sync.last_report is not None
    assert sync.last_report.label == "step-3"
    assert served.checksums() == ws.ModuleSink(trainer.model).checksums()
    assert served.checksums() != ws.ModuleSink(before).checksums()


def test_logprobs_are_those_of_the_trainers_own_model(served: Server, tmp_path: Path) -> None:
    with ServedRollouts(served.url, token=served.token) as rollouts:
        trainer = grpo_trainer(tmp_path, rollouts)
        with ws.connect(trainer.model, to=served.url, token=served.token) as sender:
            sender.send_weights()
        found = rollouts([PROMPTS[0]] * 2 + [PROMPTS[1]] * 2, trainer)
        trainer.temperature = 0.5
        assert rollouts([PROMPTS[0]], trainer)["logprobs"] is None
    assert found["prompt_ids"][0] == found["prompt_ids"][1] != found["prompt_ids"][2]
    assert found["completion_ids"][0] != found["completion_ids"][1]
    for prompt, made, scored in zip(
        found["prompt_ids"], found["completion_ids"], found["logprobs"], strict=True
    ):
        logits = trainer.model(torch.tensor([prompt + made])).logits[0, len(prompt) - 1 : -1]
        own = torch.log_softmax(logits, dim=-1)[range(len(made)), made]
        assert own.tolist() == pytest.approx(scored, abs=1e-4)


def test_the_seed_decides_what_is_drawn(served: Server, tmp_path: Path) -> None:
    drawn = []
    for seed in (1, 1, 2):
        with ServedRollouts(served.url, token=served.token) as rollouts:
            trainer = grpo_trainer(tmp_path, rollouts, seed=seed)
            drawn.append(rollouts([PROMPTS[0]] * 3, trainer)["completion_ids"])
    assert drawn[0] == drawn[1] != drawn[2]


def test_chats_are_tokenized_by_the_trainers_template(served: Server, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    with ServedRollouts(served.url, token=served.token) as rollouts:
        trainer = grpo_trainer(tmp_path, rollouts)
        trainer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        found = rollouts([chat], trainer)
        parts = [{"role": "user", "content": [{"type": "image", "image": "a"}]}]
        with pytest.raises(ws.ConfigError, match="parts that are no text"):
            rollouts([parts], trainer)
    assert trainer.processing_class.decode(found["prompt_ids"][0]).endswith("<user>Hi")


def test_settings_that_the_server_would_ignore_are_refused(tmp_path: Path) -> None:
    with ServedRollouts("http://127.0.0.1:9", token="none") as rollouts:
        trainer = grpo_trainer(tmp_path, rollouts, top_k=5, repetition_penalty=1.1)
        with pytest.raises(ws.ConfigError, match=r"follow top_k=5, repetition_penalty=1.1 of"):
            rollouts([PROMPTS[0]], trainer)


def test_requests_stay_within_the_servers_limits_and_lose_nothing() -> None:
    prompts = [[i] for i, times in enumerate([3] * 700 + [1, 300, 2, 2]) for _ in range(times)]
    batches = list(_batches(_groups(prompts)))
    covered = [at for batch in batches for group in batch for at in group]
    assert covered == list(range(len(prompts)))
    for batch in batches:
        (n,) = {len(group) for group in batch}
        assert len(batch) <= 256
        assert n <= 256
        assert len(batch) * n <= 1024
        assert all(prompts[at] == prompts[group[0]] for group in batch for at in group)


@contextmanager
def answering(status: int, body: object) -> Iterator[str]:
    """Run a server that answers everything alike."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            raw = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}"
        finally:
            listening.shutdown()
            thread.join(10)


def completion(**changed: object) -> dict[str, object]:
    whole = {
        "prompt_index": 0,
        "token_ids": [5],
        "logprobs": [-1.0],
        "weight_versions": [{"version": 1, "start": 0, "stop": 1}],
        "prompt_version": 1,
        "finish_reason": "length",
    }
    return whole | changed


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (404, {"detail": "Not Found"}, ws.ConfigError, "has no /generate; give the URL of"),
        (200, {"choices": []}, ws.ProtocolError, "something else than completions"),
        (200, {"completions": []}, ws.ProtocolError, "0 completions, 1 x 1 were asked for"),
        (
            200,
            {"completions": [completion(finish_reason="abort")]},
            ws.NotReadyError,
            "ended 1 of 1 completions early.*POST /resume",
        ),
    ],
)
def test_answers_that_cannot_be_used_say_so(
    status: int, body: object, kind: type[Exception], words: str, tmp_path: Path
) -> None:
    with answering(status, body) as url, ServedRollouts(url, token="") as rollouts:
        trainer = grpo_trainer(tmp_path, rollouts)
        with pytest.raises(kind, match=words):
            rollouts([PROMPTS[0]], trainer)


@pytest.mark.parametrize("title", BLOCKS)
def test_an_example_of_the_page(title: str, served: Server, tmp_path: Path) -> None:
    tiny = make_tiny_model()
    namespace: dict[str, Any] = {
        "torch": torch,
        "model": tiny.model,
        "tokenizer": tiny.tokenizer,
        "texts": texts(),
        "dataset": prompts(),
        "reward": lower,
        "args": grpo(tmp_path) if "GRPO" in BLOCKS[title] else sft(tmp_path),
        "url": served.url,
        "token": served.token,
    }
    exec(compile(BLOCKS[title], f"{PAGE.name}: {title}", "exec"), namespace)  # our own page
    assert namespace["sync"].version > 0
    if title != "Adapters":  # which are merged into a copy
        assert served.checksums() == ws.ModuleSink(tiny.model).checksums()


@pytest.mark.soak
def test_the_example_program(served: Server) -> None:
    program = str(ROOT / "examples" / "trl_grpo.py")
    line = [sys.executable, program, "--steps", "2", "--url", served.url]
    environment = {**os.environ, "WEIGHTSYNC_TOKEN": served.token}
    ended = subprocess.run(
        line, env=environment, text=True, capture_output=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stderr
    rewards, made, held, verified = (ended.stdout.splitlines()[at] for at in (-5, -3, -2, -1))
    version = int(held.removeprefix("the server holds version ").partition(";")[0])
    assert f"then version {version - 1}" in rewards
    assert re.findall(r"version (\d+): \d+ tokens", made) == [str(version - 2), str(version - 1)]
    assert verified.endswith(f"21 tensors, version {version}")


(ADAPTER,) = re.findall(
    r"^### Only the adapter moves\n(?:(?!^#).)*?^```python\n(.*?)^```",
    PAGE.read_text(),
    re.MULTILINE | re.DOTALL,
)


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_the_example_of_an_adapter_alone(served: Server, tmp_path: Path) -> None:
    """The server is that of `weightsync serve`; tests/vllm/test_trl_adapters.py has vLLM's."""
    tiny = make_tiny_model()
    with ws.connect(tiny.model, to=served.url, token=served.token) as sender:
        base = sender.send_weights().version
    held = served.checksums()
    asked: list[Any] = []

    def reward(completions: list[str], **given: Any) -> list[float]:
        asked.append((given["weight_versions"], given["prompt_version"]))
        return lower(completions)

    namespace: dict[str, Any] = {
        "model": tiny.model,
        "tokenizer": tiny.tokenizer,
        "dataset": prompts(),
        "reward": reward,
        "args": grpo(tmp_path),
        "url": served.url,
        "token": served.token,
    }
    exec(compile(ADAPTER, f"{PAGE.name}: the adapter alone", "exec"), namespace)  # our own page
    last = namespace["sync"].version
    assert asked == [([[v]] * 8, [v] * 8) for v in (last - 2, last - 1)]
    assert set(namespace["rollouts"].made_by) == {last - 2, last - 1}
    assert served.checksums() == held
    plain = make_tiny_model().model
    with ws.connect(plain, to=served.url, token=served.token) as sender:
        assert sender.version == base  # no update of the base was made


def test_logprobs_are_those_of_the_adapter(served: Server, tmp_path: Path) -> None:
    with ServedRollouts(served.url, token=served.token, adapter="judge") as rollouts:
        trainer = grpo_trainer(tmp_path, rollouts, peft_config=LORA)
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(generator=torch.Generator().manual_seed(3))
        base = make_tiny_model().model  # as the trainer's own
        with ws.connect(base, to=served.url, token=served.token) as sender:
            sender.send_weights()
        source = ws.AdapterSource(trainer.model, name="judge")
        with ws.connect(source, to=served.url, token=served.token) as sender:
            version = sender.send_weights().version
        found = rollouts([PROMPTS[0]] * 2 + [PROMPTS[1]] * 2, trainer)
    assert found["weight_versions"] == [[version]] * 4
    for prompt, made, scored in zip(
        found["prompt_ids"], found["completion_ids"], found["logprobs"], strict=True
    ):
        logits = trainer.model(torch.tensor([prompt + made])).logits[0, len(prompt) - 1 : -1]
        own = torch.log_softmax(logits, dim=-1)[range(len(made)), made]
        assert own.tolist() == pytest.approx(scored, abs=1e-4)


def test_every_example_of_the_page_is_run() -> None:
    assert PAGE.read_text().count("```python") == len(BLOCKS) + 1 == 4
