"""A tokenizer over bytes for the tiny models: every text is readable, nothing is downloaded."""

from __future__ import annotations

from typing import Any

from weightsync.errors import BackendUnavailableError
from weightsync.serve.hugging_face import hf

try:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
except ImportError as exc:
    raise BackendUnavailableError(
        f"making a tokenizer needs tokenizers ({exc}); pip install 'weightsync[hf]'"
    ) from exc

TINY_SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")

_CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ message.role }}:{{ ' ' }}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'text' -%}{{ part.text }}{%- else -%}<image>{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}assistant:{%- endif -%}"""


def byte_tokenizer() -> Any:
    """Make the tokenizer: three special tokens and 256 bytes; it also writes chats."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*TINY_SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, bos, eos = TINY_SPECIAL_TOKENS
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        chat_template=_CHAT_TEMPLATE,
    )
