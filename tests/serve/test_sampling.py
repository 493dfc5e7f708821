"""Choosing tokens: the right odds, streams of their own, nucleus, log-probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.serve.messages import SamplingParams
from weightsync.serve.sampling import TokenSampler

CPU = torch.device("cpu")
VOCABULARY = 50


def logits_of(seed: int, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * 2


def drawn(sampling_params: SamplingParams, logits: torch.Tensor, rows: int) -> torch.Tensor:
    """How often each token is chosen, by `rows` rows at once."""
    sampler = TokenSampler(CPU)
    names = list(range(rows))
    sampler.add(names, sampling_params)
    chosen = sampler.sample(names, logits.expand(rows, -1))
    counts = torch.bincount(torch.tensor([c.token for c in chosen]), minlength=len(logits))
    return counts / rows


@pytest.mark.parametrize("seed", [None, 5])
def test_tokens_come_as_often_as_they_are_likely(seed: int | None) -> None:
    logits, rows = logits_of(1, vocabulary=8), 20_000
    wanted = torch.softmax(logits / 0.7, dim=-1)
    found = drawn(SamplingParams(temperature=0.7, seed=seed), logits, rows)
    # Six standard deviations of a binomial count.
    assert ((found - wanted).abs() < 6 * (wanted * (1 - wanted) / rows).sqrt() + 1e-4).all()


def test_the_nucleus_keeps_its_odds_and_nothing_else() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    found = drawn(SamplingParams(top_p=0.6, seed=3), logits, 8000)
    assert found[2] == found[3] == 0
    assert float(found[0]) == pytest.approx(0.625, abs=0.04)


def test_a_wide_nucleus_is_found_too() -> None:
    logits = torch.zeros(1000)
    logits[:400] = 0.5
    logits[400:] = -0.5
    wide = drawn(SamplingParams(top_p=0.4, seed=3), logits, 4000)
    # 400 tokens hold 64 percent: about 250 of them are the fewest that reach 40 percent.
    share = float(torch.softmax(logits, dim=-1)[0])
    assert 0.9 * 0.4 / share < int((wide > 0).sum()) <= math.ceil(0.4 / share)
    assert not wide[400:].any()
    wider = drawn(SamplingParams(top_p=0.9, seed=3), logits, 4000)
    assert wider[400:].any()


def test_a_row_with_a_small_nucleus_does_not_mind_one_with_a_large_one() -> None:
    logits = torch.stack((torch.zeros(1000), logits_of(5, 1000)))
    alone, among = TokenSampler(CPU), TokenSampler(CPU)
    for sampler in (alone, among):
        sampler.add([0], SamplingParams(top_p=0.99, seed=1))
        sampler.add([1], SamplingParams(top_p=0.7, seed=2))
    for _ in range(20):
        _, second = among.sample([0, 1], logits)
        assert alone.sample([1], logits[1:])[0].token == second.token


def test_a_tiny_nucleus_and_no_heat_take_the_likeliest() -> None:
    logits = logits_of(2)
    likeliest = int(logits.argmax())
    for sampling_params in (
        SamplingParams(top_p=1e-9),
        SamplingParams(temperature=0),
        SamplingParams(temperature=1e-5),
    ):
        assert drawn(sampling_params, logits, 40)[likeliest] == 1


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_seeded_row_draws_alike_in_every_company(data: st.DataObject) -> None:
    kinds = st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.8, 1.5]),
        top_p=st.sampled_from([0.5, 1.0]),
        seed=st.none() | st.integers(0, 3),
        logprobs=st.sampled_from([-1, 0, 2]),
    )
    sampling_params = SamplingParams(seed=7, top_p=data.draw(st.sampled_from([0.9, 1.0])))
    alone, among = TokenSampler(CPU), TokenSampler(CPU)
    alone.add([0], sampling_params)
    among.add([0], sampling_params)
    for step in range(6):
        company = data.draw(st.lists(kinds, max_size=4))
        others = [100 * (step + 1) + i for i in range(len(company))]
        for row, kind in zip(others, company, strict=True):
            among.add([row], kind)
        rows = data.draw(st.permutations([0, *others]))
        logits = {row: logits_of(row + step) for row in rows}
        crowd = among.sample(list(rows), torch.stack([logits[row] for row in rows]))
        (single,) = alone.sample([0], logits[0][None])
        assert [c.row for c in crowd] == list(rows)
        assert crowd[rows.index(0)].token == single.token
        among.drop(others)


def test_seeds_and_completions_have_streams_of_their_own() -> None:
    sampler = TokenSampler(CPU)
    for first, seed in ((0, 0), (2, 1), (4, 2**64 - 1)):
        sampler.add([first, first + 1], SamplingParams(seed=seed))
    rows = list(range(6))
    steps = [sampler.sample(rows, torch.zeros(6, 1000)) for _ in range(4)]
    said = [tuple(step[row].token for step in steps) for row in rows]
    assert len(set(said)) == 6


def test_unseeded_choosers_differ() -> None:
    def once() -> list[int]:
        sampler = TokenSampler(CPU)
        sampler.add([0, 1], SamplingParams())
        return [c.token for c in sampler.sample([0, 1], torch.zeros(2, 100_000))]

    first, second = once(), once()
    assert len({*first, *second}) == 4


def test_each_row_is_told_as_many_of_the_likeliest_as_it_asked_for() -> None:
    sampler = TokenSampler(CPU)
    counts = [-1, 0, 3, 20]
    for row, count in enumerate(counts):
        sampler.add([row], SamplingParams(temperature=0, logprobs=count))
    logits = logits_of(4)
    chosen = sampler.sample([0, 1, 2, 3], logits.expand(4, -1))
    own = float(torch.log_softmax(logits, dim=-1).max())
    assert chosen[0].logprob is None
    assert [c.logprob for c in chosen[1:]] == [pytest.approx(own)] * 3
    assert [len(c.top) for c in chosen] == [0, 0, 3, 20]
    values = [value for _, value in chosen[3].top]
    assert values == sorted(values, reverse=True)
    assert math.fsum(math.exp(value) for value in values) < 1


def test_more_tokens_asked_for_than_there_are() -> None:
    sampler = TokenSampler(CPU)
    sampler.add([0], SamplingParams(logprobs=20))
    (chosen,) = sampler.sample([0], torch.zeros(1, 3))
    assert len(chosen.top) == 3
