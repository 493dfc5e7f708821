"""The update_info of vLLM's IPC engine: it carries its handles, and no memory stays open."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import TYPE_CHECKING, Self

from weightsync.errors import ConfigError, ProtocolError
from weightsync.wire.codec import decode_payload
from weightsync.wire.messages import ForeignUpdate
from weightsync.wire.offers import KeyedHandle, Name, Shape, Size
from weightsync.wire.struct_types import prepare

if TYPE_CHECKING:
    from weightsync.backends.base import LoadContext, Received

NO_PICKLES = (
    "ipc_handles_pickled: pickled handles are never read here, since a pickle runs code; send with "
    "weightsync: ws.send_weights(named_tensors, to=this_server)"
)


class HandlesUpdate(ForeignUpdate, frozen=True, kw_only=False):
    """Handles in the message itself; known to users as IPCWeightTransferUpdateInfo.

    `ipc_handles` is a list of one handle per tensor; `packed`, one handle for a buffer in which
    the tensors lie one after another, `tensor_sizes` bytes each. `fingerprints` are mix64 of each
    tensor, 16 hex digits. Raises ConfigError (a ValueError) where the fields do not fit together.
    """

    names: list[Name]
    dtype_names: list[str]
    shapes: list[Shape]
    ipc_handles: list[KeyedHandle] | KeyedHandle | None = None
    ipc_handles_pickled: str | None = None
    tensor_sizes: list[Size] | None = None
    packed: bool = False
    fingerprints: list[str] | None = None

    def __post_init__(self) -> None:
        if self.ipc_handles_pickled is not None:
            raise ConfigError(NO_PICKLES)
        if not isinstance(self.ipc_handles, dict if self.packed else list):
            seen = "missing" if self.ipc_handles is None else f"a {type(self.ipc_handles).__name__}"
            raise ConfigError(
                f"ipc_handles is {seen}; packed={self.packed} needs "
                + ("one dict, of the buffer" if self.packed else "a list, of one dict per tensor")
            )
        if self.packed and self.tensor_sizes is None:
            raise ConfigError("packed=True needs tensor_sizes: the bytes of each tensor")
        columns: dict[str, Sized | None] = {
            "dtype_names": self.dtype_names,
            "shapes": self.shapes,
            "ipc_handles": None if self.packed else self.ipc_handles,
            "tensor_sizes": self.tensor_sizes,
            "fingerprints": self.fingerprints,
        }
        for label, column in columns.items():
            if column is not None and len(column) != len(self.names):
                raise ConfigError(
                    f"names has {len(self.names)} entries, {label} has {len(column)}; they must "
                    "be equally long"
                )

    @classmethod
    def parse(cls, data: object) -> Self:
        """Return the update_info of plain data. Raises ProtocolError with the path of an error."""
        if isinstance(data, Mapping) and data.get("ipc_handles_pickled") is not None:
            raise ProtocolError(f"update_info.{NO_PICKLES}")  # whatever the other fields are
        return decode_payload(data, cls)

    def receive(self, keys: list[str], context: LoadContext) -> Received:
        """Open the handles for `keys`, load the tensors into their load target, and close them.

        Raises ProtocolError for a wrong entry, and HandleError for a handle that does not fit its
        tensor, before anything is written; VerificationError that names tensors where the message
        has fingerprints.
        """
        # An API server, which has the message alone, loads no torch.
        from weightsync.integrations.vllm.handles_receiver import (  # noqa: PLC0415 - see above
            receive_handles,
        )

        return receive_handles(self, keys, context)


prepare(HandlesUpdate)
