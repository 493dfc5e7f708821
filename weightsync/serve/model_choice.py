"""Which model is meant, and into how many shards it may be cut: known before any is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weightsync.errors import ConfigError

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
    """Return the directory that `name` means. Raises ConfigError where it is no model's."""
    directory = Path(name).expanduser()
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"model {name!r} is neither 'smollm2' nor 'tiny' nor a directory with a config.json; "
            "give one of these (models are not downloaded)"
        )
    return directory


def check_choice(name: str, shards: int) -> None:
    """Raise ConfigError for a model that is not there, or does not divide into `shards`.

    Called before any process of a server is started. Reads no more than the model's config.json.
    """
    heads, kv_heads = _HEADS.get(name) or _heads_of(model_directory(name))
    check_heads(name, heads, kv_heads, shards)


def check_heads(name: str, heads: int | None, kv_heads: int | None, shards: int) -> None:
    """Raise ConfigError where attention does not divide: each worker has whole heads.

    None: the model does not say.
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
    told = text if isinstance(text, dict) else config
    return _count(told.get("num_attention_heads")), _count(told.get("num_key_value_heads"))


def _count(told: object) -> int | None:
    return told if isinstance(told, int) and told > 0 else None
