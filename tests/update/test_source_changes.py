"""A source that changes while it is sent: refused, never committed, and the next send works."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import fully_shard

import weightsync as ws
from weightsync.integrations.huggingface import MergedSource
from weightsync.shm import shared_stream
from weightsync.weights.sources.base import SourceExtras, SourceWatch, YieldWatch

SIDE = 64
LAYERS = 12
RING: dict[str, Any] = {"packed": True, "bucket_nbytes": 1 << 15, "num_buckets": 2}
TIMEOUT_S = 60.0
Change = Callable[[nn.Module], None]


class Layers(nn.Module):
    def __init__(self, value: float, side: int = SIDE, layers: int = LAYERS) -> None:
        super().__init__()
        self.rows = nn.ModuleList(nn.Linear(side, side, bias=False) for _ in range(layers))
        fill(self, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for row in self.rows:
            x = row(x)
        return x


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def values(model: nn.Module) -> set[float]:
    """The least and greatest of every parameter: one value where nothing is mixed."""
    with torch.no_grad():
        return {v for p in model.parameters() for v in (p.min().item(), p.max().item())}


def optimizer(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    """Plain SGD that adds 1 to every parameter with each step."""
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad = torch.full_like(parameter, -1)
    return torch.optim.SGD(trained, lr=1.0, **settings)


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)


def swapped(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.detach().clone() + 1


def fused(model: nn.Module) -> None:
    optimizer(model, fused=True).step()


def foreach(model: nn.Module) -> None:
    optimizer(model, foreach=True).step()


class Meddler:
    """Carries messages to a receiver; runs `change` once while an update is on its way.

    The receiver reads after it, and the sender began before it. `reading`, if given, is set by a
    callable source once some of its tensors were taken.
    """

    def __init__(self, receiver: ws.WeightReceiver) -> None:
        self.receiver = receiver
        self.change: Callable[[], None] | None = None
        self.reading: threading.Event | None = None

    def __call__(self, message: Mapping[str, object]) -> object:
        if self.change is not None and "update_info" in repr(message):
            change, self.change = self.change, None
            if self.reading is not None:
                assert self.reading.wait(TIMEOUT_S)
            change()
        return self.receiver.handle(message)


@contextmanager
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def sharded(model: nn.Module) -> Iterator[nn.Module]:
    with one_rank():
        fully_shard(model)
        yield model


@contextmanager
def plain(model: nn.Module) -> Iterator[nn.Module]:
    yield model


def slowly(meddler: Meddler, model: nn.Module) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    """Yield a module's parameters; says so when the third is asked for."""

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        for i, (name, parameter) in enumerate(model.named_parameters()):
            if i == 2 and meddler.reading is not None:
                meddler.reading.set()
            yield name, parameter

    return pairs


KINDS: dict[str, tuple[dict[str, Any], Callable[[Meddler, nn.Module], object]]] = {
    "a module where it is": ({"packed": False}, lambda _, model: model),
    "a module": (RING, lambda _, model: model),
    "a cast": (RING | {"dtype": torch.bfloat16}, lambda _, model: model),
    "a mapping": (RING, lambda _, model: model.state_dict()),
    "a callable": (RING, slowly),
}
CASES = [
    (kind, change)
    for kind in KINDS
    for change in (in_place, swapped, fused, foreach)
    # These yield the tensors of before the swap, which do not change.
    if not (change is swapped and kind in ("a mapping", "a callable"))
]


class TestEachKind:
    @pytest.mark.parametrize(("kind", "change"), CASES)
    def test_what_changes_is_refused_and_the_next_send_works(
        self, kind: str, change: Change
    ) -> None:
        options, source_of = KINDS[kind]
        model, server = Layers(1), Layers(0)
        server.to(options.get("dtype", torch.float32))
        meddler = Meddler(ws.WeightReceiver(server, apply="staged"))
        meddler.reading = threading.Event() if kind in ("a mapping", "a callable") else None
        source = source_of(meddler, model)
        if isinstance(source, dict):
            source = Noticed(source, meddler)
        self.check(model, server, source, meddler, options, lambda: change(model))

    @pytest.mark.parametrize("change", [in_place, foreach])
    def test_shards(self, change: Change) -> None:
        model, server = Layers(1), Layers(0)
        meddler = Meddler(ws.WeightReceiver(server, apply="staged"))
        with sharded(model):
            self.check(model, server, model, meddler, RING, lambda: change(model))

    @pytest.mark.parametrize("change", [in_place, fused])
    def test_merged_adapters(self, change: Change) -> None:
        config = peft.LoraConfig(target_modules=["0", "3"], r=2, init_lora_weights=False)
        model, server = peft.get_peft_model(Layers(1).rows, config), Layers(0).rows
        meddler = Meddler(ws.WeightReceiver(server, apply="staged"))
        source = MergedSource(model)
        with ws.connect(source, to=meddler, **RING) as sender:
            meddler.change = lambda: change(model)
            with pytest.raises(ws.VerificationError, match="the source changed while it was sent"):
                sender.send_weights()
            assert values(server) == {0}
            sender.send_weights()
        held = server.state_dict()
        assert all(torch.equal(held[name], tensor) for name, tensor in source.tensors())

    def test_tensors_of_an_update_block(self) -> None:
        model, server = Layers(1), Layers(0)
        meddler = Meddler(ws.WeightReceiver(server, apply="staged"))
        with ws.connect(model, to=meddler, **RING) as sender:
            meddler.change = lambda: in_place(model)
            with (
                pytest.raises(ws.VerificationError, match="the source changed"),
                sender.update() as update,
            ):
                update.send(model.named_parameters())
            assert values(server) == {0}
            sender.send_weights()
        assert values(server) == {2}

    def check(
        self,
        model: nn.Module,
        server: nn.Module,
        source: object,
        meddler: Meddler,
        options: dict[str, Any],
        change: Callable[[], None],
    ) -> None:
        with ws.connect(source, to=meddler, **options) as sender:
            if meddler.reading is not None:  # connect() asked for all of them once
                meddler.reading.clear()
            meddler.change = change
            with pytest.raises(ws.VerificationError) as caught:
                sender.send_weights()
            assert "the source changed while it was sent: " in str(caught.value)
            assert "nothing was committed" in str(caught.value)
            if meddler.reading is None:  # else those that were taken before
                assert len(caught.value.names) == LAYERS
                assert "and 2 more; " in str(caught.value)
            assert "rows.0.weight" in caught.value.names
            assert values(server) == {0}
            assert meddler.receiver.version == 0
            assert sender.send_weights().verified == "held"
            assert values(server) == {2}


class Noticed(dict[str, torch.Tensor]):
    """A mapping that says when its third tensor is asked for."""

    def __init__(self, given: Mapping[str, torch.Tensor], meddler: Meddler) -> None:
        super().__init__(given)
        self._meddler = meddler

    def items(self) -> Any:
        for i, pair in enumerate(super().items()):
            if i == 2 and self._meddler.reading is not None:
                self._meddler.reading.set()
            yield pair


GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
EXPERTS = [f"layers.{i}.{name}" for i in range(4) for name in (GATE_UP, DOWN)]


class Experts(nn.Module):
    """Layers with fused experts, 24 KiB each."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(4):
            layer, layer.mlp = (nn.Module() for _ in range(2))
            layer.mlp.experts = nn.Module()
            layer.mlp.experts.gate_up_proj = nn.Parameter(torch.empty(4, 64, 16))
            layer.mlp.experts.down_proj = nn.Parameter(torch.empty(4, 16, 32))
            self.layers.append(layer)
        fill(self, value)


class Doubled(ws.WrappingSource):
    """A user's own wrapper, which makes new tensors of another dtype."""

    @property
    def manifest(self) -> ws.Manifest:
        specs = self.source.manifest.specs
        return ws.Manifest(tuple(ws.TensorSpec(s.name, "float64", s.shape) for s in specs))

    def convert(
        self, pairs: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in pairs:
            yield name, tensor.detach().double() * 2


WRAPPERS: dict[str, Callable[[object], ws.WrappingSource]] = {
    "per expert": ws.PerExpertSource,
    "per expert, cast": lambda given: ws.PerExpertSource(given, dtype=torch.bfloat16),
    "there and back": lambda given: ws.FusedExpertsSource(ws.PerExpertSource(given)),
    "quantized": lambda given: ws.QuantizedSource(ws.PerExpertSource(given), "fp8_channel"),
    "a user's own": Doubled,
    "a user's own around another": lambda given: Doubled(ws.PerExpertSource(given)),
}


def held_by(model: nn.Module) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    return lambda: iter(model.named_parameters())


class TestWrappers:
    """What a source tells of its tensors counts, whatever is put around it."""

    @pytest.mark.parametrize("change", [in_place, swapped, fused, foreach])
    @pytest.mark.parametrize("wrap", WRAPPERS)
    def test_of_a_module(self, wrap: str, change: Change) -> None:
        model = Experts(1)
        self.check(model, WRAPPERS[wrap](model), change)

    @pytest.mark.parametrize("wrap", WRAPPERS)
    @pytest.mark.parametrize("given", [nn.Module.state_dict, held_by], ids=["mapping", "callable"])
    def test_of_tensors_that_are_yielded(self, wrap: str, given: Any) -> None:
        model = Experts(1)
        self.check(model, WRAPPERS[wrap](given(model)), in_place)

    @pytest.mark.parametrize("wrap", ["per expert", "there and back"])
    def test_of_shards(self, wrap: str) -> None:
        with sharded(Experts(1)) as model:
            self.check(model, WRAPPERS[wrap](model), foreach)

    def test_all_that_a_source_may_tell_is_told_by_its_wrapper(self) -> None:
        told = {name for name in vars(SourceExtras) if not name.startswith("_")}
        assert told == {
            "belong_together",
            "made_of",
            "changed",
            "rounded",
            "take_merged",
            "device_types",
            "holdings",
            "receiver_path",
        }
        assert told <= set(vars(ws.WrappingSource))

    def test_a_wrapper_that_stops_early_is_checked_to_the_end(self) -> None:
        class First(Doubled):
            @property
            def manifest(self) -> ws.Manifest:
                return ws.Manifest(super().manifest.specs[:3])

            def convert(
                self, pairs: Iterator[tuple[str, torch.Tensor]]
            ) -> Iterator[tuple[str, torch.Tensor]]:
                for _, pair in zip(range(3), super().convert(pairs), strict=False):
                    yield pair

        model = Experts(1)
        self.check(model, First(model.state_dict()), in_place)

    def check(self, model: nn.Module, source: ws.WrappingSource, change: Change) -> None:
        held: dict[str, torch.Tensor] = {}

        def load(pairs: Any) -> None:
            held.update((name, tensor.clone()) for name, tensor in pairs)

        meddler = Meddler(ws.WeightReceiver(load, apply="staged"))
        small: dict[str, Any] = {"packed": True, "bucket_nbytes": 1 << 12, "num_buckets": 2}
        with ws.connect(source, to=meddler, **small) as sender:
            sender.send_weights()
            meddler.change = lambda: change(model)
            with pytest.raises(ws.VerificationError) as caught:
                sender.send_weights()
            assert "the source changed while it was sent: " in str(caught.value)
            assert set(caught.value.names) & set(EXPERTS)
            assert meddler.receiver.version == 1
            sender.send_weights()
        wanted = {name: tensor.clone() for name, tensor in source.tensors()}
        assert held.keys() == wanted.keys()
        assert all(torch.equal(held[name], tensor) for name, tensor in wanted.items())

    def test_a_wrapper_converts_and_does_not_override_tensors(self) -> None:
        with pytest.raises(TypeError, match=r"overrides tensors\(\); define convert\(pairs\)"):

            class Other(Doubled):
                def tensors(self) -> Any:  # type: ignore[misc]  # what is refused
                    return iter(())


class TestWhatFollows:
    def test_a_receiver_in_place_is_torn_and_the_error_says_so(self) -> None:
        model, staged, direct = Layers(1), Layers(0), Layers(0)
        meddler = Meddler(ws.WeightReceiver(direct, apply="in_place"))
        other = ws.WeightReceiver(staged, apply="staged")
        with ws.connect(model, to=[meddler, other.handle], packed=False) as sender:
            meddler.change = lambda: in_place(model)
            with pytest.raises(ws.VerificationError, match="TORN until the next send"):
                sender.send_weights()
            assert meddler.receiver.status().state == "TORN"
            assert values(staged) == {0}
            sender.send_weights()
            assert meddler.receiver.status().state == "READY"
        assert values(staged) == values(direct) == {2}

    def test_nobody_is_dropped_for_it(self) -> None:
        model, servers = Layers(1), [Layers(0), Layers(0)]
        meddler = Meddler(ws.WeightReceiver(servers[0]))
        other = ws.WeightReceiver(servers[1])
        to: list[Callable[..., object]] = [meddler, other.handle]
        with ws.connect(model, to=to, packed=False, on_failure="drop") as sender:
            meddler.change = lambda: in_place(model)
            with pytest.raises(ws.VerificationError, match="the source changed"):
                sender.send_weights()
            assert len(sender.targets) == 2
            sender.send_weights()
        assert values(servers[0]) == values(servers[1]) == {2}


class Waiting(torch.optim.SGD):
    """Steps in its own thread, and stays inside the step until told to go on."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1.0)
        self.inside, self.go_on = threading.Event(), threading.Event()
        self.fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise RuntimeError("the step failed")
        self.inside.set()
        assert self.go_on.wait(TIMEOUT_S)


@pytest.fixture
def waiting() -> Iterator[Callable[[nn.Module], Waiting]]:
    threads: list[tuple[Waiting, threading.Thread]] = []

    def start(model: nn.Module) -> Waiting:
        made = Waiting(model.parameters())
        thread = threading.Thread(target=made.step)
        thread.start()
        threads.append((made, thread))
        assert made.inside.wait(TIMEOUT_S)
        return made

    yield start
    for made, thread in threads:
        made.go_on.set()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


class TestOptimizers:
    def test_a_step_that_is_under_way_counts(
        self, waiting: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shared_stream, "_STEP_S", 0.5)  # how long it is waited for
        model, server, bystander = Layers(1), Layers(0), Layers(7)
        receiver = ws.WeightReceiver(server)
        with ws.connect(model, to=receiver.handle) as sender:
            waiting(bystander)  # trains another model
            sender.send_weights()
            fill(model, 2)
            step = waiting(model)
            with pytest.raises(ws.VerificationError, match="the source changed"):
                sender.send_weights()
            step.go_on.set()
        assert values(server) == {1}

    def test_a_step_that_failed_is_over(self) -> None:
        model, server = Layers(1), Layers(0)
        receiver = ws.WeightReceiver(server)
        failing = Waiting(model.parameters())
        failing.fails = True
        with ws.connect(model, to=receiver.handle) as sender:
            with pytest.raises(RuntimeError, match="the step failed"):
                failing.step()
            asyncio.run(sender.asend_weights())
        assert values(server) == {1}

    def test_a_send_from_a_hook_of_the_step_itself_works(self) -> None:
        model, server = Layers(1), Layers(0)
        receiver = ws.WeightReceiver(server)
        step = optimizer(model)
        with ws.connect(model, to=receiver.handle) as sender:

            def send(*_: object) -> None:
                sender.send_weights()

            step.register_step_post_hook(send)
            step.step()
        assert values(server) == {2}

    def test_parameters_move_at_connect(self) -> None:
        model = Layers(1)
        receiver = ws.WeightReceiver(Layers(0))
        before = [p.data_ptr() for p in model.parameters()]
        with ws.connect(model, to=receiver.handle) as sender:
            moved = [p.data_ptr() for p in model.parameters()]
            assert not set(before) & set(moved)
            sender.send_weights()
            assert [p.data_ptr() for p in model.parameters()] == moved

    def test_exchanged_parameters_that_cannot_move_are_no_change(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The sender brings them to private memory, and another thread's alias keeps them there."""
        model, server = Layers(1), Layers(0)
        receiver = ws.WeightReceiver(server)
        refresh, aliases = shared_stream.SharedStream.refresh, list[torch.Tensor]()

        def held_by_another(
            self: shared_stream.SharedStream, tensors: list[torch.Tensor], *known: Any
        ) -> int:
            aliases.extend(tensor.detach() for tensor in tensors)
            return refresh(self, tensors, *known)

        with ws.connect(model, to=receiver.handle, delta="off") as sender:
            sender.send_weights()
            weights = list(model.parameters())[:2]
            model.rows[1].weight, model.rows[0].weight = weights
            with torch.no_grad():
                weights[0].fill_(5)
            inside = {p.data_ptr() for p in model.parameters()}
            monkeypatch.setattr(shared_stream.SharedStream, "refresh", held_by_another)
            sender.send_weights()
            assert aliases
            assert not {weight.data_ptr() for weight in weights} & inside
            assert all(map(torch.equal, model.parameters(), server.parameters()))
            in_place(model)
            sender.send_weights()
            assert all(map(torch.equal, model.parameters(), server.parameters()))

    def test_nothing_moves_under_a_step(self, waiting: Any) -> None:
        model, server = Layers(1), Layers(0)
        receiver = ws.WeightReceiver(server)
        with ws.connect(model, to=receiver.handle) as sender:
            swapped(model)  # as after an offload: out of shared memory
            before = [p.data_ptr() for p in model.parameters()]
            step = waiting(model)
            with pytest.raises(ws.VerificationError, match="the source changed"):
                sender.send_weights()
            assert [p.data_ptr() for p in model.parameters()] == before
            step.go_on.set()


class TestCallables:
    """What a callable does to its own tensors is no change by others."""

    def sent(self, factory: Callable[[], Any]) -> nn.Module:
        server = Layers(0)
        receiver = ws.WeightReceiver(server)
        with ws.connect(factory, to=receiver.handle, **RING) as sender:
            sender.send_weights()
            sender.send_weights()
        return server

    def test_a_buffer_that_is_filled_again(self) -> None:
        model, buffer = Layers(1), torch.empty(SIDE, SIDE)

        def pairs() -> Iterator[tuple[str, torch.Tensor]]:
            for name, parameter in model.named_parameters():
                yield name, buffer.copy_(parameter.detach())

        assert values(self.sent(pairs)) == {1}

    def test_what_is_merged_for_the_time_of_sending(self) -> None:
        model = Layers(1)

        def pairs() -> Iterator[tuple[str, torch.Tensor]]:
            in_place(model)
            try:
                for name, parameter in model.named_parameters():
                    with torch.no_grad():
                        parameter.mul_(2)
                        yield name, parameter
                        parameter.div_(2)
            finally:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.sub_(1)

        assert values(self.sent(pairs)) == {4}
        assert values(model) == {1}


def test_tensors_without_a_version_are_sent() -> None:
    with torch.inference_mode():
        made = {"w": torch.ones(3), "b": torch.ones(1)}
    watch, yields = SourceWatch(), YieldWatch()
    watch.begin(list(made), list(made.values()))
    for name, tensor in made.items():
        yields.note(name, tensor)
        yields.read()
    assert watch.end() == yields.end() == []
    watch.begin(list(made), list(made.values()))
    made["b"].data = torch.zeros(1)
    assert watch.end() == ["b"]


@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("shards", [False, True])
def test_a_cast_of_the_module_after_connect_is_logged_once(
    dtype: torch.dtype | None, shards: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, server = Layers(1, layers=2), Layers(0, layers=2)
    receiver = ws.WeightReceiver(server)
    with (
        sharded(model) if shards else nullcontext(),
        ws.connect(model, to=receiver.handle, dtype=dtype) as sender,
    ):
        sender.send_weights()
        assert "cast" not in caplog.text
        model.bfloat16()
        for _ in range(2):
            sender.send_weights()
    said = [text for record in caplog.records if "were cast" in (text := record.getMessage())]
    assert said == [
        "2 tensors were cast since connect() or the last update, and are sent in the dtypes of "
        "connect(): rows.0.weight from float32 to bfloat16, rows.1.weight from float32 to "
        "bfloat16; connect again to send them as they are"
    ]
    assert values(server) == {1}


async def overlapped(sends: int, kind: str) -> dict[str, int]:
    """Send while plain SGD steps; count what receivers hold that is of two steps."""
    options, source_of = KINDS[kind]
    model, server = Layers(0, 256, 24), Layers(0, 256, 24)
    server.to(options.get("dtype", torch.float32))
    receiver = ws.WeightReceiver(server)
    counts = {"mixed": 0, "refused": 0, "whole": 0}
    loop = asyncio.get_running_loop()
    source = source_of(Meddler(receiver), model)
    with ws.connect(source, to=receiver.handle, **options | {"bucket_nbytes": None}) as sender:
        for i in range(sends):
            settings: dict[str, Any] = [{"fused": True}, {"foreach": False}, {"foreach": True}][
                i % 3
            ]
            stepping = optimizer(model, **settings)
            run = contextvars.copy_context().run
            sending = loop.run_in_executor(None, run, sender.send_weights)
            for _ in range(1 + i % 4):
                stepping.step()
                await asyncio.sleep(0)
            try:
                await sending
            except ws.VerificationError:
                counts["refused"] += 1
            else:
                counts["whole" if len(values(server)) == 1 else "mixed"] += 1
            assert len(values(model)) == 1, "the trainer's own model is of two steps"
            if i % 50 == 49:
                fill(model, 0)
        assert sender.send_weights().verified == "held"
        assert values(server) == values(model)
    return counts


@pytest.mark.parametrize(
    "sends", [pytest.param(12), pytest.param(240, marks=pytest.mark.soak)], ids=["few", "whole"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_no_send_beside_steps_is_mixed(kind: str, sends: int) -> None:
    counts = asyncio.run(overlapped(sends, kind))
    assert counts["mixed"] == 0
    assert sum(counts.values()) == sends
