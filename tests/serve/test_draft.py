"""A draft model of `weightsync serve`: the policy's tokens, and one update of both."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
import requests
import torch

import weightsync as ws
from tests.integrations.test_huggingface import quiet_peft
from tests.serve.adapted import (
    Served,
    dying_before,
    tiny_adapted,
    told,
    version_of_killed,
    wait_until_together,
)
from tests.serve.servers import forked_server, refused
from tests.serve.test_serve import serving_page
from tests.vllm.adapted import LARGEST_DIFFERENCE, Told, assert_told, train
from tests.vllm.tiny import PROMPT, change, expected, largest_difference
from weightsync.serve.model import make_tiny_model
from weightsync.wire.messages import FinishRequest, Request, UpdateRequest

pytestmark = [pytest.mark.timeout(600), quiet_peft]

REPLICAS = 2
UPDATES = 20
TOKENS = 24
PROMPTS = [[5], [9, 8, 7], list(range(3, 40)), [200] * 11, list(range(100, 120)), [7, 7, 9, 250]]


def near(model: Any, size: float = 0.05) -> Any:
    """Return a model of which some proposals are accepted, and others are not."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * size * 0.2)
    return other


def filled(value: float) -> Any:
    """Return a model whose weights are all the same."""
    model: Any = make_tiny_model().model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def trained(seed: int) -> Any:
    """Return the policy after a training step."""
    model = make_tiny_model().model
    change(model, seed)
    return model


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    options = ["--draft-model", "tiny", "--num-speculative-tokens", "4"]
    with forked_server("--data-parallel", str(REPLICAS), *options) as (url, token):
        yield Served(url, token)


def connect_set(served: Served, policy: Any, draft: Any) -> ws.SetSender:
    return ws.connect_set({"": policy, "draft": draft}, to=served.url, token=served.token)


def send(served: Served, policy: Any, draft: Any) -> int:
    """Send both; return their version."""
    with connect_set(served, policy, draft) as sender:
        versions = {report.version for report in sender.send_weights()}
    (version,) = versions
    return version


def versions(served: Served) -> list[tuple[int, int]]:
    """The versions of policy and draft in each worker."""
    found = []
    for worker in range(REPLICAS):
        policy, draft = (
            requests.get(f"{served.url}/{path}workers/{worker}/weight_info", timeout=60).json()
            for path in ("", "draft/")
        )
        found.append((policy["version"], draft["version"]))
    return found


def replicas(served: Served) -> list[dict[str, Any]]:
    """The statistics of the replicas, read after this call began."""
    begun = time.time()
    while True:
        status = requests.get(f"{served.url}/status.json", timeout=60).json()
        if status["at"] > begun + 0.1:
            found: list[dict[str, Any]] = status["replicas"]
            return found
        time.sleep(0.05)


def generate(served: Served, prompts: list[list[int]] = PROMPTS, **body: Any) -> list[Any]:
    body = {"prompts": prompts, "max_new_tokens": TOKENS, "temperature": 0.0, **body}
    answer = requests.post(f"{served.url}/generate", json=body, timeout=240)
    assert answer.status_code == 200, answer.text
    completions: list[Any] = answer.json()["completions"]
    return completions


@contextmanager
def counted(served: Served) -> Iterator[list[int]]:
    """Yield a list, of the tokens that were proposed and accepted inside the block, at its end."""

    def total() -> list[int]:
        found = replicas(served)
        return [sum(r[name] for r in found) for name in ("proposed_total", "accepted_total")]

    counts, before = list[int](), total()
    yield counts
    counts += [now - then for now, then in zip(total(), before, strict=True)]


DRAFTS: dict[str, tuple[Any, tuple[float, float]]] = {
    "the same": (lambda policy: policy, (1.0, 1.0)),
    "near": (near, (0.2, 0.9)),
    "noise": (lambda _: trained(77), (0.0, 0.3)),
    "zeros": (lambda _: filled(0.0), (0.0, 0.3)),
    "not a number": (lambda _: filled(float("nan")), (0.0, 0.0)),
}


@pytest.mark.parametrize("kind", DRAFTS)
def test_greedy_tokens_are_those_of_the_policy_alone(served: Served, kind: str) -> None:
    make, (least, most) = DRAFTS[kind]
    policy = trained(1)
    version = send(served, policy, make(policy))
    with counted(served) as counts:
        found = generate(served, logprobs=True)
    for prompt, one in zip(PROMPTS, found, strict=True):
        ids, logprobs = expected(policy, prompt, TOKENS)
        until = 1 + ids.index(2) if 2 in ids else TOKENS  # an end token ends a completion
        assert one["token_ids"] == ids[:until]
        assert largest_difference(one["logprobs"], logprobs[:until]) < LARGEST_DIFFERENCE
        assert [span["version"] for span in one["weight_versions"]] == [version]
        assert one["weight_versions"][0]["stop"] == until
    proposed, accepted = counts
    assert least <= accepted / proposed <= most


def test_what_ends_a_completion_ends_it_among_accepted_tokens(served: Served) -> None:
    policy = trained(1)
    send(served, policy, policy)
    prompt = PROMPTS[5]
    wanted, _ = expected(policy, prompt, TOKENS)
    assert 2 not in wanted
    for count in (1, 2, 3, 4, 5, 6, 7):
        (one,) = generate(served, [prompt], max_new_tokens=count)
        assert (one["token_ids"], one["finish_reason"]) == (wanted[:count], "length")
    (whole,) = generate(served, [prompt])
    stop = whole["text"][2:4]
    (one,) = generate(served, [prompt], stop=[stop])
    assert one["finish_reason"] == "stop"
    assert one["text"] == whole["text"][: whole["text"].index(stop)]
    # To the last token that the model has room for.
    long = [3 + 7 * i % 250 for i in range(2048 - 6)]
    (one,) = generate(served, [long], max_new_tokens=6)
    wanted, _ = expected(policy, long, 6)
    until = 1 + wanted.index(2) if 2 in wanted else 6
    assert one["token_ids"] == wanted[:until]


SAMPLED: dict[str, Any] = {"temperature": 0.2, "top_p": 0.95, "max_new_tokens": 3}
SEEDS = 24
LIMIT = 0.03
"""Of the total variation between frequencies and probabilities."""


def probabilities(model: Any, prompts: list[list[int]]) -> torch.Tensor:
    """The probabilities of the next token of prompts of one length, as SAMPLED draws them."""
    with torch.no_grad():
        found = (model(torch.tensor(prompts)).logits[:, -1] / SAMPLED["temperature"]).softmax(-1)
    ordered, places = found.sort(dim=-1, descending=True)
    kept = torch.where(ordered.cumsum(-1) - ordered >= SAMPLED["top_p"], 0.0, ordered)
    found = torch.zeros_like(found).scatter(1, places, kept)
    return found / found.sum(dim=-1, keepdim=True)


def variation(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().sum() / 2)


def test_sampled_tokens_have_the_distribution_of_the_policy(served: Served) -> None:
    policy = trained(1)
    draft, prompt = near(policy, 0.2), PROMPTS[1]
    send(served, policy, draft)
    with counted(served) as counts:
        found = [
            one["token_ids"]
            for seed in range(SEEDS)
            for one in generate(served, [prompt], seed=seed, n=256, **SAMPLED)
        ]
    proposed, accepted = counts
    assert 0.1 < accepted / proposed < 0.9
    size = policy.config.vocab_size
    going = torch.ones(size)
    going[2] = 0.0  # an end token has no token after it
    (first,) = probabilities(policy, [prompt])
    of_first = [[*prompt, token] for token in range(size)]
    policys, drafts = probabilities(policy, of_first), probabilities(draft, of_first)
    pairs = (first * going)[:, None] * policys * going
    likely = pairs.nonzero().tolist()
    third = probabilities(policy, [[*prompt, *pair] for pair in likely])
    wanted = [first, (first * going) @ policys, pairs[pairs > 0] @ third]

    def frequencies(place: int) -> torch.Tensor:
        tokens = torch.tensor([tokens[place] for tokens in found if len(tokens) > place])
        return torch.bincount(tokens, minlength=size) / len(found)

    for place, of_policy in enumerate(wanted):
        assert variation(frequencies(place), of_policy) < LIMIT
    # Other rules would be seen in the second token, the first one of which there are proposals.
    agreed = torch.minimum(policys, drafts)
    drawn_again = agreed + (1 - agreed.sum(-1, keepdim=True)) * policys
    for rule, wrong in {"all are accepted": drafts, "drawn again": drawn_again}.items():
        assert variation((first * going) @ wrong, wanted[1]) > 3 * LIMIT, rule
        assert variation((first * going) @ wrong, frequencies(1)) > 2 * LIMIT, rule


def test_a_seed_gives_the_same_tokens_in_any_batch(served: Served) -> None:
    policy = trained(1)
    send(served, policy, near(policy, 0.2))
    body: dict[str, Any] = {"temperature": 0.4, "max_new_tokens": TOKENS}
    alone = [generate(served, [prompt], seed=3, **body)[0]["token_ids"] for prompt in PROMPTS]
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(generate, served, PROMPTS, **body) for _ in range(3)]
        together = [one["token_ids"] for one in generate(served, seed=3, **body)]
        for other in others:
            other.result()
    assert together == alone


def test_an_adapter_is_computed_as_without_a_draft(served: Served) -> None:
    policy, adapted = trained(1), tiny_adapted()
    train(adapted, 5)
    change(adapted.get_base_model(), 1, "base_layer")
    base = {
        n.replace(".base_layer", ""): t for n, t in adapted.get_base_model().state_dict().items()
    }
    policy.load_state_dict({n: t for n, t in base.items() if "lora_" not in n})
    send(served, policy, near(policy))
    with served.connect(adapted, "adapter") as sender, ThreadPoolExecutor(4) as pool:
        version = sender.send_weights().version
        wanted = expected(adapted, PROMPT, TOKENS)
        others = [pool.submit(generate, served) for _ in range(4)]
        served.assert_serves("adapter", wanted, version=version)
        for other in others:
            for prompt, one in zip(PROMPTS, other.result(), strict=True):
                ids, _ = expected(policy, prompt, TOKENS)
                assert one["token_ids"] == ids[: len(one["token_ids"])]


def test_policy_and_draft_change_together_under_load(served: Served) -> None:
    """With the policy as draft every proposal is accepted, unless a step has two versions."""
    policy = trained(100)
    of_version: dict[int, Told] = {}
    made: list[tuple[int, Any]] = []
    with connect_set(served, policy, policy) as sender, ThreadPoolExecutor(4) as pool:
        of_version[sender.version + 1] = expected(policy, PROMPT, TOKENS)
        newest, over = sender.send_weights()[0].version, False

        def request() -> None:
            while not over:
                first = newest
                made.append((first, served.choice("tiny", PROMPT, TOKENS)))

        with counted(served) as counts:
            work = [pool.submit(request) for _ in range(4)]
            try:
                for seed in range(101, 100 + UPDATES):
                    change(policy, seed)
                    of_version[sender.version + 1] = expected(policy, PROMPT, TOKENS)
                    newest = sender.send_weights()[0].version
                    for replica in replicas(served):
                        assert replica["versions"] == replica["draft_versions"]
            finally:
                over = True
            for each in work:
                each.result()
    proposed, accepted = counts
    assert proposed > 10 * UPDATES
    assert proposed - accepted <= 2  # for ties
    whole = 0
    for first, choice in made:
        spans = choice["weight_versions"]
        assert spans[0]["version"] >= first
        assert choice["prompt_version"] == spans[0]["version"]
        assert spans[-1]["stop"] == TOKENS
        if len(spans) == 1:
            whole += 1
            assert_told(told(choice), of_version[spans[0]["version"]])
    assert whole > len(made) // 4
    # A policy that comes alone is another one than the draft.
    with ws.connect(trained(7), to=served.url, token=served.token) as alone:
        alone.send_weights()
    with counted(served) as counts:
        served.choice("tiny", PROMPT, TOKENS)
    assert counts[1] < counts[0]


def test_a_draft_that_is_refused_leaves_both_as_they_were(served: Served) -> None:
    policy = trained(1)
    before = send(served, policy, near(policy))
    with pytest.raises(ws.ManifestMismatchError):
        connect_set(served, trained(2), make_tiny_model(hidden_size=32).model)
    fails = list[BaseException]()

    def draft() -> dict[str, torch.Tensor]:
        if fails:
            raise fails.pop()
        return dict(make_tiny_model().model.state_dict())

    with connect_set(served, policy, draft) as sender:
        version = sender.send_weights()[0].version
        assert version == before + 1
        change(policy, 3)
        fails.append(RuntimeError("no more draft"))
        with pytest.raises(RuntimeError, match="no more draft"):
            sender.send_weights()
    assert versions(served) == [(version, version)] * REPLICAS
    served.assert_serves("tiny", expected(trained(1), PROMPT, TOKENS), version=version)


def send_until_killed(served: Served, call: type[Request], count: int, pipe: Connection) -> None:
    """Send policy and draft, and both again; die before a request of this type of that."""
    policy, draft = trained(20), trained(21)
    with connect_set(served, policy, draft) as sender:
        sender.send_weights()
        pipe.send(sender.version)
        change(policy, 22)
        change(draft, 23)
        with dying_before(call, count):
            sender.send_weights()


@pytest.mark.parametrize(
    ("call", "count"),
    [(UpdateRequest, 1), (UpdateRequest, 3), (FinishRequest, 1), (FinishRequest, 3)],
)
def test_a_trainer_that_is_killed_leaves_both_old_or_both_new(
    served: Served, call: type[Request], count: int
) -> None:
    before = version_of_killed(send_until_killed, served, call, count)
    wait_until_together(lambda: versions(served), before)
    if call is UpdateRequest:
        assert versions(served) == [(before, before)] * REPLICAS
        served.assert_serves("tiny", expected(trained(20), PROMPT, TOKENS), version=before)
    policy = trained(30)
    version = send(served, policy, near(policy))
    assert versions(served) == [(version, version)] * REPLICAS
    served.assert_serves("tiny", expected(policy, PROMPT, TOKENS), version=version)


def test_what_the_page_of_serve_sends(served: Served) -> None:
    policy = trained(40)
    names: dict[str, Any] = {"ws": ws, "policy": policy, "draft": near(policy), **vars(served)}
    exec(serving_page()[1][1], names)  # our own page
    (version,) = {report.version for report in names["reports"]}
    assert versions(served) == [(version, version)] * REPLICAS
    served.assert_serves("tiny", expected(policy, PROMPT, TOKENS), version=version)


def test_the_page_shows_the_draft(served: Served) -> None:
    policy = trained(1)
    version = send(served, policy, policy)
    with counted(served):
        generate(served)
    page = requests.get(served.url, timeout=60).text
    assert f'data-label="Draft">{version}<' in page
    assert 'data-label="Accepted">' in page
    info = requests.get(f"{served.url}/server_info", timeout=60).json()
    assert info["draft_model"] == "tiny"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--draft-model", "tiny-vision"), "a vocabulary of 260 tokens, and tiny one of 259"),
        (("--draft-model", "tiny", "--tensor-parallel", "2"), "is not supported"),
        (("--draft-model", "nothing"), "model 'nothing' is neither"),
    ],
)
def test_what_is_no_draft_is_refused_at_the_start(options: tuple[str, ...], why: str) -> None:
    code, said = refused(*options)
    assert code != 0
    (line,) = (line for line in said.splitlines() if line.startswith("weightsync:"))
    assert why in line
