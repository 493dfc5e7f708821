"""Images of a request: out of `data:` URLs, never fetched, checked before they are unpacked."""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from weightsync.errors import BackendUnavailableError
from weightsync.serve.openai_messages import RequestError

try:
    from PIL import Image, ImageOps
except ImportError as exc:
    raise BackendUnavailableError(
        f"reading images needs Pillow ({exc}); pip install pillow"
    ) from exc

MAX_IMAGES = 16
MAX_IMAGE_NBYTES = 16 << 20
MAX_IMAGE_PIXELS = 1 << 24
MAX_PIXELS = 1 << 25
"""Of all images of a request together: unpacked, a pixel takes three bytes or more."""

_MAX_HEAD = 256
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_DATA_URL = re.compile(r"data:[\w.+-]+/[\w.+-]+(?:;[\w.+-]+=[\w.+-]+)*;base64,")


def read_images(urls: Sequence[str]) -> list[Image.Image]:
    """Return the PIL image, in RGB and upright, of each `data:` URL; of a moving one, one frame.

    All their sizes are looked at before one is unpacked. Slow, so called in a thread. Raises
    RequestError for too many, for any other URL, and for what is no image, is damaged or too large.
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
        # Decoders raise many kinds of error for damaged bytes, and for one bomb a warning's class.
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
        raise _refusal(f"image {place} is no base64: {exc}; encode it again") from exc


def _refusal(message: str) -> RequestError:
    return RequestError(message, param="messages", code="invalid_image")
