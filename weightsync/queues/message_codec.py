"""Former module of MessageCodec, which is in weightsync.queues.codec."""

import warnings

from weightsync.queues.codec import MessageCodec

__all__ = ["MessageCodec"]

warnings.warn(
    "weightsync.queues.message_codec is called weightsync.queues.codec now",
    DeprecationWarning,
    stacklevel=2,
)
