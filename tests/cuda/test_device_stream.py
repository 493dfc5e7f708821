"""The tensors that are registered in place, on the host, where the same code runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from weightsync.cuda import device_stream
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


def shortened(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data[:3]


def shifted(parameter: nn.Parameter) -> None:
    parameter.data = torch.cat([parameter.data, parameter.data])[1:5]


@pytest.mark.parametrize("change", [replaced, transposed, reshaped, shortened, shifted])
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


def test_registered_memory_is_held() -> None:
    tensor = torch.randn(1 << 20)
    storage: Any = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    stream = registered([tensor])
    del tensor
    assert not storage.expired()
    stream.close()
    assert storage.expired()


def test_a_tensor_at_the_address_of_memory_that_was_freed_has_moved() -> None:
    """`resize_(0)` frees the memory of a storage that is held."""
    tensor, other = torch.randn(16), torch.randn(16)
    stream = registered([tensor])
    stream._seen = [[part(other)] for part in device_stream._PLACE]  # as if it lay there
    assert not stream.moved([other])
    tensor.untyped_storage().resize_(0)
    assert stream.moved([other])
