"""TRL's GRPO of a PEFT adapter, which is all that moves to the vLLM server that generates."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import weightsync as ws
from tests.integrations.tiny_trl import grpo, lower, prompts
from tests.vllm.adapted import adapt, adapter_nbytes, assert_serves, train
from tests.vllm.grpo import PROMPTS, assert_rolls_out, make_folder, run_example, trainer_of
from tests.vllm.served import Served, vllm_server
from tests.vllm.test_migrating import DOCS
from tests.vllm.tiny import expected, make_model
from weightsync.integrations.adapters import unload_adapter
from weightsync.integrations.trl_rollouts import ServedRollouts

pytestmark = pytest.mark.timeout(400)

(BLOCK,) = re.findall(
    r"^### Only the adapter moves\n(?:(?!^#).)*?^```python\n(.*?)^```",
    (DOCS / "trl.md").read_text(),
    re.MULTILINE | re.DOTALL,
)
OPTIONS = {"--enable-lora": "", "--max-loras": "2", "--max-lora-rank": "8"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), tied=False)


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with vllm_server(folder, log, options=OPTIONS) as made:
        yield made


@pytest.fixture
def trainer(folder: Path) -> Any:
    return trainer_of(folder)


class Connected:
    """A PEFT model of the trainer, its sender, and rollouts of the server that gets the adapter."""

    def __init__(self, model: Any, sender: ws.WeightSender, rollouts: ServedRollouts) -> None:
        self.model = model
        self.sender = sender
        self.rollouts = rollouts

    def update(self, seed: int) -> int:
        train(self.model, seed)
        return self.sender.send_weights().version


@pytest.fixture
def connected(served: Served, tmp_path: Path) -> Iterator[Connected]:
    model = adapt(make_model(tmp_path, tied=False))
    with (
        ws.connect(ws.AdapterSource(model, name="policy"), to=f"vllm+{served.url}") as sender,
        ServedRollouts(f"vllm+{served.url}", adapter="policy") as rollouts,
    ):
        yield Connected(model, sender, rollouts)
    unload_adapter(served.url, "policy")


def test_logprobs_are_those_of_the_adapter_that_was_sent(
    connected: Connected, trainer: Any
) -> None:
    for seed in (1, 2):
        version = connected.update(seed)
        assert_rolls_out(connected.rollouts, trainer, connected.model, version)
    assert set(connected.rollouts.made_by) == {version - 1, version}


def test_updates_between_the_version_and_the_request(connected: Connected, trainer: Any) -> None:
    """One leaves the version that was meant; two drop it, and the newest is requested instead."""
    version = connected.update(3)
    client: Any = connected.rollouts._client
    complete = client._complete
    pending = [4]

    def update_and_complete(*args: Any) -> Any:
        while pending:
            connected.update(pending.pop())
        return complete(*args)

    client._complete = update_and_complete
    found = connected.rollouts(PROMPTS * 4, trainer)
    assert found["weight_versions"] == [[version]] * 8
    pending += [5, 6, 7, 8]
    found = connected.rollouts(PROMPTS * 4, trainer)
    assert found["weight_versions"] == [[version + 5]] * 8
    assert None not in connected.rollouts.made_by


def test_before_the_first_update(served: Served, trainer: Any) -> None:
    none = pytest.raises(ws.NotReadyError, match=r"no version of the adapter .nothing. yet")
    with ServedRollouts(f"vllm+{served.url}", adapter="nothing") as rollouts, none:
        rollouts(PROMPTS, trainer)


def test_the_example_moves_the_adapter_alone(served: Served, folder: Path, tmp_path: Path) -> None:
    plain = make_model(tmp_path, tied=False)
    base = expected(plain)
    model = adapt(copy.deepcopy(plain))
    after, made_by, nbytes = run_example(folder, served.url, "--adapter", "policy")
    assert after == [2, 3, 4]
    assert made_by == [1, 2, 3]
    assert adapter_nbytes(model) < nbytes < 1.02 * adapter_nbytes(model)
    assert not served.is_paused
    with ws.connect(plain, to=served.url) as sender:
        assert sender.version == 0  # no update of the base was made
    assert_serves(served, "tiny", base)
    models = [m["id"] for m in served.get("v1/models")["data"]]
    assert {"tiny", "policy", "policy@3", "policy@4"} <= set(models)
    assert served.request("policy").json()["choices"] != served.request("tiny").json()["choices"]


def test_what_the_page_does(served: Served, folder: Path, tmp_path: Path) -> None:
    plain = make_model(tmp_path, tied=False)
    base = expected(plain)
    names: dict[str, Any] = {
        "model": plain,
        "tokenizer": AutoTokenizer.from_pretrained(folder),
        "dataset": prompts(),
        "reward": lower,
        "args": grpo(tmp_path),
        "url": f"vllm+{served.url}",
        "token": None,
    }
    exec(BLOCK, names)
    version = names["sync"].version
    assert {*names["rollouts"].made_by} == {version - 2, version - 1}
    assert_serves(served, "tiny", base)
    unload_adapter(served.url, "policy")
