"""`weightsync certify` with `weightsync serve` as the warm and the cold server."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.running import ROOT, TOKEN, answer_of, serving_tiny, weightsync
from tests.serve.servers import forked_server
from weightsync.integrations.certificate import Server, differences
from weightsync.serve.model import make_tiny_model

COLD = f"{sys.executable} -m weightsync serve --model {{checkpoint}} --port {{port}}"


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """The variables of all servers, which `certify` passes on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEIGHTSYNC_TOKEN", TOKEN)
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONUNBUFFERED", "1")
        yield


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three models of the same shapes, whole: with config and tokenizer."""
    made = {}
    for seed, name in enumerate("ABC", 1):
        made[name] = tmp_path_factory.mktemp(name)
        loaded = make_tiny_model(seed=seed)
        loaded.model.save_pretrained(made[name])
        loaded.tokenizer.save_pretrained(made[name])
    return made


def test_a_server_that_is_down_or_refuses_the_token(checkpoints: dict[str, Path]) -> None:
    given = ("--to", checkpoints["B"], "--from", checkpoints["A"], "--cold", COLD)
    for url in ("http://127.0.0.1:1", "vllm+http://127.0.0.1:1"):
        result = weightsync("certify", url, *given)
        assert result.exit_code == 3, result.output
        assert len(result.stderr.splitlines()) == 1
    with serving(checkpoints["A"]) as url:
        result = weightsync("certify", url, *given, "--token", "wrong")
        assert result.exit_code == 4, result.output
        assert len(result.stderr.splitlines()) == 1


@contextmanager
def serving(checkpoint: Path) -> Iterator[str]:
    with forked_server(model=str(checkpoint), want_token=False, WEIGHTSYNC_TOKEN=TOKEN) as (url, _):
        yield url


def test_updates_are_equal_to_cold_servers(checkpoints: dict[str, Path]) -> None:
    with serving(checkpoints["A"]) as url:
        given = ("certify", url, "--to", checkpoints["B"], "--from", checkpoints["A"])
        answer = answer_of(weightsync(*given, "--cold", COLD, "--json"))
        assert answer["equal"] is True
        assert [step["checkpoint"] for step in answer["steps"]] == ["B", "A", "B", "A"]
        assert [step["version"] for step in answer["steps"]] == [1, 2, 3, 4]
        assert [step["differences"] for step in answer["steps"]] == [[]] * 4
        again = answer_of(weightsync(*given, "--cold", COLD, "--json"), code=2)
        assert "holds version 4, not what it loaded" in again["error"]["message"]


def test_what_differs_is_named_and_the_exit_code_says_so(checkpoints: dict[str, Path]) -> None:
    other = f"env NOT_LOADED={{checkpoint}} {COLD.replace('{checkpoint}', str(checkpoints['C']))}"
    with serving(checkpoints["A"]) as url:
        given = ("certify", url, "--to", checkpoints["B"], "--from", checkpoints["A"])
        result = weightsync(*given, "--cold", other)
    assert result.exit_code == 1, result.output
    assert "NOT certified" in result.output
    assert re.search(r"update 1: model\.\S+: [0-9a-f]{16} in the warm", result.output)
    assert "update 2" not in result.output
    assert "prompt 0, token" in result.output or "update 3" in result.output


@pytest.fixture(scope="module")
def fresh() -> Iterator[str]:
    """A server of this file, which has had no update."""
    with serving_tiny() as url:
        yield url


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "is no vLLM: give --cold"),
        (("--cold", "no-such-program {checkpoint} {port}"), "the cold server cannot be started"),
        (("--cold", "a-server {checkpoint}"), "--cold has no {port}"),
        (("--cold", COLD, "--from", "/nowhere"), "which is no path here; give --from"),
        (
            ("--cold", f"{sys.executable} -c raise(SystemExit(7)) {{checkpoint}} {{port}}"),
            "status 7",
        ),
    ],
)
def test_what_does_not_fit_is_one_line_and_moves_nothing(
    fresh: str, checkpoints: dict[str, Path], more: tuple[str, ...], message: str
) -> None:
    before = Server(fresh, TOKEN).look()
    given = ("certify", fresh, "--to", checkpoints["B"])
    named = () if "--from" in more else ("--from", str(checkpoints["A"]))
    result = weightsync(*given, *named, *more)
    assert result.exit_code in (1, 2)
    (line,) = result.stderr.splitlines()
    assert message in line
    after = Server(fresh, TOKEN).look()
    assert (after.version, after.checksums) == (before.version, before.checksums)
    assert differences(after, before) == []
