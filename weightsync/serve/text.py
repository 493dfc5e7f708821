"""Tokens to text and text to tokens: streaming detokenization, stop texts, the tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import anyio
from transformers.convert_slow_tokenizer import bytes_to_unicode

from weightsync.serve.vision import ImagePreparer
from weightsync.server.threads import run_limited

REPLACEMENT = "\ufffd"

_MAX_OPEN = 3
"""An incomplete character decodes to at most this number of replacement characters."""
_CONTEXT_TOKENS = 8
_MAX_WINDOW_TOKENS = 48
_INLINE_SIZE = 4096
_THREADS = 4

T = TypeVar("T")

Decode = Callable[[list[int]], str]


class Detokenizer:
    """Turns the tokens of one completion into pieces of text, which never change later.

    An incomplete character is held back until its other bytes arrive, or the completion ends.
    Tokens in `skipped` have no text. The pieces together are the text of all tokens. A character
    that stays incomplete becomes replacement characters, and only that one: a tokenizer with byte
    tokens (`<0xE2>`) would also replace complete characters before it.
    """

    def __init__(self, decode: Decode, skipped: Collection[int] = ()) -> None:
        self._decode = decode
        self._skipped = skipped
        self._window: list[int] = []  # tokens that can still affect the text of later ones
        self._fresh = 0  # index in the window of the first token whose text is not returned yet
        self._given = ""  # the part of the window's text that was returned

    def push(self, token: int) -> str:
        """Add a token; return the text that is complete now."""
        if token in self._skipped:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        if not text.startswith(self._given):
            return self._push_cut()
        certain = len(text) - _open_tail(text)
        piece = text[len(self._given) : certain]
        self._given += piece
        if certain == len(text):
            self._forget(self._fresh)
        elif len(self._window) > _MAX_WINDOW_TOKENS:
            self._forget(len(self._window) - _CONTEXT_TOKENS)
        return piece

    def finish(self) -> str:
        """Return the text that was held back, with replacements for an incomplete character."""
        text = self._decode(self._window) if self._window else ""
        if not text.startswith(self._given):
            return self._decode(self._window[self._fresh :])
        return text[len(self._given) :]

    def _push_cut(self) -> str:
        # An incomplete character of byte tokens also changes the characters before it, which were
        # returned already. So the new tokens are decoded without them, and wait until they form
        # complete characters or the window is full.
        text = self._decode(self._window[self._fresh :])
        if _open_tail(text) and len(self._window) <= _MAX_WINDOW_TOKENS:
            return ""
        self._forget(max(self._fresh, len(self._window) - _CONTEXT_TOKENS))
        self._fresh, self._given = len(self._window), self._decode(self._window)
        return text

    def _forget(self, count: int) -> None:
        # Some tokens stay as context: some decoders treat the first token differently.
        self._window = self._window[count:]
        text = self._decode(self._window)
        num_open = _open_tail(text)
        self._fresh = max(0, len(self._window) - num_open)
        self._given = text[: len(text) - num_open]


def _open_tail(text: str) -> int:
    return min(len(text) - len(text.rstrip(REPLACEMENT)), _MAX_OPEN)


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """Return where the stop text begins that ends first, the longest of several; or None.

    This does not depend on how the text is divided into tokens.
    """
    places = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return min(places)[1] if places else None


class StopFinder:
    """Cuts text before the stop text that ends first; holds back a possible beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.found = False
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def push(self, text: str) -> str:
        """Add text; return the part that cannot be in a stop text. "" once `found`."""
        if self.found or not text:
            return ""
        pending = self._held + text
        place = find_stop(pending, self._stops)
        self.found = place is not None
        shown = len(pending) - self._beginning(pending) if place is None else place
        self._held = pending[shown:]
        return pending[:shown]

    def finish(self) -> str:
        """Return the text that was held back, if no stop text was found."""
        return "" if self.found else self._held

    def _beginning(self, pending: str) -> int:
        for size in range(min(len(pending), self._longest - 1), 0, -1):
            tail = pending[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0


class CompletionText:
    """The text of one completion, up to its first stop text."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._stops = StopFinder(stops)
        self.num_characters = 0  # of all complete text, returned or held back

    @property
    def stopped(self) -> bool:
        """Whether the last token completed a stop text."""
        return self._stops.found

    def push(self, token: int) -> str:
        """Add a token; return the next text to show."""
        return self._show(self._detokenizer.push(token))

    def finish(self) -> str:
        """Return the rest of the text after the last token."""
        return self._show(self._detokenizer.finish()) + self._stops.finish()

    def _show(self, text: str) -> str:
        self.num_characters += len(text)
        return self._stops.push(text)


class TokenizerService:
    """The tokenizer of the served model, for one event loop. It encodes long texts in threads.

    `processor` is the image processor of the model, None for a text-only model.
    """

    def __init__(self, tokenizer: Any, processor: Any = None) -> None:
        self.tokenizer = tokenizer
        tokenizer("a")  # the first call may change padding settings; later calls only read
        self.images = None if processor is None else ImagePreparer(processor)
        self.chat_template = getattr(tokenizer, "chat_template", None) or getattr(
            processor, "chat_template", None
        )
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {token for token, added_token in added.items() if added_token.special}
        self._special = frozenset(special | set(tokenizer.all_special_ids))
        self._threads = anyio.CapacityLimiter(_THREADS)
        # The byte of each character of a byte-level vocabulary (GPT-2's table).
        table: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call] # transformers annotates in part
        self._byte_of = {character: byte for byte, character in table.items()}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. An empty text gives the beginning-of-sequence token.

        Slow for a long text: call it through `run`.
        """
        ids = list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
        if not ids and self.tokenizer.bos_token_id is not None:
            ids = [self.tokenizer.bos_token_id]
        return ids

    async def run(self, work: Callable[[], T], size: int) -> T:
        """Return the result of `work`, run in a thread if `size` (characters of input) is large."""
        if size <= _INLINE_SIZE:
            return work()
        return await run_limited(self._threads, work)

    def completion(self, stops: Sequence[str] = (), unseen: Collection[int] = ()) -> CompletionText:
        """Return an empty completion text. Special tokens and those in `unseen` have no text."""
        return CompletionText(Detokenizer(self.decode, self._special.union(unseen)), stops)

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens, without special ones."""
        return str(
            self.tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def token_bytes(self, token: int, *, first: bool = False) -> bytes:
        """Return the bytes of one token, which may be a part of a character.

        Some tokenizers leave out the space before the `first` token of a text.
        """
        piece = str(self.tokenizer.convert_ids_to_tokens(token))
        text = self._named([token])
        if REPLACEMENT not in text:
            return (text if first or token in self._special else self._going_on(token)).encode()
        if piece.startswith("<0x") and piece.endswith(">"):  # a byte token of sentencepiece
            return bytes([int(piece[3:-1], 16)])
        if all(character in self._byte_of for character in piece):
            return bytes(self._byte_of[character] for character in piece)
        return text.encode()

    def token_name(self, token: int, *, first: bool = False) -> str:
        """Return the text of one token, or `bytes:` and its bytes if they are not UTF-8."""
        data = self.token_bytes(token, first=first)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _named(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, clean_up_tokenization_spaces=False))

    def _going_on(self, token: int) -> str:
        alone, twice = self._named([token]), self._named([token, token])
        return twice[len(alone) :] if twice.startswith(alone) else alone
