"""A conversation as the model's prompt: its chat template, and its images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from weightsync.rollout.completions import Prompt
from weightsync.rollout.openai_messages import ChatMessage, ImagePart, RequestError, TextPart
from weightsync.rollout.text import Texts
from weightsync.rollout.vision import ImagePreparer

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""What is used for a tokenizer without a chat template of its own."""


async def chat_prompt(texts: Texts, messages: Sequence[ChatMessage]) -> Prompt:
    """Return the prompt of a conversation that the assistant is to go on with.

    Raises RequestError for one that the model's template or the model cannot take.
    """
    parts = [part for message in messages for part in message.parts]
    urls = [part.image_url.url for part in parts if isinstance(part, ImagePart)]
    if not urls:
        size = sum(len(part.text) for part in parts if isinstance(part, TextPart))
        plain = [_plain(message) for message in messages]
        rendered = await texts.run(lambda: render(texts, plain), size)
        return Prompt(token_ids=await texts.encode(rendered, add_special_tokens=False))
    if (preparer := texts.images) is None:
        raise RequestError("the served model takes no images; send text alone", param="messages")
    return await texts.run_in_thread(lambda: _with_images(texts, preparer, messages, urls))


def render(texts: Texts, messages: list[dict[str, Any]]) -> str:
    """Return the text of a conversation. Raises RequestError where the template refuses it."""
    template = None if texts.tokenizer.chat_template else PLAIN_TEMPLATE
    try:
        return str(
            texts.tokenizer.apply_chat_template(
                messages, chat_template=template, tokenize=False, add_generation_prompt=True
            )
        )
    except TemplateError as exc:
        raise RequestError(
            f"the chat template of the model does not take these messages: {exc}", param="messages"
        ) from exc


def _with_images(
    texts: Texts, preparer: ImagePreparer, messages: Sequence[ChatMessage], urls: list[str]
) -> Prompt:
    from weightsync.rollout.images import read_images  # noqa: PLC0415 # needs Pillow

    images = read_images(urls)
    rendered = render(texts, [_in_parts(message) for message in messages])
    ids, inputs = preparer.prepare(rendered, images, add_special_tokens=False)
    return Prompt(token_ids=ids, inputs=inputs)


def _plain(message: ChatMessage) -> dict[str, Any]:
    """Return a message as templates of models for text want it."""
    content = "\n".join(part.text for part in message.parts if isinstance(part, TextPart))
    return _said(message, content)


def _in_parts(message: ChatMessage) -> dict[str, Any]:
    """Return a message as templates of models for images want it."""
    parts = [
        {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
        for part in message.parts
    ]
    return _said(message, parts)


def _said(message: ChatMessage, content: str | list[dict[str, str]]) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    named = {"name": message.name} if message.name is not None else {}
    return {"role": role, "content": content} | named
