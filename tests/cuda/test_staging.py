"""Buffer pairs and slice copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weightsync.cuda.staging import CpuGpuBuffer, copy_slice, numpy_view
from weightsync.errors import ConfigError


def wait(buffer: CpuGpuBuffer) -> None:
    if buffer.gpu.is_cuda:
        torch.cuda.synchronize()


class TestBuffer:
    def test_rows_go_to_the_device_and_back(self) -> None:
        buffer = CpuGpuBuffer(5, 2, dtype=torch.int32)
        buffer.np[:] = [[row, row] for row in range(5)]
        there = buffer.copy_to_gpu(3)
        wait(buffer)
        assert there.data_ptr() == buffer.gpu.data_ptr()
        assert there.tolist() == [[0, 0], [1, 1], [2, 2]]
        assert buffer.gpu[3:].tolist() == [[0, 0], [0, 0]]
        buffer.gpu += 10
        back = buffer.copy_to_cpu(2)
        wait(buffer)
        assert back.tolist() == [[10, 10], [11, 11]]
        assert buffer.cpu.tolist() == [[10, 10], [11, 11], [2, 2], [3, 3], [4, 4]]

    def test_all_rows_by_default(self) -> None:
        buffer = CpuGpuBuffer(4, dtype=torch.float32)
        buffer.cpu.fill_(1)
        assert buffer.copy_to_gpu().shape == (4,)
        wait(buffer)
        assert int(buffer.gpu.sum()) == 4
        buffer.gpu.fill_(2)
        assert buffer.copy_to_cpu().shape == (4,)
        wait(buffer)
        assert int(buffer.cpu.sum()) == 8

    def test_no_rows_at_all(self) -> None:
        buffer = CpuGpuBuffer(4, dtype=torch.float32)
        buffer.cpu.fill_(1)
        assert buffer.copy_to_gpu(0).shape == (0,)
        wait(buffer)
        assert int(buffer.gpu.sum()) == 0

    def test_the_two_sides_are_two_memories(self) -> None:
        buffer = CpuGpuBuffer(4, dtype=torch.uint8)
        assert buffer.cpu.data_ptr() != buffer.gpu.data_ptr()
        assert buffer.cpu.device.type == "cpu"
        assert buffer.gpu.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
        assert buffer.cpu.is_pinned() == torch.cuda.is_available()
        assert not CpuGpuBuffer(4, dtype=torch.uint8, device="cpu").cpu.is_pinned()

    def test_a_pair_around_memory_that_is_there(self) -> None:
        cpu, gpu = torch.arange(4), torch.arange(10, 14)
        pair = CpuGpuBuffer.around(cpu, gpu)
        assert pair.copy_to_cpu(2).data_ptr() == cpu.data_ptr()
        assert cpu.tolist() == [10, 11, 2, 3]
        with pytest.raises(ConfigError, match="the sides of a pair must have one shape and dtype"):
            CpuGpuBuffer.around(cpu, gpu[:3])
        with pytest.raises(ConfigError, match=r"torch\.int64 \[4\] and torch\.int32 \[4\]"):
            CpuGpuBuffer.around(cpu, gpu.int())

    @pytest.mark.parametrize("rows", [-1, 5])
    def test_rows_that_are_not_there(self, rows: int) -> None:
        buffer = CpuGpuBuffer(4, dtype=torch.uint8)
        with pytest.raises(ConfigError, match=f"{rows} rows are to be copied; the source has 4"):
            buffer.copy_to_gpu(rows)
        with pytest.raises(ConfigError, match=f"{rows} rows are to be copied"):
            buffer.copy_to_cpu(rows)

    def test_bfloat16_has_no_numpy_view(self) -> None:
        buffer = CpuGpuBuffer(4, dtype=torch.bfloat16)
        with pytest.raises(ConfigError, match=r"NumPy cannot view a tensor of torch\.bfloat16"):
            _ = buffer.np
        buffer.cpu.fill_(1)
        assert buffer.copy_to_gpu(2).tolist() == [1, 1]

    @pytest.mark.parametrize("size", [(), (-1,), (3, -1), ((3, 4),), (2.0,), ("3",)])
    def test_sizes_that_are_none(self, size: tuple[Any, ...]) -> None:
        with pytest.raises(ConfigError, match=r"one whole number .* as in CpuGpuBuffer\(3, 4"):
            CpuGpuBuffer(*size, dtype=torch.uint8)


class TestCopySlice:
    def test_it_copies_the_first_elements_alone(self) -> None:
        source, target = torch.arange(6.0), torch.zeros(4)
        copied = copy_slice(source, target, 3)
        assert target.tolist() == [0, 1, 2, 0]
        assert copied.data_ptr() == target.data_ptr()
        assert copied.tolist() == [0, 1, 2]

    @pytest.mark.parametrize("length", [-1, 5])
    def test_neither_side_may_be_shorter(self, length: int) -> None:
        message = f"{length} rows are to be copied; the source has 6, the target 4"
        with pytest.raises(ConfigError, match=message):
            copy_slice(torch.arange(6), torch.zeros(4), length)
        with pytest.raises(ConfigError, match="the source has 0"):
            copy_slice(torch.tensor(1), torch.zeros(4), 1)

    def test_numpy_views_share_memory(self) -> None:
        tensor = torch.zeros(3)
        numpy_view(tensor)[1] = 7
        assert tensor.tolist() == [0, 7, 0]
