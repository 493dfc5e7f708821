"""A receiver and its messages, in one process: what it accepts, refuses, repeats and survives."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from tests.offers import offered, registered
from tests.segments import opened_since
from tests.update.test_leases import LEASE_S, let_a_lease_pass
from weightsync.backends.base import TransferOptions
from weightsync.backends.ipc.sender import IpcTrainerEngine
from weightsync.errors import (
    ConfigError,
    HandleError,
    ManifestMismatchError,
    NotReadyError,
    ProtocolError,
    StaleVersionError,
    TransferError,
    TransferTimeout,
    UpdateConflictError,
    VerificationError,
)
from weightsync.integrations.vllm.handles import HandlesUpdate
from weightsync.receiver import WeightReceiver
from weightsync.shm.host_keys import host_key
from weightsync.shm.segment import Segment, live_segments
from weightsync.specs import Manifest, TensorSpec
from weightsync.tensors import as_bytes, spec_of
from weightsync.update.lifecycle import ApplyChoice
from weightsync.weights.copying.fingerprint import mix64, to_hex
from weightsync.weights.sinks.base import HookSink
from weightsync.weights.sources.base import ModuleSource
from weightsync.wire.messages import (
    AbortRequest,
    CheckReply,
    CheckRequest,
    EmptyUpdate,
    FinishRequest,
    InitRequest,
    LabelRequest,
    PauseRequest,
    PrepareRequest,
    RegisteredUpdate,
    ResetCacheRequest,
    ResumeRequest,
    ShutdownRequest,
    StartRequest,
    StartTerms,
    StepReply,
    UpdateRequest,
)
from weightsync.wire.offers import InitInfo, KeyedHandle, SegmentHandle

WAIT_S = 20.0
SHORT_S = 0.1
Pairs = Iterable[tuple[str, torch.Tensor]]


def model(value: float = 0.0) -> nn.Module:
    made = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    fill(made, value)
    return made


def fill(module: nn.Module, value: float) -> None:
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.fill_(value)


def values(module: nn.Module) -> set[float]:
    return {float(v) for t in module.state_dict().values() for v in t.reshape(-1).tolist()}


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Trainer:
    """A sender's engine without its transport: every message is made by hand."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.sender_id = secrets.token_hex(8)
        self.engine = IpcTrainerEngine(ModuleSource(module), TransferOptions(timeout_s=WAIT_S))

    def init(self, receiver: WeightReceiver) -> None:
        receiver.dispatch(InitRequest(init_info=self.offer()))

    def offer(self) -> InitInfo:
        return offered(self.engine, sender=self.sender_id, lease_s=WAIT_S)

    def info(self, value: float) -> RegisteredUpdate:
        fill(self.module, value)
        info = self.engine.begin([0], verify=True)
        self.engine.transfer(lambda: None)
        return registered(info, sender=self.sender_id)

    def update(
        self, value: float, update_id: str, *, prepare: bool = True, **terms: object
    ) -> UpdateRequest:
        return UpdateRequest(
            update_id=update_id,
            start=StartTerms(**terms),  # type: ignore[arg-type]  # the fields of StartTerms
            update_info=self.info(value),
            prepare=prepare,
        )

    def send(self, receiver: WeightReceiver, value: float, update_id: str) -> StepReply:
        receiver.dispatch(self.update(value, update_id))
        return step(receiver, FinishRequest(update_id=update_id))


class Bare:
    """Updates that carry their own handles."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def info(self, pairs: Mapping[str, torch.Tensor]) -> HandlesUpdate:
        handles: list[KeyedHandle] = []
        prints = []
        for tensor in pairs.values():
            flat = as_bytes(tensor.contiguous())
            segment = self._stack.enter_context(Segment.create(flat.numel()))
            segment.tensor().copy_(flat)
            handle = SegmentHandle(name=segment.name, nbytes=segment.nbytes)
            handles.append({host_key(): handle})
            prints.append(to_hex(mix64(flat)))
        specs = [spec_of(name, tensor) for name, tensor in pairs.items()]
        return HandlesUpdate(
            names=[spec.name for spec in specs],
            dtype_names=[spec.dtype for spec in specs],
            shapes=[list(spec.shape) for spec in specs],
            ipc_handles=handles,
            fingerprints=prints,
        )


def step(receiver: WeightReceiver, request: object) -> StepReply:
    reply = receiver.dispatch(request)  # type: ignore[arg-type]  # tests send what they like
    assert isinstance(reply, StepReply)
    return reply


def state(receiver: WeightReceiver) -> tuple[str, int]:
    status = receiver.status()
    return status.state, status.version


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    before = live_segments()
    yield
    assert not opened_since(before)


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    made = Trainer(model())
    yield made
    made.engine.close()


@pytest.fixture
def served() -> nn.Module:
    return model()


@pytest.fixture
def receiver(served: nn.Module, trainer: Trainer) -> Iterator[WeightReceiver]:
    made = WeightReceiver(served, lease_s=WAIT_S)
    trainer.init(made)
    yield made
    made.close()


@pytest.fixture
def bare() -> Iterator[Bare]:
    with ExitStack() as stack:
        yield Bare(stack)


class TestSteadyUpdate:
    @pytest.mark.parametrize("apply", ["staged", "in_place"])
    def test_two_messages(self, trainer: Trainer, served: nn.Module, apply: ApplyChoice) -> None:
        receiver = WeightReceiver(served, apply=apply)
        trainer.init(receiver)
        for version in (1, 2, 3):
            reply = step(receiver, trainer.update(version, f"u{version}", version=version))
            assert (reply.state, reply.version, reply.apply) == ("PREPARED", version - 1, apply)
            reply = step(receiver, FinishRequest(update_id=f"u{version}"))
            assert (reply.state, reply.version, reply.verified) == ("READY", version, "held")
            assert reply.nbytes == trainer.engine.manifest.nbytes
            assert values(served) == {version}
        assert receiver.updates_total == {"committed": 3}
        receiver.close()

    def test_staged_weights_are_unseen_until_finish(
        self, trainer: Trainer, receiver: WeightReceiver, served: nn.Module
    ) -> None:
        receiver.dispatch(trainer.update(1, "u", version=4))
        assert values(served) == {0}
        status = receiver.status()
        assert (status.version, status.prepared_version, status.update_id) == (0, 4, "u")
        receiver.dispatch(FinishRequest(update_id="u"))
        assert values(served) == {1}
        assert receiver.status().prepared_version is None

    def test_a_wrong_digest_gives_the_update_up(
        self, trainer: Trainer, receiver: WeightReceiver, served: nn.Module
    ) -> None:
        receiver.dispatch(trainer.update(1, "u"))
        with pytest.raises(VerificationError, match="the table was changed"):
            receiver.dispatch(FinishRequest(update_id="u", table_digest="0" * 32))
        assert state(receiver) == ("READY", 0)
        assert values(served) == {0}
        digest = trainer.update(2, "v")
        receiver.dispatch(digest)
        receiver.dispatch(FinishRequest(update_id="v", table_digest=trainer.engine.table_digest))
        assert values(served) == {2}

    def test_bytes_changed_on_the_way_are_named(
        self, trainer: Trainer, receiver: WeightReceiver, served: nn.Module
    ) -> None:
        request = trainer.update(1, "u")
        with torch.no_grad():
            trainer.module.get_parameter("0.weight")[1, 2] = -1.0
        with pytest.raises(VerificationError) as caught:
            receiver.dispatch(request)
        assert "0.weight" in caught.value.names
        assert state(receiver) == ("READY", 0)
        assert values(served) == {0}
        trainer.send(receiver, 2, "v")
        assert values(served) == {2}


class TestRefusals:
    def test_a_repeated_version(self, trainer: Trainer, receiver: WeightReceiver) -> None:
        receiver.dispatch(trainer.update(1, "u", version=5))
        receiver.dispatch(FinishRequest(update_id="u"))
        with pytest.raises(StaleVersionError) as caught:
            receiver.dispatch(trainer.update(2, "v", version=5))
        assert (caught.value.held, caught.value.offered) == (5, 5)
        assert state(receiver) == ("READY", 5)

    def test_rewind(self, trainer: Trainer, receiver: WeightReceiver) -> None:
        receiver.dispatch(trainer.update(1, "u", version=5))
        receiver.dispatch(FinishRequest(update_id="u"))
        receiver.dispatch(trainer.update(2, "v", version=3, rewind=True))
        assert step(receiver, FinishRequest(update_id="v")).version == 3

    @pytest.mark.parametrize(
        "request_",
        [
            PrepareRequest(update_id="unknown"),
            FinishRequest(update_id="unknown"),
            UpdateRequest(update_id="unknown", update_info=EmptyUpdate()),
        ],
    )
    def test_an_unknown_update_id(self, receiver: WeightReceiver, request_: object) -> None:
        with pytest.raises(UpdateConflictError, match="unknown"):
            step(receiver, request_)
        assert state(receiver) == ("READY", 0)
        receiver.dispatch(StartRequest(update_id="mine"))
        with pytest.raises(UpdateConflictError) as caught:
            step(receiver, request_)
        assert caught.value.update_id == "mine"
        assert receiver.status().state == "UPDATING"

    def test_another_start_while_one_is_open(self, receiver: WeightReceiver) -> None:
        receiver.dispatch(StartRequest(update_id="mine"))
        with pytest.raises(UpdateConflictError, match="held by update mine"):
            receiver.dispatch(StartRequest(update_id="yours"))
        with pytest.raises(UpdateConflictError, match="held by update mine"):
            receiver.dispatch(StartRequest())
        assert receiver.status().update_id == "mine"

    def test_the_same_start_twice(self, receiver: WeightReceiver) -> None:
        first = step(receiver, StartRequest(update_id="mine"))
        assert step(receiver, StartRequest(update_id="mine")) == first

    @pytest.mark.parametrize(
        "request_",
        [FinishRequest(), PrepareRequest()],
    )
    def test_no_update_is_open(self, receiver: WeightReceiver, request_: object) -> None:
        with pytest.raises(UpdateConflictError, match="no update is open"):
            step(receiver, request_)

    def test_a_sender_that_never_called_init(self, trainer: Trainer) -> None:
        receiver = WeightReceiver(model())
        with pytest.raises(ProtocolError, match="init_weight_transfer_engine first"):
            receiver.dispatch(trainer.update(1, "u"))
        assert state(receiver) == ("READY", 0)

    def test_another_manifest_than_announced(
        self, trainer: Trainer, receiver: WeightReceiver
    ) -> None:
        with pytest.raises(ProtocolError, match="init again with the new manifest"):
            receiver.dispatch(trainer.update(1, "u", manifest_digest="0" * 32))
        assert state(receiver) == ("READY", 0)

    def test_shutdown_during_its_own_update(
        self, trainer: Trainer, receiver: WeightReceiver
    ) -> None:
        receiver.dispatch(trainer.update(1, "u"))
        with pytest.raises(UpdateConflictError, match="update u is open"):
            receiver.dispatch(ShutdownRequest(sender=trainer.sender_id))
        receiver.dispatch(FinishRequest(update_id="u"))
        receiver.dispatch(ShutdownRequest(sender=trainer.sender_id))
        assert receiver.shared_memory_usage() == []

    def test_a_sink_that_is_none(self) -> None:
        with pytest.raises(ConfigError, match="cannot load weights into an object of int"):
            WeightReceiver(3)  # type: ignore[arg-type]  # what a user might pass
        with pytest.raises(ConfigError, match="apply must be"):
            WeightReceiver(model(), apply="later")  # type: ignore[arg-type]


class TestSessions:
    def test_an_anonymous_session_in_pieces(self, bare: Bare, served: nn.Module) -> None:
        receiver = WeightReceiver(served)
        tensors = {n: torch.full_like(t, 3) for n, t in served.state_dict().items()}
        names = list(tensors)
        reply = step(receiver, StartRequest())
        assert reply.update_id is not None
        for part in (names[:2], names[2:]):
            info = bare.info({n: tensors[n] for n in part})
            receiver.dispatch(UpdateRequest(update_info=info))
        assert values(served) == {0}
        assert step(receiver, FinishRequest()).version == 1
        assert values(served) == {3}

    def test_a_session_that_lacks_tensors(self, bare: Bare, served: nn.Module) -> None:
        receiver = WeightReceiver(served)
        receiver.dispatch(StartRequest())
        info = bare.info({"0.bias": torch.ones(3)})
        receiver.dispatch(UpdateRequest(update_info=info))
        with pytest.raises(ManifestMismatchError) as caught:
            receiver.dispatch(FinishRequest())
        assert "0.weight" in caught.value.missing
        assert "0.bias" not in caught.value.missing
        assert state(receiver) == ("READY", 0)
        assert values(served) == {0}

    def test_a_bare_whole_model_is_an_update_of_its_own(
        self, bare: Bare, served: nn.Module
    ) -> None:
        receiver = WeightReceiver(served)
        tensors = {n: torch.full_like(t, 3) for n, t in served.state_dict().items()}
        reply = step(receiver, UpdateRequest(update_info=bare.info(tensors)))
        assert (reply.state, reply.version, reply.verified) == ("READY", 1, "held")
        assert values(served) == {3}

    def test_an_empty_update_loads_nothing(self, served: nn.Module) -> None:
        receiver = WeightReceiver(served)
        with pytest.raises(ManifestMismatchError):
            receiver.dispatch(UpdateRequest(update_info=EmptyUpdate()))
        assert state(receiver) == ("READY", 0)

    def test_finish_without_bytes(self, served: nn.Module) -> None:
        receiver = WeightReceiver(served)
        receiver.dispatch(StartRequest(update_id="u"))
        with pytest.raises(UpdateConflictError):
            receiver.dispatch(FinishRequest(update_id="u"))
        assert receiver.status().state == "UPDATING"
        with pytest.raises(ManifestMismatchError):
            receiver.dispatch(PrepareRequest(update_id="u"))
        assert state(receiver) == ("READY", 0)

    def test_a_handle_that_cannot_be_opened(self, bare: Bare, served: nn.Module) -> None:
        receiver = WeightReceiver(served)
        info = bare.info({"0.bias": torch.ones(3)})
        assert isinstance(info.ipc_handles, list)
        handles: list[KeyedHandle] = [{"HOST-elsewhere": h} for h in info.ipc_handles[0].values()]
        foreign = HandlesUpdate(
            names=info.names,
            dtype_names=info.dtype_names,
            shapes=info.shapes,
            ipc_handles=handles,
        )
        with pytest.raises(HandleError, match="offered for HOST-elsewhere"):
            receiver.dispatch(UpdateRequest(update_info=foreign))
        assert state(receiver) == ("READY", 0)

    def test_fingerprints_of_other_bytes(self, bare: Bare, served: nn.Module) -> None:
        receiver = WeightReceiver(served)
        tensors = {n: torch.full_like(t, 3) for n, t in served.state_dict().items()}
        info = bare.info(tensors)
        assert info.fingerprints is not None
        info.fingerprints[1] = "0" * 16
        with pytest.raises(VerificationError) as caught:
            receiver.dispatch(UpdateRequest(update_info=info))
        assert caught.value.names == (info.names[1],)
        assert values(served) == {0}


class TestIdempotence:
    def test_a_repeated_update_and_finish(
        self, trainer: Trainer, receiver: WeightReceiver, served: nn.Module
    ) -> None:
        request = trainer.update(1, "u", version=1)
        assert step(receiver, request) == step(receiver, request)
        first = step(receiver, FinishRequest(update_id="u"))
        fill(served, 9)  # a second load would undo this
        assert step(receiver, FinishRequest(update_id="u")) == first
        assert step(receiver, request).state == "PREPARED"
        assert values(served) == {9}
        assert state(receiver) == ("READY", 1)

    def test_a_failure_is_told_again(self, trainer: Trainer, receiver: WeightReceiver) -> None:
        request = trainer.update(1, "u", version=1)
        with torch.no_grad():
            trainer.module.get_parameter("0.bias").add_(1)
        for _ in range(2):
            with pytest.raises(VerificationError):
                receiver.dispatch(request)
        assert receiver.updates_total == {"aborted": 1}

    def test_a_retry_joins_the_call_in_flight(self, trainer: Trainer) -> None:
        entered, go = threading.Event(), threading.Event()
        calls = []

        def load(pairs: Pairs) -> None:
            calls.append(len(list(pairs)))
            entered.set()
            assert go.wait(WAIT_S)

        receiver = WeightReceiver(load, apply="in_place")
        trainer.init(receiver)
        request = trainer.update(1, "u")
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(step, receiver, request)
            assert entered.wait(WAIT_S)
            assert receiver.status().busy
            second = pool.submit(step, receiver, request)
            go.set()
            assert first.result(WAIT_S) is second.result(WAIT_S)
        assert len(calls) == 1
        receiver.dispatch(FinishRequest(update_id="u"))
        receiver.close()

    def test_abort_twice_and_of_nothing(
        self, trainer: Trainer, receiver: WeightReceiver, served: nn.Module
    ) -> None:
        receiver.dispatch(AbortRequest(update_id="never"))
        receiver.dispatch(trainer.update(1, "u"))
        for _ in range(2):
            assert step(receiver, AbortRequest(update_id="u", reason="test")).state == "READY"
        assert values(served) == {0}
        assert receiver.updates_total == {"aborted": 1}
        with pytest.raises(UpdateConflictError):
            receiver.dispatch(FinishRequest(update_id="u"))

    def test_an_abort_overtakes_its_start(self, receiver: WeightReceiver) -> None:
        receiver.dispatch(AbortRequest(update_id="u"))
        with pytest.raises(UpdateConflictError, match="under another update_id"):
            receiver.dispatch(StartRequest(update_id="u"))
        receiver.dispatch(StartRequest(update_id="v"))
        assert receiver.status().update_id == "v"

    def test_a_late_repeat_of_an_aborted_start(self, receiver: WeightReceiver) -> None:
        start = StartRequest(update_id="u", version=1)
        receiver.dispatch(start)
        receiver.dispatch(AbortRequest(update_id="u"))
        for _ in range(2):
            with pytest.raises(UpdateConflictError, match="aborted or given up"):
                receiver.dispatch(start)
        assert state(receiver) == ("READY", 0)
        receiver.dispatch(StartRequest(update_id="v", version=1))

    @pytest.mark.parametrize("prepare", [False, True])
    @pytest.mark.parametrize("apply", ["staged", "in_place"])
    def test_a_late_repeat_of_an_aborted_update(
        self, trainer: Trainer, served: nn.Module, apply: ApplyChoice, prepare: bool
    ) -> None:
        receiver = WeightReceiver(served, apply=apply)
        trainer.init(receiver)
        late = trainer.update(1, "u", prepare=prepare)
        receiver.dispatch(late)
        receiver.dispatch(AbortRequest(update_id="u"))
        held, before = values(served), state(receiver)
        with pytest.raises(UpdateConflictError, match="aborted or given up"):
            receiver.dispatch(late)
        assert (values(served), state(receiver)) == (held, before)
        assert before == (("TORN" if apply == "in_place" else "READY"), 0)
        assert trainer.send(receiver, 2, "v").state == "READY"
        assert values(served) == {2}
        receiver.close()

    def test_a_late_repeat_of_an_update_that_failed(
        self, receiver: WeightReceiver, bare: Bare
    ) -> None:
        info = bare.info({"0.bias": torch.ones(3), "nothing": torch.ones(1)})
        late = UpdateRequest(update_id="u", start=StartTerms(), update_info=info)
        with pytest.raises(ManifestMismatchError):
            receiver.dispatch(late)
        with pytest.raises(UpdateConflictError, match="aborted or given up"):
            receiver.dispatch(late)
        assert state(receiver) == ("READY", 0)

    def test_an_abort_that_comes_too_late_changes_no_answer(
        self, trainer: Trainer, receiver: WeightReceiver
    ) -> None:
        request = trainer.update(1, "u")
        first = step(receiver, request)
        receiver.dispatch(FinishRequest(update_id="u"))
        receiver.dispatch(AbortRequest(update_id="u"))
        assert step(receiver, request) == first
        assert state(receiver) == ("READY", 1)

    def test_abort_of_another_update(self, trainer: Trainer, receiver: WeightReceiver) -> None:
        receiver.dispatch(trainer.update(1, "u"))
        with pytest.raises(UpdateConflictError):
            receiver.dispatch(AbortRequest(update_id="other"))
        assert step(receiver, FinishRequest(update_id="u")).version == 1

    def test_abort_waits_for_the_loader(self, trainer: Trainer) -> None:
        entered, go = threading.Event(), threading.Event()

        def load(pairs: Pairs) -> None:
            entered.set()
            assert go.wait(WAIT_S)

        receiver = WeightReceiver(load, apply="in_place", lease_s=WAIT_S)
        trainer.init(receiver)
        with ThreadPoolExecutor(2) as pool:
            loading = pool.submit(step, receiver, trainer.update(1, "u"))
            assert entered.wait(WAIT_S)
            aborting = pool.submit(step, receiver, AbortRequest(update_id="u"))
            until(lambda: receiver.status().state == "ABORTING")
            assert not aborting.done()
            go.set()
            assert aborting.result(WAIT_S).state == "TORN"
            assert isinstance(loading.exception(WAIT_S), (TransferError, UpdateConflictError))
        receiver.close()


class TestFleet:
    def joining(self, trainer: Trainer, receiver: WeightReceiver, fleet: int) -> None:
        info = trainer.offer()
        receiver.dispatch(InitRequest(init_info=replace(info, fleet_version=fleet)))

    def test_memory_may_be_withdrawn_without_leaving(
        self, trainer: Trainer, receiver: WeightReceiver
    ) -> None:
        self.joining(trainer, receiver, 9)
        sender = trainer.sender_id
        receiver.dispatch(ShutdownRequest(sender=sender, leaves=False))
        assert state(receiver) == ("CATCHING_UP", 0)
        assert receiver.shared_memory_usage() == []
        with pytest.raises(NotReadyError, match="holds version 9"), receiver.reading():
            pass
        receiver.dispatch(ShutdownRequest(sender=sender))
        assert state(receiver) == ("READY", 0)

    def test_a_fleet_met_during_an_update_of_another(
        self, trainer: Trainer, receiver: WeightReceiver
    ) -> None:
        other = Trainer(model())
        try:
            receiver.dispatch(trainer.update(1, "u", version=6))
            self.joining(other, receiver, 9)
            assert step(receiver, FinishRequest(update_id="u")).state == "CATCHING_UP"
            assert state(receiver) == ("CATCHING_UP", 6)
            receiver.dispatch(other.update(2, "v", version=9))
            assert step(receiver, FinishRequest(update_id="v")).state == "READY"
            receiver.dispatch(ShutdownRequest())
        finally:
            other.engine.close()

    def test_a_rewind_is_no_older_than_its_fleet(
        self, trainer: Trainer, receiver: WeightReceiver
    ) -> None:
        self.joining(trainer, receiver, 5)
        receiver.dispatch(trainer.update(1, "u", version=6))
        receiver.dispatch(FinishRequest(update_id="u"))
        receiver.dispatch(trainer.update(1, "v", version=3, rewind=True))
        receiver.dispatch(FinishRequest(update_id="v"))
        other = Trainer(model())
        try:
            self.joining(other, receiver, 3)
            assert state(receiver) == ("READY", 3)
            receiver.dispatch(ShutdownRequest())
        finally:
            other.engine.close()


class TestLease:
    def test_a_silent_sender_loses_its_update(self, trainer: Trainer, served: nn.Module) -> None:
        with closing(WeightReceiver(served, lease_s=LEASE_S)) as receiver:
            trainer.init(receiver)
            receiver.dispatch(trainer.update(1, "u", prepare=False))
            assert receiver.status().state == "UPDATING"
            let_a_lease_pass(receiver)
            until(lambda: state(receiver) == ("READY", 0))
            assert values(served) == {0}
            trainer.send(receiver, 2, "v")
            assert values(served) == {2}

    def test_a_prepared_staged_update_is_kept(self, trainer: Trainer, served: nn.Module) -> None:
        receiver = WeightReceiver(served, lease_s=SHORT_S)
        trainer.init(receiver)
        receiver.dispatch(trainer.update(1, "u"))
        time.sleep(3 * SHORT_S)
        assert receiver.status().state == "PREPARED"
        assert step(receiver, FinishRequest(update_id="u")).version == 1
        receiver.close()

    def test_a_stray_prepare_does_not_end_the_lease(self, served: nn.Module) -> None:
        receiver = WeightReceiver(served, lease_s=SHORT_S)
        receiver.dispatch(StartRequest(update_id="u"))
        with pytest.raises(UpdateConflictError):
            receiver.dispatch(PrepareRequest(update_id="stray"))
        until(lambda: receiver.status().state == "READY")

    def test_messages_of_other_updates_do_not_renew_it(self, served: nn.Module) -> None:
        receiver = WeightReceiver(served, lease_s=SHORT_S)
        receiver.dispatch(StartRequest(update_id="u"))
        deadline = time.monotonic() + WAIT_S
        while receiver.status().state == "UPDATING":
            assert time.monotonic() < deadline
            with pytest.raises(UpdateConflictError):
                receiver.dispatch(PrepareRequest(update_id="stray"))
            time.sleep(SHORT_S / 40)
        assert receiver.updates_total == {"aborted": 1}
        receiver.close()

    def test_a_long_load_is_progress(self, trainer: Trainer) -> None:
        def load(pairs: Pairs) -> None:
            time.sleep(4 * SHORT_S)

        receiver = WeightReceiver(load, apply="in_place", lease_s=SHORT_S)
        trainer.init(receiver)
        assert trainer.send(receiver, 1, "u").version == 1
        receiver.close()


class TestClosed:
    def test_no_update_starts(self, bare: Bare, served: nn.Module) -> None:
        receiver = WeightReceiver(served)
        receiver.close()
        update = bare.info({name: torch.ones_like(t) for name, t in served.state_dict().items()})
        for request in (
            StartRequest(update_id="u"),
            UpdateRequest(update_info=update),
            UpdateRequest(update_id="u", start=StartTerms(), update_info=update, prepare=True),
        ):
            with pytest.raises(ProtocolError, match="closed"):
                receiver.dispatch(request)
        assert values(served) == {0}

    def test_an_init_that_waited_for_the_close_opens_nothing(
        self, trainer: Trainer, receiver: WeightReceiver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        session = receiver._session
        wait_for_step = session._in_step

        def closes_first(*args: str) -> AbstractContextManager[None]:
            monkeypatch.undo()
            receiver.close()
            return wait_for_step(*args)

        monkeypatch.setattr(session, "_in_step", closes_first)
        with pytest.raises(ProtocolError, match="closed"):
            trainer.init(receiver)
        assert not receiver.status().senders


class TestPartial:
    def test_builds_on_the_version_held(
        self, bare: Bare, trainer: Trainer, receiver: WeightReceiver, served: nn.Module
    ) -> None:
        trainer.send(receiver, 1, "u")
        info = bare.info({"0.bias": torch.full((3,), 7.0)})
        with pytest.raises(StaleVersionError, match="builds on version 0, but version 1"):
            receiver.dispatch(
                UpdateRequest(
                    update_id="stale",
                    start=StartTerms(partial=True, base_version=0),
                    update_info=info,
                )
            )
        terms = StartTerms(partial=True, base_version=1)
        request = UpdateRequest(update_id="p", start=terms, update_info=info, prepare=True)
        receiver.dispatch(request)
        assert step(receiver, FinishRequest(update_id="p")).version == 2
        assert served.get_parameter("0.bias").tolist() == [7.0] * 3
        assert values(served) == {1.0, 7.0}

    def test_an_unknown_name_is_refused(self, bare: Bare, receiver: WeightReceiver) -> None:
        info = bare.info({"lora.a": torch.ones(3)})
        with pytest.raises(ManifestMismatchError) as caught:
            receiver.dispatch(
                UpdateRequest(update_id="p", start=StartTerms(partial=True), update_info=info)
            )
        assert caught.value.unexpected == ("lora.a",)


class TestCallbacks:
    def test_the_cache_is_cleared_after_the_swap_while_nobody_reads(
        self, trainer: Trainer, served: nn.Module
    ) -> None:
        seen: list[object] = []

        def clear() -> None:
            seen.append(values(served))
            with ThreadPoolExecutor(1) as pool:
                seen.append(pool.submit(kept_out, made).result(WAIT_S))

        made = WeightReceiver(served, on_clear_cache=clear)
        trainer.init(made)
        made.dispatch(trainer.update(1, "u"))
        assert seen == []
        made.dispatch(FinishRequest(update_id="u"))
        assert seen == [{1.0}, True]
        made.dispatch(trainer.update(2, "v"))
        made.dispatch(FinishRequest(update_id="v", clear_cache=False))
        assert len(seen) == 2
        made.close()

    def test_a_cache_that_cannot_be_cleared_is_never_served(
        self, trainer: Trainer, served: nn.Module
    ) -> None:
        fails = [True]

        def clear() -> None:
            if fails:
                raise OSError(fails.pop())

        receiver = WeightReceiver(served, on_clear_cache=clear)
        trainer.init(receiver)
        receiver.dispatch(trainer.update(1, "u"))
        with pytest.raises(OSError, match="True"):
            receiver.dispatch(FinishRequest(update_id="u"))
        assert receiver.status().state == "TORN"
        assert trainer.send(receiver, 2, "v").state == "READY"
        receiver.close()

    def test_reset_cache_pause_and_resume(self, served: nn.Module) -> None:
        calls: list[str] = []
        receiver = WeightReceiver(
            served,
            on_pause=calls.append,
            on_resume=lambda: calls.append("resume"),
            on_clear_cache=lambda: calls.append("clear"),
        )
        receiver.dispatch(PauseRequest(mode="wait"))
        paused = [receiver.paused]
        receiver.dispatch(ResetCacheRequest())
        receiver.dispatch(ResumeRequest())
        assert [*paused, receiver.paused] == [True, False]
        assert calls == ["wait", "clear", "resume"]

    def test_labels(self, trainer: Trainer, receiver: WeightReceiver) -> None:
        receiver.dispatch(trainer.update(1, "u", label="step 1"))
        receiver.dispatch(FinishRequest(update_id="u"))
        assert receiver.label == "step 1"
        receiver.dispatch(trainer.update(2, "v", label="step 2"))
        receiver.dispatch(FinishRequest(update_id="v", weight_version="best"))
        assert receiver.label == "best"
        receiver.dispatch(LabelRequest(new_version="final"))
        assert (receiver.label, receiver.version) == ("final", 2)


class TestChecker:
    def ask(self, receiver: WeightReceiver, **fields: object) -> CheckReply:
        reply = receiver.dispatch(CheckRequest(**fields))  # type: ignore[arg-type]
        assert isinstance(reply, CheckReply)
        return reply

    def test_checksums_are_those_of_the_trainer(
        self, trainer: Trainer, receiver: WeightReceiver
    ) -> None:
        trainer.send(receiver, 1, "u")
        expected = {
            name: to_hex(mix64(as_bytes(tensor)))
            for name, tensor in trainer.module.state_dict().items()
        }
        reply = self.ask(receiver)
        assert (reply.version, reply.checksums) == (1, expected)
        one = self.ask(receiver, names=["0.bias"]).checksums
        assert one == {"0.bias": expected["0.bias"]}
        assert self.ask(receiver, action="compare", checksums=expected).equal is True

    def test_compare_names_what_differs(self, receiver: WeightReceiver, served: nn.Module) -> None:
        held = self.ask(receiver).checksums
        with torch.no_grad():
            served.get_parameter("0.bias")[1] = -0.0
        reply = self.ask(receiver, action="compare", checksums=held)
        assert (reply.equal, reply.different) == (False, ["0.bias"])

    def test_bad_questions(self, receiver: WeightReceiver) -> None:
        with pytest.raises(ProtocolError, match="compare needs checksums"):
            self.ask(receiver, action="compare")
        with pytest.raises(ConfigError, match="no such tensors here: x"):
            self.ask(receiver, names=["x"])
        with pytest.raises(ConfigError, match="cannot read its weights back"):
            self.ask(WeightReceiver(lambda _: None))


def kept_out(receiver: WeightReceiver) -> bool:
    try:
        with receiver.reading(timeout_s=SHORT_S):
            return False
    except NotReadyError:
        return True


class TestReading:
    def test_yields_the_version_and_may_be_nested(
        self, trainer: Trainer, receiver: WeightReceiver
    ) -> None:
        trainer.send(receiver, 1, "u")
        with receiver.reading() as outer, receiver.reading() as inner:
            assert outer == inner == 1

    def test_no_swap_inside(
        self, trainer: Trainer, receiver: WeightReceiver, served: nn.Module
    ) -> None:
        receiver.dispatch(trainer.update(1, "u"))
        with ThreadPoolExecutor(1) as pool:
            with receiver.reading() as version:
                finishing = pool.submit(step, receiver, FinishRequest(update_id="u"))
                time.sleep(SHORT_S)
                assert (version, receiver.version, values(served)) == (0, 0, {0})
                assert not finishing.done()
            assert finishing.result(WAIT_S).version == 1

    def test_a_step_that_never_ends_costs_the_update_alone(
        self, trainer: Trainer, served: nn.Module
    ) -> None:
        receiver = WeightReceiver(served, lease_s=SHORT_S)
        trainer.init(receiver)
        receiver.dispatch(trainer.update(1, "u"))
        with ThreadPoolExecutor(1) as pool, receiver.reading():
            finishing = pool.submit(step, receiver, FinishRequest(update_id="u"))
            assert isinstance(finishing.exception(WAIT_S), TransferTimeout)
        assert state(receiver) == ("READY", 0)
        assert not kept_out(receiver)
        receiver.close()

    def test_blocks_while_weights_are_written_in_place(
        self, trainer: Trainer, served: nn.Module
    ) -> None:
        receiver = WeightReceiver(served, apply="in_place", lease_s=WAIT_S)
        trainer.init(receiver)
        receiver.dispatch(trainer.update(1, "u"))
        assert not receiver.may_generate
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(kept_out, receiver)
            assert reading.result(WAIT_S)
            receiver.dispatch(FinishRequest(update_id="u"))
            assert not pool.submit(kept_out, receiver).result(WAIT_S)
        receiver.close()

    def test_another_senders_init_does_not_open_the_gate(
        self, trainer: Trainer, served: nn.Module
    ) -> None:
        receiver = WeightReceiver(served, apply="in_place", lease_s=WAIT_S)
        trainer.init(receiver)
        receiver.dispatch(trainer.update(1, "u"))
        other = Trainer(model(5))
        try:
            other.init(receiver)
            with ThreadPoolExecutor(1) as pool:
                blocked = pool.submit(enter, receiver)
                time.sleep(SHORT_S)
                assert not blocked.done()
                receiver.dispatch(FinishRequest(update_id="u"))
                assert blocked.result(WAIT_S) == 1
        finally:
            receiver.close()
            other.engine.close()


class Engine:
    """Generates elsewhere; notes what a receiver says to it, with the state at that moment."""

    def __init__(self, served: nn.Module, **options: object) -> None:
        self.served = served
        self.said: list[tuple[str, str, int, set[float]]] = []
        self.fails: Exception | None = None
        self.receiver = WeightReceiver(
            served,
            on_hold=self._hold,
            on_release=lambda: self._note("release"),
            **options,  # type: ignore[arg-type]  # options of WeightReceiver
        )

    def _note(self, word: str) -> None:
        self.said.append((word, *state(self.receiver), values(self.served)))

    def _hold(self, timeout_s: float) -> None:
        assert timeout_s > 0
        self._note("hold")
        if self.fails is not None:
            raise self.fails

    def hears(self) -> list[tuple[str, str, int, set[float]]]:
        """What it was told since the last call."""
        said, self.said = self.said, []
        return said


class TestGenerationElsewhere:
    @pytest.fixture
    def engine(self, served: nn.Module, trainer: Trainer) -> Iterator[Engine]:
        engine = Engine(served)
        trainer.init(engine.receiver)
        engine.hears()
        yield engine
        engine.receiver.close()
        assert not engine.said or engine.said[-1][0] == "release"

    @pytest.fixture
    def in_place(self, served: nn.Module, trainer: Trainer) -> Iterator[Engine]:
        engine = Engine(served, apply="in_place")
        trainer.init(engine.receiver)
        engine.hears()
        yield engine
        engine.receiver.close()

    def test_making_room_stops_it_for_a_moment(self, served: nn.Module, trainer: Trainer) -> None:
        engine = Engine(served)
        trainer.init(engine.receiver)
        assert [word for word, *_ in engine.hears()] == ["hold", "release"]
        engine.receiver.close()

    def test_a_staged_update_stops_it_for_the_swap_alone(
        self, engine: Engine, trainer: Trainer
    ) -> None:
        engine.receiver.dispatch(trainer.update(1, "u", label="one"))
        assert engine.hears() == []
        reply = step(engine.receiver, FinishRequest(update_id="u"))
        hold, release = engine.hears()
        assert hold == ("hold", "PREPARED", 0, {0.0})
        assert release == ("release", "READY", 1, {1.0})
        assert reply.stall_s > 0
        assert engine.receiver.last_reply == reply
        engine.receiver.dispatch(FinishRequest(update_id="u"))
        assert engine.hears() == []

    def test_an_update_in_place_stops_it_from_the_first_byte_on(
        self, in_place: Engine, trainer: Trainer
    ) -> None:
        in_place.receiver.dispatch(trainer.update(1, "u"))
        assert in_place.hears() == [("hold", "UPDATING", 0, {0.0})]
        in_place.receiver.dispatch(FinishRequest(update_id="u"))
        assert in_place.hears() == [("release", "READY", 1, {1.0})]

    def test_it_goes_on_knowing_that_an_aborted_update_tore_the_weights(
        self, in_place: Engine, trainer: Trainer
    ) -> None:
        in_place.receiver.dispatch(trainer.update(1, "u"))
        in_place.receiver.dispatch(AbortRequest(update_id="u"))
        assert [said[:3] for said in in_place.hears()] == [
            ("hold", "UPDATING", 0),
            ("release", "TORN", 0),
        ]
        trainer.send(in_place.receiver, 2, "v")
        assert [said[:3] for said in in_place.hears()] == [
            ("hold", "UPDATING", 0),
            ("release", "READY", 1),
        ]

    def test_an_update_that_expires_in_place_lets_it_go_on(
        self, served: nn.Module, trainer: Trainer
    ) -> None:
        engine = Engine(served, apply="in_place", lease_s=SHORT_S)
        trainer.init(engine.receiver)
        engine.hears()
        engine.receiver.dispatch(trainer.update(1, "u", prepare=False))
        time.sleep(SHORT_S)
        until(lambda: state(engine.receiver)[0] == "TORN" and len(engine.said) == 2)
        assert [said[:2] for said in engine.hears()] == [("hold", "UPDATING"), ("release", "TORN")]
        engine.receiver.close()

    @pytest.mark.parametrize("in_place", [False, True])
    def test_one_that_does_not_stop_costs_the_update_alone(
        self, served: nn.Module, trainer: Trainer, in_place: bool
    ) -> None:
        engine = Engine(served, apply="in_place" if in_place else "staged")
        trainer.init(engine.receiver)
        engine.hears()
        engine.fails = OSError("the engine core is gone")
        with pytest.raises(TransferError, match="could not be stopped: on_hold raised OSError"):
            trainer.send(engine.receiver, 1, "u")
        assert [word for word, *_ in engine.hears()] == ["hold"]
        assert (*state(engine.receiver), values(served)) == ("READY", 0, {0.0})
        engine.fails = None
        assert trainer.send(engine.receiver, 2, "v").version == 1
        assert [word for word, *_ in engine.hears()] == ["hold", "release"]
        engine.receiver.close()

    def test_a_swap_that_fails_is_known_when_it_goes_on(
        self, served: nn.Module, trainer: Trainer
    ) -> None:
        def clear() -> None:
            raise OSError("no cache")

        engine = Engine(served, on_clear_cache=clear)
        trainer.init(engine.receiver)
        engine.hears()
        with pytest.raises(OSError, match="no cache"):
            trainer.send(engine.receiver, 1, "u")
        assert [said[:2] for said in engine.hears()] == [("hold", "PREPARED"), ("release", "TORN")]
        engine.receiver.close()

    def test_its_own_failure_to_go_on_changes_nothing(
        self, served: nn.Module, trainer: Trainer, caplog: pytest.LogCaptureFixture
    ) -> None:
        def release() -> None:
            raise OSError("no engine core")

        receiver = WeightReceiver(served, on_release=release)
        trainer.init(receiver)
        assert trainer.send(receiver, 1, "u").version == 1
        assert "on_release failed" in caplog.text
        receiver.close()


def enter(receiver: WeightReceiver) -> int:
    with receiver.reading(timeout_s=WAIT_S) as version:
        return version


class Hook:
    """A `load_weights` that says, keeps or breaks what a test tells it to."""

    def __init__(self) -> None:
        self.held: dict[str, torch.Tensor] = {}
        self.fails = False
        self.returns: Callable[[set[str]], object] = lambda _: None

    def __call__(self, pairs: Pairs) -> object:
        listed = list(pairs)
        for i, (name, tensor) in enumerate(listed):
            if self.fails and i == 2:
                raise RuntimeError("no room for this tensor")
            self.held[name] = tensor.clone()
        return self.returns({name for name, _ in listed})

    @property
    def values(self) -> set[float]:
        return {float(v) for t in self.held.values() for v in t.reshape(-1).tolist()}


class TestHooks:
    @pytest.mark.parametrize("apply", ["staged", "in_place"])
    def test_gets_every_tensor(self, trainer: Trainer, apply: ApplyChoice) -> None:
        hook = Hook()
        hook.returns = lambda names: names
        receiver = WeightReceiver(hook, apply=apply)
        trainer.init(receiver)
        for version in (1, 2):
            reply = trainer.send(receiver, version, f"u{version}")
            assert (reply.version, reply.verified) == (version, "arrived")
            assert hook.values == {version}
        assert set(hook.held) == set(trainer.module.state_dict())
        receiver.close()

    @pytest.mark.parametrize(("apply", "then"), [("staged", "TORN"), ("in_place", "TORN")])
    def test_that_loads_too_few_is_found_out(
        self, trainer: Trainer, apply: ApplyChoice, then: str
    ) -> None:
        hook = Hook()
        hook.returns = lambda names: names - {"0.bias"}
        receiver = WeightReceiver(hook, apply=apply)
        trainer.init(receiver)
        with pytest.raises(ManifestMismatchError) as caught:
            trainer.send(receiver, 1, "u")
        assert caught.value.missing == ("0.bias",)
        assert receiver.status().state == then
        receiver.close()

    def test_that_renames_is_believed(self, trainer: Trainer) -> None:
        hook = Hook()
        hook.returns = lambda _: {"fused.weight"}
        receiver = WeightReceiver(hook)
        trainer.init(receiver)
        assert trainer.send(receiver, 1, "u").version == 1
        receiver.close()

    @pytest.mark.parametrize("apply", ["staged", "in_place"])
    def test_that_raises_tears_and_the_next_good_update_heals(
        self, trainer: Trainer, apply: ApplyChoice, bare: Bare
    ) -> None:
        hook = Hook()
        receiver = WeightReceiver(hook, apply=apply)
        trainer.init(receiver)
        trainer.send(receiver, 1, "good")
        hook.fails = True
        with pytest.raises(RuntimeError, match="no room"):
            trainer.send(receiver, 2, "bad")
        status = receiver.status()
        assert (status.state, status.version, status.update_id) == ("TORN", 1, "bad")
        with pytest.raises(NotReadyError, match="update bad") as caught, receiver.reading():
            pass
        assert caught.value.state == "TORN"
        partial = UpdateRequest(
            update_id="p",
            start=StartTerms(partial=True),
            update_info=bare.info({"0.bias": torch.ones(3)}),
        )
        with pytest.raises(UpdateConflictError, match="only a full update heals"):
            receiver.dispatch(partial)
        hook.fails = False
        receiver.dispatch(trainer.update(2, "again", version=2))
        assert kept_out(receiver)
        receiver.dispatch(FinishRequest(update_id="again"))
        assert state(receiver) == ("READY", 2)
        assert hook.values == {2}
        assert not kept_out(receiver)
        receiver.close()

    def test_an_update_of_nothing_heals_nothing(self, trainer: Trainer) -> None:
        hook = Hook()
        receiver = WeightReceiver(hook, apply="in_place")
        trainer.init(receiver)
        hook.fails = True
        with pytest.raises(RuntimeError):
            trainer.send(receiver, 1, "bad")
        receiver.dispatch(StartRequest())
        with pytest.raises(ProtocolError):
            receiver.dispatch(FinishRequest())
        assert receiver.status().state == "TORN"
        receiver.close()

    def test_a_declared_manifest_is_compared_at_init(self, trainer: Trainer) -> None:
        wanted = Manifest((TensorSpec("0.bias", "float32", (3,)),))
        receiver = WeightReceiver(Hook(), manifest=wanted)
        with pytest.raises(ManifestMismatchError) as caught:
            trainer.init(receiver)
        assert "0.weight" in caught.value.unexpected
        assert receiver.shared_memory_usage() == []

    @pytest.mark.parametrize("apply", ["staged", "in_place"])
    def test_views_that_it_kept_are_named(self, trainer: Trainer, apply: ApplyChoice) -> None:
        kept: dict[str, torch.Tensor] = {}

        def load(pairs: Pairs) -> None:
            kept.update((name, tensor) for name, tensor in pairs if name == "0.weight")

        receiver = WeightReceiver(load, apply=apply)
        trainer.init(receiver)
        with pytest.raises(TransferError, match=r"kept views of 1 tensors .*: 0\.weight"):
            trainer.send(receiver, 1, "u")
        kept.clear()
        receiver.close()

    @pytest.mark.parametrize("apply", ["staged", "in_place"])
    def test_that_keeps_views_can_be_given_clones(
        self, trainer: Trainer, apply: ApplyChoice
    ) -> None:
        kept: dict[str, torch.Tensor] = {}
        receiver = WeightReceiver(HookSink(kept.update, keeps_views=True), apply=apply)
        trainer.init(receiver)
        trainer.send(receiver, 1, "u")
        old = dict(kept)
        trainer.send(receiver, 2, "v")
        assert {v for t in old.values() for v in t.reshape(-1).tolist()} == {1.0}
        receiver.close()


def test_the_single_door_takes_and_gives_plain_data(receiver: WeightReceiver) -> None:
    reply = receiver.handle({"call": "weight_info", "body": {}})
    assert (reply["state"], reply["version"]) == ("READY", 0)
    with pytest.raises(ProtocolError, match="there is no call"):
        receiver.handle({"call": "format_disk", "body": {}})
    with pytest.raises(ProtocolError, match="keys call and body"):
        receiver.handle({"body": {}})
