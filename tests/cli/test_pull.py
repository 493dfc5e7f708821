"""`weightsync pull`, and a server that begins with the weights of another one."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fastapi import FastAPI
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import weightsync as ws
from tests.cli.running import (
    TOKEN,
    answer_of,
    fingerprints,
    serving_tiny,
    tiny_tensors,
    weightsync,
    write_checkpoint,
)
from tests.cli.test_push import held_by, version_of
from tests.serve.servers import refused
from tests.server import live
from tests.server.live import make_app, serving
from tests.weights.meshes import member, shard
from weightsync.receiver import WeightReceiver
from weightsync.server.dispatcher import Receiver
from weightsync.server.workers import Workers, worker_path, workers_router

pytestmark = pytest.mark.usefixtures("segments_closed")


@pytest.fixture
def pushed(url: str, tmp_path: Path) -> int:
    """The version of weights that were pushed into the server."""
    path = write_checkpoint(tmp_path / "pushed", tiny_tensors(8))
    return int(answer_of(weightsync("push", path, "--to", url, "--json"))["version"])


def test_what_is_pulled_is_what_is_held(url: str, pushed: int, tmp_path: Path) -> None:
    result = weightsync("pull", url, tmp_path / "a" / "pulled")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"pulled version {pushed} by shared_memory: 0.4 MB in ")
    held = load_file(tmp_path / "a" / "pulled" / "model.safetensors")
    assert held_by(url) == fingerprints(held)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["pulled"]
    assert weightsync("verify", url, tmp_path / "a" / "pulled").exit_code == 0
    assert weightsync("push", tmp_path / "a" / "pulled", "--to", url).exit_code == 0
    assert held_by(url) == fingerprints(held)


def test_json_is_the_report(url: str, pushed: int, tmp_path: Path) -> None:
    report = answer_of(weightsync("pull", url, tmp_path / "pulled", "--json"))
    assert (report["version"], report["verified"]) == (pushed, "arrived")
    assert report["directory"] == str(tmp_path / "pulled")
    assert report["receivers"][0]["source"] == url


def test_a_directory_that_is_not_empty_stays(url: str, tmp_path: Path) -> None:
    (tmp_path / "pulled").mkdir()
    assert weightsync("pull", url, tmp_path / "pulled").exit_code == 0
    before = (tmp_path / "pulled" / "model.safetensors").stat()
    result = weightsync("pull", url, tmp_path / "pulled")
    assert result.exit_code == 2
    assert "is not empty" in result.stderr
    assert (tmp_path / "pulled" / "model.safetensors").stat() == before


def test_a_server_that_cannot_send_leaves_nothing(tmp_path: Path) -> None:
    receiver = WeightReceiver(lambda _: None, apply="in_place")
    with serving(make_app(receiver)) as address:
        result = weightsync("pull", address, tmp_path / "pulled", token=live.TOKEN)
    assert result.exit_code == 2
    assert "keeps no whole copy" in result.stderr
    assert not list(tmp_path.iterdir())


def test_files_that_cannot_all_be_moved_leave_nothing(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, target: Path) -> Path:
        raise OSError(f"no room for {target}")

    monkeypatch.setattr(Path, "rename", refuse)
    assert weightsync("pull", url, tmp_path / "a" / "pulled").exit_code != 0
    assert not list(tmp_path.iterdir())


def test_empty_tensors_are_pulled(tmp_path: Path) -> None:
    module = nn.ParameterDict({"a": torch.ones(3), "b": torch.ones(0), "c": torch.ones(0, 4)})
    with serving(make_app(WeightReceiver(module, version=2))) as address:
        result = weightsync("pull", address, tmp_path / "pulled", token=live.TOKEN)
    assert result.exit_code == 0, result.output
    held = load_file(tmp_path / "pulled" / "model.safetensors")
    assert {name: list(tensor.shape) for name, tensor in held.items()} == {
        "a": [3],
        "b": [0],
        "c": [0, 4],
    }


def test_a_server_begins_with_the_weights_of_another(url: str, pushed: int) -> None:
    nobody = "http://127.0.0.1:9"
    with serving_tiny("--weights-from", nobody, "--weights-from", url) as other:
        assert version_of(other) == pushed
        assert held_by(other) == held_by(url)


def test_a_server_passes_over_a_source_that_answers_nothing(url: str, pushed: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        nobody = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with serving_tiny("--weights-from", nobody, "--weights-from", url) as other:
            assert version_of(other) == pushed


def test_a_server_that_fetches_says_so_and_is_ended_by_sigterm() -> None:
    """Without waiting for a source that answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        nobody = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with subprocess.Popen(
            [
                *(sys.executable, "-m", "weightsync", "serve", "tiny", "--port", "0"),
                *("--token", TOKEN, "--weights-from", nobody),
            ],
            stderr=subprocess.PIPE,
            text=True,
        ) as server:
            try:
                assert server.stderr is not None
                said = ""
                while "fetching the weights from" not in said:
                    line = server.stderr.readline()
                    assert line, said
                    said += line
                assert f"fetching the weights from {nobody}" in said
                server.terminate()
                _, rest = server.communicate(timeout=120)
            finally:
                server.kill()
    assert server.returncode == 0, rest
    assert "nothing was fetched" not in rest


def test_a_server_whose_source_is_gone_does_not_start() -> None:
    code, said = refused("--token", TOKEN, "--weights-from", "http://127.0.0.1:9")
    assert code == 3
    assert "http://127.0.0.1:9" in said.splitlines()[-1]


def rows_of(directory: Path, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    return load_file(directory / f"rank-{rank:05}-of-{ranks:05}.safetensors")


@pytest.mark.parametrize("ranks", [1, 3, 16])
def test_a_rank_pulls_the_rows_that_fsdp2_gives_it(ranks: int, tmp_path: Path) -> None:
    torch.manual_seed(ranks)
    shapes = {"matrix": (10, 37), "experts": (6, 8, 6), "few": (2, 3), "norm": (5,), "scalar": ()}
    module = nn.ParameterDict({name: torch.randn(shape) for name, shape in shapes.items()})
    module["short"] = nn.Parameter(torch.randn(11, 300).bfloat16())
    module["tied"] = module["matrix"]
    with serving(make_app(WeightReceiver(module, version=2))) as address:
        for rank in range(ranks):
            words = ("--rank", f"{rank}/{ranks}", "--json")
            result = weightsync("pull", address, tmp_path / str(rank), *words, token=live.TOKEN)
            report = answer_of(result)
            assert (report["version"], report["verified"]) == (2, "arrived")
            held = rows_of(tmp_path / str(rank), rank, ranks)
            assert held.keys() == module.keys()
            for name, tensor in module.items():
                with member(rank, (ranks,)) as mesh:
                    own = shard(tensor.detach(), mesh, Shard(0) if tensor.dim() else Replicate())
                assert torch.equal(held[name], own.to_local()), name
    with safe_open(tmp_path / "0" / f"rank-00000-of-{ranks:05}.safetensors", "pt") as file:
        rows = json.loads(file.metadata()["rows"])
    assert rows["matrix"] == rows["tied"] == [0, -(-10 // ranks), 10]
    assert "scalar" not in rows


@pytest.mark.parametrize("rank", ["4/4", "1", "-1/4", "1/0", "a/b", "", "\uff11/3"])
def test_what_is_no_rank_is_refused(url: str, tmp_path: Path, rank: str) -> None:
    result = weightsync("pull", url, tmp_path / "pulled", "--rank", rank)
    assert result.exit_code == 2
    assert "--rank is R/N" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rank", [None, 1])
def test_the_parts_of_a_servers_workers_make_whole_tensors(
    rank: int | None, tmp_path: Path
) -> None:
    module = nn.ParameterDict({"rows": torch.randn(5, 7), "norm": torch.randn(3)})
    receivers: dict[str, Receiver] = {}
    for worker in range(2):
        with member(worker, (2,)) as mesh:
            held = nn.Module()
            held.rows = nn.Parameter(shard(torch.zeros(5, 7), mesh, Shard(0)))
            held.norm = nn.Parameter(shard(torch.zeros(3), mesh, Replicate()))
        receivers[worker_path(worker)] = WeightReceiver(held)
    workers = Workers(receivers, tensor_parallel=2)
    app = FastAPI()
    app.include_router(workers_router(workers, token=live.TOKEN))
    with serving(app) as address:
        with ws.connect(module, to=address, token=live.TOKEN) as sender:
            sender.send_weights(4)
        words = () if rank is None else ("--rank", f"{rank}/3")
        result = weightsync("pull", address, tmp_path / "pulled", *words, token=live.TOKEN)
    assert result.exit_code == 0, result.stderr
    assert "version 4" in result.stdout
    if rank is None:
        pulled = load_file(tmp_path / "pulled" / "model.safetensors")
        assert pulled.keys() == module.keys()
        assert all(torch.equal(pulled[name], module[name]) for name in pulled)
    else:
        own = rows_of(tmp_path / "pulled", rank, 3)
        assert torch.equal(own["rows"], module["rows"][2:4])
        assert torch.equal(own["norm"], module["norm"][1:2])
    workers.close()
