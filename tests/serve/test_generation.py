"""Generation: the model's own tokens, seeds, stops, and a weight version for every token."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import torch

from weightsync.errors import ConfigError, NotReadyError, ProtocolError
from weightsync.serve.generation import Generator
from weightsync.serve.model import LoadedModel, make_tiny_model
from weightsync.serve.requests import (
    Completion,
    GenerateRequest,
    Sampling,
    VersionSpan,
    decode_response,
)

PROMPTS: list[str | list[int]] = ["a", "The sea, the sky.", "weights " * 9]
JOIN_S = 60


class Gate:
    """A `reading` that counts its readers and changes version every `steps_per_version` steps."""

    def __init__(self, steps_per_version: int = 10**9) -> None:
        self.entered = 0
        self.inside = 0
        self._steps_per_version = steps_per_version

    @contextmanager
    def __call__(self) -> Iterator[int]:
        version = 1 + self.entered // self._steps_per_version
        self.entered += 1
        self.inside += 1
        try:
            yield version
        finally:
            self.inside -= 1


def generator(loaded: LoadedModel, gate: Gate | None = None) -> Generator:
    return Generator(loaded.model, loaded.tokenizer, reading=gate or Gate())


def ids_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


@torch.no_grad()
def greedy(loaded: LoadedModel, prompt: str, steps: int) -> list[int]:
    """The likeliest tokens, found without a cache or a batch."""
    ids = list(loaded.tokenizer(prompt)["input_ids"])
    start = len(ids)
    for _ in range(steps):
        ids.append(int(loaded.model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[start:]


def test_temperature_zero_takes_the_likeliest_tokens_of_each_prompt(tiny: LoadedModel) -> None:
    found = generator(tiny).generate(PROMPTS, Sampling(temperature=0, max_new_tokens=12))
    assert ids_of(found) == [greedy(tiny, str(prompt), 12) for prompt in PROMPTS]
    assert [c.finish_reason for c in found] == ["length"] * 3


def test_text_and_token_ids_are_the_same_prompt(tiny: LoadedModel) -> None:
    as_ids = [list(tiny.tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]
    sampling = Sampling(seed=4)
    by_text = generator(tiny).generate(PROMPTS, sampling)
    assert ids_of(generator(tiny).generate(list(as_ids), sampling)) == ids_of(by_text)
    assert [c.text for c in by_text] == [tiny.tokenizer.decode(c.token_ids) for c in by_text]


def test_a_seed_repeats_and_others_differ(tiny: LoadedModel) -> None:
    def sample(seed: int | None) -> list[list[int]]:
        return ids_of(generator(tiny).generate(PROMPTS, Sampling(seed=seed, n=2)))

    assert sample(7) == sample(7)
    assert sample(7) != sample(8)
    assert sample(None) != sample(None)


def test_n_completions_of_a_prompt_are_neighbours_and_differ(tiny: LoadedModel) -> None:
    found = generator(tiny).generate(PROMPTS, Sampling(n=4, seed=1))
    assert [c.prompt_index for c in found] == [0] * 4 + [1] * 4 + [2] * 4
    assert len({tuple(ids) for ids in ids_of(found)}) == 12


@torch.no_grad()
def test_logprobs_are_those_of_a_forward_pass_without_cache(tiny: LoadedModel) -> None:
    found = generator(tiny).generate(
        PROMPTS, Sampling(seed=3, n=3, logprobs=True, temperature=0.7, top_p=0.9)
    )
    for completion in found:
        prompt = tiny.tokenizer(PROMPTS[completion.prompt_index])["input_ids"]
        logits = tiny.model(torch.tensor([prompt + completion.token_ids])).logits[0]
        expected = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
        wanted = expected.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert completion.logprobs is not None
        torch.testing.assert_close(torch.tensor(completion.logprobs), wanted, rtol=0, atol=1e-4)


def test_logprobs_come_only_when_asked_for(tiny: LoadedModel) -> None:
    assert generator(tiny).generate(["a"])[0].logprobs is None


def test_a_small_top_p_leaves_only_the_likeliest_token(tiny: LoadedModel) -> None:
    found = generator(tiny).generate(PROMPTS, Sampling(top_p=1e-6, seed=1))
    assert ids_of(found) == [greedy(tiny, str(prompt), 16) for prompt in PROMPTS]


@torch.no_grad()
def test_top_p_samples_the_fewest_tokens_that_reach_it(tiny: LoadedModel) -> None:
    ids = torch.tensor([tiny.tokenizer("abc")["input_ids"]])
    probabilities = tiny.model(ids).logits[0, -1].softmax(dim=-1)
    allowed: set[int] = set()
    for token in probabilities.argsort(descending=True).tolist():
        allowed.add(token)
        if probabilities[list(allowed)].sum() >= 0.05:
            break
    sampling = Sampling(top_p=0.05, n=256, max_new_tokens=1, seed=2)
    chosen = {ids[0] for ids in ids_of(generator(tiny).generate(["abc"], sampling))}
    assert 1 < len(allowed) < 30
    assert chosen == allowed


def test_the_end_token_ends_a_completion_and_only_that_one() -> None:
    loaded = make_tiny_model()
    likeliest = greedy(loaded, "a", 1)[0]
    loaded.model.config.eos_token_id = [likeliest, 3]
    found = generator(loaded).generate(["a", [5, 6]], Sampling(temperature=0, max_new_tokens=4))
    assert found[0].token_ids == [likeliest]
    assert found[0].finish_reason == "stop"
    assert found[0].weight_versions == [VersionSpan(version=1, start=0, stop=1)]
    assert len(found[1].token_ids) == 4 or found[1].finish_reason == "stop"


def test_a_stop_text_ends_a_completion_and_is_cut_off(tiny: LoadedModel) -> None:
    full = generator(tiny).generate(["abc"], Sampling(seed=9, max_new_tokens=40))[0]
    at = next(i for i, c in enumerate(full.text) if i > 5 and c.isascii() and c.isprintable())
    stop = full.text[at]
    found = generator(tiny).generate(
        ["abc"], Sampling(seed=9, max_new_tokens=40, stop=(stop, "never seen"))
    )[0]
    assert found.finish_reason == "stop"
    assert found.text == full.text[: full.text.index(stop)]
    assert found.token_ids == full.token_ids[: len(found.token_ids)]
    assert tiny.tokenizer.decode(found.token_ids).endswith(stop)


def test_every_step_is_one_reading_and_versions_come_as_spans(tiny: LoadedModel) -> None:
    gate = Gate(steps_per_version=3)
    found = generator(tiny, gate).generate(PROMPTS, Sampling(max_new_tokens=8, seed=1))
    assert (gate.entered, gate.inside) == (8, 0)
    spans = [(1, 0, 3), (2, 3, 6), (3, 6, 8)]
    assert [[(s.version, s.start, s.stop) for s in c.weight_versions] for c in found] == [spans] * 3
    assert [c.prompt_version for c in found] == [1] * 3


class Swap(Gate):
    """Replaces the weights between two decode steps, as an update does."""

    def __init__(self, model: torch.nn.Module, weights: dict[str, torch.Tensor], at: int) -> None:
        super().__init__(steps_per_version=at)
        self._model, self._weights, self._at = model, weights, at

    @contextmanager
    def __call__(self) -> Iterator[int]:
        if self.entered == self._at:
            self._model.load_state_dict(self._weights)
        with super().__call__() as version:
            yield version


@torch.no_grad()
def swapped(old: LoadedModel, new: LoadedModel, prompt: str, at: int, steps: int) -> list[int]:
    """Greedy tokens when the weights change before step `at`, and the old cache is kept."""
    ids = torch.tensor([old.tokenizer(prompt)["input_ids"]])
    cache, found = None, []
    for step in range(steps):
        model = (old if step < at else new).model
        output = model(ids, past_key_values=cache, use_cache=True)
        cache, ids = output.past_key_values, output.logits[:, -1:].argmax(dim=-1)
        found.append(int(ids))
    return found


def test_a_completion_goes_on_over_an_update_with_its_cache(tiny: LoadedModel) -> None:
    live, new = make_tiny_model(), make_tiny_model(seed=99)
    gate = Swap(live.model, new.model.state_dict(), at=5)
    found = generator(live, gate).generate(["abc"], Sampling(temperature=0, max_new_tokens=10))[0]
    assert found.token_ids == swapped(tiny, new, "abc", at=5, steps=10)
    assert found.token_ids != greedy(tiny, "abc", 10)
    assert [s.version for s in found.weight_versions] == [1, 2]


def test_a_receiver_that_is_not_ready_fails_the_call_and_not_the_next_one(
    tiny: LoadedModel,
) -> None:
    class Torn(Gate):
        @contextmanager
        def __call__(self) -> Iterator[int]:
            with super().__call__() as version:
                if self.entered == 3:
                    raise NotReadyError("torn", state="TORN", update_id="u1")
                yield version

    torn = generator(tiny, Torn())
    with pytest.raises(NotReadyError, match="torn"):
        torn.generate(["a"])
    assert len(torn.generate(["a"])[0].token_ids) == 16


def test_an_abort_returns_what_is_there(tiny: LoadedModel) -> None:
    gate = Gate()
    found = generator(tiny, gate).generate(["abc"], should_stop=lambda: gate.entered >= 4)[0]
    assert found.finish_reason == "abort"
    assert len(found.token_ids) == 4
    assert found.text == tiny.tokenizer.decode(found.token_ids, skip_special_tokens=True)


def test_an_abort_reaches_a_request_that_waits_for_its_turn(tiny: LoadedModel) -> None:
    inside, release = threading.Event(), threading.Event()

    class Held(Gate):
        @contextmanager
        def __call__(self) -> Iterator[int]:
            inside.set()
            assert release.wait(JOIN_S)
            with super().__call__() as version:
                yield version

    held = generator(tiny, Held())
    first = threading.Thread(target=held.generate, args=(["a"],))
    first.start()
    try:
        assert inside.wait(JOIN_S)
        asked = itertools.count()
        waited = held.generate(["b"], should_stop=lambda: next(asked) > 2)
        assert (waited[0].finish_reason, waited[0].token_ids) == ("abort", [])
        assert waited[0].weight_versions == []
    finally:
        release.set()
        first.join(JOIN_S)
    assert not first.is_alive()


def test_requests_of_several_threads_do_not_mix(tiny: LoadedModel) -> None:
    shared = generator(tiny)
    alone = {seed: ids_of(shared.generate(PROMPTS, Sampling(seed=seed))) for seed in range(4)}
    found: dict[int, list[list[int]]] = {}

    def ask(seed: int) -> None:
        found[seed] = ids_of(shared.generate(PROMPTS, Sampling(seed=seed)))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
    assert found == alone


@pytest.mark.parametrize(
    ("prompts", "sampling", "message"),
    [
        ([], Sampling(), "0 prompts"),
        ([[1, 10**6]], Sampling(), "prompt 0 is empty or has token ids outside 0 to 258"),
        (["a", [-1]], Sampling(), "prompt 1 is empty"),
        (["a"] * 5, Sampling(n=256), "5 prompts, 256 completions each"),
        (["a"], Sampling(max_new_tokens=2048), "take 2049 tokens, the model has room for 2048"),
    ],
)
def test_prompts_that_the_model_cannot_take_are_refused(
    tiny: LoadedModel, prompts: list[str | list[int]], sampling: Sampling, message: str
) -> None:
    gate = Gate()
    with pytest.raises(ConfigError, match=message):
        generator(tiny, gate).generate(prompts, sampling)
    assert gate.entered == 0


def test_an_empty_text_starts_from_the_first_token(tiny: LoadedModel) -> None:
    sampling = Sampling(temperature=0)
    by_bos = generator(tiny).generate([[tiny.tokenizer.bos_token_id]], sampling)
    assert ids_of(generator(tiny).generate([""], sampling)) == ids_of(by_bos)


def test_a_request_body_is_answered_with_json(tiny: LoadedModel) -> None:
    request = GenerateRequest(prompts=["a", [5, 6]], n=2, seed=1, logprobs=True, max_new_tokens=3)
    answer = generator(tiny).handle_generate(msgspec.json.encode(request))
    expected = generator(tiny).generate(request.prompts, request)
    assert decode_response(answer).completions == expected
    first = msgspec.json.decode(answer)["completions"][0]
    assert first["weight_versions"] == [{"version": 1, "start": 0, "stop": 3}]
    assert set(first) == {
        "prompt_index",
        "text",
        "token_ids",
        "logprobs",
        "weight_versions",
        "prompt_version",
        "finish_reason",
    }


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b'{"prompts": ["\xff"]}', "body of /generate"),
        (b'{"prompts": []}', r"length >= 1 - at `\$.prompts`"),
        (b'{"prompts": "text"}', r"Expected `array`, got `str` - at `\$.prompts`"),
        (b'{"prompts": [[]]}', r"\$.prompts\[0\]"),
        (b'{"prompts": [[-1]]}', r">= 0 - at `\$.prompts\[0\]\[0\]`"),
        (b'{"n": 2}', "missing required field `prompts`"),
        (b'{"prompts": ["a"], "prompt": "b"}', "unknown field `prompt`"),
        (b'{"prompts": ["a"], "n": 0}', r">= 1 - at `\$.n`"),
        (b'{"prompts": ["a"], "temperature": -1}', r">= 0.0 - at `\$.temperature`"),
        (b'{"prompts": ["a"], "temperature": NaN}', "malformed"),
        (b'{"prompts": ["a"], "top_p": 0}', r"> 0.0 - at `\$.top_p`"),
        (b'{"prompts": ["a"], "max_new_tokens": 1e9}', r"\$.max_new_tokens"),
        (b'{"prompts": ["a"], "stop": [""]}', r"\$.stop\[0\]"),
    ],
)
def test_a_body_that_is_no_request_names_the_field(
    tiny: LoadedModel, body: bytes, message: str
) -> None:
    with pytest.raises(ProtocolError, match=message):
        generator(tiny).handle_generate(body)


def test_an_answer_that_is_none_of_ours_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match=r"no answer of /generate: .*`completions`"):
        decode_response(b"{}")
