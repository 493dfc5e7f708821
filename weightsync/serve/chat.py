"""A conversation as the model's prompt: its chat template, and its images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from weightsync.serve.completions import Prompt
from weightsync.serve.openai_messages import ChatMessage, ImagePart, RequestError, TextPart
from weightsync.serve.text import TokenizerService
from weightsync.serve.vision import ImagePreparer

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""What is used for a tokenizer without a chat template of its own."""


_MESSAGE_SIZE = 32
_UNKNOWN_SIZE = 1 << 20


async def chat_prompt(texts: TokenizerService, messages: Sequence[ChatMessage]) -> Prompt:
    """Return the prompt of a conversation that the assistant is to go on with.

    Raises RequestError for one that the model's template or the model cannot take.
    """
    return await texts.run(lambda: _prompt(texts, messages), sum(map(_size, messages)))


def _size(message: ChatMessage) -> int:
    content = message.content or ""
    return _MESSAGE_SIZE + len(content) if isinstance(content, str) else _UNKNOWN_SIZE


def _prompt(texts: TokenizerService, messages: Sequence[ChatMessage]) -> Prompt:
    parts = [part for message in messages for part in message.parts]
    urls = [part.image_url.url for part in parts if isinstance(part, ImagePart)]
    preparer = texts.images
    if urls and preparer is None:
        raise RequestError("the served model takes no images; send text alone", param="messages")
    rendered = render(texts, [_as_wanted(texts, message) for message in messages])
    if preparer is not None and urls:
        return _with_images(preparer, rendered, urls)
    return Prompt(token_ids=texts.encode_here(rendered, add_special_tokens=False))


def render(texts: TokenizerService, messages: list[dict[str, Any]]) -> str:
    """Return the text of a conversation. Raises RequestError where the template refuses it."""
    # A tokenizer with several templates of its own chooses among them where it is given none.
    own = texts.tokenizer.chat_template
    template = None if own else texts.chat_template or PLAIN_TEMPLATE
    try:
        return str(
            texts.tokenizer.apply_chat_template(
                messages, chat_template=template, tokenize=False, add_generation_prompt=True
            )
        )
    except (TemplateError, TypeError, ValueError, ArithmeticError) as exc:
        raise RequestError(
            f"the chat template of the model does not take these messages: {exc}", param="messages"
        ) from exc


def _with_images(preparer: ImagePreparer, rendered: str, urls: list[str]) -> Prompt:
    from weightsync.serve.images import read_images  # noqa: PLC0415 # needs Pillow

    ids, inputs = preparer.prepare(rendered, read_images(urls), add_special_tokens=False)
    return Prompt(token_ids=ids, inputs=inputs)


def _as_wanted(texts: TokenizerService, message: ChatMessage) -> dict[str, Any]:
    # Templates of models for images go through parts, and see none in a string.
    if texts.images is not None and texts.chat_template:
        return _in_parts(message)
    return _plain(message, texts.images.image_token if texts.images else "")


def _plain(message: ChatMessage, image_token: str) -> dict[str, Any]:
    """Return a message as templates of models for text want it."""
    texts = [part.text if isinstance(part, TextPart) else image_token for part in message.parts]
    return _said(message, "\n".join(texts))


def _in_parts(message: ChatMessage) -> dict[str, Any]:
    """Return a message as templates of models for images want it."""
    parts = [
        {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
        for part in message.parts
    ]
    return _said(message, parts or [{"type": "text", "text": ""}])


def _said(message: ChatMessage, content: str | list[dict[str, str]]) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    named = {"name": message.name} if message.name is not None else {}
    return {"role": role, "content": content} | named
