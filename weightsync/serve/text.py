"""From tokens to text: whole characters only, nothing special, and no stop text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from weightsync.serve.vision import ImagePreparer

REPLACEMENT = "\ufffd"

_MAX_OPEN = 3
"""A character whose last byte is missing decodes to at most so many replacement characters."""
_CONTEXT_TOKENS = 8
_MAX_WINDOW_TOKENS = 48
_INLINE_SIZE = 4096
_THREADS = 4

T = TypeVar("T")

Decode = Callable[[list[int]], str]


class Detokenizer:
    """Turns the tokens of one completion into text that is never taken back.

    Half a character is held back until its other bytes come, or the end. Tokens in `skipped` have
    no text. Pieces add up to what the tokenizer makes of all the tokens at once; where a character
    stays cut, its bytes alone become replacement characters, even for tokenizers (of bytes as
    `<0xE2>`) that would replace the whole characters before it, too.
    """

    def __init__(self, decode: Decode, skipped: Collection[int] = ()) -> None:
        self._decode = decode
        self._skipped = skipped
        self._window: list[int] = []  # the tokens that may still change what follows
        self._fresh = 0  # where the tokens begin whose text the window was last cut for
        self._given = ""  # what has left of the window's text

    def push(self, token: int) -> str:
        """Return the text that has become certain with one more token."""
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
        """Return the text that was held back; half a character has become a replacement."""
        text = self._decode(self._window) if self._window else ""
        if not text.startswith(self._given):
            return self._decode(self._window[self._fresh :])
        return text[len(self._given) :]

    def _push_cut(self) -> str:
        # One cut character among bytes hides those before it, which are out already. The rest
        # waits for its end; by itself it is readable only when that end cannot come any more.
        text = self._decode(self._window[self._fresh :])
        if _open_tail(text) and len(self._window) <= _MAX_WINDOW_TOKENS:
            return ""
        self._forget(max(self._fresh, len(self._window) - _CONTEXT_TOKENS))
        self._fresh, self._given = len(self._window), self._decode(self._window)
        return text

    def _forget(self, count: int) -> None:
        # What is kept is context: some decoders write the first token unlike the others.
        self._window = self._window[count:]
        text = self._decode(self._window)
        num_open = _open_tail(text)
        self._fresh = max(0, len(self._window) - num_open)
        self._given = text[: len(text) - num_open]


def _open_tail(text: str) -> int:
    return min(len(text) - len(text.rstrip(REPLACEMENT)), _MAX_OPEN)


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """Return where the stop text begins that ends first, of those the longest; None for none.

    However a text is cut into tokens, that is the one which is complete first.
    """
    places = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return min(places)[1] if places else None


class StopFinder:
    """Cuts text before the stop text that ends first; holds back what may begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.found = False
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def push(self, text: str) -> str:
        """Return what may be shown now. Nothing comes any more once `found`."""
        if self.found or not text:
            return ""
        pending = self._held + text
        place = find_stop(pending, self._stops)
        self.found = place is not None
        shown = len(pending) - self._beginning(pending) if place is None else place
        self._held = pending[shown:]
        return pending[:shown]

    def finish(self) -> str:
        """Return what was held back and has become no stop text."""
        return "" if self.found else self._held

    def _beginning(self, pending: str) -> int:
        for size in range(min(len(pending), self._longest - 1), 0, -1):
            tail = pending[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0


class CompletionText:
    """The text of one completion as it may be shown; `stopped` once a stop text was in it."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._stops = StopFinder(stops)
        self.num_characters = 0  # of all text that is certain, shown or not

    @property
    def stopped(self) -> bool:
        """Whether a stop text was found: the token pushed last completed it."""
        return self._stops.found

    def push(self, token: int) -> str:
        """Return the text to show after one more token."""
        return self._show(self._detokenizer.push(token))

    def finish(self) -> str:
        """Return the rest of the text, when no token comes any more."""
        return self._show(self._detokenizer.finish()) + self._stops.finish()

    def _show(self, text: str) -> str:
        self.num_characters += len(text)
        return self._stops.push(text)


class TokenizerService:
    """The tokenizer of the served model, for one event loop: long texts are encoded in threads.

    `processor` is that of a model which takes images, None for a model of text alone.
    """

    def __init__(self, tokenizer: Any, processor: Any = None) -> None:
        self.tokenizer = tokenizer
        tokenizer("a")  # the first call may still settle padding; later ones only read
        self.images = None if processor is None else ImagePreparer(processor)
        self.chat_template = _chat_template(tokenizer) or _chat_template(processor)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {token for token, added_token in added.items() if added_token.special}
        self._special = frozenset(special | set(tokenizer.all_special_ids))
        self._threads = anyio.CapacityLimiter(_THREADS)
        self._byte_of = _byte_alphabet()

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text; of an empty one, the token that begins a text."""
        return await self.run(
            lambda: self.encode_here(text, add_special_tokens=add_special_tokens), len(text)
        )

    def encode_here(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return what `encode` does, in this thread; slow for a long text."""
        ids = list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
        if not ids and self.tokenizer.bos_token_id is not None:
            ids = [self.tokenizer.bos_token_id]
        return ids

    async def run(self, work: Callable[[], T], size: int) -> T:
        """Return what `work` returns; in a thread if its input's `size` (characters) is large."""
        return work() if size <= _INLINE_SIZE else await self.run_in_thread(work)

    async def run_in_thread(self, work: Callable[[], T]) -> T:
        """Return what `work` returns; few run at once, the others wait their turn."""
        return await anyio.to_thread.run_sync(work, limiter=self._threads, abandon_on_cancel=True)

    def completion(self, stops: Sequence[str] = (), unseen: Collection[int] = ()) -> CompletionText:
        """Begin the text of a completion; tokens `unseen` have no text, like special ones."""
        return CompletionText(Detokenizer(self.decode, self._special.union(unseen)), stops)

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens, special ones left out."""
        return str(
            self.tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def token_bytes(self, token: int, *, first: bool = False) -> bytes:
        """Return the bytes of one token, of which a character may need several.

        Some tokenizers leave out the space before a text: that of the `first` token.
        """
        piece = str(self.tokenizer.convert_ids_to_tokens(token))
        text = self._named([token])
        if REPLACEMENT not in text:
            return (text if first or token in self._special else self._going_on(token)).encode()
        if piece.startswith("<0x") and piece.endswith(">"):  # how sentencepiece writes a byte
            return bytes([int(piece[3:-1], 16)])
        if all(character in self._byte_of for character in piece):
            return bytes(self._byte_of[character] for character in piece)
        return text.encode()

    def token_name(self, token: int, *, first: bool = False) -> str:
        """Return the text of one token; `bytes:` and its bytes where it is no whole text."""
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


def _chat_template(owner: Any) -> Any:
    return getattr(owner, "chat_template", None)


def _byte_alphabet() -> dict[str, int]:
    """Which byte each character of a byte-level vocabulary stands for (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }
