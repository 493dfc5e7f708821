"""What is refused of a model before any process is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weightsync.errors import ConfigError
from weightsync.serve.model import load_model
from weightsync.serve.model_files import TINY, TINY_VISION, check_heads, check_model
from weightsync.serve.options import ServeOptions
from weightsync.serve.serving import serving
from weightsync.server.listening import listen


@pytest.mark.parametrize("name", [TINY, TINY_VISION])
def test_the_built_in_models_have_the_heads_that_are_checked(name: str) -> None:
    text = load_model(name).model.config.get_text_config()
    check_model(name, 2)
    with pytest.raises(ConfigError) as refused:
        check_model(name, 4)
    assert str(refused.value) == (
        f"{name} has {text.num_key_value_heads} key-value heads, which do not divide among "
        "--tensor-parallel 4 workers; give one of 1, 2"
    )
    assert text.num_attention_heads % 4 == 0


@pytest.mark.parametrize("inside", [None, "text_config"])
def test_a_directory_says_its_heads(tmp_path: Path, inside: str | None) -> None:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6}
    config = {inside: heads, "num_attention_heads": 5} if inside else heads
    (tmp_path / "config.json").write_text(json.dumps(config))
    for fits in (1, 2, 3, 6):
        check_model(str(tmp_path), fits)
    with pytest.raises(ConfigError, match="6 attention heads and 6 key-value heads, which do not"):
        check_model(str(tmp_path), 4)


def test_what_a_config_does_not_say_is_left_to_the_loader(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"n_head": 12, "num_key_value_heads": null}')
    check_model(str(tmp_path), 5)
    with pytest.raises(ConfigError, match="give one of 1, 2, 3, 4, 6, 12"):
        check_heads("x", 12, None, 5)


@pytest.mark.parametrize("text", ["", "[]", "\x00", None])
def test_no_config_is_one_line(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError) as refused:
        check_model(str(tmp_path), 1)
    assert "\n" not in str(refused.value)
    assert "give " in str(refused.value)


@pytest.mark.usefixtures("shm_clean")
def test_no_process_is_started_for_what_cannot_be_served() -> None:
    options = ServeOptions(model=TINY, tensor_parallel=4)
    with (
        listen("127.0.0.1", 0) as listener,
        pytest.raises(ConfigError) as refused,
        serving(options, listener),
    ):
        pytest.fail("it serves")
    assert str(refused.value).startswith("tiny has 2 key-value heads")  # and no worker in front
