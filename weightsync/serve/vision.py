"""Images of requests: decoded, checked, and turned into inputs of a model."""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from weightsync.errors import ConfigError, MissingExtraError, install_hint
from weightsync.queues.codec import Tensor
from weightsync.serve.hugging_face import hf
from weightsync.serve.requests import RequestError

try:
    from PIL import Image, ImageOps
except ImportError as exc:
    raise MissingExtraError(f"reading images needs Pillow ({exc}); {install_hint('hf')}") from exc

IMAGE_TOKEN = "<image>"  # noqa: S105 # a token of text
TINY_IMAGE_SIZE = 16
TINY_PATCH_SIZE = 8

_READ_BY_THE_RUNNER = ("input_ids", "attention_mask")


class ImagePreparer:
    """Turns a text with images into token ids and model inputs, with the model's `processor`.

    Used by API servers, which have no model. Thread-safe: it keeps no state.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self.image_token = str(processor.image_token)
        self.image_token_id = int(processor.image_token_id)

    def prepare(
        self, text: str, images: Sequence[Any], *, add_special_tokens: bool = True
    ) -> tuple[list[int], dict[str, Tensor]]:
        """Return the prompt's token ids, with expanded placeholders, and the tensors of its images.

        `images` are PIL images, one for each `image_token` in `text`, in that order. Pass
        `add_special_tokens=False` for the text of a chat template, which has special tokens. The
        tensors are for NewRows.inputs; there are none without images. Raises ConfigError if the
        numbers of images and placeholders differ, or if the processor cannot take an image.
        """
        wanted = text.count(self.image_token)
        if wanted != len(images):
            raise ConfigError(
                f"the text has {wanted} placeholders of images ({self.image_token}), but "
                f"{len(images)} images come with it; send one for each placeholder"
            )
        try:
            made = self._processor(
                text=[text],
                images=list(images) or None,
                add_special_tokens=add_special_tokens,
                return_tensors="pt",
            )
        except (ValueError, TypeError, IndexError, OSError) as exc:
            raise ConfigError(
                f"the model's processor cannot take this prompt: {exc}; send RGB images of a "
                "usual size"
            ) from exc
        inputs = {
            name: tensor
            for name, tensor in made.items()
            if name not in _READ_BY_THE_RUNNER and isinstance(tensor, Tensor)
        }
        return made["input_ids"][0].tolist(), inputs


def make_tiny_processor(tokenizer: Any) -> Any:
    """Make the processor of the tiny vision model. `tokenizer` must have IMAGE_TOKEN."""
    from transformers.models.clip.image_processing_pil_clip import (  # noqa: PLC0415 # needs Pillow
        CLIPImageProcessorPil,
    )

    side = {"height": TINY_IMAGE_SIZE, "width": TINY_IMAGE_SIZE}
    return hf.LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size=side, crop_size=side),
        tokenizer=tokenizer,
        patch_size=TINY_PATCH_SIZE,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=IMAGE_TOKEN,
        chat_template=tokenizer.chat_template,
    )


def tiny_vision_config(text_config: Any, image_token_id: int) -> Any:
    """Return the configuration of a LLaVA with four tokens per image."""
    vision = hf.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=TINY_IMAGE_SIZE,
        patch_size=TINY_PATCH_SIZE,
        projection_dim=32,
    )
    return hf.LlavaConfig(
        vision_config=vision,
        text_config=text_config,
        image_token_id=image_token_id,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=(TINY_IMAGE_SIZE // TINY_PATCH_SIZE) ** 2,
        initializer_range=text_config.initializer_range,
    )


MAX_IMAGES = 16
MAX_IMAGE_NBYTES = 16 << 20
MAX_IMAGE_PIXELS = 1 << 24
MAX_PIXELS = 1 << 25
"""The most pixels of all images of a request; a decoded pixel takes 3 bytes or more."""

_MAX_HEAD = 256
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_DATA_URL = re.compile(r"data:[\w.+-]+/[\w.+-]+(?:;[\w.+-]+=[\w.+-]+)*;base64,")


def read_images(urls: Sequence[str]) -> list[Image.Image]:
    """Return the PIL image of each `data:` URL, in RGB and upright; one frame of an animation.

    All sizes are checked before the first image is decoded. Slow: call it in a thread. Raises
    RequestError for too many images, for other URLs, and for damaged or too large images.
    """
    if len(urls) > MAX_IMAGES:
        raise _refusal(f"{len(urls)} images are too many; send at most {MAX_IMAGES}")
    opened = [_opened(place, url) for place, url in enumerate(urls)]
    total = sum(image.width * image.height for image in opened)
    if total > MAX_PIXELS:
        raise _refusal(
            f"the images have {total} pixels together; send at most {MAX_PIXELS} in a request"
        )
    return [_unpacked(place, image) for place, image in enumerate(opened)]


def _opened(place: int, url: str) -> Image.Image:
    data = _bytes_of(place, url)
    with _readable(place):
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
    width, height = image.size
    if width * height > MAX_IMAGE_PIXELS:
        raise _refusal(
            f"image {place} is {width} x {height}; send at most {MAX_IMAGE_PIXELS} pixels"
        )
    return image


def _unpacked(place: int, image: Image.Image) -> Image.Image:
    with _readable(place):
        ImageOps.exif_transpose(image, in_place=True)
        return image.convert("RGB")


@contextmanager
def _readable(place: int) -> Iterator[None]:
    try:
        yield
    except Exception as exc:
        # Decoders raise many classes of errors for damaged bytes, even the class of a warning.
        raise _refusal(
            f"image {place} cannot be read: {exc}; send one of {', '.join(_FORMATS)}, whole"
        ) from exc


def _bytes_of(place: int, url: str) -> bytes:
    head = _DATA_URL.match(url[:_MAX_HEAD])
    if head is None:
        raise _refusal(
            f"image {place} is not a data: URL in base64, and nothing is fetched here; send "
            "data:image/png;base64,…"
        )
    if (len(url) - head.end()) * 3 // 4 > MAX_IMAGE_NBYTES:
        raise _refusal(f"image {place} is longer than {MAX_IMAGE_NBYTES} bytes; send a smaller one")
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as exc:
        raise _refusal(f"image {place} is not base64: {exc}; encode it again") from exc


def _refusal(message: str) -> RequestError:
    return RequestError(message, param="messages", code="invalid_image")
