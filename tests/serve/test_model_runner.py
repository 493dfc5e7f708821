"""The runner: what transformers generates, whatever joins, leaves, is reused or is refused."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.serve.stepping import Stepping, alone, cache_nbytes, kept_nbytes
from weightsync.errors import ConfigError
from weightsync.serve.messages import SamplingParams, Step
from weightsync.serve.model import LoadedModel, make_tiny_model, make_tiny_vision_model
from weightsync.serve.model_runner import ModelRunner
from weightsync.serve.vision import ImagePreparer

hf: Any = transformers

PROMPTS = [[5], [9, 8, 7], list(range(3, 40)), [200] * 11, list(range(100, 120)), [7, 7, 9, 250]]
SIZES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
WINDOW = 5
LONGEST = 14


@functools.cache
def model_of(kind: str) -> Any:
    """One small random model of each way to attend."""
    torch.manual_seed(3)
    match kind:
        case "llama":
            return make_tiny_model().model
        case "mistral, sliding":
            config = hf.MistralConfig(**SIZES, sliding_window=WINDOW)
            return hf.MistralForCausalLM(config).eval()
        case "gemma 3, some layers sliding":
            types = ["sliding_attention", "full_attention", "sliding_attention"]
            options = {"sliding_window": WINDOW, "layer_types": types, "head_dim": 8}
            return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SIZES, **options)).eval()
        case _:
            config = hf.GPT2Config(
                vocab_size=259, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3
            )
            return hf.GPT2LMHeadModel(config).eval()


KINDS = ["llama", "mistral, sliding", "gemma 3, some layers sliding", "gpt 2"]


@functools.cache
def expected(kind: str, place: int) -> list[int]:
    return alone(model_of(kind), PROMPTS[place], LONGEST)


def stepping(kind: str = "llama") -> Stepping:
    return Stepping(ModelRunner(model_of(kind)).execute)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_all_lengths_say_together_what_each_says_alone(kind: str) -> None:
    core = stepping(kind)
    core.start(*(core.new(prompt) for prompt in PROMPTS))
    core.go_on(LONGEST - 1)
    assert list(core.said.values()) == [expected(kind, i) for i in range(len(PROMPTS))]


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_cache_is_passed_by_the_name_of_either_transformers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("llama")
    wanted = expected("llama", 2)
    forward = model.forward

    def of_5_24(
        input_ids: Any, attention_mask: Any, position_ids: Any, cache: Any, use_cache: bool
    ) -> Any:
        return forward(input_ids, attention_mask, position_ids, cache, use_cache=use_cache)

    def of_5_23(
        input_ids: Any,
        attention_mask: Any,
        position_ids: Any,
        past_key_values: Any,
        use_cache: bool,
    ) -> Any:
        return of_5_24(input_ids, attention_mask, position_ids, past_key_values, use_cache)

    monkeypatch.setattr(model, "forward", of_5_24 if name == "cache" else of_5_23)
    core = stepping()
    core.start(core.new(PROMPTS[2]))
    core.go_on(LONGEST - 1)
    assert core.said[0] == wanted


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_joins_and_leaves_change_nothing_for_the_others(kind: str, data: st.DataObject) -> None:
    core = stepping(kind)
    places: dict[int, int] = {}
    for _ in range(data.draw(st.integers(2, 10))):
        joining = data.draw(st.lists(st.integers(0, len(PROMPTS) - 1), max_size=3))
        if joining:
            new = [core.new(PROMPTS[place]) for place in joining]
            core.start(*new)
            places.update({one.rows[0]: i for one, i in zip(new, joining, strict=True)})
        core.leave(*(row for row in core.living if len(core.said[row]) == LONGEST))
        if core.living:
            core.living = data.draw(st.permutations(core.living))
            core.go_on()
            core.leave(*data.draw(st.lists(st.sampled_from(core.living), max_size=2, unique=True)))
    for row, said in core.said.items():
        assert said == expected(kind, places[row])[: len(said)]


def draft_of(kind: str) -> Any:
    """A model that proposes some of another one's tokens, and others."""
    size = 0.3 if kind.startswith("gemma") else 0.03
    draft = copy.deepcopy(model_of(kind))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in draft.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * parameter.abs().mean() * size)
    return draft


@pytest.mark.parametrize("kind", KINDS)
def test_with_a_draft_rows_join_and_leave_and_say_the_same(kind: str) -> None:
    runner = ModelRunner(model_of(kind), draft=draft_of(kind), num_speculative_tokens=3)
    core = Stepping(runner.execute)
    prompt = PROMPTS[2]
    core.start(core.new(PROMPTS[0]), core.new(prompt, keep_as=1))
    results = [core.go_on() for _ in range(3)]
    again = core.new([*prompt, 9], n=2, reuse=1, reuse_length=len(prompt))
    core.start(again, core.new(PROMPTS[3]))
    results += [core.go_on() for _ in range(2)]
    core.leave(1, again.rows[0])
    core.start(core.new(PROMPTS[4]))
    core.living.reverse()
    results += [core.go_on() for _ in range(40)]
    prompts = dict(enumerate([PROMPTS[0], prompt, *[[*prompt, 9]] * 2, PROMPTS[3], PROMPTS[4]]))
    for row, said in core.said.items():
        assert said == alone(model_of(kind), prompts[row], len(said))
    assert all(result.accepted == len(result.sampled) - result.proposed // 3 for result in results)
    accepted, proposed = (sum(getattr(r, n) for r in results) for n in ("accepted", "proposed"))
    assert 0.2 < accepted / proposed < 0.98
    longest = max(len(prompts[row]) + len(core.said[row]) for row in core.living)
    assert longest <= runner._batches[""].width + 1 <= longest + 64 + 4
    core.leave(*core.living)
    core.evict()
    assert cache_nbytes(runner) == kept_nbytes(runner._kept[1])


@torch.no_grad()
def test_with_a_draft_logprobs_are_those_of_the_model() -> None:
    sampling = SamplingParams(temperature=0.5, seed=1, logprobs=2)
    runner = ModelRunner(model_of("llama"), draft=draft_of("llama"), num_speculative_tokens=3)
    core = Stepping(runner.execute)
    row = core.start(core.new(PROMPTS[1], sampling), core.new(PROMPTS[2])).sampled[0].row
    core.go_on(8)
    said = core.said[row]
    logits = model_of("llama")(torch.tensor([PROMPTS[1] + said])).logits[0]
    wanted = torch.log_softmax(logits[len(PROMPTS[1]) - 1 : -1], dim=-1)
    for place, choice in enumerate(core.sampled[row]):
        assert choice.logprob == pytest.approx(float(wanted[place, choice.token]), abs=1e-4)
        assert [token for token, _ in choice.top] == wanted[place].topk(2).indices.tolist()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_a_reused_prompt_says_what_a_fresh_one_says(kind: str, data: st.DataObject) -> None:
    core = stepping(kind)
    old = data.draw(st.lists(st.integers(3, 258), min_size=1, max_size=20))
    cut = data.draw(st.integers(0, len(old)))
    new = old[:cut] + data.draw(st.lists(st.integers(3, 258), min_size=1, max_size=12))
    claimed = data.draw(st.integers(0, 25))
    # The first is kept out of a padded batch, and its own row goes on beside the new one.
    first = core.new(old, keep_as=4)
    core.start(first, core.new(PROMPTS[3]))
    core.go_on(2)
    second = core.new(new, reuse=4, reuse_length=claimed, keep_as=5)
    core.start(second)
    third = core.new([*new, 17], reuse=5, reuse_length=len(new))
    core.start(third)
    core.go_on(5)
    assert core.said[first.rows[0]] == alone(model_of(kind), old, 10)[: 1 + 2 + 5]
    assert core.said[second.rows[0]] == alone(model_of(kind), new, 6)
    assert core.said[third.rows[0]] == alone(model_of(kind), [*new, 17], 6)


def test_reuse_computes_only_the_rest() -> None:
    model = model_of("llama")
    read: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _model, _args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    core = stepping()
    prompt = PROMPTS[2]
    try:
        core.start(core.new(prompt, keep_as=1))
        core.start(core.new([*prompt, 4, 5], reuse=1, reuse_length=len(prompt)))
        core.start(core.new(prompt, reuse=1, reuse_length=len(prompt)))
        core.evict(1)
        core.start(core.new(prompt, reuse=1, reuse_length=len(prompt)))
    finally:
        hook.remove()
    assert read == [len(prompt), 2, 1, len(prompt)]


def test_a_prompt_may_reuse_one_that_is_read_in_the_same_step() -> None:
    core = stepping()
    again = core.new([*PROMPTS[2], 9], reuse=1, reuse_length=len(PROMPTS[2]))
    core.start(again, core.new(PROMPTS[2], keep_as=1))
    core.go_on(4)
    assert core.said[again.rows[0]] == alone(model_of("llama"), [*PROMPTS[2], 9], 5)


def test_completions_of_one_prompt_share_its_reading() -> None:
    core = stepping()
    other, new = core.new(PROMPTS[2]), core.new(PROMPTS[1], n=3)
    result = core.start(other, new)
    assert [choice.row for choice in result.sampled] == [0, 1, 2, 3]
    core.go_on(4)
    assert [core.said[row] for row in new.rows] == [expected("llama", 1)[:5]] * 3


def test_a_seed_draws_the_same_whatever_is_in_the_batch() -> None:
    seeded = SamplingParams(temperature=1.3, top_p=0.9, seed=11)
    quiet = stepping()
    quiet.start(quiet.new(PROMPTS[1], seeded, n=2))
    quiet.go_on(9)
    busy = stepping()
    busy.start(busy.new(PROMPTS[2]), busy.new(PROMPTS[4], SamplingParams()))
    busy.go_on(3)
    new = busy.new(PROMPTS[1], seeded, n=2)
    busy.start(busy.new(PROMPTS[5], SamplingParams(seed=11)), new)
    busy.go_on(4)
    busy.leave(0, 1)
    busy.go_on(5)
    first, second = (busy.said[row] for row in new.rows)
    assert [first, second] == list(quiet.said.values())
    assert first != second


def test_a_completion_of_a_request_does_not_depend_on_how_many_there_are() -> None:
    core = stepping()
    many = core.new(PROMPTS[1], SamplingParams(seed=2), n=3)
    one = core.new(PROMPTS[1], SamplingParams(seed=2))
    core.start(many, one)
    core.go_on(6)
    assert core.said[many.rows[0]] == core.said[one.rows[0]]


@torch.no_grad()
def test_logprobs_are_of_the_models_own_distribution() -> None:
    core = stepping()
    told = core.new(PROMPTS[1], SamplingParams(temperature=0.5, seed=1, logprobs=3))
    silent = core.new(PROMPTS[2])
    only_own = core.new(PROMPTS[0], SamplingParams(temperature=0, logprobs=0))
    core.start(silent, told, only_own)
    core.go_on(5)
    said = core.said[told.rows[0]]
    logits = model_of("llama")(torch.tensor([PROMPTS[1] + said])).logits[0]
    wanted = torch.log_softmax(logits[len(PROMPTS[1]) - 1 : -1], dim=-1)
    for place, choice in enumerate(core.sampled[told.rows[0]]):
        best = wanted[place].topk(3)
        assert choice.logprob == pytest.approx(float(wanted[place, choice.token]), abs=1e-4)
        assert [token for token, _ in choice.top] == best.indices.tolist()
        assert [value for _, value in choice.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert all(c.logprob is None and c.top == [] for c in core.sampled[silent.rows[0]])
    assert all(c.logprob is not None and c.top == [] for c in core.sampled[only_own.rows[0]])


def test_bad_prompts_are_refused_and_the_others_go_on() -> None:
    core = stepping()
    pixels = {"pixel_values": torch.zeros(1, 3, 16, 16)}
    new = [
        core.new(PROMPTS[0]),
        core.new([5], n=2, inputs=pixels),
        core.new([5], inputs={"attention_mask": torch.ones(1, 1)}),
        core.new(PROMPTS[1]),
    ]
    result = core.start(*new)
    assert [choice.row for choice in result.sampled] == [new[0].rows[0], new[-1].rows[0]]
    assert sorted(result.refused) == [one.rows[0] for one in new[1:-1]]
    messages = list(result.refused.values())
    assert "takes no inputs named pixel_values" in messages[0]
    assert "takes no inputs named attention_mask" in messages[1]
    core.go_on(5)
    assert core.said[new[0].rows[0]] == expected("llama", 0)[:6]
    assert core.said[new[-1].rows[0]] == expected("llama", 1)[:6]


def test_a_rank_that_does_not_choose_says_nothing() -> None:
    runner = ModelRunner(model_of("llama"), samples=False)
    core = Stepping(runner.execute)
    result = core.start(core.new(PROMPTS[0]), core.new([5], inputs={"labels": torch.ones(1)}))
    assert (result.sampled, sorted(result.refused)) == ([], [1])
    assert runner.execute(Step(number=2, rows=[0], tokens=[5]), 1).sampled == []


def test_memory_comes_back_when_rows_leave() -> None:
    runner = ModelRunner(model_of("llama"))
    core = Stepping(runner.execute)
    core.start(core.new(PROMPTS[1]))
    core.go_on(2)
    small = cache_nbytes(runner)
    core.start(core.new(PROMPTS[2], n=4, keep_as=3))
    core.go_on()
    assert cache_nbytes(runner) > 40 * small
    core.leave(1, 2, 3, 4)
    core.evict(3)
    # One row of five tokens and the one that it read meanwhile.
    assert cache_nbytes(runner) == small * 6 // 5
    core.leave(0)
    core.evict()
    assert cache_nbytes(runner) == 0


def test_the_cache_of_old_weights_is_kept_over_an_update() -> None:
    live, other = make_tiny_model().model, make_tiny_model(seed=99).model
    core = Stepping(ModelRunner(live).execute)
    core.start(core.new(PROMPTS[1]))
    core.go_on(3)
    live.load_state_dict(other.state_dict())
    core.go_on(4)
    old = make_tiny_model().model
    ids, cache, wanted = torch.tensor([PROMPTS[1]]), hf.DynamicCache(), []
    for step in range(8):
        # By position, since transformers 5.24 has another name for the cache.
        output = (old if step < 4 else other)(ids, None, None, cache, use_cache=True)
        ids = output.logits[:, -1:].argmax(dim=-1)
        wanted.append(int(ids))
    assert core.said[0] == wanted != expected("llama", 1)[:8]


@pytest.fixture(scope="module")
def seeing() -> LoadedModel:
    return make_tiny_vision_model()


def test_an_image_says_in_a_batch_what_it_says_alone(seeing: LoadedModel) -> None:
    preparer = ImagePreparer(seeing.processor)
    core = Stepping(ModelRunner(seeing.model).execute)
    pictures = [Image.new("RGB", (20, 30), colour) for colour in ("red", "blue", "green")]
    prompts = [preparer.prepare("see <image>, and?", [picture]) for picture in pictures]
    prompts.append(preparer.prepare("<image> or <image>", pictures[:2]))
    core.start(core.new(PROMPTS[2]), *(core.new(ids, inputs=i, keep_as=1) for ids, i in prompts))
    core.go_on(7)
    wanted = [alone(seeing.model, ids, 8, inputs) for ids, inputs in prompts]
    assert [core.said[row] for row in range(1, 5)] == wanted
    assert wanted[0] != wanted[1]
    assert core.said[0] == alone(seeing.model, PROMPTS[2], 8)
    # The same tokens with another image are another prompt: nothing of them is reused.
    again = core.new(prompts[1][0], inputs=prompts[1][1], reuse=1, reuse_length=99)
    core.start(again)
    core.go_on(7)
    assert core.said[again.rows[0]] == wanted[1]


def test_images_that_do_not_fit_are_refused(seeing: LoadedModel) -> None:
    ids, inputs = ImagePreparer(seeing.processor).prepare("<image>", [Image.new("RGB", (9, 9))])
    core = Stepping(ModelRunner(seeing.model).execute)
    result = core.start(
        core.new(ids[:-1], inputs=inputs),
        core.new(ids, inputs={"pixel_values": torch.zeros(1, 3, 24, 24)}),
        core.new(ids, inputs={"pixel_values": torch.zeros(3)}),
        core.new(ids, inputs=inputs),
    )
    assert sorted(result.refused) == [0, 1, 2]
    assert all("rejects its inputs" in why for why in result.refused.values())
    core.go_on(3)
    assert core.said[3] == alone(seeing.model, ids, 4, inputs)


def test_a_card_tells_what_others_need(seeing: LoadedModel, tiny: LoadedModel) -> None:
    card = seeing.card("tiny-vision")
    assert (card.name, card.directory) == (seeing.name, "tiny-vision")
    assert (card.vocab_size, card.max_length, card.end_ids) == (260, 2048, [2])
    assert (card.architecture, card.dtype) == ("LlavaForConditionalGeneration", "float32")
    assert card.num_parameters == seeing.num_parameters
    assert card.image_token_id == 259
    assert tiny.card("tiny").image_token_id is None


def test_models_without_an_attention_cache_are_refused() -> None:
    mamba = hf.MambaForCausalLM(hf.MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1))
    with pytest.raises(ConfigError, match="MambaForCausalLM"):
        ModelRunner(mamba)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 8}
    hybrid = hf.Qwen3NextConfig(
        vocab_size=9, num_hidden_layers=2, num_key_value_heads=1, num_experts=2, **sizes
    )
    with pytest.raises(ConfigError, match="layers of kind linear_attention"):
        ModelRunner(hf.Qwen3NextForCausalLM(hybrid))
    xlm = hf.XLMConfig(vocab_size=9, emb_dim=8, n_layers=1, n_heads=2)  # its own kind of cache
    with pytest.raises(ConfigError, match="XLMWithLMHeadModel is not a causal language model"):
        ModelRunner(hf.XLMWithLMHeadModel(xlm))
    t5 = hf.T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with pytest.raises(
        ConfigError, match="T5ForConditionalGeneration is not a causal language model"
    ):
        ModelRunner(hf.T5ForConditionalGeneration(t5))
