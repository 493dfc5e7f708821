"""All of CUDA handles that can be known without a GPU; tests/gpu moves bytes with them."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch.multiprocessing import reductions

from weightsync.cuda import handles
from weightsync.cuda.handles import (
    check_torch,
    collect,
    export,
    local_gpu_keys,
    normal_key,
    open_handle,
    why_not,
    withdraw,
)
from weightsync.errors import BackendUnavailableError, ConfigError, HandleError
from weightsync.wire.offers import CudaHandle

UUID = "a8f1c3d2-0b4e-4f6a-9c7d-1e2f3a4b5c6d"
KEY = f"GPU-{UUID}"
GIB = 1 << 30

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")


def handle(**changes: object) -> CudaHandle:
    """Return a handle as torch 2.13 would make it, but for `changes`."""
    whole = CudaHandle(
        device=KEY,
        nbytes=4096,
        handle=b"\x03c" + bytes(range(64)),
        base_offset=512,
        ref_counter_handle=b"/torch_4711_2869133711_0",
        ref_counter_offset=17,
        event_handle=bytes(64),
        event_sync_required=True,
    )
    return msgspec.structs.replace(whole, **changes)


# The device key


@pytest.mark.parametrize(
    ("given", "key"),
    [
        (UUID, KEY),
        (KEY, KEY),
        (UUID.upper(), KEY),
        (f"GPU-{UUID.upper()}", KEY),
        (f" {UUID}\n", KEY),
        (f"MIG-{UUID}", f"MIG-{UUID}"),
        ("MIG-GPU-5c6d/7/0", "MIG-GPU-5c6d/7/0"),
    ],
)
def test_ids_have_one_normal_form(given: str, key: str) -> None:
    assert normal_key(given) == key
    assert normal_key(key) == key


@pytest.mark.parametrize("given", ["", "GPU-", "0", "cuda:0", UUID[:-1], f"GPU-GPU-{UUID}"])
def test_what_is_no_id_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="is not a GPU id; give GPU-<uuid>"):
        normal_key(given)


# What torch is expected to be


def test_this_torch_is_known() -> None:
    check_torch()


def other_rebuild(tensor_cls: type, storage: object, fabric_token: bytes) -> None: ...


def test_another_torch_is_refused_with_its_version() -> None:
    with pytest.raises(BackendUnavailableError) as caught:
        check_torch(other_rebuild)
    message = str(caught.value)
    assert f"torch {torch.__version__} " in message
    assert "new: storage, fabric_token;" in message
    assert "gone: tensor_size," in message
    assert "torch 2.11 to 2.13" in message


def test_the_same_parameters_in_another_order_are_refused() -> None:
    parameters = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters.values())
    parameters[7], parameters[8] = parameters[8], parameters[7]

    def rebuild() -> None: ...

    rebuild.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # read by inspect
    with pytest.raises(BackendUnavailableError):
        check_torch(rebuild)


def calls_of(function: Callable[..., object], attribute: str) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(inspect.getsource(function))):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == attribute:
            yield node


def test_torch_opens_storages_with_our_fields_in_our_order() -> None:
    (call,) = calls_of(reductions.rebuild_cuda_tensor, "_new_shared_cuda")
    assert tuple(map(ast.unparse, call.args)) == handles._SHARED_FIELDS


def test_torch_reads_its_own_tuple_in_our_order() -> None:
    tree = ast.parse(inspect.getsource(reductions.reduce_tensor))
    (assignment,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and "_share_cuda_()" in ast.unparse(node.value)
    )
    (target,) = assignment.targets
    assert isinstance(target, ast.Tuple)
    read = [ast.unparse(name) for name in target.elts]
    # There the first two go without the prefix.
    assert ("storage_device", "storage_handle", *read[2:]) == handles._SHARED_FIELDS
    assert read[:2] == ["device", "handle"]


# Torch's tuple and our handle


TUPLE = (3, b"\x02c" + bytes(64), 8192, 1024, b"/torch_1_2_3", 9, bytes(64), True)


def test_a_tuple_becomes_a_handle_of_the_view() -> None:
    made = handles._to_handle(TUPLE, KEY, offset=256, nbytes=512)
    assert made == CudaHandle(
        device=KEY,
        nbytes=512,
        handle=TUPLE[1],
        base_offset=1280,
        ref_counter_handle=b"/torch_1_2_3",
        ref_counter_offset=9,
        event_handle=bytes(64),
        event_sync_required=True,
    )


def test_a_handle_becomes_the_tuple_with_the_local_ordinal() -> None:
    made = handles._to_handle(TUPLE, KEY, offset=0, nbytes=8192)
    assert handles._to_fields(made, 5) == (5, *TUPLE[1:])


@pytest.mark.parametrize("length", [7, 9])
def test_a_tuple_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(BackendUnavailableError, match=f"with {length} values.*knows 8"):
        handles._to_handle((*TUPLE, 0)[:length], KEY, offset=0, nbytes=1)


def test_a_handle_survives_the_wire() -> None:
    sent = handle()
    assert msgspec.json.decode(msgspec.json.encode(sent), type=CudaHandle) == sent


# Malformed handles


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"handle": b""}, "memory handle of 0 bytes"),
        ({"handle": bytes(64)}, "memory handle of 64 bytes"),
        ({"handle": b"\x02c" + bytes(63)}, "has 66 bytes, this has 65"),
        ({"handle": b"\x02c" + bytes(65)}, "has 66 bytes, this has 67"),
        ({"handle": b"\x02x" + bytes(64)}, "kind b'x' is unknown"),
        (
            {"handle": b"\x02e" + bytes(24)},
            "expandable segment has at most 1024 bytes, this has 26",
        ),
        ({"handle": b"\x02e" + bytes(1024)}, "at most 1024 bytes, this has 1026"),
        ({"event_handle": b""}, "event handle has 64 bytes, this has 0"),
        ({"event_handle": bytes(65)}, "this has 65"),
        ({"ref_counter_handle": b""}, "is not a file of counters"),
        ({"ref_counter_handle": b"/torch_1_2_3/../../etc"}, "is not a file of counters"),
        ({"ref_counter_handle": b"/weightsync-00"}, "is not a file of counters"),
        ({"ref_counter_handle": b"/torch_1_2\0"}, "is not a file of counters"),
        ({"ref_counter_handle": b"/torch_1_" + b"1" * 60}, "is not a file of counters"),
        ({"ref_counter_offset": -1}, "counter -1 is not among 10000"),
        ({"ref_counter_offset": 10_000}, "counter 10000 is not"),
        ({"nbytes": 0}, "nbytes is 0"),
        ({"nbytes": 1 << 63}, f"nbytes is {1 << 63}"),
        ({"base_offset": -1}, "base_offset is -1"),
        ({"base_offset": 1 << 63}, "base_offset is"),
        ({"offset": 4097}, "offset 4097 lies outside 4096 bytes"),
        ({"offset": -1}, "offset -1 lies outside"),
    ],
)
def test_malformed_handles_are_refused_before_anything_is_opened(
    changes: dict[str, object], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> dict[str, int]:
        raise AssertionError("a malformed handle got as far as the GPU")

    monkeypatch.setattr(handles, "local_gpu_keys", refuse)
    with pytest.raises(HandleError, match=r"^malformed CUDA handle: ") as caught:
        open_handle(handle(**changes))
    assert fault in str(caught.value)


def test_all_faults_are_listed_at_once() -> None:
    with pytest.raises(HandleError) as caught:
        open_handle(handle(handle=b"", event_handle=b"", nbytes=0))
    assert str(caught.value).count(";") == 3


@pytest.mark.parametrize(
    "memory",
    [
        b"\x02c" + bytes(64),
        b"\x03c" + bytes(64),
        b"\x03e" + bytes(24 + 4),
        b"\x03e" + bytes(24 + 64 * 3),
    ],
)
def test_handles_of_every_known_torch_pass(memory: bytes) -> None:
    handles._check_fields(handle(handle=memory))


def test_a_counter_file_without_a_serial_number_passes() -> None:
    handles._check_fields(handle(ref_counter_handle=b"/torch_1_2"))


def test_memory_that_ends_outside_the_gpu_is_refused() -> None:
    handles._check_fits(handle(base_offset=GIB - 4096), GIB)
    with pytest.raises(HandleError, match=f"ends at byte {GIB + 1} .* has {GIB} bytes"):
        handles._check_fits(handle(base_offset=GIB - 4095), GIB)


# This process's GPUs


def test_a_foreign_gpus_handle_is_refused_listing_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {f"GPU-{UUID[:-1]}0": 0, f"GPU-{UUID[:-1]}1": 1}
    monkeypatch.setattr(handles, "local_gpu_keys", lambda: ours)
    with pytest.raises(HandleError) as caught:
        open_handle(handle())
    assert f"for GPU {KEY}, this process sees {', '.join(ours)};" in str(caught.value)


@without_cuda
def test_without_cuda_there_are_no_keys() -> None:
    assert local_gpu_keys() == {}
    with pytest.raises(HandleError, match=f"for GPU {KEY}, this process sees none"):
        open_handle(handle())


@without_cuda
def test_torchs_own_refusal_becomes_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "local_gpu_keys", lambda: {KEY: 0})
    with pytest.raises(HandleError, match=r"^opening CUDA memory of another process failed: ") as e:
        open_handle(handle())
    assert isinstance(e.value.__cause__, RuntimeError | AssertionError)


@without_cuda
def test_withdraw_without_cuda_is_an_error_of_ours() -> None:
    with pytest.raises(HandleError, match=r"^withdrawing an export failed: "):
        withdraw(handle())


def test_importing_and_asking_initialises_nothing() -> None:
    script = (
        "import torch\n"
        "from weightsync.cuda import handles\n"
        "assert not torch.cuda.is_initialized()\n"
        "handles.check_torch()\n"
        "handles.why_not()\n"
        "handles.collect()\n"
        "assert not torch.cuda.is_initialized()\n"
        "if not torch.cuda.is_available():\n"
        "    assert handles.local_gpu_keys() == {}\n"
        "    assert not torch.cuda.is_initialized()\n"
        "print('nothing')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout == "nothing\n", done.stderr


def test_collect_is_harmless() -> None:
    collect()
    collect()


# Export


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(8, dtype=torch.uint8),
        torch.zeros(8, dtype=torch.uint8, device="meta"),
        torch.zeros(8),
        torch.zeros(0, dtype=torch.uint8),
    ],
    ids=["cpu", "meta", "float32", "empty"],
)
def test_only_gpu_bytes_are_exported(tensor: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="only a contiguous uint8 tensor on a GPU") as caught:
        export(tensor)
    assert str(tensor.dtype) in str(caught.value)
    assert str(tensor.device) in str(caught.value)


# Why not


@pytest.fixture
def gpu_machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let the questions about torch and its GPU be answered as on a machine that has one."""
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: False,
        "_is_in_bad_fork": lambda: False,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@without_cuda
def test_a_machine_without_cuda_says_so() -> None:
    assert "CUDA" in (why_not() or "")


def test_nothing_speaks_against_a_plain_gpu(gpu_machine: pytest.MonkeyPatch) -> None:
    assert why_not() is None


@pytest.mark.parametrize(
    ("variables", "culprit"),
    [
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "PYTORCH_CUDA_ALLOC_CONF"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "PYTORCH_ALLOC_CONF"),
        (
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: True"},
            "PYTORCH_ALLOC_CONF",
        ),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": ""}, None),
        (
            {
                "PYTORCH_ALLOC_CONF": "expandable_segments:False",
                "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            },
            None,
        ),
    ],
)
def test_expandable_segments_are_seen(
    variables: dict[str, str], culprit: str | None, gpu_machine: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        gpu_machine.setenv(name, value)
    reason = why_not()
    if culprit is None:
        assert reason is None
    else:
        assert (reason or "").startswith(f"{culprit} asks for expandable segments")


def test_mig_is_seen_by_its_id_and_by_the_gpus_name(gpu_machine: pytest.MonkeyPatch) -> None:
    gpu_machine.setenv("CUDA_VISIBLE_DEVICES", f"MIG-{UUID}")
    assert "MIG" in (why_not() or "")
    gpu_machine.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert why_not() is None
    gpu_machine.setattr(torch.cuda, "is_initialized", lambda: True)
    gpu_machine.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200 MIG 1g.18gb")
    assert "MIG" in (why_not() or "")


def test_a_child_forked_after_cuda_began_has_no_gpu(gpu_machine: pytest.MonkeyPatch) -> None:
    gpu_machine.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert "spawn" in (why_not() or "")
    assert local_gpu_keys() == {}


def test_every_visible_gpu_has_its_ordinal(gpu_machine: pytest.MonkeyPatch) -> None:
    uuids = [UUID, f"GPU-{UUID[:-1]}e"]

    class Properties:
        def __init__(self, ordinal: int) -> None:
            self.uuid = uuids[ordinal]

    gpu_machine.setattr(torch.cuda, "device_count", lambda: 2)
    gpu_machine.setattr(torch.cuda, "get_device_properties", Properties)
    assert local_gpu_keys() == {KEY: 0, f"GPU-{UUID[:-1]}e": 1}
