"""`weightsync verify`: equal or not, and which tensors are to blame."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import weightsync as ws
from tests.cli.running import HEAD, Tensors, answer_of, tiny_tensors, weightsync, write_checkpoint
from tests.server.live import make_app, serving
from weightsync.cli.checkpoint import open_checkpoint
from weightsync.cli.verify import compare
from weightsync.tensors import as_bytes
from weightsync.weights.copying.fingerprint import mix64, to_hex
from weightsync.wire.messages import CheckReply

NORM = "model.norm.weight"


def pushed(url: str, path: Path) -> int:
    """Push a checkpoint, and return the version that the server then holds."""
    version = answer_of(weightsync("push", path, "--to", url, "--json"))["version"]
    assert isinstance(version, int)
    return version


def value_of(tensor: torch.Tensor) -> str:
    return to_hex(mix64(as_bytes(tensor)))


def changed(tensors: Tensors, name: str) -> Tensors:
    """Return copies, with one bit of one tensor flipped."""
    copies = {key: tensor.clone() for key, tensor in tensors.items()}
    copies[name].view(torch.uint8).view(-1)[-1] ^= 1
    return copies


def test_what_was_pushed_is_held(url: str, checkpoint: Path) -> None:
    version = pushed(url, checkpoint)
    result = weightsync("verify", url, checkpoint)
    assert result.exit_code == 0, result.output
    count = len(tiny_tensors(5)) + 1
    assert result.stdout == f"{url} holds {checkpoint}: {count} tensors, version {version}\n"
    answer = answer_of(weightsync("verify", url, checkpoint, "--json"))
    assert answer == {
        "equal": True,
        "url": url,
        "checkpoint": str(checkpoint),
        "version": version,
        "dtype": None,
        "checked": count,
        "different": [],
        "missing": [],
        "surplus": [],
    }


@pytest.mark.parametrize(
    ("name", "blamed"),
    [
        (NORM, [NORM]),
        ("model.embed_tokens.weight", ["model.embed_tokens.weight", HEAD]),
    ],
)
def test_one_bit_is_found_and_its_tensor_named(
    url: str, checkpoint: Path, tmp_path: Path, name: str, blamed: list[str]
) -> None:
    pushed(url, checkpoint)
    other = write_checkpoint(tmp_path, changed(tiny_tensors(5), name))
    result = weightsync("verify", url, other)
    assert result.exit_code == 1
    assert "does NOT hold" in result.stdout
    assert [line.strip() for line in result.stdout.splitlines()[2:]] == blamed
    answer = answer_of(weightsync("verify", url, other, "--json"), 1)
    assert (answer["different"], answer["equal"], answer["missing"]) == (blamed, False, [])


def test_tensors_of_one_side_alone_are_named(url: str, checkpoint: Path, tmp_path: Path) -> None:
    pushed(url, checkpoint)
    tensors = tiny_tensors(5)
    del tensors[NORM]
    other = write_checkpoint(tmp_path, tensors | {"model.extra": torch.zeros(2)})
    answer = answer_of(weightsync("verify", url, other, "--json"), 1)
    assert (answer["missing"], answer["surplus"], answer["different"]) == (
        [NORM],
        ["model.extra"],
        [],
    )
    said = weightsync("verify", url, other).stdout
    assert f"1 are held by the server and not in the files:\n  {NORM}\n" in said
    assert "1 are in the files and not held by the server:\n  model.extra\n" in said


def test_a_cast_is_found_out_or_said(url: str, tmp_path: Path) -> None:
    half = tiny_tensors(9, torch.bfloat16)
    path = write_checkpoint(tmp_path / "half", half)
    assert weightsync("push", path, "--to", url, "--dtype", "float32").exit_code == 0
    answer = answer_of(weightsync("verify", url, path, "--json"))
    assert (answer["equal"], answer["dtype"]) == (True, "float32")
    assert "holds" in weightsync("verify", url, path, "--dtype", "float32").stdout
    wrong = answer_of(weightsync("verify", url, path, "--dtype", "float16", "--json"), 1)
    assert len(wrong["different"]) == len(half) + 1
    other = write_checkpoint(tmp_path / "other", changed(half, NORM))
    assert answer_of(weightsync("verify", url, other, "--json"), 1)["different"] == [NORM]


def test_a_server_that_keeps_some_tensors_in_another_dtype(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(4), "n": torch.tensor([3])}
    source = open_checkpoint(write_checkpoint(tmp_path, tensors | {"b": torch.randn(4)}), None)
    held = {
        name: value_of(tensor.half() if name == "b" else tensor)
        for name, tensor in source.tensors()
    }
    found = compare(source, CheckReply(version=1, checksums=held), url="u", dtype=None)
    assert (found.equal, found.dtype, found.checked) == (True, "float16", 3)
    only = compare(source, CheckReply(version=1, checksums=held), url="u", dtype="float16")
    assert only.different == ["a"]


def test_a_long_list_is_cut_for_people_alone(url: str, checkpoint: Path, tmp_path: Path) -> None:
    pushed(url, checkpoint)
    other = write_checkpoint(tmp_path, {f"t{i:03}": torch.zeros(1) for i in range(30)})
    result = weightsync("verify", url, other)
    assert "  and 10 more (--json lists all)" in result.stdout
    assert "t019" in result.stdout
    assert "t020" not in result.stdout
    assert len(answer_of(weightsync("verify", url, other, "--json"), 1)["surplus"]) == 30


def test_it_ends_with_the_code_of_what_went_wrong(url: str, checkpoint: Path, down: str) -> None:
    cases = (
        (weightsync("verify", down, checkpoint, "--json"), 3, "ConnectError"),
        (weightsync("verify", url, checkpoint, "--json", token="no"), 4, "AuthError"),
        (weightsync("verify", url, "nowhere", "--json"), 2, "ConfigError"),
        (weightsync("verify", checkpoint, url, "--json"), 2, "ConfigError"),
    )
    for result, code, name in cases:
        assert answer_of(result, code)["error"]["type"] == name
        assert result.stderr.count("\n") == 1
    assert weightsync("verify", url).exit_code == 2


def test_a_server_that_cannot_read_its_weights_back_says_so(checkpoint: Path) -> None:
    receiver = ws.WeightReceiver(lambda _: None)
    with serving(make_app(receiver, None)) as url:
        result = weightsync("verify", url, checkpoint, "--json")
    receiver.close()
    error = answer_of(result, 1)["error"]
    assert error["type"] == "RemoteError"
    assert "cannot read its weights back" in error["message"]
