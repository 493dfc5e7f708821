"""Former module of TensorEncoder and TensorDecoder, which are in weightsync.queues.codec."""

import warnings

from weightsync.queues.codec import TensorDecoder, TensorEncoder, chosen_tensor_ipc

__all__ = ["TensorDecoder", "TensorEncoder", "chosen_tensor_ipc"]

warnings.warn(
    "weightsync.queues.tensor_codec is called weightsync.queues.codec now",
    DeprecationWarning,
    stacklevel=2,
)
