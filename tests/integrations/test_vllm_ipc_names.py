"""The names that users of another system know: arguments, send modes, and both halves together."""

from __future__ import annotations

import asyncio
import json
import threading
import weakref
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import msgspec
import pytest
import torch

import weightsync as ws
from tests.segments import opened_since
from weightsync.cuda.memory import OpenMemory
from weightsync.integrations.vllm import ipc_engine
from weightsync.runtime import optimizer_steps
from weightsync.shm.host_keys import host_key
from weightsync.shm.segment import live_segments
from weightsync.update.lifecycle import ApplyChoice
from weightsync.weights.copying.fingerprint import mix64
from weightsync.wire.messages import FinishRequest, StartRequest, UpdateRequest
from weightsync.wire.offers import Handle, KeyedHandle, SegmentHandle

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


@pytest.mark.parametrize("names", [("a", "a"), ("a", "b")])
def test_a_session_that_fails_watches_nothing_any_more(names: tuple[str, str]) -> None:
    before = set(optimizer_steps._windows)

    def fail(_: object) -> None:
        raise ConnectionError("not delivered")

    with pytest.raises((ValueError, ws.WeightSyncError, ConnectionError)):
        Engine.trainer_send_weights([(name, torch.ones(3)) for name in names], {"send_mode": fail})
    assert set(optimizer_steps._windows) <= before


def test_what_changes_while_it_is_copied_is_not_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = torch.nn.Parameter(torch.ones(8))
    parameter.grad = torch.ones(8)
    step = torch.optim.SGD([parameter], lr=1.0, fused=True).step
    changes = [step]

    def changed(flat: torch.Tensor) -> int:
        while changes:
            changes.pop()()
        return mix64(flat)

    monkeypatch.setattr(ipc_engine, "mix64", changed)
    delivered: list[object] = []
    args = Args(send_mode=delivered.append)
    with pytest.raises(ws.VerificationError, match="the source changed while it was sent") as seen:
        Engine.trainer_send_weights([("w", parameter)], args)
    assert seen.value.names == ("w",)
    assert not delivered
    Engine.trainer_send_weights([("w", parameter)], args)
    assert len(delivered) == 1


@pytest.fixture(autouse=True)
def _nothing_stays_open() -> Iterator[None]:
    before = live_segments()
    yield
    assert not opened_since(before)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"send_mode": "ray"}, "llm_handle"),
        ({"send_mode": "http"}, "url"),
        ({"send_mode": "pigeon"}, "'pigeon'"),
        ({"send_mode": list, "packed_buffer_size_bytes": 0}, "packed_buffer_size_bytes"),
        ({"send_mode": list, "timeout_s": -1}, "timeout_s"),
    ],
)
def test_wrong_arguments_are_value_errors(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Args(**arguments)
    with pytest.raises(ValueError, match=told):
        Engine.trainer_send_weights(iter(tensors()), arguments)


@pytest.mark.parametrize("arguments", [{}, {"send_mode": list, "pace": 1}])
def test_a_dict_of_other_names_says_which_are_known(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"needs send_mode and may have llm_handle, url, packed"):
        Engine.trainer_send_weights(iter(tensors()), arguments)


def test_the_defaults_are_the_known_ones() -> None:
    arguments = Args(send_mode="http", url="http://127.0.0.1:1")
    assert arguments.packed is False
    assert arguments.packed_buffer_size_bytes == 1 << 30
    assert arguments.timeout_s == 300


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


class Counting:
    """Yields tensors of 1 KiB, made one by one, and counts how many of them exist at once."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.alive = 0
        self.most = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(self.count):
            yield f"layer.{i}", self._made(i)

    def _made(self, value: int) -> torch.Tensor:
        tensor = torch.full((256,), float(value))
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(tensor.untyped_storage(), self._gone)
        return tensor

    def _gone(self) -> None:
        self.alive -= 1


def test_packed_takes_a_bufferful_at_a_time_through_one_buffer() -> None:
    source, engine, segments, values = Counting(10), Engine(), [], {}

    def load(pairs: Any) -> None:
        values.update({name: float(tensor[0]) for name, tensor in pairs})

    def deliver(info: Any) -> None:
        segments.append(info.ipc_handles[host_key()].name)
        assert source.alive <= 1  # the first of the next buffer
        engine.receive_weights(info, load)

    Engine.trainer_send_weights(
        source, {"send_mode": deliver, "packed": True, "packed_buffer_size_bytes": 2048}
    )
    assert len(segments) == 5
    assert len(set(segments)) == 1
    assert source.most <= 4  # two groups of two
    assert source.alive == 0
    assert values == {f"layer.{i}": float(i) for i in range(10)}


def test_a_coroutine_function_is_awaited_in_one_event_loop() -> None:
    loops, names = set(), []

    async def deliver(info: Any) -> None:
        loops.add(asyncio.get_running_loop())
        await asyncio.sleep(0)
        names.extend(info.names)

    Engine.trainer_send_weights(
        iter(tensors()), {"send_mode": deliver, "packed": True, "packed_buffer_size_bytes": 200}
    )
    assert names == [name for name, _ in tensors()]
    assert len(loops) == 1


def test_a_coroutine_that_does_not_end_is_cancelled() -> None:
    cancelled = []

    async def deliver(_: Any) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(ws.TransportTimeout, match=r"deliver did not end within 0\.1 s"):
        Engine.trainer_send_weights(iter(tensors()), {"send_mode": deliver, "timeout_s": 0.1})
    assert cancelled == [True]


class Hidden:
    """A callable that does not look like the coroutine function that it is."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, info: Any) -> Any:
        return self._function(info)


@pytest.mark.parametrize("hidden", [False, True], ids=["function", "object"])
def test_a_coroutine_function_is_refused_where_an_event_loop_runs(hidden: bool) -> None:
    entered = []

    async def deliver(_: Any) -> None:
        entered.append(True)

    async def train() -> None:
        mode = Hidden(deliver) if hidden else deliver
        with pytest.raises(ws.ConfigError, match=r"call it with asyncio\.to_thread"):
            Engine.trainer_send_weights(iter(tensors()), {"send_mode": mode})
        assert entered == []
        await asyncio.to_thread(Engine.trainer_send_weights, iter(tensors()), {"send_mode": mode})

    asyncio.run(train())
    assert entered == [True]


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
    assert Engine.parse_init_info({}) == ws.IPCWeightTransferInitInfo()
    with pytest.raises(ValueError, match=r"init_info of this engine is empty: .*`x`"):
        Engine.parse_init_info({"x": 1})
    with pytest.raises(ValueError, match="carries no handles"):
        Engine.parse_update_info({})
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


COLUMNS: dict[str, Any] = {"names": ["a"], "dtype_names": ["int8"], "shapes": [[1]]}
HANDLE: KeyedHandle = {"GPU-x": SegmentHandle(name="weightsync-" + "0" * 32, nbytes=1)}


def test_an_update_info_is_made_from_its_fields() -> None:
    info = ws.IPCWeightTransferUpdateInfo(**COLUMNS, ipc_handles=[HANDLE])
    assert (info.packed, info.tensor_sizes, info.ipc_handles_pickled) == (False, None, None)
    packed = ws.IPCWeightTransferUpdateInfo(
        **COLUMNS, ipc_handles=HANDLE, tensor_sizes=[1], packed=True
    )
    assert Engine.parse_update_info(msgspec.to_builtins(packed)) == packed
    plain = msgspec.to_builtins(info) | {"ipc_handles_pickled": None, "tensor_sizes": None}
    assert Engine.parse_update_info(plain) == info


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "ipc_handles is missing; packed=False needs a list"),
        ({"ipc_handles": [HANDLE, HANDLE]}, "names has 1 entries, ipc_handles has 2"),
        ({"ipc_handles": [HANDLE], "shapes": []}, "names has 1 entries, shapes has 0"),
        ({"ipc_handles": [HANDLE], "packed": True}, "packed=True needs one dict, of the buffer"),
        ({"ipc_handles": HANDLE, "packed": True}, "packed=True needs tensor_sizes"),
        ({"ipc_handles_pickled": "gASV"}, "a pickle runs code"),
    ],
)
def test_an_update_info_whose_fields_do_not_fit_is_refused(
    fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        ws.IPCWeightTransferUpdateInfo(**COLUMNS | fields)


def test_a_hook_that_keeps_views_is_told_what_it_can_do() -> None:
    engine = Engine()
    kept: list[Any] = []

    def deliver(info: Any) -> None:
        engine.receive_weights(info, kept.extend)

    with pytest.raises(ws.TransferError, match=r"kept views of .*; copy them in load_weights$"):
        Engine.trainer_send_weights(iter(tensors()), {"send_mode": deliver})


def test_one_segment_is_mapped_once_for_all_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, opened = Engine(), []

    def open_memory(handle: Handle) -> OpenMemory:
        opened.append(handle)
        return OpenMemory(handle)

    monkeypatch.setattr("weightsync.integrations.vllm.handles_receiver.OpenMemory", open_memory)
    Engine.trainer_send_weights(
        iter(tensors()), {"send_mode": lambda info: engine.receive_weights(info, list)}
    )
    assert len(opened) == 1


def test_no_handle_for_this_process_lists_what_was_offered() -> None:
    info = {"names": ["a"], "dtype_names": ["int8"], "shapes": [[1]]}
    handle = {"kind": "segment", "name": "weightsync-" + "0" * 32, "nbytes": 1}
    with pytest.raises(ws.HandleError, match="GPU-elsewhere") as caught:
        Engine().receive_weights({**info, "ipc_handles": [{"GPU-elsewhere": handle}]}, list)
    assert isinstance(caught.value, ValueError)  # vLLM's engine raises one


def test_the_engine_is_made_and_asked_as_vllms_is() -> None:
    engine = Engine(object(), parallel_config=object())
    assert engine.init_info_cls is type(engine.parse_init_info({}))
    given: list[Any] = []
    Engine.trainer_send_weights(iter(tensors()), {"send_mode": given.append, "packed": True})
    plain = msgspec.to_builtins(given[0])
    made = engine.update_info_cls(**plain)  # its handles are plain dicts
    with pytest.raises(ws.SegmentError, match="cannot open segment"):  # and no AttributeError
        engine.receive_weights(made, list)  # its sender has ended
    with pytest.raises(ws.ConfigError, match="is a mapping or a HandlesUpdate, not list"):
        engine.receive_weights([], list)  # type: ignore[arg-type]  # what is refused


@pytest.mark.parametrize(
    "given",
    [
        object(),
        3,
        {"names": [object()], "dtype_names": ["int8"], "shapes": [[1]], "ipc_handles": [{}]},
        {"names": ["a"], "dtype_names": [torch.int8], "shapes": [[1]], "ipc_handles": [{}]},
        Engine.update_info_cls(["a"], [torch.int8], [[1]], [{}]),  # type: ignore[list-item]
    ],
    ids=["object", "number", "name", "dtype", "struct"],
)
def test_what_is_no_update_info_is_a_value_error(given: Any) -> None:
    with pytest.raises(ws.ConfigError):
        Engine().receive_weights(given, list)


def test_an_update_info_of_plain_data_is_received() -> None:
    got: dict[str, torch.Tensor] = {}

    def load(pairs: Any) -> None:
        got.update({name: tensor.clone() for name, tensor in pairs})

    def deliver(info: Any) -> None:
        engine = Engine()
        engine.receive_weights(engine.update_info_cls(**msgspec.to_builtins(info)), load)

    Engine.trainer_send_weights(iter(tensors()), {"send_mode": deliver})
    assert all(torch.equal(got[name], tensor) for name, tensor in tensors())


def test_pickled_handles_are_refused_and_our_sender_is_named() -> None:
    with pytest.raises(ValueError, match=r"ws\.send_weights"):
        Engine.parse_update_info({"names": ["a"], "ipc_handles_pickled": "gAR9lC4="})


class Tied(torch.nn.Module):
    """An embedding, a layer, and a head over the embedding's tensor, or one of its own."""

    def __init__(self, *, tied: bool = True, fill: float = 0) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4)
        self.layer = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(fill)


@pytest.mark.parametrize("apply", ["staged", "in_place"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize("names", ["once", "twice", "head"])
def test_a_tied_tensor_may_be_offered_by_one_name_or_by_both(
    names: str, packed: bool, apply: ApplyChoice
) -> None:
    model, sent = Tied(), Tied(fill=3)
    pairs = dict(sent.named_parameters() if names == "once" else sent.state_dict())
    if names == "head":
        del pairs["embed.weight"]
    receiver = ws.WeightReceiver(model, apply=apply)
    try:
        Engine.trainer_send_weights(
            pairs.items(),
            {
                "send_mode": lambda info: receiver.dispatch(UpdateRequest(update_info=info)),
                "packed": packed,
            },
        )
        assert receiver.version == 1
        assert model.head.weight is model.embed.weight
        assert all(torch.equal(p, torch.full_like(p, 3)) for p in model.parameters())
    finally:
        receiver.close()


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
def test_two_tensors_for_one_tied_place_are_refused(packed: bool) -> None:
    model, sent = Tied(), Tied(tied=False, fill=3)
    torch.nn.init.zeros_(sent.head.weight)
    receiver = ws.WeightReceiver(model)
    receiver.dispatch(StartRequest())

    def send() -> None:
        Engine.trainer_send_weights(
            sent.state_dict().items(),
            {
                "send_mode": lambda info: receiver.dispatch(UpdateRequest(update_info=info)),
                "packed": packed,
                "packed_buffer_size_bytes": 128,
            },
        )
        receiver.dispatch(FinishRequest())

    try:
        with pytest.raises(ws.ManifestMismatchError, match="wanted as one tied tensor"):
            send()
        assert receiver.version == 0
    finally:
        receiver.close()
