"""The batched cache against a list of rows: joins, growth, leaves, kept prompts, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import Cache, DynamicLayer

from tests.serve.stepping import kept_nbytes, living_nbytes
from weightsync.serve.hugging_face import hf
from weightsync.serve.kv_cache import BatchedKVCache, CachedPrefix, PreallocatedLayer, cached_layers

HEADS, KEY_SIZE, VALUE_SIZE, LAYERS = 2, 3, 5, 2
CPU = torch.device("cpu")


def empty() -> Cache:
    cache: Cache = hf.DynamicCache()
    cache.layers = [PreallocatedLayer() for _ in range(LAYERS)]
    return cache


def states(rows: int, tokens: int, first: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that no other call has, if `first` is far enough from others'."""
    keys = torch.arange(rows * HEADS * tokens * KEY_SIZE).view(rows, HEADS, tokens, KEY_SIZE)
    values = torch.arange(rows * HEADS * tokens * VALUE_SIZE).view(rows, HEADS, tokens, VALUE_SIZE)
    return keys + first, -values - first


def written(tokens: int, first: float, rows: int = 1) -> Cache:
    cache = empty()
    for layer in range(LAYERS):
        cache.update(*states(rows, tokens, first + layer / 2), layer)
    return cache


def contents(cache: Cache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [layer.held() for layer in cached_layers(cache)]


def seen(living: BatchedKVCache, place: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the mask lets a row see, layer by layer."""
    columns = living.mask()[place, :-1].bool()
    found = []
    for layer in cached_layers(living.cache):
        keys, values = layer.held()
        found.append((keys[place][:, columns], values[place][:, columns]))
    return found


def equal(found: list[Any], wanted: list[Any]) -> bool:
    return all(
        torch.equal(have, want)
        for one, other in zip(found, wanted, strict=True)
        for have, want in zip(one, other, strict=True)
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_row_sees_its_own_tokens_and_no_others(data: st.DataObject) -> None:
    living = BatchedKVCache(empty(), CPU)
    truth: dict[int, list[Any]] = {}
    for number in range(1, data.draw(st.integers(1, 12)) + 1):
        first = 1000.0 * number
        match data.draw(st.sampled_from(["join", "grow", "drop"])):
            case "join":
                tokens = data.draw(st.integers(1, 9))
                pads = data.draw(st.lists(st.integers(0, tokens - 1), min_size=1, max_size=3))
                cache = written(tokens, first, rows=len(pads))
                rows = [number * 10 + i for i in range(len(pads))]
                for place, (row, pad) in enumerate(zip(rows, pads, strict=True)):
                    truth[row] = [
                        (keys[place][:, pad:], values[place][:, pad:])
                        for keys, values in contents(cache)
                    ]
                living.join(rows, cache, pads)
            case "grow" if living.rows:
                for layer in range(LAYERS):
                    keys, values = states(len(living.rows), 1, first + layer / 2)
                    living.cache.update(keys, values, layer)
                    for place, row in enumerate(living.rows):
                        old_keys, old_values = truth[row][layer]
                        truth[row][layer] = (
                            torch.cat((old_keys, keys[place]), dim=1),
                            torch.cat((old_values, values[place]), dim=1),
                        )
            case "drop" if living.rows:
                gone = data.draw(st.lists(st.sampled_from(living.rows), unique=True))
                living.drop([*gone, 999])
                truth = {row: held for row, held in truth.items() if row not in gone}
        assert sorted(living.rows) == sorted(truth)
        for place, row in enumerate(living.rows):
            assert equal(seen(living, place), truth[row])
            assert living.positions()[place].item() == truth[row][0][0].shape[1]
        longest = max((held[0][0].shape[1] for held in truth.values()), default=0)
        if not truth:
            assert living_nbytes(living) == living.width == 0
        assert living.width >= longest


def test_columns_of_padding_alone_are_given_back() -> None:
    living = BatchedKVCache(empty(), CPU)
    living.join([1], written(100, 0.0), [0])
    living.join([2], written(3, 5000.0), [0])
    assert living.width == 100
    living.drop([1])
    assert living.width == 3
    assert living_nbytes(living) == LAYERS * HEADS * 3 * (KEY_SIZE + VALUE_SIZE) * 4
    wanted = [(keys[0], values[0]) for keys, values in contents(written(3, 5000.0))]
    assert equal(seen(living, 0), wanted)


def test_a_batch_that_was_emptied_takes_rows_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a draft's is. transformers 5.0 resets a layer by zeros in the columns that it has."""

    def reset(self: DynamicLayer) -> None:
        for tensor in (self.keys, self.values):
            if tensor is not None:
                tensor.zero_()

    monkeypatch.setattr(DynamicLayer, "reset", reset)
    living = BatchedKVCache(empty(), CPU)
    living.join([1, 2], written(9, 0.0, rows=2), [0, 3])
    living.drop([1, 2])
    assert living.width == living_nbytes(living) == 0
    living.join([3], written(4, 5000.0), [0])
    wanted = [(keys[0], values[0]) for keys, values in contents(written(4, 5000.0))]
    assert equal(seen(living, 0), wanted)


def test_a_decode_step_copies_its_own_token_only() -> None:
    cache = written(4, 0.0)
    cache.update(*states(1, 1, 900.0), 0)
    before, _ = cached_layers(cache)[0].held()
    cache.update(*states(1, 1, 901.0), 0)
    after, _ = cached_layers(cache)[0].held()
    assert before.data_ptr() == after.data_ptr()
    assert after.shape[-2] == 6


def test_room_runs_out_and_is_made_again() -> None:
    cache = written(1, 0.0)
    for token in range(200):
        cache.update(*states(1, 1, 100.0 * token), 0)
    keys, _ = cached_layers(cache)[0].held()
    wanted = [states(1, 1, 0.0)[0], *(states(1, 1, 100.0 * token)[0] for token in range(200))]
    assert torch.equal(keys, torch.cat(wanted, dim=2))


def test_a_kept_prompt_is_not_changed_by_those_that_go_on_from_it() -> None:
    source = written(6, 0.0, rows=2)
    kept = CachedPrefix.of([4, 5, 6], source, row=1)
    wanted = [
        (keys[1:, :, 3:5].clone(), values[1:, :, 3:5].clone()) for keys, values in contents(source)
    ]
    for first in (700.0, 800.0):
        cache = empty()
        kept.fill(cache, 2)
        assert cache.get_seq_length() == 2
        for layer in range(LAYERS):
            cache.update(*states(1, 3, first), layer)
        assert cache.get_seq_length() == 5
        begun = [(keys[:, :, :2], values[:, :, :2]) for keys, values in contents(cache)]
        assert equal(begun, wanted)
    assert kept_nbytes(kept) == LAYERS * HEADS * 3 * (KEY_SIZE + VALUE_SIZE) * 4


def test_the_common_length_is_where_prompts_part() -> None:
    kept = CachedPrefix([4, 5, 6], [])
    lengths = [kept.common_length(other) for other in ([4, 5, 6, 7], [4, 5], [4, 9, 6], [], [1])]
    assert lengths == [3, 2, 1, 0, 0]
