"""The tensors that are registered in place, on the host, where the same code runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from weightsync.cuda.device_stream import DeviceStream

CPU = torch.device("cpu")


def registered(tensors: list[torch.Tensor]) -> DeviceStream:
    return DeviceStream([t.dtype for t in tensors], [t.shape for t in tensors], CPU, tensors)


def replaced(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.clone()


def transposed(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.t()


def reshaped(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.view(2, 8)


def shifted(parameter: nn.Parameter) -> None:
    parameter.data = torch.cat([parameter.data, parameter.data])[1:5]


@pytest.mark.parametrize("change", [replaced, transposed, reshaped, shifted])
def test_tensors_that_lie_elsewhere_have_moved(change: Callable[[nn.Parameter], None]) -> None:
    tensors = [nn.Parameter(torch.randn(4, 4)) for _ in range(3)]
    stream = registered(list(tensors))
    with torch.no_grad():
        tensors[1].add_(1)
    assert not stream.moved(tensors)
    change(tensors[1])
    assert stream.moved(tensors)


def test_buffers_do_not_move() -> None:
    stream = DeviceStream([torch.float32], [(4, 4)], CPU, None)
    assert not stream.moved([])


def test_an_address_is_not_used_again() -> None:
    """The storage is held, so that another tensor cannot be where this one was."""
    tensor = torch.randn(1 << 20)
    address = tensor.data_ptr()
    stream = registered([tensor])
    del tensor
    assert all(torch.randn(1 << 20).data_ptr() != address for _ in range(50))
    assert stream.copied_nbytes == 0
