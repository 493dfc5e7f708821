"""Codec for request objects with tensors: multipart messages of msgpack and raw frames."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Generic,
    Literal,
    Protocol,
    TypeVar,
    cast,
    get_args,
    overload,
)

import msgspec
from msgspec import Meta, Struct
from msgspec.msgpack import Ext

from weightsync.errors import (
    BackendUnavailableError,
    ConfigError,
    ProtocolError,
    TransferError,
    TransportError,
    WeightSyncError,
    shorten,
)
from weightsync.queues.message_codec import Tensor, from_plain, to_plain
from weightsync.specs import TensorSpec
from weightsync.wire.offers import Shape

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Frame = bytes | bytearray | memoryview

IN_LINE, IN_FRAME, CARRIED, VALUE = 1, 2, 3, 4
"""Extension codes: a tensor with its bytes, its frame number or a carrier's handle; another value
(message_codec)."""
MAX_TENSORS = 1 << 16

_Dtype = Annotated[str, Meta(max_length=32)]


class InLine(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor and its bytes."""

    dtype: _Dtype
    shape: Shape
    data: bytearray


class InFrame(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor whose bytes are an auxiliary frame of the message; frame 0 is the message."""

    dtype: _Dtype
    shape: Shape
    frame: Annotated[int, Meta(ge=1, le=MAX_TENSORS)]


def in_line(spec: TensorSpec, data: memoryview) -> Ext:
    """Return the extension for a tensor with these bytes."""
    tensor = InLine(spec.dtype, list(spec.shape), bytearray(data))
    return Ext(IN_LINE, msgspec.msgpack.encode(tensor))


def in_frame(spec: TensorSpec, number: int) -> Ext:
    """Return the extension for a tensor in auxiliary frame `number`."""
    return Ext(IN_FRAME, msgspec.msgpack.encode(InFrame(spec.dtype, list(spec.shape), number)))


def line_of(data: memoryview) -> InLine:
    """Decode a tensor that carries its bytes. Raises ProtocolError."""
    return _decode(data, InLine)


def frame_of(data: memoryview) -> InFrame:
    """Decode the frame number and the description of a tensor. Raises ProtocolError."""
    return _decode(data, InFrame)


def _decode(data: memoryview, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"a tensor of this message cannot be read: {exc}") from exc


logger = logging.getLogger(__name__)

TensorIpc = Literal["direct_rpc", "torch_shm"]

SETTING = "WEIGHTSYNC_TENSOR_IPC"
"""Environment variable with the default of `tensor_ipc`."""
INLINE_NBYTES = 4096
MAX_MESSAGE_NBYTES = 1 << 28
"""Maximum bytes of a message with its in-line tensors, without its auxiliary frames."""


class TensorPutter(Protocol):
    """Sends tensors outside the message, for the encoder: `TensorIpcSender`, for example."""

    def put(self, tensor: torch.Tensor, key: str | None) -> bytes:
        """Send a tensor under `key` and return its handle, which is opaque to the codec.

        Raises BackendUnavailableError or TransportError for a permanent failure, TransferError for
        a failure with this tensor only.
        """

    def take_back(self, handle: bytes) -> None:
        """Undo a `put` when its message will not be sent."""


class TensorTaker(Protocol):
    """Receives tensors outside the message, for the decoder: `TensorIpcReceiver`, for example."""

    def take(self, handle: bytes) -> torch.Tensor:
        """Return the tensor of a handle that the other side's `put` returned."""

    def drop(self, handle: bytes) -> None:
        """Drop the tensor of a handle when its message could not be decoded."""


def chosen_tensor_ipc(setting: str | None = None) -> TensorIpc:
    """Return `setting`, or the value of WEIGHTSYNC_TENSOR_IPC, or "torch_shm".

    Raises ConfigError for an unknown value.
    """
    value = setting or os.environ.get(SETTING) or "torch_shm"
    if value not in get_args(TensorIpc):
        where = "tensor_ipc" if setting else SETTING
        raise ConfigError(f'{where} is {value!r}; wanted "direct_rpc" or "torch_shm"')
    return cast(TensorIpc, value)


class TensorEncoder:
    """Encodes messages. Thread-safe.

    With `torch_shm`, the constructor calls `open_carrier` once. If that or a later `put` fails
    permanently, tensors are sent in the message from then on. A warning is logged once, and
    `tensor_ipc` and `fallback_reason` show the change. Values that the message codec does not
    support go to `enc_hook`, which returns plain data.
    """

    def __init__(
        self,
        tensor_ipc: str | None = None,
        open_carrier: Callable[[], TensorPutter] | None = None,
        *,
        inline_nbytes: int = INLINE_NBYTES,
        enc_hook: Callable[[Any], Any] | None = None,
    ) -> None:
        self._tensor_ipc = chosen_tensor_ipc(tensor_ipc)
        self._inline_nbytes = inline_nbytes
        self._enc_hook = enc_hook
        self._carrier: TensorPutter | None = None
        self._warned = False
        self.fallback_reason: str | None = None
        self.crowded_out = 0
        """Number of tensors sent in the message because shared memory was full at that moment."""
        if self._tensor_ipc == "torch_shm":
            self._open(open_carrier)

    @property
    def tensor_ipc(self) -> TensorIpc:
        """How large tensors are sent now; "direct_rpc" after a fallback."""
        return self._tensor_ipc

    def encode(self, message: object, key: str | None = None) -> list[Frame]:
        """Return the frames of a message: the msgpack body, then auxiliary frames in order.

        `key` goes to the carrier with each tensor, so that the tensors can be cleaned up by key.
        Frames may view the message's tensors: do not change these until the frames are sent. Raises
        ConfigError for an object that cannot be encoded; no tensor stays in the carrier then.
        """
        call = _Encoding(self, key)
        try:
            main = msgspec.msgpack.encode(message, enc_hook=call.replace)
        except BaseException as exc:
            call.take_back()
            if isinstance(exc, TypeError | ValueError | OverflowError | RecursionError):
                raise ConfigError(f"this message cannot be encoded: {exc}") from exc
            raise
        return [main, *call.frames]

    def replace_foreign(self, value: object) -> object:
        """Return `enc_hook`'s plain data for a value of another type. Raises TypeError."""
        if self._enc_hook is None:
            raise TypeError(
                f"{type(value).__name__} is neither plain data nor a tensor; give enc_hook"
            )
        return self._enc_hook(value)

    def fits_in_line(self, nbytes: int) -> bool:
        """Return whether a tensor is small enough for the message body."""
        return nbytes <= self._inline_nbytes

    def carry(self, tensor: torch.Tensor, key: str | None) -> tuple[TensorPutter, bytes] | None:
        """Return the carrier and its handle; None if the carrier could not take the tensor."""
        carrier = self._carrier
        if carrier is None:
            return None
        try:
            return carrier, carrier.put(tensor, key)
        except (BackendUnavailableError, TransportError) as exc:
            self._fall_back(str(exc))
        except TransferError as exc:
            self.crowded_out += 1
            self._warn_once(f"a tensor is sent in its message, not in shared memory: {exc}")
        return None

    def _open(self, open_carrier: Callable[[], TensorPutter] | None) -> None:
        if open_carrier is None:
            self._fall_back("no tensor queue was given")
            return
        try:
            self._carrier = open_carrier()
        except (BackendUnavailableError, TransportError, TransferError) as exc:
            self._fall_back(str(exc))

    def _fall_back(self, reason: str) -> None:
        self._carrier = None
        self._tensor_ipc = "direct_rpc"
        if self.fallback_reason is None:
            self.fallback_reason = reason
            logger.warning("tensors are sent in their messages, not in shared memory: %s", reason)

    def _warn_once(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("%s", text)


class _Encoding:
    """State of one `encode` call: the frames so far, and the tensors given to the carrier."""

    def __init__(self, encoder: TensorEncoder, key: str | None) -> None:
        self._encoder = encoder
        self._key = key
        self._carried: list[tuple[TensorPutter, bytes]] = []
        self._tensors = 0
        self.frames: list[Frame] = []

    def replace(self, value: object) -> object:
        """Return the extension for a value that msgpack does not support."""
        if not isinstance(value, Tensor):
            plain = to_plain(value)
            if plain is None:
                return self._encoder.replace_foreign(value)
            return Ext(VALUE, msgspec.msgpack.encode(plain, enc_hook=self.replace))
        # Imported here because messages without tensors need no torch.
        from weightsync.tensors import check_dense, spec_of, tensor_data  # noqa: PLC0415 - above

        self._tensors += 1
        if self._tensors > MAX_TENSORS:
            raise ConfigError(f"a message has at most {MAX_TENSORS} tensors, this has more")
        check_dense(value)
        spec = spec_of("tensor", value)
        if self._encoder.fits_in_line(spec.nbytes):
            return in_line(spec, tensor_data(value))
        carried = self._encoder.carry(value, self._key)
        if carried is not None:
            self._carried.append(carried)
            return Ext(CARRIED, carried[1])
        self.frames.append(tensor_data(value))
        return in_frame(spec, len(self.frames))

    def take_back(self) -> None:
        """Undo all `put` calls of this message."""
        for carrier, handle in self._carried:
            with suppress(WeightSyncError):
                carrier.take_back(handle)


class TensorDecoder(Generic[T]):
    """Decodes messages as `kind`, or as plain data and tensors. Thread-safe.

    Fields may be typed `torch.Tensor`, also inside lists and dicts. Type a field `Any` if it holds
    either a tensor or a list of tensors. `pin_memory` pins CPU tensors where CUDA is available.
    `dec_hook` makes other types from plain data.
    """

    @overload
    def __init__(
        self: TensorDecoder[Any],
        kind: None = None,
        carrier: TensorTaker | None = None,
        *,
        pin_memory: bool = False,
        dec_hook: Callable[[type, Any], Any] | None = None,
        max_message_nbytes: int = MAX_MESSAGE_NBYTES,
    ) -> None: ...
    @overload
    def __init__(
        self,
        kind: type[T],
        carrier: TensorTaker | None = None,
        *,
        pin_memory: bool = False,
        dec_hook: Callable[[type, Any], Any] | None = None,
        max_message_nbytes: int = MAX_MESSAGE_NBYTES,
    ) -> None: ...
    def __init__(
        self,
        kind: type[T] | None = None,
        carrier: TensorTaker | None = None,
        *,
        pin_memory: bool = False,
        dec_hook: Callable[[type, Any], Any] | None = None,
        max_message_nbytes: int = MAX_MESSAGE_NBYTES,
    ) -> None:
        self._carrier = carrier
        self._pin = pin_memory and _has_cuda()
        self._dec_hook = dec_hook
        self._max_nbytes = max_message_nbytes
        self._call = threading.local()
        self._decoder = msgspec.msgpack.Decoder(
            Any if kind is None else kind, ext_hook=self._restore, dec_hook=self._convert
        )

    def decode(self, frames: Sequence[Frame] | Frame) -> T:
        """Decode `frames`, as made by `encode`.

        Tensors are views of writable auxiliary frames and copies of read-only ones. Raises
        ProtocolError for an invalid message, and what the carrier raises. In both cases no tensor
        of the message stays in the carrier.
        """
        parts = [frames] if isinstance(frames, bytes | bytearray | memoryview) else list(frames)
        if not parts:
            raise ProtocolError("a message has at least one frame")
        if memoryview(parts[0]).nbytes > self._max_nbytes:
            raise ProtocolError(
                f"a message may have {self._max_nbytes} bytes, this has "
                f"{memoryview(parts[0]).nbytes}"
            )
        outer = getattr(self._call, "state", None)  # a dec_hook may decode a nested message
        call = self._call.state = _Decoding(parts, self._carrier, pin=self._pin)
        try:
            message = cast(T, self._decoder.decode(parts[0]))
            call.check_all_used()
        except BaseException as exc:
            call.drop_rest()
            if isinstance(exc, msgspec.DecodeError | UnicodeDecodeError | RecursionError):
                raise ProtocolError(f"this message cannot be read: {exc}") from exc
            raise
        finally:
            self._call.state = outer
        return message

    def _restore(self, code: int, data: memoryview) -> object:
        call: _Decoding = self._call.state
        return call.restore(code, data)

    def _convert(self, kind: Any, value: Any) -> Any:
        if isinstance(kind, type) and isinstance(value, kind):
            return value  # a tensor, or another value that came as an extension
        torch = sys.modules.get("torch")  # without torch there are no values of its types
        if torch is not None and kind is torch.Size and isinstance(value, list):
            return torch.Size(value)  # a tuple, which msgpack encodes as an array
        if _is_tensor_kind(kind):
            raise ValueError(f"Expected a tensor, got `{type(value).__name__}`")
        if self._dec_hook is None:
            raise ValueError(f"{kind} can be decoded with a dec_hook only")
        return self._dec_hook(kind, value)


class _Decoding:
    """State of one `decode` call: the frames, and which of them were used."""

    def __init__(self, frames: list[Frame], carrier: TensorTaker | None, *, pin: bool) -> None:
        self._frames = frames
        self._unused = set(range(1, len(frames)))
        self._carrier = carrier
        self._pin = pin
        self._tensors = 0
        self._taken: set[bytes] = set()

    def restore(self, code: int, data: memoryview) -> Any:
        """Return the value of an extension. Raises ProtocolError, and what the carrier raises."""
        if code == VALUE:
            name, plain = msgspec.msgpack.decode(data, type=tuple[str, Any], ext_hook=self.restore)
            return from_plain(name, plain)
        self._tensors += 1
        if self._tensors > MAX_TENSORS:
            raise ProtocolError(f"a message has at most {MAX_TENSORS} tensors, this has more")
        # Imported here because messages without tensors need no torch.
        from weightsync.tensors import tensor_of  # noqa: PLC0415 - see above

        if code == IN_LINE:
            inline = line_of(data)
            tensor = tensor_of(inline.data, inline.dtype, inline.shape)
        elif code == IN_FRAME:
            framed = frame_of(data)
            tensor = tensor_of(self._frame(framed.frame), framed.dtype, framed.shape)
        elif code == CARRIED:
            tensor = self._take(bytes(data))
        else:
            raise ProtocolError(f"a message has the unknown extension {code}")
        return tensor.pin_memory() if self._pin and pinnable(tensor) else tensor

    def check_all_used(self) -> None:
        """Raise ProtocolError for frames that no tensor refers to."""
        if self._unused:
            raise ProtocolError(
                f"the message has {len(self._frames) - 1} auxiliary frames, and no tensor is in "
                f"number {shorten(map(str, sorted(self._unused)))}"
            )

    def drop_rest(self) -> None:
        """Drop the tensors in the carrier that this failed `decode` did not take."""
        carrier = self._carrier
        if carrier is None:
            return

        def drop(code: int, data: memoryview) -> None:
            if code == VALUE:
                msgspec.msgpack.decode(data, ext_hook=drop)
            if code == CARRIED and bytes(data) not in self._taken:
                with suppress(WeightSyncError):
                    carrier.drop(bytes(data))

        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            msgspec.msgpack.Decoder(ext_hook=drop).decode(self._frames[0])

    def _take(self, handle: bytes) -> torch.Tensor:
        if self._carrier is None:
            raise ProtocolError(
                "a tensor of this message is in shared memory, and no tensor queue was given to "
                'read it from; give the decoder one, or set tensor_ipc to "direct_rpc"'
            )
        tensor = self._carrier.take(handle)
        self._taken.add(handle)
        return tensor

    def _frame(self, number: int) -> Frame:
        if number not in self._unused:
            raise ProtocolError(
                f"a tensor is in auxiliary frame {number}, which is missing or another tensor's; "
                f"the message has {len(self._frames) - 1}"
            )
        self._unused.remove(number)
        return self._frames[number]


def pinnable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can be pinned: it is on the CPU and not empty."""
    return tensor.device.type == "cpu" and tensor.numel() > 0


def _is_tensor_kind(kind: Any) -> bool:
    torch = sys.modules.get("torch")
    known = (Tensor,) if torch is None else (Tensor, torch.Tensor)
    return isinstance(kind, type) and issubclass(kind, known)


def _has_cuda() -> bool:
    import torch  # noqa: PLC0415 - needed for pin_memory only

    return torch.cuda.is_available()
