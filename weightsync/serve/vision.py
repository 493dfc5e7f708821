"""Prompts with images: what a processor makes of text and pictures, and a tiny model to read them.

A picture stands in the prompt as a run of image tokens; its pixels go to the model beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import util as import_util
from typing import Any

from weightsync.errors import BackendUnavailableError, ConfigError
from weightsync.queues.message_codec import Tensor
from weightsync.serve.hugging_face import hf

IMAGE_TOKEN = "<image>"  # noqa: S105 # a token of text
TINY_IMAGE_SIZE = 16
TINY_PATCH_SIZE = 8

_READ_BY_THE_RUNNER = ("input_ids", "attention_mask")


class ImagePreparer:
    """Makes token ids and model inputs of a text with images; `processor` is the model's own.

    Used by API servers, which hold no model. Safe from several threads: nothing is kept.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self.image_token = str(processor.image_token)
        self.image_token_id = int(processor.image_token_id)

    def prepare(
        self, text: str, images: Sequence[Any], *, add_special_tokens: bool = True
    ) -> tuple[list[int], dict[str, Tensor]]:
        """Return the prompt's token ids, placeholders spread out, and the tensors of its images.

        `images` are PIL images, one for each `image_token` in `text`, in that order. A chat
        template has written special tokens already: pass `add_special_tokens=False` for its text.
        The tensors are NewRows.inputs, empty without images. Raises ConfigError for images and
        places that differ in number, and for an image that the processor cannot take.
        """
        wanted = text.count(self.image_token)
        if wanted != len(images):
            raise ConfigError(
                f"the text has {wanted} places for an image ({self.image_token}), but "
                f"{len(images)} images come with it; send one for each place"
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
    """Make the processor of the tiny vision model; `tokenizer` knows IMAGE_TOKEN."""
    if import_util.find_spec("PIL") is None:
        raise BackendUnavailableError("reading images needs Pillow; pip install pillow")
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
    """Return the configuration of a LLaVA whose images are four tokens each."""
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
