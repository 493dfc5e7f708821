"""Every dtype of the installed torch whose tensors can be copied is sent as it is."""

from __future__ import annotations

import re

import pytest
import torch

import weightsync as ws
from weightsync.errors import ConfigError
from weightsync.specs import DTYPE_NBYTES
from weightsync.tensors import dtype_name

ALL = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
# Raw bits, deprecated quantized tensors, an experiment of torch's, and integers it cannot copy.
LEFT_OUT = re.compile(r"torch\.(bits\w+|qu?int\w+|quint\w+|complex32|u?int[1-7])")


SENT = [dtype for dtype in ALL if not LEFT_OUT.fullmatch(str(dtype))]


def test_the_table_has_every_dtype_that_is_not_left_out() -> None:
    assert {str(dtype).removeprefix("torch.") for dtype in SENT} <= set(DTYPE_NBYTES)
    for dtype in SENT:
        assert DTYPE_NBYTES[dtype_name(dtype)] == dtype.itemsize
    with pytest.raises(ConfigError, match="cannot be sent"):
        dtype_name(torch.quint8)


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """One tensor of each dtype, of any bytes (a bool's are 0 or 1)."""
    made = {}
    generator = torch.Generator().manual_seed(seed)
    for dtype in SENT:
        high = 2 if dtype is torch.bool else 256
        flat = torch.randint(0, high, (12 * dtype.itemsize,), generator=generator)
        made[str(dtype)] = flat.to(torch.uint8).view(dtype).view(3, 4)
    return made


def as_bytes(tensor: torch.Tensor) -> list[int]:
    found: list[int] = tensor.contiguous().view(-1).view(torch.uint8).tolist()
    return found


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_a_model_of_all_dtypes_is_sent(packed: bool, apply: str) -> None:
    server = torch.nn.Module()
    for name, tensor in tensors(0).items():
        server.register_buffer(name.replace(".", "_"), tensor)
    source = {name.replace(".", "_"): tensor for name, tensor in tensors(1).items()}
    receiver = ws.WeightReceiver(server, apply=apply)  # type: ignore[arg-type]  # both words
    with ws.connect(source, to=receiver.handle, packed=packed) as sender:
        sender.send_weights()
        for name, tensor in source.items():
            assert as_bytes(getattr(server, name)) == as_bytes(tensor), name


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_tensors_that_torch_conjugates_lazily_keep_their_values(packed: bool, apply: str) -> None:
    value = torch.tensor([[1 + 2j, 3 - 4j]])
    server = torch.nn.Module()
    server.register_buffer("plain", torch.zeros_like(value))
    server.register_buffer("lazy", torch.zeros_like(value).conj())
    receiver = ws.WeightReceiver(server, apply=apply)  # type: ignore[arg-type]  # both words
    source = {"plain": value.conj(), "lazy": value.clone()}
    with ws.connect(source, to=receiver.handle, packed=packed) as sender:
        sender.send_weights()
        assert server.get_buffer("plain").tolist() == [[1 - 2j, 3 + 4j]]
        assert server.get_buffer("lazy").tolist() == [[1 + 2j, 3 - 4j]]
