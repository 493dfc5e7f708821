"""Malformed and hostile messages: a typed error, weights untouched, and the next update works."""

from __future__ import annotations

import copy
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

import weightsync as ws
from tests.e2e import models
from tests.e2e.models import digests
from tests.e2e.processes import Host, Remote
from weightsync.backends.ring import HOST_BUCKET_NBYTES, HOST_BUCKETS
from weightsync.shm.host_keys import host_key
from weightsync.shm.segment import Segment

Plain = dict[str, Any]
SHM = Path("/dev/shm")


def offer(segment: Segment) -> Plain:
    """A whole `plain` model in one message, which the receiver would take as it is."""
    model = models.make("plain", seed=5)
    names, shapes, handles, at = [], [], [], 0
    for name, tensor in model.state_dict().items():
        nbytes = tensor.numel() * 4
        segment.tensor(at, nbytes).copy_(tensor.reshape(-1).view(torch.uint8))
        names.append(name)
        shapes.append(list(tensor.shape))
        handles.append({host_key(): handle(segment.name, segment.nbytes, at)})
        at += nbytes
    return {
        "names": names,
        "dtype_names": ["float32"] * len(names),
        "shapes": shapes,
        "ipc_handles": handles,
    }


def handle(name: str, nbytes: int, offset: int = 0) -> Plain:
    return {"kind": "segment", "name": name, "nbytes": nbytes, "offset": offset}


def body(info: Plain, **more: object) -> Plain:
    return {"update_info": info, **more}


def put(path: list[Any], value: object) -> Callable[[Plain], Plain]:
    """Return a change of the update_info: `value` at `path`."""

    def change(info: Plain) -> Plain:
        place: Any = info
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        return body(info)

    return change


def in_first_handle(**fields: object) -> Callable[[Plain], Plain]:
    def change(info: Plain) -> Plain:
        info["ipc_handles"][0][host_key()].update(fields)
        return body(info)

    return change


CUDA = {
    "kind": "cuda",
    "device": "GPU-00000000-0000-0000-0000-000000000000",
    "nbytes": 8000,
    "handle": "AAAA",
    "base_offset": 0,
    "ref_counter_handle": "AAAA",
    "ref_counter_offset": 0,
    "event_handle": "AAAA",
    "event_sync_required": False,
}

BAD_UPDATES: dict[str, tuple[Callable[[Plain], Plain], type[ws.WeightSyncError], str]] = {
    "unknown field": (lambda i: body({**i, "extra": 1}), ws.ProtocolError, "extra"),
    "unknown field outside": (lambda i: body(i, extra=1), ws.ProtocolError, "extra"),
    "wrong type": (put(["names"], "large"), ws.ProtocolError, r"\$\.names"),
    "a number for a name": (put(["names", 0], 7), ws.ProtocolError, r"\$\.names\[0\]"),
    "no update_info": (lambda _: {}, ws.ProtocolError, "update_info"),
    "null": (lambda _: {"update_info": 3}, ws.ProtocolError, "valid"),
    "unequal lengths": (put(["dtype_names"], ["float32"]), ws.ProtocolError, "25.*has 1"),
    "unequal handles": (put(["ipc_handles"], []), ws.ProtocolError, "25.*has 0"),
    "unknown dtype": (put(["dtype_names", 0], "float31"), ws.ProtocolError, "float31"),
    "pickled dtype": (put(["dtype_names", 0], "os.system"), ws.ProtocolError, "unknown dtype"),
    "negative shape": (put(["shapes", 0], [-1, 2]), ws.ProtocolError, r"\$\.shapes\[0\]"),
    "overflowing shape": (put(["shapes", 0], [2**62, 2**62]), ws.ProtocolError, "too many"),
    "overflow around zero": (
        put(["shapes", 0], [2**62, 2**62, 0]),
        ws.ProtocolError,
        "too many",
    ),
    "shape beyond 64 bits": (put(["shapes", 0], [2**80]), ws.ProtocolError, "shapes"),
    "another shape": (put(["shapes", 0], [3]), ws.ManifestMismatchError, "mismatched"),
    "a name twice": (put(["names", 1], "large"), ws.ProtocolError, "twice"),
    "a foreign name": (put(["names", 0], "nowhere"), ws.ManifestMismatchError, "nowhere"),
    "an endless name": (put(["names", 0], "x" * 5000), ws.ProtocolError, "names"),
    "beyond the segment": (in_first_handle(offset=1 << 40), ws.HandleError, "outside"),
    "ends beyond the segment": (in_first_handle(offset=(1 << 20) - 4), ws.HandleError, "outside"),
    "negative offset": (in_first_handle(offset=-64), ws.ProtocolError, "offset"),
    "wrong segment size": (in_first_handle(nbytes=64), ws.SegmentError, "bytes where"),
    "empty segment": (in_first_handle(nbytes=0), ws.ConfigError, "positive size"),
    "a path": (in_first_handle(name="../../etc/passwd"), ws.HandleError, "not the name"),
    "an absolute path": (in_first_handle(name="/etc/passwd"), ws.HandleError, "not the name"),
    "a newline": (
        in_first_handle(name=f"weightsync-{'0' * 32}\n"),
        ws.HandleError,
        "not the name",
    ),
    "no such segment": (
        in_first_handle(name=f"weightsync-{'0' * 32}"),
        ws.SegmentError,
        "No such file",
    ),
    "another GPU": (put(["ipc_handles", 0], {CUDA["device"]: CUDA}), ws.HandleError, "GPU-0000"),
    "no handle": (put(["ipc_handles", 0], {}), ws.HandleError, "offered for no key"),
    "pickled payload": (
        lambda i: body({"names": i["names"], "ipc_handles_pickled": "gASVKA=="}),
        ws.ProtocolError,
        "a pickle runs code",
    ),
    "unknown update_id": (
        lambda i: body(i, update_id="never started"),
        ws.UpdateConflictError,
        "no update is open",
    ),
    "unknown sender": (
        lambda _: body({"registered": True, "sender": "s", "epoch": 1}),
        ws.ProtocolError,
        "not known",
    ),
    "wrong fingerprints": (
        lambda i: body({**i, "fingerprints": ["0" * 16] * len(i["names"])}),
        ws.VerificationError,
        "large",
    ),
    "packed without sizes": (
        lambda i: body({**i, "packed": True, "ipc_handles": i["ipc_handles"][0]}),
        ws.ProtocolError,
        "tensor_sizes",
    ),
    "packed with wrong sizes": (
        lambda i: body(
            {
                **i,
                "packed": True,
                "ipc_handles": i["ipc_handles"][0],
                "tensor_sizes": [1] * len(i["names"]),
            }
        ),
        ws.HandleError,
        "tensor_sizes says 1",
    ),
}


def refuse(
    receiver: Remote, call: str, message: object, kind: type[ws.WeightSyncError], told: str
) -> None:
    """The message is refused by both ways in: the same class, over HTTP as a 4xx document."""
    with pytest.raises(kind, match=told):
        receiver.call(call, message)
    answer = requests.post(f"{receiver.url}/{call}", json=message, timeout=30)
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.headers["content-type"].startswith("application/problem+json")
    assert issubclass(getattr(ws, answer.json()["error"]), kind)


@contextmanager
def untouched(receiver: Remote) -> Iterator[None]:
    """The weights stay, bit for bit, through the block, and the next good update works."""
    held, version = receiver.digests(), receiver.reading()
    yield
    assert receiver.digests() == held
    assert receiver.reading() == version
    assert receiver.status()["state"] == "READY"
    model = models.make("plain", seed=9)
    with ws.connect(model, to=receiver.url, takeover=True) as sender:
        sender.send_weights()
        assert receiver.digests() == digests(model)


@pytest.mark.parametrize("case", BAD_UPDATES)
def test_sglang_30165_a_malformed_update_is_refused(host: Host, case: str) -> None:
    """In place, where a byte that is written cannot be taken back."""
    change, kind, told = BAD_UPDATES[case]
    receiver = host.receiver(apply="in_place", model="plain")
    with Segment.create(1 << 20) as segment, untouched(receiver):
        refuse(receiver, "update_weights", change(copy.deepcopy(offer(segment))), kind, told)


@pytest.mark.parametrize("kind", ["link", "fifo", "directory", "foreign"])
def test_only_our_own_regular_files_are_opened(host: Host, kind: str) -> None:
    path = SHM / f"weightsync-{secrets.token_hex(16)}"
    target = SHM / f"target-{secrets.token_hex(8)}"
    receiver = host.receiver(model="plain")
    if kind == "foreign" and os.geteuid() != 0:
        pytest.skip("only root can make a file of another user")
    with Segment.create(1 << 20) as segment, untouched(receiver):
        try:
            if kind == "fifo":
                os.mkfifo(path)
            elif kind == "directory":
                path.mkdir()
            else:
                (target if kind == "link" else path).write_bytes(bytes(1 << 20))
            if kind == "link":
                path.symlink_to(target)
            if kind == "foreign":
                os.chown(path, 12345, 12345)
            bad = in_first_handle(name=path.name)(offer(segment))
            refuse(receiver, "update_weights", bad, ws.SegmentError, path.name)
        finally:
            target.unlink(missing_ok=True)
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)


@pytest.mark.parametrize("shape", [[2**62, 2**62, 0], [0, 2**62], [2**40]])
def test_a_hook_is_never_given_a_shape_that_makes_no_tensor(host: Host, shape: list[int]) -> None:
    receiver = host.receiver(model="plain", sink="hook", apply="in_place")
    with Segment.create(1 << 20) as segment, untouched(receiver):
        bad = put(["shapes", 0], shape)(offer(segment))
        refuse(receiver, "update_weights", bad, ws.WeightSyncError, "too many|outside")


def of_payload(path: str, value: object) -> Callable[[Plain], None]:
    return set_in(f"payload.{path}", value)


def set_in(path: str, value: object) -> Callable[[Plain], None]:
    *way, last = path.split(".")

    def change(info: Plain) -> None:
        place: Any = info
        for key in way:
            place = place[next(iter(place))] if key == "*" else place[key]
        place[last] = value

    return change


BAD_INITS: dict[str, tuple[Callable[[Plain], None], type[ws.WeightSyncError], str]] = {
    "wrong probe": (of_payload("probe.digest", "0" * 32), ws.HandleError, "probe"),
    "no such probe": (of_payload("probe.handle", {}), ws.HandleError, "offered for no key"),
    "reader out of range": (of_payload("reader", 68), ws.HandleError, "no reader 68"),
    "too many buckets": (of_payload("ring.num_buckets", 900), ws.HandleError, "control segment"),
    "buckets too large": (of_payload("ring.bucket_nbytes", 1 << 30), ws.HandleError, "outside"),
    "buckets of odd size": (of_payload("ring.bucket_nbytes", 100), ws.ConfigError, "multiple"),
    "control too small": (of_payload("control.nbytes", 64), ws.HandleError, "control segment"),
    "too many fingerprints": (
        of_payload("entries", 1 << 20),
        ws.HandleError,
        "control segment",
    ),
    "storage out of range": (
        of_payload("storages.storage", [9] * 25),
        ws.HandleError,
        "storage 9",
    ),
    "offsets beyond": (
        of_payload("storages.offset", [1 << 50] * 25),
        ws.HandleError,
        "outside",
    ),
    "too few offsets": (of_payload("storages.offset", [0]), ws.HandleError, "1 offsets"),
    "units of odd size": (of_payload("unit_nbytes", (1 << 20) + 1), ws.ConfigError, "multiple"),
    "terabytes": (set_in("manifest.shapes", [[1 << 40]] * 25), ws.HandleError, "has room for"),
    "an offer never made": (
        set_in("generation", 1 << 40),
        ws.HandleError,
        "not one of the sender's",
    ),
    "other protocol": (set_in("protocol_min", 2), ws.ProtocolError, "2 to 1, which is no range"),
    "unknown backend": (set_in("backend", "pigeon"), ws.BackendUnavailableError, "'pigeon'"),
    "a backend that is no name": (set_in("backend", "a/../b"), ws.ProtocolError, "backend"),
    "no payload": (set_in("payload", None), ws.ProtocolError, "IpcInit"),
    "another backend's payload": (set_in("backend", "tcp"), ws.ProtocolError, "TcpInit"),
    "unknown field of the payload": (of_payload("extra", 1), ws.ProtocolError, "extra"),
    "unknown field": (set_in("extra", 1), ws.ProtocolError, "extra"),
    "no lease": (set_in("lease_s", 0), ws.ProtocolError, "lease_s"),
    "foreign tensors": (
        set_in("manifest.names", [f"t{i}" for i in range(25)]),
        ws.ProtocolError,
        "t0",
    ),
}


@pytest.mark.parametrize("case", BAD_INITS)
def test_a_malformed_init_is_refused(host: Host, case: str) -> None:
    change, kind, told = BAD_INITS[case]
    receiver = host.receiver(model="plain")
    seen: list[Plain] = []

    def listen(message: Any) -> object:
        seen.append(copy.deepcopy(message))
        return receiver(message)

    with ws.connect(models.make("plain", seed=5), to=listen, packed=False), untouched(receiver):
        info = next(m["body"]["init_info"] for m in seen if "init_info" in m["body"])
        info["sender"] = "another"
        change(info)
        refuse(receiver, "init_weight_transfer_engine", {"init_info": info}, kind, told)


def test_skyrl_1605_a_second_start_is_refused_and_names_the_holder(host: Host) -> None:
    receiver = host.receiver(model="plain")
    with untouched(receiver):
        receiver.call("start_weight_update", {"update_id": "first"})
        refuse(
            receiver,
            "start_weight_update",
            {"update_id": "second"},
            ws.UpdateConflictError,
            "first",
        )
        for call in ("prepare_weight_update", "finish_weight_update", "abort_weight_update"):
            refuse(receiver, call, {"update_id": "second"}, ws.UpdateConflictError, "second")
        receiver.call("abort_weight_update", {"update_id": "first"})


def test_repeated_versions_and_wrong_digests_are_refused(host: Host) -> None:
    receiver = host.receiver(model="plain")
    seen: list[Plain] = []

    def listen(message: Any) -> object:
        seen.append(copy.deepcopy(message))
        return receiver(message)

    with ws.connect(models.make("plain", seed=5), to=listen) as sender:
        sender.send_weights(version=3)
        with untouched(receiver):
            again = {"update_id": "again", "version": 3}
            refuse(receiver, "start_weight_update", again, ws.StaleVersionError, "version 3")
            update = next(m for m in seen if m["call"] == "update_weights")["body"]
            update["update_id"] = "other"
            update["start"] = {"version": 9, "manifest_digest": "0" * 32}
            refuse(receiver, "update_weights", update, ws.ProtocolError, "manifest")
            update["start"]["manifest_digest"] = None
            update["update_info"]["epoch"] = update["update_info"]["payload"]["epoch"] = 77
            refuse(receiver, "update_weights", update, ws.TransferError, "epoch 77")


SMALL_SHM = """
import subprocess, torch
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm"], check=True)
import weightsync as ws
model = torch.nn.Linear(1024, 1024)
for packed in (True, False):
    try:
        ws.connect(model, to=ws.WeightReceiver(torch.nn.Linear(1024, 1024)).handle, packed=packed)
    except ws.SegmentError as exc:
        print(exc)
"""


def test_a_small_dev_shm_is_an_error_at_init_that_names_the_size() -> None:
    root = str(Path(ws.__path__[0]).parent)
    may = subprocess.run(
        ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /dev/shm"],
        capture_output=True,
        check=False,
        timeout=30,
    )
    if may.returncode != 0:
        pytest.skip(f"no private mounts here: {may.stderr.decode().strip()}")
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", SMALL_SHM],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": root},
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all("bytes is wanted and /dev/shm has" in line for line in lines)
    assert f"{HOST_BUCKETS * HOST_BUCKET_NBYTES} bytes" in lines[0]
