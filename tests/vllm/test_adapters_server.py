"""Adapters sent to a real vLLM server: its models generate what PEFT does with each version."""

from __future__ import annotations

import copy
import itertools
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import weightsync as ws
from tests.children import CONTEXT
from tests.crew import crew
from tests.vllm.adapted import (
    BLOCK,
    LONG,
    Told,
    Unnamed,
    adapt,
    adapter_nbytes,
    adapter_of,
    assert_serves,
    assert_told,
    base_of,
    same,
    train,
)
from tests.vllm.served import Served, vllm_server
from tests.vllm.tiny import PROMPT, change, expected, make_model
from tests.vllm.victims import (
    connect_set,
    plain_state,
    send_adapter_until_killed,
    send_shards_of_adapter,
    train_set,
)
from weightsync.integrations.adapters import unload_adapter
from weightsync.transports.factory import TransportFactory
from weightsync.wire.messages import StatusRequest

pytestmark = pytest.mark.timeout(600)

OPTIONS = {
    "--enable-lora": "",
    "--max-loras": "2",
    "--max-cpu-loras": "2",
    "--max-lora-rank": "8",
}
UPDATES = 50
IN_A_ROW = 150


class Trained:
    """A server, and the PEFT model of its trainer."""

    def __init__(self, served: Served, base: Any, folder: Path, workers: int) -> None:
        self.served = served
        self.base = base
        self.folder = folder
        self.workers = workers
        self.model = adapt(base)

    def sender(self, name: str = "policy", model: Any = None, **options: Any) -> ws.WeightSender:
        source = ws.AdapterSource(self.model if model is None else model, name=name)
        return ws.connect(source, to=self.served.url, **options)

    def models(self) -> list[str]:
        return [model["id"] for model in self.served.get("v1/models")["data"]]


@pytest.fixture(scope="module", params=[1, 2], ids=["one-worker", "two-workers"])
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("adapters")
    base = make_model(folder, tied=False)
    with vllm_server(
        folder,
        folder / "server.log",
        workers=request.param,
        options=OPTIONS,
        variables={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
    ) as served:
        yield Trained(served, base, folder, request.param)


def test_each_version_generates_what_peft_does(trained: Trained) -> None:
    served, model = trained.served, trained.model
    base, told = base_of(model), {}
    with trained.sender() as sender:
        for seed in (1, 2, 3):
            train(model, seed)
            report = sender.send_weights()
            assert (report.apply, report.verified) == ("staged", "arrived")
            assert report.control_messages == 2
            assert adapter_nbytes(model) < report.nbytes < 1.02 * adapter_nbytes(model)
            told[report.version] = expected(model)
            assert_serves(served, "policy", told[report.version])
            assert_serves(served, f"policy@{report.version}", told[report.version])
            assert_serves(served, "tiny", base)
            assert not served.is_paused
        newest = sender.version
    before = {version: told[version] for version in (newest - 1, newest)}
    assert told[newest] != told[newest - 1]
    for version, wanted in before.items():
        assert_serves(served, f"policy@{version}", wanted)
    assert {"tiny", "policy", f"policy@{newest - 1}", f"policy@{newest}"} <= {*trained.models()}


def test_the_shards_of_two_ranks_are_read_from_both(trained: Trained) -> None:
    with crew(2) as ranks:
        (gathered, sources), _ = ranks.run(
            send_shards_of_adapter, trained.served.url, str(trained.folder), 5
        )
    assert gathered == {}
    assert len(sources) == trained.workers
    assert all(read.keys() == {0, 1} for read in sources)
    train(trained.model, 5)
    assert_serves(trained.served, "shards", expected(trained.model))
    unload_adapter(trained.served.url, "shards")


def found_in_cache(served: Served, model: str, wanted: Told) -> int:
    """Assert that a model answers LONG as PEFT does; return how many tokens vLLM had in a cache."""
    queried, before = served.cached()
    assert_serves(served, model, wanted, LONG)
    return served.cached(queried + len(LONG))[1] - before


def test_each_version_has_its_own_prefix_cache(trained: Trained) -> None:
    """A prompt of more than a block is in the cache of a version from its second request on."""
    served, model = trained.served, trained.model
    base = base_of(model, LONG)
    assert_serves(served, "tiny", base, LONG)
    assert found_in_cache(served, "tiny", base) == BLOCK
    told = dict[int, Told]()
    with trained.sender() as sender:
        for seed in (11, 12, 11):  # the third one is as the first, but another version
            train(model, seed)
            version = sender.send_weights().version
            told[version] = expected(model, LONG)
            assert found_in_cache(served, "policy", told[version]) == 0
            assert found_in_cache(served, "policy", told[version]) == BLOCK
            assert found_in_cache(served, f"policy@{version}", told[version]) == BLOCK
        before = version - 1
        assert told[before] != told[version]
        assert found_in_cache(served, f"policy@{before}", told[before]) == BLOCK
    assert found_in_cache(served, "tiny", base) == BLOCK


def test_requests_in_flight_end_with_the_version_that_they_began_with(trained: Trained) -> None:
    """Each answer is that of one version; of those that were in use when it was accepted."""
    served, model = trained.served, trained.model
    told: dict[int, list[Told]] = {}
    answers: list[tuple[int, int, int, Told]] = []
    prompts, tokens = (PROMPT, LONG), 24

    def wanted() -> list[Told]:
        return [expected(model, prompt, tokens) for prompt in prompts]

    hits = served.cached()[1]
    with trained.sender() as sender, ThreadPoolExecutor(4) as pool:
        train(model, 100)
        sender.send_weights()
        told[sender.version] = wanted()
        newest, over = sender.version, False

        def ask(which: int) -> None:
            while not over:
                first = newest
                found = served.complete(tokens, model="policy", prompt=prompts[which])
                answers.append((which, first, newest, found))

        asking = [pool.submit(ask, which) for which in (0, 1, 1)]
        try:
            for i in range(1, UPDATES):
                train(model, 100 + i)
                told[sender.version + 1] = wanted()
                sender.send_weights()
                newest = sender.version
        finally:
            over = True
        for each in asking:
            each.result()
    assert len(told) == UPDATES
    assert len({tuple(tokens) for (tokens, _), _ in told.values()}) > UPDATES // 2
    assert len(answers) > 10
    wrong = [
        (which, first, last)
        for which, first, last, found in answers
        # An update that a request is sent beside may be in use before its sender knows it.
        if not any(same(found, told[v][which]) for v in range(first, min(last + 1, max(told)) + 1))
    ]
    assert wrong == []
    assert served.cached()[1] > hits  # or no request read what another one had computed


def test_versions_that_are_dropped_while_they_are_requested(trained: Trained) -> None:
    """A request by number is answered by that version, or refused: never by another one."""
    served, model = trained.served, trained.model
    told: dict[int, Told] = {}
    answers: list[tuple[int, int, Any]] = []
    with trained.sender() as sender, ThreadPoolExecutor(3) as pool:
        train(model, 200)
        sender.send_weights()
        told[sender.version] = expected(model)
        newest, over = sender.version, False

        def ask(behind: int) -> None:
            while not over:
                version = max(newest - behind, min(told))
                answer = served.request(f"policy@{version}")
                answers.append((version, answer.status_code, answer.json()))

        asking = [pool.submit(ask, behind) for behind in (1, 2, 3)]
        try:
            for i in range(1, 25):
                train(model, 200 + i)
                told[sender.version + 1] = expected(model)
                sender.send_weights()
                newest = sender.version
        finally:
            over = True
        for each in asking:
            each.result()
    statuses = Counter(status for _, status, _ in answers)
    assert statuses[200] > 5
    assert statuses[404] > 0
    assert set(statuses) == {200, 404}, statuses
    for version, status, found in answers:
        if status == 200:
            assert found["choices"][0]["token_ids"] == told[version][0]
    assert_serves(served, "tiny", base_of(model))
    assert_serves(served, "policy", told[newest])


def test_adapters_that_do_not_fit_in_vllms_tables_are_built_again(trained: Trained) -> None:
    """vLLM has room for two; its scale is folded into a copy each time."""
    served, model = trained.served, copy.deepcopy(trained.model)
    names = ("policy", "judge", "draft")
    for name in names[1:]:
        adapt_more(model, name)
    told = {}
    senders = [
        trained.sender(name, model) if name != "policy" else trained.sender(model=model)
        for name in names
    ]
    for round_ in range(2):
        for i, (name, sender) in enumerate(zip(names, senders, strict=True)):
            adapter = "default" if name == "policy" else name
            train(model, 20 + 3 * round_ + i, adapter)
            sender.send_weights()
            with adapter_of(model, adapter):
                told[name] = expected(model)
    for _ in range(3):
        for name in names:
            assert_serves(served, name, told[name])
    for sender in senders:
        sender.close()
    for name in names[1:]:
        unload_adapter(served.url, name)


def test_versions_in_a_row_grow_nothing(trained: Trained) -> None:
    """What is kept of each version would take 78 kB in the engine's process, in all workers."""
    root = psutil.Process(trained.served.process.pid)
    processes = [root, *root.children(recursive=True)]

    def used() -> tuple[int, list[int]]:
        memory = sum(process.memory_info().rss for process in processes)
        return memory, [process.num_fds() for process in processes]

    with trained.sender() as sender:
        for seed in range(IN_A_ROW):
            if seed == IN_A_ROW // 3:
                before = used()
            train(trained.model, seed)
            sender.send_weights()
            if seed % 10 == 0:
                assert_serves(trained.served, "policy", expected(trained.model))
        memory, files = used()
    assert files == before[1]
    leaked = IN_A_ROW * 2 // 3 * adapter_nbytes(trained.model)
    assert memory - before[0] < leaked / 3


def adapt_more(model: Any, name: str) -> None:
    """Add an adapter of another rank to a PEFT model."""
    config = copy.deepcopy(model.peft_config["default"])
    config.r, config.lora_alpha, config.target_modules = 4, 3, {"q_proj", "down_proj"}
    model.add_adapter(name, config)
    train(model, 0, name)


def test_a_base_update_keeps_the_adapters(trained: Trained) -> None:
    served, model = trained.served, trained.model
    plain = model.get_base_model()
    base = ws.connect(lambda: plain_state(model), to=served.url)
    with trained.sender() as sender, base as base_sender:
        train(model, 31)
        sender.send_weights()
        change(plain, 32, "base_layer")
        base_sender.send_weights()
        assert_serves(served, "policy", expected(model))
        assert_serves(served, "tiny", base_of(model))
        train(model, 33)
        sender.send_weights()
        assert_serves(served, "policy", expected(model))


def test_base_and_adapter_in_one_update_under_load(trained: Trained) -> None:
    """Requests that begin after an update, and end before the next, have both parts of it."""
    served, model = trained.served, trained.model
    told: dict[int, dict[str, Told]] = {}
    answers: list[tuple[str, int, list[int]]] = []
    with connect_set(model, served.url) as sender, ThreadPoolExecutor(1) as pool:
        began = ended = 0
        over = False

        def ask() -> None:
            """Request both in turns: together this vLLM's CPU kernels mix them up."""
            for name in itertools.cycle(("tiny", "policy")):
                if over:
                    return
                was = ended
                found, _ = served.complete(4, model=name)
                if was == began:  # no update came meanwhile
                    answers.append((name, was, found))

        asking: list[Future[None]] = []
        try:
            for seed in range(500, 506):
                train_set(model, seed)
                version = sender.version + 1
                told[version] = {
                    "tiny": base_of(model, count=4),
                    "policy": expected(model, count=4),
                }
                began = version
                reports = sender.send_weights()
                ended = version
                assert [report.version for report in reports] == [version] * 2
                asking = asking or [pool.submit(ask)]
                wanted = len(answers) + 4
                deadline = time.monotonic() + 30
                while len(answers) < wanted and time.monotonic() < deadline:
                    time.sleep(0.01)
        finally:
            over = True
        for each in asking:
            each.result()
    assert len(answers) > 12
    assert [a for a in answers if a[2] != told[a[1]][a[0]][0]] == []
    assert len({tuple(each[name][0]) for each in told.values() for name in each}) > 6
    assert_serves(served, "policy", expected(model))
    assert_serves(served, "tiny", base_of(model))
    assert not served.is_paused


def test_embeddings_may_have_an_adapter(trained: Trained) -> None:
    base = another_base(trained)
    base.load_state_dict(plain_state(trained.model))
    model = adapt(base, target_modules=["embed_tokens", "down_proj"])
    with trained.sender("words", model) as sender:
        sender.send_weights()
        assert_serves(trained.served, "words", expected(model))
    unload_adapter(trained.served.url, "words")


def test_an_unloaded_adapter_is_gone_until_it_is_sent_again(trained: Trained) -> None:
    served, model = trained.served, trained.model
    with trained.sender("passing") as sender:
        sender.send_weights()
        assert_serves(served, "passing", expected(model))
        unload_adapter(served.url, "passing")
        for name in ("passing", f"passing@{sender.version}"):
            assert served.request(name).status_code == 404
        assert "passing" not in trained.models()
        train(model, 41)
        sender.send_weights()
        assert_serves(served, "passing", expected(model))
        gone = served.post("v1/unload_lora_adapter", {"lora_name": "passing"})
        assert gone.status_code == 200, gone.text
        assert served.request("passing").status_code == 404
        assert_serves(served, "tiny", base_of(model))


def test_an_adapter_that_is_unloaded_while_it_is_requested(trained: Trained) -> None:
    """Each request ends with what it began with, or is refused; a sender that asks changes none."""
    served, model = trained.served, trained.model
    with trained.sender("passing") as sender, ThreadPoolExecutor(5) as pool:
        train(model, 43)
        sender.send_weights()
        wanted = expected(model, count=100)
        over, answers = False, list[tuple[int, Any]]()

        def ask() -> None:
            while not over:
                answer = served.request("passing", tokens=100)
                answers.append((answer.status_code, answer.json()))

        def await_answers(count: int) -> None:
            deadline = time.monotonic() + 60
            while len(answers) < count and time.monotonic() < deadline:
                time.sleep(0.01)

        asking = [pool.submit(ask) for _ in range(4)]
        try:
            await_answers(4)
            unload_adapter(served.url, "passing")
            told = len(answers)
            (transport, *_) = TransportFactory(None, below="adapters/passing").every(served.url)
            transport.call(StatusRequest(), timeout_s=30)
            transport.close()
            assert "passing" not in trained.models()
            await_answers(told + 12)  # four of them may have begun before
            assert served.request("passing").status_code == 404
        finally:
            over = True
        for each in asking:
            each.result()
    statuses = Counter(status for status, _ in answers)
    assert set(statuses) == {200, 404}, statuses
    for status, found in answers:
        if status == 200:
            choice = found["choices"][0]
            assert_told((choice["token_ids"], choice["logprobs"]["token_logprobs"]), wanted)
    assert_serves(served, "tiny", base_of(model))


def test_models_that_are_not_held_are_not_found(trained: Trained) -> None:
    for name in ("nobody", "nobody@1", "policy@999", "tiny@1"):
        assert trained.served.request(name).status_code == 404


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"r": 16}, r"rank 16, and --max-lora-rank is 8: .*q_proj"),
    "dora": ({"use_dora": True}, r"DoRA: .*lora_magnitude_vector"),
    "bias": ({"lora_bias": True}, r"bias: .*lora_B\.bias"),
    "modules": ({"modules_to_save": ["lm_head"]}, r"modules_to_save.*lm_head\.weight"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_vllm_does_not_take_is_refused_by_name(kind: str, trained: Trained) -> None:
    config, named = REFUSED[kind]
    model = adapt(another_base(trained), **config)
    with pytest.raises(ws.WeightSyncError, match=named):
        trained.sender("refused", model)
    assert "refused" not in trained.models()
    assert_serves(trained.served, "tiny", base_of(trained.model))


def another_base(trained: Trained, **sizes: int) -> Any:
    """Return a model as the base without adapters, or of other sizes."""
    given = trained.base.config.to_dict()
    given.pop("layer_types")
    config = type(trained.base.config)(**{**given, **sizes})
    return type(trained.base)(config).float().eval()


def test_an_adapter_for_another_base_is_refused(trained: Trained) -> None:
    model = adapt(another_base(trained, hidden_size=32, num_hidden_layers=3))
    with pytest.raises(ws.WeightSyncError, match=r"another base model.*here 64 to 128") as refused:
        trained.sender("refused", model)
    assert "adds no LoRA: model.layers.2" in str(refused.value)


def test_what_has_no_config_is_refused(trained: Trained) -> None:
    tensors = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(8, 64)}
    with trained.sender() as sender:
        sender.send_weights()
    with pytest.raises(ws.WeightSyncError, match=r"adapter_config\.json") as refused:
        ws.connect(Unnamed(tensors), to=trained.served.url)
    assert "\n" not in str(refused.value)
    assert_serves(trained.served, "tiny", base_of(trained.model))
    assert_serves(trained.served, "policy", expected(trained.model))


def test_names_that_are_taken(trained: Trained) -> None:
    served, model = trained.served, trained.model
    with pytest.raises(ws.ConfigError, match="'tiny' is the name of the base model"):
        trained.sender("tiny")
    folder = trained.folder / "file"
    model.save_pretrained(folder, save_embedding_layers=False)
    body = {"lora_name": "file", "lora_path": str(folder)}
    assert served.post("v1/load_lora_adapter", body).status_code == 200
    wanted = expected(model)
    with pytest.raises(ws.ConfigError, match=r"'file' is the name of an adapter.*from a file"):
        trained.sender("file")
    assert_serves(served, "file", wanted)
    with trained.sender() as sender:
        sender.send_weights()
        again = served.post("v1/load_lora_adapter", body | {"lora_name": "policy"})
        assert again.status_code == 400
        assert "already been loaded" in again.text
    assert served.post("v1/unload_lora_adapter", {"lora_name": "file"}).status_code == 200
    with trained.sender("file") as sender:
        sender.send_weights()
        assert_serves(served, "file", wanted)
        body["lora_name"] = f"file@{sender.version + 1}"
        refused = served.post("v1/load_lora_adapter", body)
        assert refused.status_code == 400
        assert "'file' is sent by a trainer" in refused.json()["error"]["message"]
    unload_adapter(served.url, "file")
    assert served.post("v1/load_lora_adapter", body).status_code == 200
    with pytest.raises(ws.ConfigError, match=r"'file@\d+' is the name of an adapter.*from a file"):
        trained.sender("file")
    assert_serves(served, body["lora_name"], wanted)
    assert served.post("v1/unload_lora_adapter", body).status_code == 200


def test_one_name_has_one_sender(trained: Trained) -> None:
    with trained.sender() as sender:
        with pytest.raises(ws.SenderConflictError):
            trained.sender()
        with trained.sender("other") as other:
            other.send_weights()
        sender.send_weights()
    unload_adapter(trained.served.url, "other")


def test_a_trainer_that_dies_between_stage_and_swap(trained: Trained) -> None:
    served, model = trained.served, trained.model
    train(model, 51)
    with trained.sender() as sender:
        sender.send_weights()
    victim = CONTEXT.Process(
        target=send_adapter_until_killed, args=(served.url, str(trained.folder), 60), daemon=True
    )
    victim.start()
    victim.join(120)
    assert victim.exitcode == -9
    train(model, 60)
    was = assert_any(served, model)
    assert not served.is_paused
    train(model, 52)
    with trained.sender() as sender:
        sender.send_weights()
        assert sender.version > was
        assert_serves(served, "policy", expected(model))


def assert_any(served: Served, model: Any) -> int:
    """Assert that the server has the version before the one that was staged; return its number."""
    assert_serves(served, "policy", expected(model))
    models = [m["id"] for m in served.get("v1/models")["data"]]
    return max(int(name.partition("@")[2]) for name in models if name.startswith("policy@"))
