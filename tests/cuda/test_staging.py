"""Buffer pairs, slice copies and addresses."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from weightsync.cuda.staging import CpuGpuBuffer, copy_slice, numpy_view
from weightsync.errors import ConfigError, ConnectError
from weightsync.queues.sockets import IPC_PATH_LIMIT, socket_address


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


class TestAddresses:
    def bound(self, address: str, *, ipv6: bool = False) -> str:
        with zmq.Context() as context, context.socket(zmq.PULL) as listener:
            listener.setsockopt(zmq.LINGER, 0)
            listener.setsockopt(zmq.IPV6, int(ipv6))
            listener.bind(address)
            endpoint = listener.getsockopt(zmq.LAST_ENDPOINT)
            assert isinstance(endpoint, bytes)
            return endpoint.decode().rstrip("\0")

    def test_local_peers_get_a_path_of_their_own(self, tmp_path: Path) -> None:
        addresses = [socket_address(local_only=True, directory=tmp_path) for _ in range(2)]
        assert addresses[0] != addresses[1]
        assert all(address.startswith(f"ipc://{tmp_path}/") for address in addresses)
        assert self.bound(addresses[0]) == addresses[0]
        assert socket_address(local_only=True).startswith("ipc:///")

    @pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]"])
    def test_a_free_port_is_kept_for_a_socket_that_is_bound_later(self, host: str) -> None:
        addresses = [socket_address(local_only=False, host=host) for _ in range(3)]
        ports = {int(address.rpartition(":")[2]) for address in addresses}
        assert len(ports) == 3
        assert 0 not in ports
        shown = "[::1]" if ":" in host else host
        assert all(address.startswith(f"tcp://{shown}:") for address in addresses)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as other, pytest.raises(OSError, match="in use"):
            other.bind((host.strip("[]"), min(ports)))
        for address in addresses * 2:
            assert self.bound(address, ipv6=":" in host) == address

    def test_no_more_than_128_ports_are_kept(self) -> None:
        program = (
            "import os\n"
            "from weightsync.queues.sockets import socket_address\n"
            "held = [len(os.listdir('/proc/self/fd'))]\n"
            "for _ in range(2):\n"
            "    for _ in range(150): socket_address(local_only=False)\n"
            "    held.append(len(os.listdir('/proc/self/fd')))\n"
            "print(*(now - held[0] for now in held))"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], check=True, capture_output=True, text=True
        )
        assert done.stdout == "0 128 128\n"

    def test_a_host_that_is_not_this_one_has_no_port_to_keep(self) -> None:
        with pytest.raises(ConnectError, match=r"cannot bind to tcp://192\.0\.2\.7:0.*give a port"):
            socket_address(local_only=False, host="192.0.2.7")

    @pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
    def test_a_socket_that_is_given_is_bound_and_its_port_told(self, host: str) -> None:
        with (
            zmq.Context() as context,
            context.socket(zmq.PULL) as listener,
            context.socket(zmq.PUSH) as peer,
            context.socket(zmq.PULL) as second,
        ):
            address = socket_address(local_only=False, host=host, bind=listener)
            port = int(address.rpartition(":")[2])
            assert port > 0
            peer.ipv6 = ":" in host
            peer.linger = 0
            peer.connect(address)
            peer.send(b"hello")
            assert listener.poll(60_000)
            assert listener.recv() == b"hello"
            with pytest.raises(ConnectError, match="cannot bind to"):
                socket_address(local_only=False, host=host, port=port, bind=second)

    @pytest.mark.parametrize("host", ["10.0.0.1", "node-7.cluster.local", "localhost"])
    def test_other_hosts_stand_as_they_are(self, host: str) -> None:
        assert socket_address(local_only=False, host=host, port=5555) == f"tcp://{host}:5555"

    @pytest.mark.parametrize("host", ["", "a b", "tcp://x", "x:1", "-x", "*"])
    def test_what_is_no_host_is_refused(self, host: str) -> None:
        with pytest.raises(ConfigError, match="is no host name and no IP address"):
            socket_address(local_only=False, host=host)

    @pytest.mark.parametrize("port", [-1, 65536])
    def test_what_is_no_port_is_refused(self, port: int) -> None:
        with pytest.raises(ConfigError, match=f"{port} is no port"):
            socket_address(local_only=False, port=port)

    def test_paths_that_are_too_long_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=f"longer than the {IPC_PATH_LIMIT} bytes"):
            socket_address(local_only=True, directory=tmp_path / ("x" * 80))
