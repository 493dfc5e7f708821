"""The command line in this process, a server in another, and checkpoints for both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from tests.serve.servers import forked_server
from weightsync.cli.app import make_app
from weightsync.serve.model import make_tiny_model
from weightsync.tensors import as_bytes
from weightsync.weights.copying.fingerprint import mix64, to_hex

TOKEN = "the-token-of-the-test"
START_S = 90.0
HEAD = "lm_head.weight"
ROOT = Path(__file__).resolve().parents[2]

Tensors = dict[str, torch.Tensor]


def weightsync(*arguments: object, token: str | None = TOKEN) -> Result:
    """Run one verb in this process."""
    words = [str(argument) for argument in arguments]
    return CliRunner(env={"WEIGHTSYNC_TOKEN": token}).invoke(make_app(words), words)


def answer_of(result: Result, code: int = 0) -> dict[str, Any]:
    """Return the one object on stdout of a `--json` run."""
    assert result.exit_code == code, result.output
    answer = json.loads(result.stdout)
    assert isinstance(answer, dict)
    return answer


@contextmanager
def serving_tiny(*options: str) -> Iterator[str]:
    """Run `weightsync serve --model tiny` with further options; yields its URL."""
    with forked_server(*options, want_token=False, WEIGHTSYNC_TOKEN=TOKEN) as (url, _):
        yield url


def tiny_tensors(seed: int, dtype: torch.dtype = torch.float32) -> Tensors:
    """Weights that fit the server, in the form of a checkpoint: without the tied head."""
    state = make_tiny_model(seed=seed, dtype=dtype).model.state_dict()
    return {name: tensor.clone() for name, tensor in state.items() if name != HEAD}


def write_checkpoint(path: Path, tensors: Tensors) -> Path:
    """Write a directory of the tiny model."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    save_file(tensors, path / "model.safetensors")
    return path


def fingerprints(tensors: Tensors) -> dict[str, str]:
    """The fingerprints of a server that holds `tensors`, the tied head included."""
    known = {name: to_hex(mix64(as_bytes(tensor))) for name, tensor in tensors.items()}
    return known | {HEAD: known["model.embed_tokens.weight"]}
