"""Addresses of ZeroMQ sockets."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from weightsync.errors import ConfigError, ConnectError
from weightsync.queues.sockets import IPC_PATH_LIMIT, socket_address


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
