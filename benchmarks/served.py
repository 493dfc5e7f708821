"""A server process for benchmarks, and models of any size."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import torch

from weightsync.serve.hugging_face import hf_logging
from weightsync.serve.model import make_tiny_model, make_tiny_vision_model

START_S = 600.0
END_S = 30.0
PROMPT = [7, 11, 19, 23, 31, 43, 61, 79]
LAYERS, HEAD_WIDTH = 30, 64
PATCHES = 8

Found = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running server: its URL, the pid of its supervisor, and the name of its model."""

    url: str
    pid: int
    model: str

    def stats(self, version: int | None = None) -> tuple[float, Found]:
        """Return the time and the statistics of its replica, when the server holds `version`."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            status = requests.get(f"{self.url}/status.json", timeout=START_S).json()
            held = [replica["versions"] for replica in status["replicas"]]
            if held and (version is None or held == [[version]]):
                return status["at"], status["replicas"][0]
            time.sleep(0.1)
        raise TimeoutError(f"{self.url} does not report version {version}")

    def completion(self, tokens: int) -> Found:
        """Return the body of a request for `tokens` tokens."""
        asked = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return {"model": self.model, **asked}


@contextmanager
def server(model: str, *options: str) -> Iterator[Server]:
    """Run `weightsync serve` on `model`."""
    command = [sys.executable, "-m", "weightsync", "serve", "--model", model, "--port", "0"]
    process = subprocess.Popen([*command, "--no-auth", *options], stdout=subprocess.PIPE, text=True)
    watchdog = threading.Timer(START_S, process.kill)
    watchdog.start()
    try:
        line = process.stdout.readline() if process.stdout else ""
        watchdog.cancel()
        if "listening on " not in line:
            raise RuntimeError(f"the server of {model} did not start; the reason is above")
        url = line.split()[-1]
        name = requests.get(f"{url}/v1/models", timeout=END_S).json()["data"][0]["id"]
        yield Server(url=url, pid=process.pid, model=name)
    finally:
        watchdog.cancel()
        process.terminate()
        process.communicate(timeout=END_S)


def write_llama(folder: Path, mbytes: int, dtype: str) -> str:
    """Write a Llama of about `mbytes` (1e6) of weights; return its directory.

    Small or large, it has about LAYERS layers, nine tensors each, as real ones of these sizes have.
    """
    tiny = make_tiny_model()
    config, kind = tiny.model.config, getattr(torch, dtype)
    elements = mbytes * 1_000_000 / kind.itemsize
    width = max(1, round((elements / (LAYERS * 12)) ** 0.5 / HEAD_WIDTH)) * HEAD_WIDTH
    heads = width // HEAD_WIDTH
    config.hidden_size, config.intermediate_size = width, 8 * width // 3
    config.num_attention_heads = config.num_key_value_heads = heads
    config.head_dim = HEAD_WIDTH
    config.num_hidden_layers = max(1, round(elements / (12 * width**2)))
    config.initializer_range = 0.02
    directory = folder / f"llama-{mbytes}"
    hf_logging.disable_progress_bar()
    type(tiny.model)(config).to(kind).save_pretrained(directory)
    tiny.tokenizer.save_pretrained(directory)
    return str(directory)


def write_llava(folder: Path, side: int) -> str:
    """Write the tiny vision model for images of `side` pixels; return its directory."""
    tiny = make_tiny_vision_model()
    config, processor = tiny.model.config, tiny.processor
    patch = side // PATCHES
    config.vision_config.image_size, config.vision_config.patch_size = side, patch
    config.image_seq_length = PATCHES**2
    processor.patch_size = patch
    processor.image_processor.size = {"height": side, "width": side}
    processor.image_processor.crop_size = {"height": side, "width": side}
    directory = folder / f"llava-{side}"
    hf_logging.disable_progress_bar()
    type(tiny.model)(config).save_pretrained(directory)
    processor.save_pretrained(directory)
    return str(directory)
