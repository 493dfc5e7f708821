"""A real `vllm serve` of a tiny model with an engine, and sources of weights for it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import requests
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from vllm.distributed.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ParamMeta,
    WeightSource,
    WeightTransferTrainerFactory,
)

from weightsync.runtime.processes import end_with

Tensors = Mapping[str, torch.Tensor]

READY_S = 240.0
ANSWER_S = 30.0
_VOCABULARY = 32_768
_CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _config(*, tied: bool) -> Any:
    return Qwen3Config(
        **_CONFIG,
        tie_word_embeddings=tied,
        architectures=["Qwen3ForCausalLM"],
        dtype=torch.float32,
    )


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
QUERY, NORM = "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    """Return the model's weights in float32; embedding and head have 8 MiB each."""
    with torch.device("meta"):
        shapes = Qwen3ForCausalLM(_config(tied=False)).named_parameters()
    made = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(tensor.shape, generator=made) * 0.1 + (tensor.dim() == 1)
        for name, tensor in shapes
    }


HAS_ITER_FULL = hasattr(WeightSource, "iter_full")
"""Whether a source has `iter_full()`, and `metadata` as a property: vLLM from 0.33."""


def as_metadata(method: Callable[[Any], list[Any]]) -> Any:
    """Make a method the `metadata` of a source, as the installed vLLM wants it."""
    return cached_property(method) if HAS_ITER_FULL else method


class Weights(WeightSource):  # type: ignore[misc]  # vLLM has no types here
    """A source that yields a new copy of each tensor; `acts` are called before a tensor.

    It describes the tensors `left_out`, and does not yield them.
    """

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = dict(tensors)
        self.acts: dict[str, Callable[[], object]] = {}
        self.left_out: set[str] = set()
        self.begun = self.ended = 0

    @as_metadata
    def metadata(self) -> list[Any]:
        """Return name, dtype and shape of every tensor."""
        return [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.iter_full()

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors."""
        self.begun += 1
        for name, tensor in self.tensors.items():
            if name in self.left_out:
                continue
            self.acts.get(name, lambda: None)()
            # Not of `clone`: a tensor that is not contiguous has to stay so.
            yield (
                name,
                torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(
                    tensor
                ),
            )
        self.ended += 1


def recording_client(url: str, timeout_s: float) -> HTTPVLLMWeightSyncClient:
    """Return vLLM's client for HTTP, with a list `calls` of the paths and bodies that it posts."""
    client: Any = HTTPVLLMWeightSyncClient(url, timeout=timeout_s)
    post, client.calls = client._post, []

    def record(path: str, json: dict[str, Any] | None = None) -> None:
        client.calls.append((path.strip("/"), json))
        post(path, json)

    client._post = record
    return client


class StillWaits(Exception):
    """A call did not end within its bound."""


def within(bound_s: float, work: Callable[[], Any]) -> Any:
    """Return what `work` returns, or raise its error; raise StillWaits if neither comes in time."""
    ended: list[Any] = []

    def run() -> None:
        try:
            ended.append((work(), None))
        except BaseException as exc:  # noqa: BLE001  # raised below
            ended.append((None, exc))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(bound_s)
    if not ended:
        raise StillWaits(f"after {bound_s:g} s")
    result, error = ended[0]
    if error is not None:
        raise error
    return result


@dataclass
class Address:
    """The facts about a server that the process of a trainer is given."""

    url: str


class Server(Address):
    """A server in a process of its own, at one URL however often it is started."""

    def __init__(
        self,
        folder: Path,
        engine: str,
        probe: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        tied: bool = False,
    ) -> None:
        self._folder = folder
        self._tied = tied
        self._process: subprocess.Popen[bytes] | None = None
        # Bound and never listening: no other program takes the port, and vLLM binds it as well.
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("127.0.0.1", 0))
        port = self._port.getsockname()[1]
        super().__init__(f"http://127.0.0.1:{port}")
        self._checkpoint = self._save("started", weights_of(0))
        self._command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"),
            *("--model", str(self._checkpoint), "--served-model-name", "tiny"),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
            *("--max-model-len", "128", "--max-num-seqs", "8", "--max-num-batched-tokens", "128"),
            *("--weight-transfer-config", f'{{"backend":"{engine}"}}'),
            *("--worker-extension-cls", probe),
            *arguments,
        ]
        self._environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", **environment}
        self._environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        log = self._folder / "server.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=partial(end_with, os.getpid()),  # noqa: PLW1509  # kernel calls alone
            )
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with suppress(requests.ConnectionError):
                if requests.get(f"{self.url}/health", timeout=5).ok:
                    return
            time.sleep(0.3)
        raise RuntimeError(f"vLLM did not start:\n{log.read_text(errors='replace')[-3000:]}")

    def signal(self, number: int) -> None:
        """Send a signal to all its processes."""
        if self._process is not None:
            os.killpg(self._process.pid, number)

    def end(self) -> None:
        """Kill all its processes."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self.signal(signal.SIGKILL)
            self._process.wait(READY_S)
            self._process = None

    def close(self) -> None:
        """End it for good: its port is free again."""
        self.end()
        self._port.close()

    def post(self, path: str, body: Any = None) -> requests.Response:
        """Call an endpoint."""
        return requests.post(f"{self.url}/{path}", json=body, timeout=ANSWER_S)

    def held(self) -> dict[str, str]:
        """Return the fingerprints of all that its model consists of."""
        return self._ask("conformance_held")

    def wanted(self, tensors: Tensors) -> dict[str, str]:
        """Return those of a model that vLLM loads from a checkpoint of these tensors."""
        return self._ask("conformance_wanted", str(self._save("wanted", tensors)))

    def resources(self) -> dict[str, int]:
        """Return what its worker has: `descriptors`, `threads`, mapped `segments`, `nbytes`."""
        return self._ask("conformance_resources")

    def generate(self) -> None:
        """Generate a few tokens, or raise."""
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
        self.post("v1/completions", body).raise_for_status()

    def differences(self, tensors: Tensors) -> list[str]:
        """Generate, and return the names of what differs from these weights."""
        self.generate()
        held, wanted = self.held(), self.wanted(tensors)
        assert held.keys() == wanted.keys()
        return [name for name in held if held[name] != wanted[name]]

    def _ask(self, method: str, *args: str) -> dict[str, Any]:
        answer = self.post("collective_rpc", {"method": method, "args": args})
        answer.raise_for_status()
        (result,) = answer.json()["results"]
        return dict(result)

    def _save(self, name: str, tensors: Tensors) -> Path:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        _config(tied=self._tied).save_pretrained(folder)
        kept = {n: t.float().contiguous() for n, t in tensors.items()}
        if self._tied:
            kept.pop(HEAD, None)
        save_file(kept, folder / "model.safetensors")
        if not (folder / "tokenizer.json").exists():
            words = Tokenizer(models.WordLevel({str(i): i for i in range(_VOCABULARY)}, "0"))
            PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers has no type
                tokenizer_object=words
            ).save_pretrained(folder)
        return folder


def start_trainer(init_info: Any, client: Any, source: WeightSource) -> Any:
    """Return a trainer engine, by vLLM's factory."""
    return WeightTransferTrainerFactory.trainer_init(init_info, client=client, source=source)
