"""Images of chat messages: out of data: URLs into the job, and what is refused."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from PIL import Image

from tests.serve.scripted_engine import MODEL, ScriptedEngine, app_of
from tests.server.live import serving
from weightsync.errors import ConfigError
from weightsync.serve.model_files import TINY_VISION, load_tokenizer
from weightsync.serve.requests import RequestError
from weightsync.serve.vision import MAX_IMAGES, read_images

WAIT_S = 60.0


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def url_of(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


RED = Image.new("RGB", (30, 20), "red")
BLUE = Image.new("RGBA", (16, 16), "blue")


def bomb(width: int, height: int) -> bytes:
    """A PNG that says it is large, and is not."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(reader=load_tokenizer(TINY_VISION))


@pytest.fixture(scope="module")
def client(engine: ScriptedEngine) -> Iterator[openai.OpenAI]:
    with (
        serving(app_of(engine)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=WAIT_S) as made,
    ):
        yield made


def look(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def ask(client: openai.OpenAI, *parts: dict[str, Any]) -> Any:
    messages: Any = [{"role": "user", "content": list(parts)}]
    return client.chat.completions.create(model=MODEL, messages=messages, max_tokens=20)


def test_images_stand_where_they_were_and_their_pixels_come_along(
    engine: ScriptedEngine, client: openai.OpenAI
) -> None:
    tokenizer, processor = load_tokenizer(TINY_VISION)
    red, blue = url_of(encoded(RED)), url_of(encoded(BLUE, "PNG"), "image/png")
    answer = ask(client, said("a"), look(red), said("b"), look(blue))
    assert answer.choices[0].message.content == "hello"
    job = engine.jobs[-1]
    assert tokenizer.decode(job.prompt) == (
        "user: a" + "<image>" * 4 + "b" + "<image>" * 4 + "\nassistant:"
    )
    assert answer.usage.prompt_tokens == len(job.prompt)
    assert job.inputs is not None
    wanted = processor(
        text=["<image><image>"], images=[RED, BLUE.convert("RGB")], return_tensors="pt"
    )["pixel_values"]
    assert set(job.inputs) == {"pixel_values"}
    assert job.inputs["pixel_values"].equal(wanted)


def test_text_alone_has_no_inputs(engine: ScriptedEngine, client: openai.OpenAI) -> None:
    ask(client, said("a"))
    assert engine.jobs[-1].inputs is None


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([look("https://example.com/a.png")], "nothing is fetched here"),
        ([look("file:///etc/passwd")], "nothing is fetched here"),
        ([look("data:image/png,abc")], "nothing is fetched here"),
        ([look("data:image/png;base64,@@@@")], "is not base64"),
        ([look(url_of(b"no image"))], "cannot be read"),
        ([look(url_of(encoded(RED)[:60]))], "cannot be read"),
        ([look(url_of(bomb(5000, 5000)))], "image 0 is 5000 x 5000"),
        ([look(url_of(bomb(60_000, 60_000)))], "image 0"),
        ([look(url_of(encoded(BLUE)))] * (MAX_IMAGES + 1), "17 images are too many"),
        ([look(url_of(encoded(RED))), said("<image>")], "2 placeholders of images"),
    ],
)
def test_bad_images_are_refused(client: openai.OpenAI, parts: Any, text: str) -> None:
    with pytest.raises(openai.BadRequestError, match=text):
        ask(client, *parts)


def test_a_place_without_an_image_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(
        openai.BadRequestError, match="has a placeholder of an image and none comes"
    ):
        client.completions.create(model=MODEL, prompt="<image>")


def test_a_model_of_text_takes_none() -> None:
    with (
        serving(app_of(ScriptedEngine())) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=WAIT_S) as client,
        pytest.raises(openai.BadRequestError, match="takes no images"),
    ):
        ask(client, look(url_of(encoded(RED))))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_every_kind_of_image_becomes_rgb(kind: str) -> None:
    image = RED.convert("P") if kind == "GIF" else RED
    (found,) = read_images([url_of(encoded(image, kind), "image/x")])
    assert (found.mode, found.size) == ("RGB", RED.size)
    pixel: Any = found.getpixel((5, 5))
    red, green, blue = pixel
    assert red > 240
    assert max(green, blue) < 15


def test_the_pixels_of_all_images_count_together() -> None:
    with pytest.raises(RequestError, match="pixels together"):
        read_images([url_of(bomb(4096, 4096))] * 3)


def test_a_photograph_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    RED.save(buffer, "JPEG", exif=exif)
    (found,) = read_images([url_of(buffer.getvalue())])
    assert found.size == (20, 30)


def test_other_kinds_are_refused() -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        read_images([url_of(encoded(RED, "TIFF"), "image/tiff")])
    assert issubclass(RequestError, ConfigError)
