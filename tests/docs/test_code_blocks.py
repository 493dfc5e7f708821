"""Every block of code of every page is run, or the table says why not.

Python runs from top to bottom of its page in one namespace; commands are read by the real command
line; JSON is read. A block of another language, or more blocks than the tables know, is a failure.
"""

from __future__ import annotations

import json
import re
import shlex
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch
import typer
from torch import nn

import weightsync as ws
from tests.docs.pages import ROOT, Block, blocks, pages
from tests.server.live import TOKEN, make_app, serving
from weightsync.cli.app import VERBS
from weightsync.cli.app import make_app as make_cli
from weightsync.queues.codec import MessageCodec
from weightsync.queues.message_queue import MessageQueue
from weightsync.testing import TinyModel

ELSEWHERE: dict[tuple[str, str], tuple[int, str]] = {
    ("docs/command-line.md", "console"): (4, "tests/cli/test_docs_command_line.py"),
    ("docs/command-line.md", "python"): (1, "tests/cli/test_docs_command_line.py"),
    ("docs/megatron.md", "python"): (2, "tests/integrations/test_megatron_names.py"),
    ("docs/adapters.md", "python"): (5, "tests/serve/test_adapters_page.py"),
    ("docs/migrating-from-trl.md", "python"): (3, "tests/docs/test_migrating.py"),
    ("docs/migrating-from-vllm.md", "python"): (4, "tests/docs/test_migrating.py"),
    ("docs/quickstart.md", "console"): (6, "tests/docs/test_quickstart.py"),
    ("docs/quickstart.md", "python"): (2, "tests/docs/test_quickstart.py"),
    ("docs/seeing.md", "python"): (7, "tests/observe/test_docs_seeing.py"),
    ("docs/serving.md", "python"): (4, "tests/serve/test_serve.py"),
    ("docs/sglang.md", "python"): (2, "tests/integrations/test_docs_sglang.py"),
    ("docs/sources.md", "python"): (13, "tests/weights/test_docs_sources.py"),
    ("docs/tensor-queue.md", "python"): (2, "tests/queues/test_codec.py"),
    ("docs/testing.md", "python"): (5, "tests/testing/test_docs_testing.py"),
    ("docs/trl.md", "python"): (4, "tests/integrations/test_trl_ranks.py"),
    ("docs/writing-a-backend.md", "python"): (7, "tests/docs/test_writing_a_backend.py"),
    ("docs/writing-a-backend.md", "toml"): (1, "tests/docs/test_writing_a_backend.py"),
}
"""Blocks that another test runs: how many of a language on a page, and which test."""

NOT_RUN: dict[tuple[str, str], str] = {
    ("README.md", "@ws.ray.remote(num_gpus=1)"): "tests/examples/test_ray_example.py runs the same",
    ("docs/sleep.md", "llm.sleep(level=2)"): "tests/vllm/test_sleep.py runs the same loop",
    ("docs/deploy.md", "import uvicorn"): "tests/serve/test_descriptor_limit.py serves in this way",
    ("docs/ray.md", "import ray"): "tests/examples/test_ray_example.py runs the same as a program",
    (
        "docs/conformance.md",
        "from weightsync.testing.conformance.vllm import VllmTrainerContract, VllmWorkerContract",
    ): "the same of our engine: tests/vllm/test_conformance.py",
    (
        "docs/conformance.md",
        "from weightsync.testing.conformance.verl import VerlEngineContract",
    ): "the same of our engine: tests/verl/engines.py",
    (
        "docs/quantized.md",
        'sender = ws.connect(model, to=url, quantize="receiver")',
    ): "the server is quantized: tests/vllm/test_quantized.py",
    (
        "docs/migrating-from-skyrl.md",
        "from weightsync.integrations.skyrl import BACKEND",
    ): "SkyRL is not here: make test-skyrl runs the same",
    (
        "docs/migrating-from-openrlhf.md",
        "from weightsync.integrations.openrlhf import install",
    ): "OpenRLHF is not here: tests/openrlhf/test_install.py calls it",
    ("docs/vllm.md", "from vllm import LLM"): "vLLM is not here: make test-vllm runs page.py",
    (
        "docs/vllm.md",
        "from vllm.distributed.weight_transfer import (",
    ): "the same: tests/vllm/test_trainer_api.py",
    (
        "docs/message-queue.md",
        "queue = MessageQueue.create_from_process_group(pg, writer_rank=0)  # every rank calls it",
    ): "several ranks: tests/queues/test_message_group.py",
}
"""Python that is compiled only, by its page and its first line, and why."""

SHOWN: dict[tuple[str, str], tuple[int, str]] = {
    ("README.md", "text"): (1, "what tests/docs/test_readme.py compares with a run of the program"),
    ("docs/concepts.md", "text"): (1, "a drawing of the states of an update"),
    ("docs/errors.md", "text"): (1, "the tree; tests/docs/test_errors.py compares it"),
    ("docs/quickstart.md", "text"): (1, "what the program above it prints"),
    ("docs/scaling.md", "text"): (1, "a formula"),
}
"""What is no code: how many blocks on a page, and what they are."""

PROGRAMS = {
    ".": "the shell's: it enters an environment that the line before makes",
    "export": "the shell's",
    "docker": "tests/examples/test_deploy.py reads its file, and runs the commands in it",
    "kubectl": "tests/examples/test_deploy.py reads its file",
    "vllm": "vLLM's own command; make test-vllm starts it with these options",
    "pytest": "the plug-in is run by tests/testing/test_conformance.py",
    "curl": "no program of ours; the routes are tested in tests/server",
}
"""Commands in shell blocks that are not ours, and why they are not looked at."""

SERVER = "http://127.0.0.1:8000"


def of(language: str) -> list[str]:
    return [p for p in pages() if any(b.language == language for b in blocks(p))]


def here(page: str, language: str) -> list[Block]:
    """Return a page's blocks of a language that are this file's business."""
    found = [b for b in blocks(page) if b.language == language]
    table = ELSEWHERE if language in ("python", "console", "bash") else SHOWN
    if (page, language) not in table:
        return found
    count, why = table[page, language]
    assert len(found) == count, f"{page}: {len(found)} blocks of {language}; {why} knows {count}"
    return []


def test_every_block_is_of_a_language_that_is_looked_at() -> None:
    known = {"python", "console", "bash", "json", "text", "toml", "yaml"}
    for block in (block for page in pages() for block in blocks(page)):
        assert block.language in known, f"{block.page}:{block.line}: {block.language or 'none'}"


def test_what_is_no_code_is_listed() -> None:
    for page in of("text"):
        for block in here(page, "text"):
            pytest.fail(f"{page}:{block.line}: say in SHOWN what this is")


def test_the_tables_name_what_there_is() -> None:
    for (page, language), (_, test) in ELSEWHERE.items():
        assert any(b.language == language for b in blocks(page))
        assert Path(page).name in (ROOT / test).read_text(encoding="utf-8"), test
    for (page, language), (count, _) in SHOWN.items():
        assert sum(b.language == language for b in blocks(page)) == count, page
    for page, first in NOT_RUN:
        assert any(b.first == first for b in blocks(page)), f"{page}: {first}"
    named = re.findall(r"tests/[\w/]+\.py", " ".join(NOT_RUN.values()))
    assert all((ROOT / test).exists() for test in named)


@pytest.mark.parametrize("page", of("json"))
def test_json_is_json(page: str) -> None:
    for block in here(page, "json"):
        json.loads(block.text)


# Python


def filled(seed: int) -> TinyModel:
    torch.manual_seed(seed)
    model = TinyModel()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, TinyModel]]:
    model = filled(2)
    with serving(make_app(ws.WeightReceiver(model))) as url:
        yield url, model


Names = dict[str, Any]


@pytest.fixture
def names(server: tuple[str, TinyModel], tmp_path: Path) -> Iterator[Names]:
    """What the pages speak of without making it: a model, a server, a batch."""
    url, _ = server
    model = filled(1)
    made: Names = {
        "ws": ws,
        "torch": torch,
        "nn": nn,
        "model": model,
        "server_model": filled(2),
        "url": url,
        "urls": [ws.WeightReceiver(filled(2).to(torch.bfloat16)).handle],
        "token": TOKEN,
        "directory": tmp_path,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "batches": [torch.ones(1)],
        "policy_loss": lambda model, batch: sum(p.sum() for p in model.parameters()) * batch.sum(),
        "train": lambda *_: None,
        "decode": lambda *_: "",
    }
    try:
        yield made
    finally:
        for name in ("sender", "queue"):
            if hasattr(made.get(name), "close"):
                made[name].close()


def run(block: Block, names: Names) -> None:
    """Run one block; a traceback names the page and the line in it."""
    text = "\n" * block.line + block.text.replace(SERVER, names["url"])
    exec(compile(text, block.page, "exec"), names)  # our own page


@pytest.mark.parametrize("page", of("python"))
@pytest.mark.usefixtures("shm_clean")
def test_python(page: str, names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", TOKEN)
    special = SPECIAL.get(page)
    found = here(page, "python")
    to_run = [block for block in found if (page, block.first) not in NOT_RUN]
    for block in found:
        compile(block.text, f"{page}:{block.line}", "exec")
    if special and found:
        special(to_run, names)
        return
    for block in to_run:
        run(block, names)


class Kept(MessageQueue):
    """A queue that the page makes, and shows no end of."""

    made: ClassVar[list[MessageQueue]] = []

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.made.append(self)


def message_queue(found: list[Block], names: Names) -> None:
    """The writer's block waits for two readers, who run theirs in threads."""
    writing, reading, codec = found
    seen: list[Any] = []

    def read(rank: int) -> None:
        deadline = time.monotonic() + 20
        while "handle" not in names and time.monotonic() < deadline:
            time.sleep(0.005)
        own = {**names, "rank": rank}
        run(reading, own)
        seen.append(own["message"])
        own["queue"].close()

    readers = [threading.Thread(target=read, args=(rank,)) for rank in range(2)]
    for reader in readers:
        reader.start()
    try:
        run(writing, names)
        names["queue"].enqueue("the next", timeout_s=10)
        for reader in readers:
            reader.join(20)
        assert seen == ["the next"] * 2
        names["queue"].close()
        names.update(MessageQueue=Kept, MessageCodec=MessageCodec, SamplingParams=Sampling)
        run(codec, names)
    finally:
        for queue in Kept.made:
            queue.close()


class Sampling(msgspec.Struct):
    temperature: float = 1.0


def errors(found: list[Block], names: Names) -> None:
    """The first is about a sender that is there."""
    with ws.connect(names["model"], to=names["url"], token=TOKEN) as sender:
        names["sender"] = sender
        for block in found:
            run(block, names)


SPECIAL: dict[str, Callable[[list[Block], Names], None]] = {
    "docs/errors.md": errors,
    "docs/message-queue.md": message_queue,
}
"""Pages whose blocks need more around them."""


# Commands


def commands(block: Block) -> list[list[str]]:
    """Return the words of each command of a shell block, without variables set before it."""
    text = block.text.replace("\\\n", " ")
    lines = text.splitlines()
    if block.language == "console":
        lines = [line[2:] for line in lines if line.startswith("$ ")]
        assert lines, f"{block.page}:{block.line}: a console without a command"
    found = []
    for line in lines:
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("|&;"):
                found.append(words)
                words = []
            elif words or not re.fullmatch(r"[A-Z_]+=.*", word):
                words.append(word)
    return [words for words in found if words]


def check(words: list[str], where: str) -> None:
    """Raise unless this command exists as it is written."""
    program, *rest = words
    if program == "weightsync":
        check_weightsync(rest)
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        for target in (word for word in rest if "=" not in word):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{where}: make {target}"
    elif program in ("pip", "uv"):
        check_extras(rest, where)
    elif program in ("python", "python3", "torchrun", "bash"):
        check_program(rest, where)
    else:
        assert program in PROGRAMS, f"{where}: {program} is neither checked nor listed"


def check_weightsync(words: list[str]) -> None:
    if not words or words[0].startswith("-"):
        return
    assert words[0] in VERBS
    app = typer.main.get_command(make_cli(words))
    verb = app.commands[words[0]]  # type: ignore[attr-defined]  # a group, which typer does not say
    context = verb.make_context(words[0], [], resilient_parsing=True)
    context.resilient_parsing = False
    verb.make_parser(context).parse_args(args=list(words[1:]))  # raises for an unknown option


def check_extras(words: list[str], where: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extras in re.findall(r"(?:weightsync|\.)\[([\w,-]+)\]", " ".join(words)):
        lacking = set(extras.split(",")) - set(project["optional-dependencies"])
        assert not lacking, f"{where}: there is no extra {', '.join(lacking)}"


def check_program(words: list[str], where: str) -> None:
    if words[:1] == ["-m"]:
        module = words[1].replace(".", "/")
        ours = words[1].partition(".")[0] in ("benchmarks", "weightsync", "tests")
        exists = (ROOT / f"{module}.py").exists() or (ROOT / module).is_dir()
        assert exists or not ours, f"{where}: there is no {words[1]}"
        return
    scripts = [word for word in words if word.endswith((".py", ".sh"))]
    for script in scripts:
        if "/" in script:
            assert (ROOT / script).exists(), f"{where}: there is no {script}"


@pytest.mark.parametrize("page", sorted({*of("console"), *of("bash")}))
def test_commands_are_as_they_are_written(page: str) -> None:
    for language in ("console", "bash"):
        for block in here(page, language):
            for words in commands(block):
                check(words, f"{page}:{block.line}")


def test_a_command_that_there_is_not_is_found() -> None:
    wrong = {
        "weightsync push x --too http://host": Exception,
        "weightsync throw x": AssertionError,
        "make dmeo": AssertionError,
        "pip install '.[sever]'": AssertionError,
        "python -m benchmarks.nothing": AssertionError,
        "frobnicate": AssertionError,
    }
    for line, error in wrong.items():
        (words,) = commands(Block("page", "bash", line, 1))
        with pytest.raises(error):
            check(words, "page")
