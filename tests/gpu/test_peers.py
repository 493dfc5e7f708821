"""A trainer and a receiver on two GPUs of a node, by a stand-in for the driver (two_gpus.py).

Not run on two GPUs: what is shown is which path is taken, that all bytes cross the link once and
arrive, and what happens where the driver refuses.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.backends.test_fused_updates import CountingKernel, alike, fill, kernel, model
from tests.gpu.two_gpus import GPUS, REFUSED, Node, install
from weightsync.backends.ipc import landing, receiver, sender
from weightsync.backends.ipc.transfer import HookFeeder
from weightsync.backends.ring import ProbeMemory
from weightsync.cuda import memory
from weightsync.cuda.memory import pick_readable
from weightsync.errors import BackendUnavailableError, HandleError
from weightsync.report import GpuPair
from weightsync.specs import Manifest, TensorSpec
from weightsync.weights.copying.copy_plan import Memory
from weightsync.weights.copying.layout import StreamLayout
from weightsync.wire.offers import CudaHandle

__all__ = ["kernel"]
pytestmark = pytest.mark.usefixtures("shm_clean")

BUCKET_NBYTES = 256 << 10
PAIR = GpuPair(trainer=GPUS[0], receiver=GPUS[1])
packings = pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
applies = pytest.mark.parametrize("apply", ["staged", "in_place"])


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    made = Node()
    install(made, monkeypatch.setattr)
    return made


@pytest.fixture
def ours() -> nn.Module:
    return model()


def connect(module: nn.Module, to: ws.WeightReceiver, **options: Any) -> ws.WeightSender:
    return ws.connect(module, to=to.handle, bucket_nbytes=BUCKET_NBYTES, **options)


def stream_nbytes(module: nn.Module, *, packed: bool) -> int:
    """Return the bytes that cross: in a bucket with the zeros between tensors."""
    manifest = ws.ModuleSource(module).manifest
    return StreamLayout(manifest).nbytes if packed else manifest.nbytes


def check_direct(report: ws.SyncReport) -> None:
    assert (report.path, report.peer) == ("cuda_ipc", True), report.skipped_paths
    assert report.receivers[0].gpus == {0: PAIR}
    assert "by cuda_ipc between GPUs (" in str(report)


@packings
@applies
@pytest.mark.parametrize("verify", [True, False])
def test_each_byte_crosses_once_and_arrives(
    node: Node, ours: nn.Module, packed: bool, apply: Any, verify: bool
) -> None:
    theirs = model()
    to = ws.WeightReceiver(theirs, apply=apply)
    with connect(ours, to, packed=packed, verify=verify) as made:
        for seed in (1, 2, 3):
            fill(ours, seed)
            before = node.crossed
            report = made.send_weights()
            check_direct(report)
            assert report.packed is packed
            assert report.verified == ("held" if verify else "none")
            assert alike(ours, theirs)
            assert node.crossed - before == stream_nbytes(ours, packed=packed)
    to.close()


@packings
def test_kernels_read_what_landed(
    node: Node, kernel: CountingKernel, ours: nn.Module, packed: bool
) -> None:
    """Fused launches copy and fingerprint memory of the receiver's own GPU."""
    theirs = model()
    to = ws.WeightReceiver(theirs)
    with connect(ours, to, packed=packed) as made:
        for seed in (1, 2):
            fill(ours, seed)
            before = node.crossed
            check_direct(made.send_weights())
            assert alike(ours, theirs)
            assert node.crossed - before == stream_nbytes(ours, packed=packed)
        fill(ours, 3)
        kernel.losing = "receiver"
        with pytest.raises(ws.VerificationError):
            made.send_weights()
        kernel.losing = ""
        made.send_weights()
        assert alike(ours, theirs)
    to.close()


@packings
@applies
def test_a_hook_is_given_what_landed(node: Node, ours: nn.Module, packed: bool, apply: Any) -> None:
    """It may write to it: it is no memory of the trainer."""
    theirs = model()
    own = dict(theirs.named_parameters())

    def load_weights(pairs: Any) -> None:
        for name, tensor in pairs:
            own[name].data.copy_(tensor)
            tensor.zero_()

    to = ws.WeightReceiver(load_weights, apply=apply)
    with connect(ours, to, packed=packed) as made:
        for seed in (1, 2):
            fill(ours, seed)
            before = node.crossed
            check_direct(made.send_weights())
            assert alike(ours, theirs)
            assert node.crossed - before == stream_nbytes(ours, packed=packed)
    to.close()


def test_what_a_hook_writes_to_is_refused_where_it_is_the_senders() -> None:
    """Tensors of the device `meta` stand for those of a GPU."""
    layout = StreamLayout(Manifest((TensorSpec("a", "uint8", (64,)),)))
    context: Any = SimpleNamespace(lends_views=True, kept_advice="")

    def load(pairs: Any) -> None:
        pairs[0][1].zero_()

    target: Any = SimpleNamespace(users_own=True, load=load, together=None)
    given = Memory([torch.empty(64, dtype=torch.uint8, device="meta")])
    HookFeeder(layout, target, context, landed=True).deliver_whole(given)
    with pytest.raises(ws.TransferError, match="on a GPU they are the memory of the sender"):
        HookFeeder(layout, target, context).deliver_whole(given)


def test_deltas_cross_too(node: Node, ours: nn.Module) -> None:
    theirs = model()
    to = ws.WeightReceiver(theirs)
    with connect(ours, to, packed=True, delta="always") as made:
        for seed in (1, 2):
            fill(ours, seed)
            made.send_weights()
        next(ours.parameters()).data += 1
        before = node.crossed
        report = made.send_weights()
        check_direct(report)
        assert report.delta is not None
        assert report.delta.sent
        assert alike(ours, theirs)
        assert 0 < node.crossed - before < stream_nbytes(ours, packed=True) / 10
    to.close()


UNSEEN = "which the receiver does not see (CUDA_VISIBLE_DEVICES, its container)"
REASONS: list[tuple[dict[str, Any], str]] = [
    ({"seen": (GPUS[1],)}, f"the trainer on {GPUS[0]}, {UNSEEN}"),
    (
        {"apart": [frozenset(GPUS[:2])]},
        f"no peer access between {GPUS[1]} and {GPUS[0]} (cudaDeviceCanAccessPeer)",
    ),
    ({"no_cuda_ipc": "the GPU is a MIG slice"}, "the GPU is a MIG slice"),
    ({"receiver": "MIG-1", "seen": ("MIG-1", GPUS[0])}, "a MIG slice reads no memory"),
]


@pytest.mark.parametrize(("changes", "why"), REASONS, ids=["hidden", "no peers", "mig", "on mig"])
def test_a_gpu_that_cannot_be_read_is_reached_through_the_host(
    node: Node, ours: nn.Module, changes: dict[str, Any], why: str
) -> None:
    for name, value in changes.items():
        setattr(node, name, value)
    theirs = model()
    to = ws.WeightReceiver(theirs)
    with connect(ours, to) as made:
        fill(ours, 1)
        report = made.send_weights()
        assert (report.path, report.peer) == ("shared_memory", False)
        assert why in report.skipped_paths["cuda_ipc"]
        assert report.receivers[0].gpus == {}
        assert alike(ours, theirs)
        assert node.copies == 0
    to.close()


@packings
@applies
def test_a_driver_that_refuses_in_an_update_costs_the_path(
    node: Node, ours: nn.Module, packed: bool, apply: Any
) -> None:
    theirs = model()
    to = ws.WeightReceiver(theirs, apply=apply)
    with connect(ours, to, packed=packed) as made:
        fill(ours, 1)
        check_direct(made.send_weights())
        node.fails = node.copies + 3
        fill(ours, 2)
        report = made.send_weights()
        assert report.path == "shared_memory"
        assert REFUSED in report.skipped_paths["cuda_ipc"]
        assert "\n" not in report.skipped_paths["cuda_ipc"]
        assert alike(ours, theirs)
        node.fails = None
        fill(ours, 3)
        assert made.send_weights().path == "shared_memory"  # not tried again
        assert alike(ours, theirs)
    to.close()


def test_nothing_is_half_updated_where_the_update_cannot_be_sent_again(
    node: Node, ours: nn.Module
) -> None:
    """In a block the caller's tensors are sent once: a typed error, and the former weights."""
    theirs = model()
    to = ws.WeightReceiver(theirs)
    with connect(ours, to, packed=True) as made:
        fill(ours, 1)
        made.send_weights()
        held = [parameter.data.clone() for parameter in theirs.parameters()]
        node.fails = node.copies + 3
        fill(ours, 2)
        with pytest.raises(HandleError, match="cannot read the memory of GPU"), made.update() as up:
            up.send(ours.named_parameters())
        with to.reading() as version:
            assert version == 1
            for parameter, before in zip(theirs.parameters(), held, strict=True):
                assert torch.equal(parameter.data.view(torch.int16), before.view(torch.int16))
        assert made.send_weights().path == "shared_memory"
        assert alike(ours, theirs)
    to.close()


def test_bytes_that_the_link_changes_are_found(node: Node, ours: nn.Module) -> None:
    """Drivers report peer access of links that lose writes: the fingerprint is of what landed."""
    theirs = model()
    to = ws.WeightReceiver(theirs)
    read = node.read
    with connect(ours, to, packed=False) as made:
        fill(ours, 1)
        made.send_weights()
        held = [parameter.data.clone() for parameter in theirs.parameters()]

        def lose(source: torch.Tensor) -> None:
            read(source)
            source[-1] ^= 1

        node.read = lose  # type: ignore[method-assign]
        fill(ours, 2)
        with pytest.raises(ws.VerificationError):
            made.send_weights()
        for parameter, before in zip(theirs.parameters(), held, strict=True):
            assert torch.equal(parameter.data.view(torch.int16), before.view(torch.int16))
    to.close()


class TestMemoryThatIsFull:
    """No room on one of the GPUs: the next path, with the reason."""

    def sent(self, ours: nn.Module, **options: Any) -> ws.SyncReport:
        theirs = model()
        to = ws.WeightReceiver(theirs)
        with connect(ours, to, **options) as made:
            fill(ours, 1)
            report = made.send_weights()
            assert alike(ours, theirs)
        to.close()
        assert report.path == "shared_memory"
        return report

    @packings
    def test_the_receivers_two_buffers(
        self, node: Node, ours: nn.Module, packed: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Full(landing.Landing):
            def __init__(self, device: torch.device, peer: str, nbytes: int) -> None:
                del nbytes
                super().__init__(device, peer, 1 << 62)

        def empty(*size: int, **options: Any) -> torch.Tensor:
            if size[0] >= 1 << 60:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4 EiB")
            return plain(*size, **options)

        plain = torch.empty
        monkeypatch.setattr(receiver, "Landing", Full)
        monkeypatch.setattr(torch, "empty", empty)
        why = self.sent(ours, packed=packed).skipped_paths["cuda_ipc"]
        assert f"bytes left, in which memory of GPU {GPUS[0]} would land" in why

    def test_the_trainers_ring(
        self, node: Node, ours: nn.Module, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begin: Any = vars(sender)["Ring"]

        def full(shape: Any, device: Any, probe: Any) -> Any:
            if probe is not None:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
            return begin(shape, device, probe)

        monkeypatch.setattr(sender, "Ring", full)
        why = self.sent(ours, packed=True).skipped_paths["cuda_ipc"]
        assert "CUDA out of memory. Tried to allocate 1 GiB" in why

    def test_a_backend_without_another_path_raises(
        self, node: Node, ours: nn.Module, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(sender, "Ring", full)
        to = ws.WeightReceiver(model())
        with pytest.raises(BackendUnavailableError, match="CUDA out of memory"):
            connect(ours, to, backend="ipc")
        to.close()


class TestHandles:
    KEYS = (GPUS[1], "HOST-1")

    @pytest.fixture
    def handle(self, node: Node) -> CudaHandle:
        return node.export(torch.zeros(64, dtype=torch.uint8))

    def test_of_a_gpu_that_is_not_seen(self, node: Node, handle: CudaHandle) -> None:
        node.seen = (GPUS[1],)
        with pytest.raises(HandleError, match=f"does not see GPU {GPUS[0]} .CUDA_VISIBLE_DEVICES"):
            pick_readable({GPUS[0]: handle}, self.KEYS)

    def test_that_are_offered_for_another_gpu(self, node: Node, handle: CudaHandle) -> None:
        with pytest.raises(HandleError, match=f"it is of GPU {GPUS[0]}, and offered for {GPUS[2]}"):
            pick_readable({GPUS[2]: handle}, self.KEYS)

    def test_by_a_receiver_on_the_cpu(self, node: Node, handle: CudaHandle) -> None:
        with pytest.raises(HandleError, match="no handle for this process"):
            pick_readable({GPUS[0]: handle}, ["HOST-1"])

    def test_a_probe_that_comes_with_other_bytes(
        self, node: Node, ours: nn.Module, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain = torch.Tensor.to

        def lossy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            made = plain(tensor, *args, **kwargs).clone()
            return made.zero_() if tensor.dtype is torch.uint8 else made

        theirs = model()
        to = ws.WeightReceiver(theirs)
        monkeypatch.setattr(torch.Tensor, "to", lossy)
        made = connect(ours, to)
        monkeypatch.undo()
        assert made.path == "shared_memory"
        made.close()
        to.close()


def test_the_order_of_gpus_in_a_process_does_not_matter(node: Node, ours: nn.Module) -> None:
    """CUDA_VISIBLE_DEVICES numbers the GPUs of each process anew: UUIDs tell which is which."""
    node.seen = (GPUS[3], GPUS[0], GPUS[1])
    theirs = model()
    to = ws.WeightReceiver(theirs)
    with connect(ours, to) as made:
        fill(ours, 1)
        check_direct(made.send_weights())
        assert alike(ours, theirs)
    to.close()


def test_probes_are_small() -> None:
    """The stand-in fills a mirror of a probe at once, and no other."""
    probe = ProbeMemory()
    assert probe.info().nbytes == memory.PROBE_NBYTES
    probe.close()
