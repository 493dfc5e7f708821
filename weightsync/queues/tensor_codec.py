"""Request objects with tensors in them, to and from multipart messages (msgpack)."""

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
"""Extension codes: a tensor with its bytes, with the number of its frame, with a carrier's handle;
and what is no tensor (message_values)."""
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
    """Return what stands in the message for a tensor with these bytes."""
    tensor = InLine(spec.dtype, list(spec.shape), bytearray(data))
    return Ext(IN_LINE, msgspec.msgpack.encode(tensor))


def in_frame(spec: TensorSpec, number: int) -> Ext:
    """Return what stands in the message for a tensor in auxiliary frame `number`."""
    return Ext(IN_FRAME, msgspec.msgpack.encode(InFrame(spec.dtype, list(spec.shape), number)))


def line_of(data: memoryview) -> InLine:
    """Return what a tensor is that came with its bytes. Raises ProtocolError."""
    return _decode(data, InLine)


def frame_of(data: memoryview) -> InFrame:
    """Return which frame a tensor is in, and what it is. Raises ProtocolError."""
    return _decode(data, InFrame)


def _decode(data: memoryview, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"a tensor of this message cannot be read: {exc}") from exc


logger = logging.getLogger(__name__)

TensorIpc = Literal["direct_rpc", "torch_shm"]

SETTING = "WEIGHTSYNC_TENSOR_IPC"
"""Environment variable that chooses the way of tensors where the caller does not."""
INLINE_NBYTES = 4096
MAX_MESSAGE_NBYTES = 1 << 28
"""Bytes of a message without its auxiliary frames, in line tensors included."""


class TensorPutter(Protocol):
    """Takes tensors out of messages: `TensorIpcSender` is one."""

    def put(self, tensor: torch.Tensor, key: str | None) -> bytes:
        """Send a tensor under `key` and return a handle that means nothing to the codec.

        Raises BackendUnavailableError or TransportError when it will not work again, TransferError
        when it does not for this tensor.
        """

    def take_back(self, handle: bytes) -> None:
        """Undo a `put` whose message will not be sent."""


class TensorTaker(Protocol):
    """Gives tensors back to messages: `TensorIpcReceiver` is one."""

    def take(self, handle: bytes) -> torch.Tensor:
        """Return the tensor of a handle that the other side's `put` returned."""

    def drop(self, handle: bytes) -> None:
        """Give up the tensor of a handle whose message could not be read."""


def chosen_tensor_ipc(setting: str | None = None) -> TensorIpc:
    """Return `setting`, or what WEIGHTSYNC_TENSOR_IPC says, or "torch_shm".

    Raises ConfigError for another word.
    """
    word = setting or os.environ.get(SETTING) or "torch_shm"
    if word not in get_args(TensorIpc):
        where = "tensor_ipc" if setting else SETTING
        raise ConfigError(f'{where} is {word!r}; wanted "direct_rpc" or "torch_shm"')
    return cast(TensorIpc, word)


class TensorEncoder:
    """Makes messages; any thread may call.

    With `torch_shm`, `open_carrier` is called once, here. If it or a later `put` shows that shared
    memory does not work, tensors travel in the message from then on: a warning says so once, and
    `tensor_ipc` and `fallback_reason` tell. What is neither plain data nor a kind of message_values
    goes to `enc_hook`, which returns plain data.
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
        """Tensors that travelled in the message because there was no room for them just then."""
        if self._tensor_ipc == "torch_shm":
            self._open(open_carrier)

    @property
    def tensor_ipc(self) -> TensorIpc:
        """The way that large tensors take now, which a fallback makes "direct_rpc"."""
        return self._tensor_ipc

    def encode(self, message: object, key: str | None = None) -> list[Frame]:
        """Return the frames of a message: itself, then auxiliary ones in order.

        `key` goes to the carrier with each tensor, for whoever cleans up. Frames may view the
        message's own tensors: change none of them until the frames are sent. Raises ConfigError
        for what cannot be encoded; nothing stays in the carrier then.
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
        """Return plain data for what is no tensor. Raises TypeError."""
        if self._enc_hook is None:
            raise TypeError(
                f"{type(value).__name__} is neither plain data nor a tensor; give enc_hook"
            )
        return self._enc_hook(value)

    def fits_in_line(self, nbytes: int) -> bool:
        """Whether a tensor is small enough to stand in the message."""
        return nbytes <= self._inline_nbytes

    def carry(self, tensor: torch.Tensor, key: str | None) -> tuple[TensorPutter, bytes] | None:
        """Return the carrier and the handle it gave, None where it could not take the tensor."""
        carrier = self._carrier
        if carrier is None:
            return None
        try:
            return carrier, carrier.put(tensor, key)
        except (BackendUnavailableError, TransportError) as exc:
            self._fall_back(str(exc))
        except TransferError as exc:
            self.crowded_out += 1
            self._warn_once(f"a tensor travels in its message, not in shared memory: {exc}")
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
            logger.warning("tensors travel in their messages, not in shared memory: %s", reason)

    def _warn_once(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("%s", text)


class _Encoding:
    """One message on its way: its frames so far, and what was given to the carrier."""

    def __init__(self, encoder: TensorEncoder, key: str | None) -> None:
        self._encoder = encoder
        self._key = key
        self._carried: list[tuple[TensorPutter, bytes]] = []
        self._tensors = 0
        self.frames: list[Frame] = []

    def replace(self, value: object) -> object:
        """Return what stands in the message for a value that msgpack does not know."""
        if not isinstance(value, Tensor):
            plain = to_plain(value)
            if plain is None:
                return self._encoder.replace_foreign(value)
            return Ext(VALUE, msgspec.msgpack.encode(plain, enc_hook=self.replace))
        # Here, since messages without tensors need no torch.
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
        """Undo what the carrier was given."""
        for carrier, handle in self._carried:
            with suppress(WeightSyncError):
                carrier.take_back(handle)


class TensorDecoder(Generic[T]):
    """Reads messages as `kind`, or as plain data and tensors; any thread may call.

    Fields may be typed `torch.Tensor`, also within lists and dicts; where a field holds tensors or
    lists of them, type it `Any`. `pin_memory` pins tensors on the CPU where there is CUDA.
    `dec_hook` makes other foreign types from plain data.
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
        """Return the message of `frames`, as `encode` made them.

        Tensors view auxiliary frames that are writable, and copy others. Raises ProtocolError for
        what is no such message, and what the carrier raises; either way no tensor of the message
        stays behind in the carrier.
        """
        parts = [frames] if isinstance(frames, bytes | bytearray | memoryview) else list(frames)
        if not parts:
            raise ProtocolError("a message has at least one frame")
        if memoryview(parts[0]).nbytes > self._max_nbytes:
            raise ProtocolError(
                f"a message may have {self._max_nbytes} bytes, this has "
                f"{memoryview(parts[0]).nbytes}"
            )
        outer = getattr(self._call, "state", None)  # a dec_hook may decode a message within
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
        torch = sys.modules.get("torch")  # what is one of its types was made by it
        if torch is not None and kind is torch.Size and isinstance(value, list):
            return torch.Size(value)  # a tuple, which msgpack has a word for
        if _is_tensor_kind(kind):
            raise ValueError(f"Expected a tensor, got `{type(value).__name__}`")
        if self._dec_hook is None:
            raise ValueError(f"{kind} can be read with a dec_hook alone")
        return self._dec_hook(kind, value)


class _Decoding:
    """One message being read: its frames, and which of them were used."""

    def __init__(self, frames: list[Frame], carrier: TensorTaker | None, *, pin: bool) -> None:
        self._frames = frames
        self._unused = set(range(1, len(frames)))
        self._carrier = carrier
        self._pin = pin
        self._tensors = 0
        self._taken: set[bytes] = set()

    def restore(self, code: int, data: memoryview) -> Any:
        """Return what an extension holds. Raises ProtocolError and what the carrier raises."""
        if code == VALUE:
            name, plain = msgspec.msgpack.decode(data, type=tuple[str, Any], ext_hook=self.restore)
            return from_plain(name, plain)
        self._tensors += 1
        if self._tensors > MAX_TENSORS:
            raise ProtocolError(f"a message has at most {MAX_TENSORS} tensors, this has more")
        # Here, since messages without tensors need no torch.
        from weightsync.tensors import tensor_of  # noqa: PLC0415 - see above

        if code == IN_LINE:
            came = line_of(data)
            tensor = tensor_of(came.data, came.dtype, came.shape)
        elif code == IN_FRAME:
            place = frame_of(data)
            tensor = tensor_of(self._frame(place.frame), place.dtype, place.shape)
        elif code == CARRIED:
            tensor = self._take(bytes(data))
        else:
            raise ProtocolError(f"extension {code} of a message is no tensor of ours")
        return tensor.pin_memory() if self._pin and pinnable(tensor) else tensor

    def check_all_used(self) -> None:
        """Raise ProtocolError for frames that no tensor named."""
        if self._unused:
            raise ProtocolError(
                f"the message has {len(self._frames) - 1} auxiliary frames, and no tensor is in "
                f"number {shorten(map(str, sorted(self._unused)))}"
            )

    def drop_rest(self) -> None:
        """Have the carrier drop the tensors of a message that could not be read to its end."""
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
    """Whether a tensor can be pinned: only memory of the CPU can, and only if there is some."""
    return tensor.device.type == "cpu" and tensor.numel() > 0


def _is_tensor_kind(kind: Any) -> bool:
    torch = sys.modules.get("torch")
    known = (Tensor,) if torch is None else (Tensor, torch.Tensor)
    return isinstance(kind, type) and issubclass(kind, known)


def _has_cuda() -> bool:
    import torch  # noqa: PLC0415 - only who pins needs it to read messages

    return torch.cuda.is_available()
