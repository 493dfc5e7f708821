"""The mix64 of a full tensor, out of what slices of it add to it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from weightsync.errors import ConfigError, ProtocolError, shorten
from weightsync.tensors import as_bytes
from weightsync.weights.copying import fingerprint
from weightsync.weights.copying.checksums import (
    DISAGREE,
    SumsCompared,
    compare_sums,
    compose,
    compose_all,
    to_hex,
)
from weightsync.weights.copying.fingerprint import mix64, part_of
from weightsync.weights.copying.shards import Slice, Span
from weightsync.wire.messages import CheckReply, TensorPart

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.int64]


def take(full: torch.Tensor, held: Slice) -> torch.Tensor:
    """What a shard of these spans holds."""
    for dim, spans in enumerate(held.spans):
        full = torch.cat([full.narrow(dim, a, b - a) for a, b in spans], dim)
    return full.contiguous()


def parts_of(full: torch.Tensor, slices: list[Slice]) -> list[TensorPart]:
    size = full.element_size()
    return [part_of("w", as_bytes(take(full, held)), held, size) for held in slices]


def named(ranks: Sequence[int]) -> str:
    """Ranks as errors list them."""
    return f"rank{'s' if len(ranks) > 1 else ''} {shorten(map(str, ranks))}"


@st.composite
def cuts(draw: st.DrawFn) -> tuple[torch.Tensor, list[Slice]]:
    """A tensor, and slices that make it: each dimension is cut where it falls."""
    shape = draw(st.lists(st.integers(1, 13), min_size=1, max_size=3))
    dims: list[list[tuple[Span, ...]]] = []
    for size in shape:
        points = sorted(draw(st.sets(st.integers(1, size), max_size=3)) | {0, size})
        spans = list(itertools.pairwise(points))
        if len(spans) > 2 and draw(st.booleans()):
            dims.append([(spans[0], spans[2]), (spans[1],), *((s,) for s in spans[3:])])
        else:
            dims.append([(span,) for span in spans])
    dtype = draw(st.sampled_from(DTYPES))
    torch.manual_seed(draw(st.integers(0, 99)))
    full = torch.randint(0, 100, shape).to(dtype)
    return full, [Slice(tuple(shape), spans) for spans in itertools.product(*dims)]


@given(cuts())
@settings(max_examples=200, deadline=None)
def test_parts_make_the_fingerprint_of_the_whole(cut: tuple[torch.Tensor, list[Slice]]) -> None:
    full, slices = cut
    assert compose("w", parts_of(full, slices)) == to_hex(mix64(as_bytes(full)))


@given(cuts(), st.data())
@settings(max_examples=100, deadline=None)
def test_the_sums_of_two_sides_are_compared(
    cut: tuple[torch.Tensor, list[Slice]], data: st.DataObject
) -> None:
    """Ranks and servers cut as they like; a byte in another place, or another one, differs."""
    full, slices = cut
    ranks = [{"w": [part]} for part in parts_of(full, slices)]
    whole = {"w": parts_of(full, [Slice.whole_of(tuple(full.shape))])}
    held = {"a": {"w": parts_of(full, list(reversed(slices)))}, "b": whole}
    assert compare_sums(ranks, held) == SumsCompared({}, {"w"}, set())
    wrong = full.clone()
    flat = wrong.view(-1)
    a, b = (data.draw(st.integers(0, full.numel() - 1)) for _ in range(2))
    flat[[a, b]] = flat[[b, a]].clone()
    if torch.equal(wrong, full):
        flat[a] += 1
    damaged = {"w": parts_of(wrong, slices)}
    found = compare_sums(ranks, {**held, "c": damaged})
    apart = [r for r, own in enumerate(parts_of(wrong, slices)) if [own] != ranks[r]["w"]]
    assert found.compared == {"w"}
    assert found.wrong == {"w": f"on c, sent by {named(apart)}"}
    # Whole tensors do not tell which of the ranks that sent a part of it.
    found = compare_sums(ranks, {"c": {"w": parts_of(wrong, [Slice.whole_of(tuple(full.shape))])}})
    assert found.wrong == {"w": f"on c, sent by {named(range(len(ranks)))}"}


def workers_of(full: torch.Tensor, dim: int, count: int) -> list[TensorPart]:
    """What each of `count` workers has, as `torch.chunk` cuts the dimension: the last may be less.

    Some may have nothing.
    """
    size, slices = full.shape[dim], []
    step = -(-size // count)
    for worker in range(count):
        spans = [((0, each),) for each in full.shape]
        spans[dim] = ((min(worker * step, size), min((worker + 1) * step, size)),)
        slices.append(Slice(tuple(full.shape), tuple(spans)))
    return parts_of(full, slices)


@given(
    st.tuples(st.integers(1, 13), st.integers(1, 13)),
    st.lists(st.tuples(st.integers(0, 1), st.integers(1, 5)), min_size=1, max_size=3),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_workers_that_are_cut_in_several_ways_are_compared(
    shape: tuple[int, int], ways: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Groups of tensor parallelism of unlike sizes and dimensions, each worker a server."""
    full = torch.arange(shape[0] * shape[1], dtype=torch.int32).view(shape)
    sent = [{"w": [part]} for part in workers_of(full, 0, 2)]
    parts = [part for way in ways for part in workers_of(full, *way)]
    order = data.draw(st.permutations(range(len(parts))))
    held = {str(i): {"w": [parts[i]]} for i in order}
    assert compare_sums(sent, held) == SumsCompared({}, {"w"}, set())
    wrong = full + 1
    at = data.draw(
        st.sampled_from([i for i, part in enumerate(parts) if part.words or part.pieces])
    )
    spoiled = [part for way in ways for part in workers_of(wrong, *way)]
    found = compare_sums(sent, {**held, str(at): {"w": [spoiled[at]]}})
    assert set(found.wrong) == {"w"}
    assert found.compared == {"w"}


@pytest.mark.parametrize(
    "spans", [[[(0, 4)]], [[(4, 0)], [(0, 6)]], [[(i, i + 1) for i in range(70_000)], [(0, 6)]]]
)
def test_boxes_that_are_none_are_not_compared(spans: list[list[Span]]) -> None:
    """A reply may say anything; it takes no time, and no error comes of it."""
    full = torch.zeros(8, 6)
    sent = [{"w": [part]} for part in workers_of(full, 0, 2)]
    odd = structs.replace(sent[0]["w"][0], spans=spans)
    found = compare_sums(sent, {"a": {"w": [odd]}, "b": sent[1]})
    assert (found.wrong, found.partial) == ({}, {"a", "b"})


def test_what_is_not_complete_is_not_compared() -> None:
    full = torch.arange(12, dtype=torch.uint8)
    halves = [Slice((12,), (((0, 6),),)), Slice((12,), (((6, 12),),))]
    first, second = ({"w": [part]} for part in parts_of(full, halves))
    both = {"w": [*first["w"], *second["w"]]}
    sent: list[dict[str, list[TensorPart]]] = [first, second]
    assert compare_sums(sent, {"a": first, "b": second}) == SumsCompared({}, {"w"}, set())
    assert compare_sums(sent, {"a": first}) == SumsCompared({}, set(), {"a"})
    assert compare_sums([first, {}], {"a": both}) == SumsCompared({}, set(), set())
    assert compare_sums(sent, {"a": both, "b": {}}) == SumsCompared({}, set(), set())
    several = {"a": both, "b": first, "c": second}
    assert compare_sums(sent, several) == SumsCompared({}, {"w"}, set())
    # What a server has is compared, also where another one has less.
    wrong = {"w": parts_of(full.flip(0), [Slice.whole_of((12,))])}
    others: list[dict[str, list[TensorPart]]] = [{}, {"w": []}, first]
    for less in others:
        found = compare_sums(sent, {"a": wrong, "b": less, "c": both})
        assert (found.wrong, found.compared) == ({"w": "on a, sent by ranks 0, 1"}, set())
        assert found.partial == ({"b"} if less is first else set())
    # Of workers that are wrong together, nothing says which.
    halved = [{"w": [part]} for part in parts_of(full.flip(0), halves)]
    (where,) = compare_sums([both], dict(zip("ab", halved, strict=True))).wrong.values()
    assert where == "on a and b, sent by rank 0"
    assert compare_sums([both, {"w": []}], {"a": both}) == SumsCompared({}, set(), set())


@given(cuts(), st.integers(1, 200))
@settings(max_examples=100, deadline=None)
def test_pieces_of_slices_are_small_and_make_the_whole(
    cut: tuple[torch.Tensor, list[Slice]], most: int
) -> None:
    full, slices = cut
    pieces = [(piece, held) for box in slices for piece, held in box.pieces(take(full, box), most)]
    for piece, held in pieces:
        assert piece.numel() <= most
        assert torch.equal(piece, take(full, held))
    assert compose("w", parts_of(full, [held for _, held in pieces])) == to_hex(
        mix64(as_bytes(full))
    )


@pytest.mark.parametrize("dim", [0, 1])
def test_aligned_slices_cut_no_word(dim: int) -> None:
    full = torch.randn(64, 48).bfloat16()
    spans: list[tuple[tuple[Span, ...], ...]] = [
        tuple(
            ((0, n),) if d != dim else ((h * n // 2, (h + 1) * n // 2),)
            for d, n in ((0, 64), (1, 48))
        )
        for h in (0, 1)
    ]
    parts = parts_of(full, [Slice((64, 48), s) for s in spans])
    assert all(not part.pieces for part in parts)
    assert compose("w", parts) == to_hex(mix64(as_bytes(full)))


def test_a_slice_may_lie_anywhere_in_memory() -> None:
    full = torch.arange(24, dtype=torch.uint8).view(4, 6)
    slices = [Slice((4, 6), (((0, 4),), ((a, a + 3),))) for a in (0, 3)]
    parts = []
    for held in slices:
        memory = torch.zeros(40, dtype=torch.uint8)
        memory[5:17] = as_bytes(take(full, held))
        parts.append(part_of("w", memory[5:17], held, 1))
    assert parts == parts_of(full, slices)


def halves(full: torch.Tensor) -> list[TensorPart]:
    at = full.numel() // 2
    shape = (full.numel(),)
    return parts_of(full, [Slice(shape, (((0, at),),)), Slice(shape, (((at, full.numel()),),))])


def test_every_change_of_a_slice_changes_the_whole() -> None:
    full = torch.arange(11, dtype=torch.uint8)
    before = compose("w", halves(full))
    for i in range(11):
        full[i] += 1
        assert compose("w", halves(full)) != before
        full[i] -= 1


def test_slices_that_make_no_whole_are_refused() -> None:
    first, second = halves(torch.arange(20))
    for parts in ([first], [second], [first, *halves(torch.arange(22))]):
        with pytest.raises(ProtocolError, match=r"w: the workers' slices make \d+ of \d+ bytes"):
            compose("w", parts)


def test_copies_of_a_slice_count_once_and_have_to_agree() -> None:
    first, second = halves(torch.arange(20))
    assert compose("w", [first, second, first]) == to_hex(mix64(as_bytes(torch.arange(20))))
    other, _ = halves(torch.arange(20) + 1)
    assert compose("w", [first, second, other]) == DISAGREE


def test_a_tensor_whose_words_are_cut_too_often_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "MAX_PIECES", 3)
    with pytest.raises(ConfigError, match="w: its slices cut more than 3 words of 8 bytes"):
        parts_of(torch.zeros(9, 3, dtype=torch.uint8), [Slice((9, 3), (((0, 9),), ((0, 2),)))])


def test_pieces_of_all_tensors_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a message is, and with it the time to make them one by one."""
    cut, uncut = Slice((9, 3), (((0, 9),), ((0, 2),))), Slice.whole_of((16,))
    (part,) = parts_of(torch.zeros(9, 3, dtype=torch.uint8), [cut])
    flat, count = torch.zeros(18, dtype=torch.uint8), len(part.pieces)
    monkeypatch.setattr(fingerprint, "MAX_ALL_PIECES", 2 * count - 1)
    listed = [("a", flat, cut, 1), ("b", flat, cut, 1), ("c", flat[:16], uncut, 1)]
    found = fingerprint.parts_of(listed)
    assert (found["a"], found["b"], len(found["c"])) == ([part], [], 1)
    monkeypatch.setattr(fingerprint, "MAX_PIECES", count - 1)
    assert fingerprint.parts_of(listed[:1]) == {"a": []}


@settings(max_examples=60, deadline=None)
@given(cuts())
def test_pieces_are_counted_before_they_are_made(cut: tuple[torch.Tensor, list[Slice]]) -> None:
    full, slices = cut
    for held, part in zip(slices, parts_of(full, slices), strict=True):
        assert fingerprint._count_pieces(held, full.element_size()) == len(part.pieces)


def test_replicas_and_whole_tensors_have_to_agree() -> None:
    full = torch.arange(20)
    first, second = halves(full)
    right = to_hex(mix64(as_bytes(full)))
    replies = [
        CheckReply(version=1, checksums={"b": "1"}, parts={"w": first}),
        CheckReply(version=1, checksums={"b": "1"}, parts={"w": second}),
    ]
    assert compose_all(replies, 2) == ({"b": "1", "w": right}, [])
    assert compose_all(replies * 2, 2) == ({"b": "1", "w": right}, [])
    wrong = CheckReply(version=1, checksums={"b": "2"}, parts={"w": second})
    assert compose_all([replies[0], wrong], 2) == ({"b": DISAGREE, "w": right}, ["b"])
    apart = compose_all([*replies, replies[0], wrong], 2)
    assert apart == ({"b": DISAGREE, "w": right}, ["b"])
    less = [CheckReply(version=1, checksums={"b": "1"})]
    assert compose_all([*less, *less], 1)[1] == []
    assert compose_all([*less, CheckReply(version=1)], 1)[1] == ["b"]
