"""The names that users of another system know: arguments, send modes, and both halves together."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import torch

import weightsync as ws
from weightsync.samehost.device_keys import host_key
from weightsync.samehost.segment import live_segments

Engine = ws.IPCWeightTransferEngine
Args = ws.IPCTrainerSendWeightsArgs


def tensors() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        ("odd", torch.randint(256, (3,), dtype=torch.uint8, generator=generator)),
        ("weight", torch.randn(40, 30, generator=generator)),
        ("turned", torch.randn(8, 5, generator=generator).t()),
        ("half", torch.randn(7, generator=generator).bfloat16()),
        ("empty", torch.zeros(0, 4)),
        ("scalar", torch.tensor(3)),
    ]


@pytest.fixture(autouse=True)
def _nothing_stays_open() -> Iterator[None]:
    before = live_segments()
    yield
    assert live_segments() == before


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"send_mode": "ray"}, "llm_handle"),
        ({"send_mode": "http"}, "url"),
        ({"send_mode": "pigeon"}, "'pigeon'"),
    ],
)
def test_wrong_arguments_are_value_errors(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Args(**arguments)
    with pytest.raises(ValueError, match=told):
        Engine.trainer_send_weights(iter(tensors()), arguments)


def test_the_defaults_are_the_known_ones() -> None:
    arguments = Args(send_mode="http", url="http://127.0.0.1:1")
    assert arguments.packed is False
    assert arguments.packed_buffer_size_bytes == 1 << 30


@pytest.mark.parametrize("as_dict", [True, False])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
def test_both_halves_by_a_callable(packed: bool, as_dict: bool) -> None:
    engine, got = Engine(), {}

    def load(pairs: Any) -> None:
        got.update({name: tensor.clone() for name, tensor in pairs})

    def deliver(info: Any) -> None:
        assert info.packed is packed
        engine.receive_weights(info, load)

    arguments = {"send_mode": deliver, "packed": packed}
    Engine.trainer_send_weights(iter(tensors()), arguments if as_dict else Args(**arguments))  # type: ignore[arg-type]  # mixed values
    for name, tensor in tensors():
        assert got[name].dtype is tensor.dtype
        assert torch.equal(got[name], tensor)


def test_packed_groups_hold_what_fits_and_larger_tensors_travel_alone() -> None:
    engine, groups = Engine(), []

    def deliver(info: Any) -> None:
        groups.append((info.names, sum(info.tensor_sizes)))
        engine.receive_weights(info, list)

    Engine.trainer_send_weights(
        iter(tensors()),
        {"send_mode": deliver, "packed": True, "packed_buffer_size_bytes": 200},
    )
    assert [names for names, _ in groups] == [
        ["odd"],
        ["weight"],
        ["turned", "half", "empty", "scalar"],
    ]
    assert [size for _, size in groups] == [3, 4800, 182]


class Recorder(BaseHTTPRequestHandler):
    """Answers 200 once, then 500; remembers what it was posted."""

    posted: list[tuple[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.posted.append((self.path, body))
        answer = b'{"state":"READY","version":1}' if len(self.posted) == 1 else b"broken"
        self.send_response(200 if len(self.posted) == 1 else 500)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


def test_http_posts_typed_json_and_error_statuses_raise() -> None:
    handler = type("Handler", (Recorder,), {"posted": []})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        arguments = Args(send_mode="http", url=url)
        Engine.trainer_send_weights(iter(tensors()), arguments)
        with pytest.raises(ws.WeightSyncError, match="500"):
            Engine.trainer_send_weights(iter(tensors()), arguments)
        server.shutdown()
        thread.join(10)
    path, body = handler.posted[0]  # type: ignore[attr-defined]  # made above
    assert path == "/update_weights"
    info = body["update_info"]
    assert info["names"] == [name for name, _ in tensors()]
    assert info["dtype_names"][3] == "bfloat16"
    assert [list(handle) for handle in info["ipc_handles"]] == [[host_key()]] * 6
    assert "ipc_handles_pickled" not in info


def test_infos_are_parsed_or_refused() -> None:
    assert Engine.parse_init_info({}) is None
    with pytest.raises(ValueError, match="backend"):
        Engine.parse_init_info({"x": 1})
    info = {"names": ["a", "b"], "dtype_names": ["int8"], "shapes": [[1], [1]], "ipc_handles": []}
    with pytest.raises(ValueError, match="2 entries, dtype_names has 1"):
        Engine.parse_update_info(info)


@pytest.mark.parametrize("packed", [True, False])
def test_lists_of_unequal_length_are_value_errors_that_name_both(packed: bool) -> None:
    info: dict[str, Any] = {"names": ["a", "b"], "dtype_names": ["int8"], "shapes": [[1], [1]]}
    info |= {"ipc_handles": {} if packed else [{}, {}], "packed": packed}
    info |= {"tensor_sizes": [1, 1]} if packed else {}
    with pytest.raises(ValueError, match="names has 2 entries, dtype_names has 1"):
        Engine.parse_update_info(info)


def test_no_handle_for_this_process_lists_what_was_offered() -> None:
    info = {"names": ["a"], "dtype_names": ["int8"], "shapes": [[1]]}
    handle = {"kind": "segment", "name": "weightsync-" + "0" * 32, "nbytes": 1}
    with pytest.raises(ws.HandleError, match="GPU-elsewhere"):
        Engine().receive_weights({**info, "ipc_handles": [{"GPU-elsewhere": handle}]}, list)


def test_pickled_handles_are_refused_and_our_sender_is_named() -> None:
    with pytest.raises(ValueError, match=r"ws\.send_weights"):
        Engine.parse_update_info({"names": ["a"], "ipc_handles_pickled": "gAR9lC4="})
