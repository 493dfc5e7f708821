"""Text out of tokens: any cut of any text gives the same text, and stop texts never show."""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from weightsync.serve.model import make_tiny_model
from weightsync.serve.text import CompletionText, StopFinder, TokenizerService

LETTERS = "aé€😀 \n\ufffd"
quick = settings(max_examples=150, deadline=None)
texts = st.text(alphabet=LETTERS, max_size=12) | st.text(max_size=12)


def byte_texts(chunks: list[bytes]) -> TokenizerService:
    """A byte-level tokenizer whose tokens are the chunks, token `i` being `chunks[i]`."""
    of_byte = {
        byte: letter for letter, byte in TokenizerService(make_tiny_tokenizer())._byte_of.items()
    }
    pieces = ["".join(of_byte[byte] for byte in chunk) for chunk in chunks]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys([*of_byte.values(), *pieces]))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made: Any = PreTrainedTokenizerFast
    return TokenizerService(made(tokenizer_object=tokenizer, eos_token="<end>"))


@functools.cache
def make_tiny_tokenizer() -> Any:
    return make_tiny_model().tokenizer


def ids_of(known: TokenizerService, chunks: list[bytes]) -> list[int]:
    of_byte = {byte: letter for letter, byte in known._byte_of.items()}
    pieces = ["".join(of_byte[byte] for byte in chunk) for chunk in chunks]
    ids: list[int] = known.tokenizer.convert_tokens_to_ids(pieces)
    return ids


def cut(data: bytes, places: list[int]) -> list[bytes]:
    bounds = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[start:stop] for start, stop in pairwise(bounds)]


def run(text: CompletionText, ids: list[int]) -> tuple[list[str], int]:
    """Push until a stop text is found; return the pieces and how many tokens it took."""
    pieces = []
    for count, token in enumerate(ids, 1):
        pieces.append(text.push(token))
        if text.stopped:
            return pieces, count
    return [*pieces, text.finish()], len(ids)


def shown(text: str, stops: list[str]) -> str | None:
    places = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(places)[1]] if places else None


@quick
@given(text=texts, places=st.lists(st.integers(0, 60), max_size=12))
def test_any_chunking_of_any_text_gives_the_text(text: str, places: list[int]) -> None:
    chunks = cut(text.encode(), places)
    known = byte_texts(chunks)
    pieces, _ = run(known.completion(), ids_of(known, chunks))
    assert "".join(pieces) == text
    for piece in pieces:
        assert piece.count("\ufffd") <= text.count("\ufffd")


@quick
@given(data=st.binary(max_size=80), places=st.lists(st.integers(0, 80), max_size=60))
def test_bytes_that_are_no_text_read_as_decoding_them_at_once(
    data: bytes, places: list[int]
) -> None:
    chunks = cut(data, places)
    known = byte_texts(chunks)
    pieces, _ = run(known.completion(), ids_of(known, chunks))
    assert "".join(pieces) == data.decode("utf-8", "replace")


def test_no_end_of_broken_bytes_is_decoded_again_and_again() -> None:
    known = TokenizerService(make_tiny_tokenizer())
    decoded: list[int] = []
    decode = known.decode

    def counting(tokens: list[int]) -> str:
        decoded.append(len(tokens))
        return decode(tokens)

    known.decode = counting  # type: ignore[method-assign] # counts, and passes on
    data = (b"\xff\xe2\x82" * 500) + "€".encode()
    pieces, _ = run(known.completion(), ids_of(known, [bytes([byte]) for byte in data]))
    assert "".join(pieces) == data.decode("utf-8", "replace")
    assert max(decoded) < 60


@quick
@given(
    text=texts,
    places=st.lists(st.integers(0, 60), max_size=12),
    stops=st.lists(st.text(alphabet="aé€ \n", min_size=1, max_size=4), max_size=3),
    at=st.integers(0, 12),
)
def test_a_stop_text_ends_the_text_wherever_it_is(
    text: str, places: list[int], stops: list[str], at: int
) -> None:
    if stops:
        text = text[:at] + stops[0] + text[at:]
    chunks = cut(text.encode(), places)
    known = byte_texts(chunks)
    pieces, num_tokens = run(known.completion(stops), ids_of(known, chunks))
    for count in range(len(chunks) + 1):
        so_far = b"".join(chunks[:count]).decode("utf-8", "ignore")
        if (wanted := shown(so_far, stops)) is not None:
            assert (num_tokens, "".join(pieces)) == (count, wanted)
            break
    else:
        assert "".join(pieces) == text


@quick
@given(
    text=st.text(alphabet="abx", max_size=10),
    stops=st.lists(st.text(alphabet="abx", min_size=1, max_size=4), max_size=3),
    places=st.lists(st.integers(0, 10), max_size=6),
)
def test_stop_texts_do_not_depend_on_the_cut(
    text: str, stops: list[str], places: list[int]
) -> None:
    finder = StopFinder(stops)
    pieces = [finder.push(piece.decode()) for piece in cut(text.encode(), places)]
    wanted = shown(text, stops)
    assert "".join(pieces) + finder.finish() == (text if wanted is None else wanted)


def test_a_possible_beginning_of_a_stop_text_waits() -> None:
    known = TokenizerService(make_tiny_tokenizer())
    text = known.completion(["END."])
    ids = known.tokenizer("xENxEND.y")["input_ids"]
    assert [text.push(token) for token in ids[:8]] == ["x", "", "", "ENx", "", "", "", ""]
    assert text.stopped
    assert text.push(ids[8]) + text.finish() == ""


def test_what_was_held_back_comes_at_the_end() -> None:
    known = TokenizerService(make_tiny_tokenizer())
    text = known.completion(["END."])
    for token in known.tokenizer("END")["input_ids"]:
        assert text.push(token) == ""
    assert text.push(known.tokenizer("€")["input_ids"][0]) == ""
    assert text.finish() == "END\ufffd"
    assert not text.stopped


def test_special_tokens_and_unseen_ones_have_no_text() -> None:
    tokenizer = make_tiny_tokenizer()
    known = TokenizerService(tokenizer)
    letters = tokenizer("ab")["input_ids"]
    text = known.completion(unseen=[letters[1]])
    ids = [tokenizer.bos_token_id, letters[0], tokenizer.eos_token_id, letters[1], letters[0]]
    assert "".join(run(text, ids)[0]) == "aa"


def test_a_special_token_in_the_middle_of_a_character() -> None:
    tokenizer = make_tiny_tokenizer()
    first, *rest = tokenizer("€")["input_ids"]
    ids = [first, *[tokenizer.eos_token_id] * 60, *rest]
    assert run(TokenizerService(tokenizer).completion(), ids)[0][-2:] == ["€", ""]


WORDS = ("▁", "▁hello", "▁world", "a", "!")
FALLBACK = [f"<0x{byte:02X}>" for byte in range(256)]


def fallback_texts() -> TokenizerService:
    """A tokenizer as Llama 2 has it: token `i` is byte `i`, the words come after."""
    pieces = [*FALLBACK, *WORDS, "<unk>"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made: Any = PreTrainedTokenizerFast
    return TokenizerService(made(tokenizer_object=tokenizer, unk_token="<unk>"))


FALLBACK_TEXTS = fallback_texts()
words = st.integers(256, 255 + len(WORDS)).map(lambda token: [token])
written_in_bytes = st.text(alphabet="aé€😀你", max_size=20).map(lambda text: list(text.encode()))
cut_off = st.sampled_from("é€😀").map(lambda text: list(text.encode())[:-1])


def joined(runs: list[list[int]]) -> list[int]:
    return [token for run_ in runs for token in run_]


@quick
@given(runs=st.lists(words | written_in_bytes, max_size=12))
def test_runs_of_byte_tokens_lose_no_character(runs: list[list[int]]) -> None:
    ids = joined(runs)
    text = FALLBACK_TEXTS.completion()
    seen = "".join(text.push(token) for token in ids)
    assert seen == FALLBACK_TEXTS.decode(ids)
    assert text.finish() == ""


@quick
@given(runs=st.lists(words | written_in_bytes | cut_off, max_size=12))
def test_a_cut_character_among_byte_tokens_takes_no_other_with_it(runs: list[list[int]]) -> None:
    text = FALLBACK_TEXTS.completion()
    seen = ""
    for token in joined(runs):
        seen += text.push(token)
        if token >= 256:  # a word ends what bytes may wait for
            assert seen.endswith(WORDS[token - 256].strip("▁"))
    seen += text.finish()
    whole = FALLBACK_TEXTS.decode(joined(runs)).replace("\ufffd", "")
    rest = iter(seen)
    assert all(character in rest for character in whole)


def test_the_character_that_stays_cut_is_the_only_one_replaced() -> None:
    known = FALLBACK_TEXTS
    ids = list("你好".encode())[:-1]
    assert run(known.completion(), ids)[0] == ["", "", "你", "", "", "\ufffd\ufffd"]
    assert run(known.completion(), [*ids, 259])[0][-2:] == ["\ufffd\ufffda", ""]
    for length in (10, 100, 1000):
        long = [*"你".encode(), *[0xFF] * length, *"好".encode(), 259]
        pieces, _ = run(known.completion(), long)
        assert pieces[2] == "你"
        assert pieces[-2][-1] == "a"
        assert set("".join(pieces)) <= set("你好\ufffda")


@pytest.mark.parametrize(
    ("decoder", "pieces", "text"),
    [
        (decoders.Metaspace(), ["▁Hello", "▁world", "s", "▁!"], "Hello worlds !"),
        (decoders.WordPiece(cleanup=False), ["un", "##do", "it"], "undo it"),
        (
            decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]),
            ["a", "<0xE2>", "<0x82>", "<0xAC>", "b", "<0xF0>", "c"],
            "a€b\ufffdc",
        ),
    ],
)
def test_other_kinds_of_tokenizer(decoder: Any, pieces: list[str], text: str) -> None:
    vocabulary = {piece: i for i, piece in enumerate([*pieces, "<unk>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoder
    made: Any = PreTrainedTokenizerFast
    known = TokenizerService(made(tokenizer_object=tokenizer, unk_token="<unk>"))
    given_pieces, _ = run(known.completion(), list(range(len(pieces))))
    assert "".join(given_pieces) == text
    assert len([piece for piece in given_pieces if piece]) > 1
    told = [known.token_bytes(token, first=token == 0) for token in range(len(pieces))]
    assert b"".join(told).decode("utf-8", "replace") == text


def test_the_bytes_and_the_name_of_a_token() -> None:
    known = TokenizerService(make_tiny_tokenizer())
    ids = known.tokenizer("€a")["input_ids"]
    assert b"".join(known.token_bytes(token) for token in ids) == "€a".encode()
    assert [known.token_name(token) for token in ids] == [
        "bytes:\\xe2",
        "bytes:\\x82",
        "bytes:\\xac",
        "a",
    ]
    assert known.token_name(known.tokenizer.eos_token_id) == "<eos>"


@pytest.mark.anyio
async def test_short_and_long_texts_are_encoded_alike() -> None:
    known = TokenizerService(make_tiny_tokenizer())
    long = "weights " * 2000
    encoded = await known.run(lambda: known.encode(long), len(long))
    assert encoded == known.tokenizer(long)["input_ids"]
    assert known.encode("a") == known.tokenizer("a")["input_ids"]
    assert known.encode("") == [known.tokenizer.bos_token_id]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
