"""Adapters sent to `weightsync serve`: each version generates what PEFT does with it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import openai
import psutil
import pytest
import requests
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import LlamaConfig, LlamaForCausalLM

import weightsync as ws
from tests.integrations.test_huggingface import quiet_peft
from tests.serve.adapted import (
    Served,
    send_until_killed,
    tiny_adapted,
    told,
    version_of_killed,
)
from tests.serve.servers import forked_server, members, running, server, wait_until
from tests.vllm.adapted import (
    LARGEST_DIFFERENCE,
    Told,
    Unnamed,
    adapt,
    adapter_nbytes,
    adapter_of,
    assert_told,
    base_of,
    train,
)
from tests.vllm.tiny import PROMPT, change, expected, largest_difference
from weightsync.integrations.adapters import unload_adapter
from weightsync.serve.model import make_tiny_model
from weightsync.transports.http import HttpTransport
from weightsync.wire.messages import FinishRequest, UpdateRequest

pytestmark = [pytest.mark.timeout(600), quiet_peft]

UPDATES = 50
LONG = 120
IN_A_ROW = 150


class Trained:
    """A server, its processes, and the PEFT model of its trainer."""

    def __init__(self, served: Served, processes: dict[str, psutil.Process]) -> None:
        self.served = served
        self.processes = processes
        self.model = tiny_adapted()


@pytest.fixture(scope="module")
def trained() -> Iterator[Trained]:
    with server() as (url, token, process):
        yield Trained(Served(url, token), members(process))


def test_each_version_generates_what_peft_does(trained: Trained) -> None:
    served, model = trained.served, trained.model
    base, of_version = base_of(model), dict[int, Told]()
    with served.connect(model) as sender:
        for seed in (1, 2, 3):
            train(model, seed)
            report = sender.send_weights()
            assert (report.apply, report.verified) == ("staged", "arrived")
            assert report.control_messages == 2
            assert adapter_nbytes(model) < report.nbytes < 1.02 * adapter_nbytes(model)
            of_version[report.version] = expected(model)
            for name in ("policy", f"policy@{report.version}"):
                served.assert_serves(name, of_version[report.version], version=report.version)
            served.assert_serves("tiny", base, version=0)
        newest = sender.version
    assert of_version[newest][0] != of_version[newest - 1][0]
    for version in (newest - 1, newest):
        served.assert_serves(f"policy@{version}", of_version[version], version=version)
    assert served.models == ["tiny", "policy", f"policy@{newest - 1}", f"policy@{newest}"]
    gone = served.post(f"policy@{newest - 2}")
    assert gone.status_code == 404
    assert f"use tiny, policy@{newest - 1}, policy@{newest}" in gone.json()["error"]["message"]


def test_requests_in_flight_end_with_the_version_that_they_began_with(trained: Trained) -> None:
    """Each answer is that of the version it names: one that was in use when it was accepted."""
    served, model = trained.served, trained.model
    prompts = [PROMPT, [7 * i % 250 + 3 for i in range(40)]]  # the second one is kept, and reused
    of_version: dict[int, list[Told]] = {}
    made: list[tuple[int, int, int, Any]] = []
    tokens = 24
    with served.connect(model) as sender, ThreadPoolExecutor(5) as pool:
        train(model, 100)
        sender.send_weights()
        of_version[sender.version] = [expected(model, prompt, tokens) for prompt in prompts]
        newest, over = sender.version, False
        base = [base_of(model, prompt) for prompt in prompts]

        def request(which: int) -> None:
            while not over:
                first = newest
                choice = served.choice("policy", prompts[which], tokens)
                made.append((which, first, newest, choice))

        def request_base() -> None:
            while not over:
                for prompt, wanted in zip(prompts, base, strict=True):
                    served.assert_serves("tiny", wanted, prompt)

        work = [pool.submit(request, i % 2) for i in range(4)] + [pool.submit(request_base)]
        try:
            for i in range(1, UPDATES):
                train(model, 100 + i)
                of_version[sender.version + 1] = [expected(model, p, tokens) for p in prompts]
                newest = sender.send_weights().version
        finally:
            over = True
        for each in work:
            each.result()
    assert len(of_version) == UPDATES
    assert len(made) > UPDATES
    claimed = set()
    for which, first, last, choice in made:
        (span,) = choice["weight_versions"]
        # An update that a request is sent beside may be in use before its sender knows it.
        assert first <= span["version"] <= last + 1
        assert (span["start"], span["stop"], span["base_version"]) == (0, tokens, 0)
        assert choice["prompt_version"] == span["version"]
        assert_told(told(choice), of_version[span["version"]][which])
        claimed.add(span["version"])
    assert len(claimed) > UPDATES // 3


def test_a_version_is_kept_as_long_as_a_request_uses_it(trained: Trained) -> None:
    served, model = trained.served, trained.model
    with served.connect(model) as sender, ThreadPoolExecutor(1) as pool:
        train(model, 7)
        first = sender.send_weights().version
        wanted = expected(model, count=LONG)
        for attempt in range(4):  # the request may be over before the last update
            request = pool.submit(served.choice, f"policy@{first}", PROMPT, LONG << attempt)
            wait_until(partial(is_at_work, served, request), "it is not running")
            for seed in (8, 9, 10):
                train(model, seed)
                sender.send_weights()
            overtaken = not request.done()
            choice = request.result()
            (span,) = choice["weight_versions"]
            assert span["version"] == first
            tokens, logprobs = told(choice)
            assert tokens[:LONG] == wanted[0]
            assert largest_difference(logprobs[:LONG], wanted[1]) < LARGEST_DIFFERENCE
            if overtaken:
                break
            train(model, 7)
            first = sender.send_weights().version
        assert overtaken
        last = sender.version
    wait_until(lambda: served.post(f"policy@{first}").status_code == 404, "it is never dropped")
    assert served.models[1:] == ["policy", f"policy@{last - 1}", f"policy@{last}"]


def is_at_work(served: Served, future: Future[Any]) -> bool:
    return future.done() or running(served.url)[0] > 0


def test_several_adapters_in_one_batch(trained: Trained) -> None:
    served, model = trained.served, tiny_adapted()
    more = copy.deepcopy(model.peft_config["default"])
    more.r, more.lora_alpha, more.target_modules = 4, 3, {"q_proj", "down_proj"}
    model.add_adapter("judge", more)
    train(model, 21, "judge")
    with served.connect(model) as sender, served.connect(model, "judge") as judge:
        train(model, 22)
        sender.send_weights()
        judge.send_weights()
        wanted = {"policy": expected(model, count=60), "tiny": base_of(model)}
        with adapter_of(model, "judge"):
            wanted["judge"] = expected(model, count=60)
        assert wanted["judge"][0] != wanted["policy"][0]
        with ThreadPoolExecutor(6) as pool:
            names = [*wanted] * 4
            work = [pool.submit(served.assert_serves, name, wanted[name]) for name in names]
            for each in work:
                each.result()
    unload_adapter(served.url, "judge", token=served.token)
    assert "judge" not in served.models


def test_a_base_update_keeps_the_adapters(trained: Trained) -> None:
    served, model = trained.served, tiny_adapted()
    plain = model.get_base_model()
    base = ws.connect(
        lambda: plain_state(model), to=served.url, token=served.token, dtype=torch.float32
    )
    with served.connect(model) as sender, base as base_sender:
        train(model, 31)
        version = sender.send_weights().version
        change(plain, 32, "base_layer")
        of_base = base_sender.send_weights().version
        served.assert_serves("policy", expected(model), version=version)
        served.assert_serves("tiny", base_of(model), version=of_base)
        (span,) = served.choice("policy")["weight_versions"]
        assert span["base_version"] == of_base
        train(model, 33)
        sender.send_weights()
        served.assert_serves("policy", expected(model))
        back = make_tiny_model().model.state_dict()
        with torch.no_grad():
            for name, tensor in plain.state_dict().items():
                if "lora_" not in name:
                    tensor.copy_(back[name.replace(".base_layer", "")])
        base_sender.send_weights()
        served.assert_serves("policy", expected(model))
        served.assert_serves("tiny", base_of(trained.model))


def plain_state(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a PEFT model's base, by their names without adapters."""
    found = model.get_base_model().state_dict()
    return {n.replace(".base_layer", ""): t for n, t in found.items() if "lora_" not in n}


def test_an_unloaded_adapter_is_gone_until_it_is_sent_again(trained: Trained) -> None:
    served, model = trained.served, trained.model
    with served.connect(model, "passing") as sender, ThreadPoolExecutor(1) as pool:
        train(model, 40)
        sender.send_weights()
        wanted = expected(model, count=LONG)
        served.assert_serves("passing", wanted)
        in_flight = pool.submit(served.choice, "passing", PROMPT, LONG)
        wait_until(partial(is_at_work, served, in_flight), "it is not running")
        unload_adapter(served.url, "passing", token=served.token)
        for name in ("passing", f"passing@{sender.version}"):
            assert served.post(name).status_code == 404
        assert "passing" not in served.models
        assert_told(told(in_flight.result()), wanted)
        train(model, 41)
        sender.send_weights()
        served.assert_serves("passing", expected(model), version=sender.version)
    unload_adapter(served.url, "passing", token=served.token)
    unload_adapter(served.url, "passing", token=served.token)  # it is no error
    served.assert_serves("tiny", base_of(model))


def test_unloading_needs_the_token(trained: Trained) -> None:
    with pytest.raises(ws.AuthError):
        unload_adapter(trained.served.url, "policy", token="another")


@pytest.mark.parametrize("token", [None, "another"])
def test_a_read_of_a_new_name_needs_the_token(trained: Trained, token: str | None) -> None:
    served = trained.served
    with ws.connect(
        ws.AdapterSource(tiny_adapted(), name="known"), to=served.url, token=served.token
    ):
        pass
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    wanted = {None: 401, "another": 403}[token]
    for name, status in (("known", 200), (f"guest-{wanted}", wanted)):
        url = f"{served.url}/adapters/{name}/weight_info"
        assert requests.get(url, headers=headers, timeout=60).status_code == status


def test_an_openai_client_names_adapters(trained: Trained) -> None:
    served, model = trained.served, trained.model
    with served.connect(model) as sender:
        train(model, 45)
        version = sender.send_weights().version
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
    chunks = client.completions.create(
        model=f"policy@{version}", prompt="ab", max_tokens=6, temperature=0, stream=True
    )
    assert {chunk.model for chunk in chunks} == {f"policy@{version}"}
    said = client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "ab"}], max_tokens=6, temperature=0
    )
    assert said.choices[0].model_extra is not None
    assert said.choices[0].model_extra["weight_versions"][0]["version"] == version
    assert client.models.retrieve("policy").model_extra == {"max_model_len": 2048, "parent": "tiny"}
    for name in ("", "nobody", "policy@999", "policy@x", "tiny@1", "@1", "policy@" + "9" * 30):
        with pytest.raises(openai.NotFoundError, match="is not served here"):
            client.completions.create(model=name, prompt="ab", stream=name == "nobody")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, r"DoRA: .*lora_magnitude_vector"),
    "bias": ({"lora_bias": True}, r"bias: .*lora_B\.bias"),
    "modules": ({"modules_to_save": ["lm_head"]}, r"modules_to_save.*lm_head\.weight"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_computed_is_refused_by_name(kind: str, trained: Trained) -> None:
    config, named = REFUSED[kind]
    with pytest.raises(ws.ManifestMismatchError, match=named):
        trained.served.connect(tiny_adapted(**config), "refused")
    assert "refused" not in trained.served.models


def test_an_adapter_for_another_base_is_refused_and_the_former_stays(trained: Trained) -> None:
    served, model = trained.served, trained.model
    with served.connect(model) as sender:
        train(model, 46)
        version = sender.send_weights().version
    sizes = make_tiny_model().model.config.to_dict() | {"hidden_size": 32, "num_hidden_layers": 3}
    other: Any = LlamaForCausalLM(LlamaConfig(**sizes | {"head_dim": None}))
    with pytest.raises(ws.ManifestMismatchError) as refused:
        served.connect(adapt(other))
    assert "made for another base model, with layers of 32 to" in str(refused.value)
    assert "does not have: model.layers.2" in str(refused.value)
    served.assert_serves("policy", expected(model), version=version)


def test_ranks_that_the_config_does_not_tell_are_refused(trained: Trained) -> None:
    served, model = trained.served, tiny_adapted()
    with served.connect(model) as sender:
        version = sender.send_weights().version
    wanted = expected(model)
    wrong = tiny_adapted()
    wrong.peft_config["default"].r = 4
    layers: list[Any] = [m for m in wrong.modules() if isinstance(m, BaseTunerLayer)]
    for layer in layers:
        if layer.scaling:
            layer.r["default"], layer.scaling["default"] = 4, 16 / 4
    with (
        served.connect(wrong) as sender,
        pytest.raises(ws.ConfigError, match=r"other ranks .*q_proj \(rank 4, tensors of rank 8\)"),
    ):
        sender.send_weights()
    served.assert_serves("policy", wanted, version=version)


def test_what_has_no_config_is_refused(trained: Trained) -> None:
    served, model = trained.served, trained.model
    with served.connect(model) as sender:
        version = sender.send_weights().version
    tensors = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(8, 64)}
    with pytest.raises(ws.ManifestMismatchError, match=r"adapter_config\.json") as refused:
        ws.connect(Unnamed(tensors), to=served.url, token=served.token)
    assert "\n" not in str(refused.value)
    served.assert_serves("policy", expected(model), version=version)
    served.assert_serves("tiny", base_of(model))


def test_names_that_are_taken(trained: Trained) -> None:
    with pytest.raises(ws.ConfigError, match="'tiny' is the name of the base model"):
        trained.served.connect(trained.model, "tiny")


def test_one_name_has_one_sender(trained: Trained) -> None:
    served, model = trained.served, trained.model
    with served.connect(model) as sender:
        with pytest.raises(ws.SenderConflictError):
            served.connect(model)
        with served.connect(model, "other") as other:
            other.send_weights()
        sender.send_weights()
    unload_adapter(served.url, "other", token=served.token)


@pytest.mark.parametrize("call", [UpdateRequest, FinishRequest])
def test_a_trainer_that_dies_in_an_update(trained: Trained, call: Any) -> None:
    served, model = trained.served, trained.model
    version = version_of_killed(send_until_killed, served, call, 60)
    train(model, 60)
    served.assert_serves("policy", expected(model), version=version)
    served.assert_serves("tiny", base_of(model))
    train(model, 52)
    with served.connect(model) as sender:
        sender.send_weights()
        served.assert_serves("policy", expected(model), version=sender.version)


def test_a_worker_that_is_killed_between_stage_and_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server ends; each answer until then is of the version in use.

    The server that is started in its place gets the adapter from the same sender.
    """
    model, token = tiny_adapted(), "a-token-of-this-test"
    call, over = HttpTransport.call, False
    choices: list[Any] = []
    with server(want_token=False, WEIGHTSYNC_TOKEN=token) as (url, _, process):
        served, port = Served(url, token), url.rpartition(":")[2]
        worker = members(process)["worker 0.0"]
        sender = served.connect(model, timeout_s=10)
        train(model, 70)
        sender.send_weights()
        wanted = expected(model)

        def killing(self: HttpTransport, request: Any, *, timeout_s: float) -> Any:
            if isinstance(request, FinishRequest):
                worker.kill()
            return call(self, request, timeout_s=timeout_s)

        def ask() -> None:
            while not over:
                try:
                    answer = served.post("policy")
                except requests.RequestException:
                    return
                if answer.status_code != 200:
                    return
                choices.append(answer.json()["choices"][0])

        with ThreadPoolExecutor(2) as pool:
            asking = [pool.submit(ask) for _ in range(2)]
            wait_until(lambda: len(choices) > 4, "no request is answered")
            train(model, 71)
            try:
                monkeypatch.setattr(HttpTransport, "call", killing)
                with pytest.raises(ws.WeightSyncError) as raised:
                    sender.send_weights()
                monkeypatch.undo()
                assert "\n" not in str(raised.value)
                assert process.wait(60) not in (0, None)
            finally:
                over = True
            for each in asking:
                each.result()
        assert not worker.is_running()
    for choice in choices:
        found = told(choice)
        # What was under way ends where it is, perhaps before its first token.
        length = len(found[0]) if choice["finish_reason"] == "abort" else len(wanted[0])
        if length:
            assert_told(found, (wanted[0][:length], wanted[1][:length]))
    with (
        sender,
        server("--port", port, want_token=False, WEIGHTSYNC_TOKEN=token) as (url, _, _),
    ):
        served = Served(url, token)
        assert served.post("policy").status_code == 404
        served.assert_serves("tiny", base_of(model), version=0)
        sender.send_weights()
        served.assert_serves("policy", expected(model), version=sender.version)
        served.assert_serves("tiny", base_of(model), version=0)


def test_versions_in_a_row_grow_nothing(trained: Trained) -> None:
    served, model = trained.served, trained.model

    def used() -> tuple[int, list[int]]:
        found = trained.processes.values()
        memory = sum(process.memory_info().rss for process in found)
        return memory, [process.num_fds() for process in found]

    with served.connect(model) as sender:
        for seed in range(IN_A_ROW):
            if seed == IN_A_ROW // 3:
                before = used()
            train(model, seed)
            sender.send_weights()
            if seed % 10 == 0:
                served.assert_serves("policy", expected(model), version=sender.version)
        memory, files = used()
    assert files == before[1]
    leaked = IN_A_ROW * 2 // 3 * adapter_nbytes(model)
    assert memory - before[0] < leaked / 3
    assert len(served.models) == 4


def test_replicas_and_api_servers_all_know_the_versions() -> None:
    model = tiny_adapted()
    layout = ["--data-parallel", "2", "--api-servers", "2", "--adapter-versions", "1"]
    with forked_server(*layout) as (url, token):
        served = Served(url, token)
        with served.connect(model) as sender:
            for seed in (1, 2):
                train(model, seed)
                report = sender.send_weights()
                assert len(report.receivers) == 2
                wanted = expected(model)
                for _ in range(6):
                    served.assert_serves("policy", wanted, version=report.version)
                    assert served.models == ["tiny", "policy", f"policy@{report.version}"]
        assert {served.post("policy@1").status_code for _ in range(4)} == {404}


def test_shards_of_a_model_take_no_adapter() -> None:
    with forked_server("--tensor-parallel", "2") as (url, token):
        served = Served(url, token)
        with pytest.raises(ws.ConfigError, match="--tensor-parallel 2 takes no adapter"):
            served.connect(tiny_adapted())
        assert served.models == ["tiny"]
        assert math.isfinite(told(served.choice("tiny"))[1][0])
