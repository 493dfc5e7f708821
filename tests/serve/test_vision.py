"""Images in prompts: placeholders and pixels, the tiny model that reads them, and bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from weightsync.errors import ConfigError
from weightsync.serve.model import LoadedModel, load_model
from weightsync.serve.model_files import load_tokenizer
from weightsync.serve.vision import ImagePreparer

RED = Image.new("RGB", (40, 30), "red")
BLUE = Image.new("RGB", (16, 16), "blue")


@pytest.fixture(scope="module")
def seeing() -> LoadedModel:
    return load_model("tiny-vision")


def greedy(loaded: LoadedModel, ids: list[int], inputs: dict[str, torch.Tensor]) -> list[int]:
    prompt = torch.tensor([ids])
    found = loaded.model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False, **inputs
    )
    tokens: list[int] = found[0, len(ids) :].tolist()
    return tokens


def test_an_image_is_a_run_of_image_tokens_and_its_pixels(seeing: LoadedModel) -> None:
    preparer = ImagePreparer(seeing.processor)
    ids, inputs = preparer.prepare("a<image>b<image>", [RED, BLUE])
    around = [seeing.tokenizer(letter)["input_ids"][0] for letter in "ab"]
    images = [preparer.image_token_id] * 4
    assert ids == [around[0], *images, around[1], *images]
    assert {name: tuple(tensor.shape) for name, tensor in inputs.items()} == {
        "pixel_values": (2, 3, 16, 16)
    }
    assert preparer.image_token_id == seeing.model.config.image_token_id


def test_text_alone_has_no_inputs(seeing: LoadedModel) -> None:
    ids, inputs = ImagePreparer(seeing.processor).prepare("abc", [])
    assert ids == seeing.tokenizer("abc")["input_ids"]
    assert inputs == {}


def test_what_is_said_depends_on_the_image(seeing: LoadedModel) -> None:
    preparer = ImagePreparer(seeing.processor)
    red, blue = (greedy(seeing, *preparer.prepare("<image>?", [i])) for i in (RED, BLUE))
    assert red != blue
    assert red == greedy(seeing, *preparer.prepare("<image>?", [RED]))


def test_a_chat_puts_its_images_where_they_were(seeing: LoadedModel) -> None:
    parts = [{"type": "text", "text": "see "}, {"type": "image"}]
    messages = [{"role": "system", "content": "hi"}, {"role": "user", "content": parts}]
    text = seeing.processor.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert text == "system: hi\nuser: see <image>\nassistant:"


@pytest.mark.parametrize(
    ("text", "images"), [("<image>", []), ("a", [RED]), ("<image>" * 2, [RED])]
)
def test_places_and_images_must_agree(seeing: LoadedModel, text: str, images: list[Any]) -> None:
    with pytest.raises(ConfigError, match=r"placeholders of images \(<image>\)"):
        ImagePreparer(seeing.processor).prepare(text, images)


def test_what_is_no_image_is_a_config_error(seeing: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="processor cannot take this prompt"):
        ImagePreparer(seeing.processor).prepare("<image>", [b"no image"])


def test_a_directory_gives_back_the_model_and_its_processor(
    seeing: LoadedModel, tmp_path: Path
) -> None:
    seeing.model.save_pretrained(tmp_path)
    seeing.processor.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    prompt = ImagePreparer(seeing.processor).prepare("<image>?", [RED])
    again = ImagePreparer(loaded.processor).prepare("<image>?", [RED])
    assert prompt[0] == again[0]
    assert greedy(loaded, *again) == greedy(seeing, *prompt)
    assert load_tokenizer(str(tmp_path))[0].vocab_size == seeing.tokenizer.vocab_size


@pytest.mark.parametrize("name", ["tiny", "tiny-vision"])
def test_a_reader_is_loaded_without_its_model(name: str) -> None:
    tokenizer, processor = load_tokenizer(name)
    assert tokenizer("abc")["input_ids"] == load_model(name).tokenizer("abc")["input_ids"]
    assert (processor is not None) == (name == "tiny-vision")
