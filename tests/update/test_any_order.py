"""Whatever a trainer does to its model between two calls: the right weights arrive, or an error.

Real senders and receivers in one process. Parameters are trained, replaced, renamed, removed, tied,
untied, pruned and offloaded; messages are lost, hooks fail, calls are cancelled, and the source
changes while it is sent. After each call every receiver holds, bit for bit, weights that the
trainer had when they were sent; after a call that returned, those that it has now. A model that
does not fit is refused each time and changes nothing, and one that fits is sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Literal

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn
from torch.nn.utils import prune

import weightsync as ws
from tests.protocol.sizes import SOAK_TIMEOUT_S, at_length, quick
from weightsync.testing import Act, Fault, Faults, FaultyTransport
from weightsync.transports.callback import CallbackTransport
from weightsync.update import deltas

Kind = Literal["pointer", "copy", "in_place", "hook"]
Contents = dict[str, torch.Tensor]
KINDS: list[Kind] = ["pointer", "copy", "in_place", "hook"]
ACTS: list[Act] = ["drop", "drop_reply", "repeat"]
CALLS = [
    "weight_info",
    "init_weight_transfer_engine",
    "update_weights",
    "finish_weight_update",
    "abort_weight_update",
]
FAULTS = st.builds(Fault, st.sampled_from(ACTS), st.sampled_from(CALLS), nth=st.integers(1, 2))
SETTINGS = st.fixed_dictionaries(
    {
        "packed": st.sampled_from([None, None, True, False]),
        "adopt": st.booleans(),
        "delta": st.sampled_from(["always", "always", "always", "auto", "off"]),
        "scrub": st.sampled_from([0.0, 0.0, 1 / 8]),
        "dtype": st.sampled_from([None, None, torch.bfloat16]),
    }
)
TIMEOUT_S = 20.0
seen: Counter[str] = Counter()


class Net(nn.Module):
    """A few tensors of several lines each, of equal shapes, with a norm, a buffer and a tie."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        for i, name in enumerate("abc"):
            self.register_parameter(name, parameter(value + i, 96))
        self.w = parameter(value, 40, 33)
        self.norm = nn.LayerNorm(48)
        self.embed = nn.Embedding(12, 32)
        self.head = nn.Linear(32, 12, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
        with torch.no_grad():
            self.norm.weight.fill_(value)
            self.embed.weight.fill_(value)


def parameter(value: float, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, float(value)), requires_grad=False)


def state_of(model: nn.Module) -> Mapping[str, torch.Tensor]:
    return model.state_dict(keep_vars=True)


def described(model: nn.Module) -> tuple[dict[str, torch.Size], set[frozenset[str]]]:
    """The shapes of all tensors by name, and the names that stand for one tensor."""
    state = state_of(model)
    ties: dict[int, list[str]] = {}
    for name, tensor in state.items():
        ties.setdefault(id(tensor), []).append(name)
    return {name: t.shape for name, t in state.items()}, set(map(frozenset, ties.values()))


def copied(tensors: Mapping[str, torch.Tensor]) -> Contents:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Whether `other` has the bits of `one`, in its own dtypes."""
    return one.keys() >= other.keys() and all(
        torch.equal(one[name].to(t.dtype), t) for name, t in other.items()
    )


class Place:
    """One receiver, its faults, and what is done while the bytes are on their way."""

    def __init__(self, name: str, kind: Kind, dtype: torch.dtype) -> None:
        self.name = name
        self.faults = Faults()
        self.meanwhile: Callable[[], object] | None = None
        self.fails = False
        self.server = Net(-1).to(dtype)
        self.given: Contents = {}
        sink = (
            ws.HookSink(self._load)
            if kind == "hook"
            else ws.ModuleSink(self.server, swap="copy" if kind == "copy" else "pointer")
        )
        apply: Any = "in_place" if kind == "in_place" else "staged"
        self.receiver = ws.WeightReceiver(sink, apply=apply)
        self.is_hook = kind == "hook"
        self.known: dict[str, Contents] = {"": copied(self.held)}
        self.before = ""

    def transport(self) -> FaultyTransport:
        return FaultyTransport(CallbackTransport(self._carry, self.name), self.faults)

    def _carry(self, message: Mapping[str, object]) -> object:
        if self.meanwhile is not None and "update_info" in repr(message):
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        return self.receiver.handle(message)

    def _load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self.fails:
            raise RuntimeError("the hook failed")
        self.given |= copied(dict(pairs))
        if "embed.weight" in self.given:
            self.given["head.weight"] = self.given["embed.weight"]  # it is given no aliases

    @property
    def held(self) -> Mapping[str, torch.Tensor]:
        """What generation would use."""
        return self.given if self.is_hook else self.server.state_dict()

    @property
    def torn(self) -> bool:
        return bool(self.receiver._session.lifecycle.torn_by)

    @property
    def weights_id(self) -> str:
        return self.receiver._session.lifecycle.weights_id or ""


class AnyOrder(RuleBasedStateMachine):
    """One trainer, up to two receivers at a time, and one sender after another."""

    def __init__(self) -> None:
        super().__init__()
        self.trainer: Any = Net(1)
        self.wanted = described(self.trainer)
        self.aside: dict[str, torch.Tensor] = {}
        self.places: list[Place] = []
        self.sender: ws.WeightSender | None = None
        self.attempts: list[Contents] = []
        self.clean = True
        self.value = 1.0
        self.patched = pytest.MonkeyPatch()
        self.patched.setattr(deltas, "MIN_NBYTES", 0)

    @initialize(kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=2), settings=SETTINGS)
    def begin(self, kinds: list[Kind], settings: dict[str, Any]) -> None:
        self.settings = settings
        dtype = settings["dtype"] or torch.float32
        self.places = [Place(f"r{i}", kind, dtype) for i, kind in enumerate(kinds)]
        self._connect()

    def _connect(self) -> None:
        to = [place.transport() for place in self.places]
        self.sender = ws.connect(self.trainer, to=to, timeout_s=TIMEOUT_S, **self.settings)

    # What a trainer does

    @rule(every=st.sampled_from([1, 3, 50, 1000]))
    def train(self, every: int) -> None:
        self._change(every)

    def _change(self, every: int = 3) -> None:
        """Add 1 to some elements of each tensor, each time from another one on."""
        self.value += 1
        with torch.no_grad():
            for tensor in state_of(self.trainer).values():
                if tensor.numel():
                    tensor.view(-1)[int(self.value) * 37 % tensor.numel() :: every] += 1

    def _nudge(self) -> None:
        """Change one element, in another line than the last time."""
        self.value += 1
        flat = self.trainer.w.data.view(-1)
        if len(flat):
            flat[int(self.value) * 48 % len(flat)] += 1

    @rule(name=st.sampled_from("abc"))
    def replace(self, name: str) -> None:
        if getattr(self.trainer, name, None) is not None:
            self.value += 1
            setattr(self.trainer, name, parameter(self.value, 96))

    @rule()
    def exchange(self) -> None:
        """Two parameters of one shape change their places."""
        if {"a", "b"} <= self.trainer._parameters.keys():
            self.trainer.a, self.trainer.b = self.trainer.b, self.trainer.a

    @rule()
    def load_assigned(self) -> None:
        """It unties what is tied."""
        state = {name: t + 1 for name, t in copied(self.trainer.state_dict()).items()}
        self.trainer.load_state_dict(state, assign=True)

    @rule(name=st.sampled_from("abc"))
    def rename(self, name: str) -> None:
        if name in self.trainer._parameters:
            setattr(self.trainer, f"{name}2", getattr(self.trainer, name))
            delattr(self.trainer, name)

    @rule(name=st.sampled_from("abc"), to=st.sampled_from("abc"))
    def name_back(self, name: str, to: str) -> None:
        """Perhaps under the name of another one."""
        if f"{name}2" in self.trainer._parameters and to not in self.trainer._parameters:
            setattr(self.trainer, to, getattr(self.trainer, f"{name}2"))
            delattr(self.trainer, f"{name}2")

    @rule()
    def add_or_take_out(self) -> None:
        if "extra" in self.trainer._parameters:
            del self.trainer.extra
        else:
            self.trainer.extra = parameter(3, 96)

    @rule(module=st.sampled_from(["norm"]), name=st.sampled_from(["weight", "bias"]))
    def prune_or_remove(self, module: str, name: str) -> None:
        there = getattr(self.trainer, module)
        if f"{name}_orig" in there._parameters:
            prune.remove(there, name)  # type: ignore[no-untyped-call]  # torch's
        elif name in there._parameters:
            prune.identity(there, name)  # type: ignore[no-untyped-call]  # torch's

    @rule()
    def untie(self) -> None:
        self.trainer.head.weight = nn.Parameter(self.trainer.embed.weight.detach() + 1)

    @rule(first=st.booleans())
    def tie(self, first: bool) -> None:
        if first:
            self.trainer.head.weight = self.trainer.embed.weight
        else:
            self.trainer.embed.weight = self.trainer.head.weight

    @rule(name=st.sampled_from("abcw"))
    def offload_or_bring_back(self, name: str) -> None:
        there = self.trainer._parameters.get(name)
        if there is None:
            return
        if there.numel():
            self.aside[name] = there.data
            there.data = torch.empty(0)
        elif name in self.aside:
            there.data = self.aside.pop(name)

    @rule()
    def give_new_memory(self) -> None:
        for each in self.trainer.parameters():
            each.data = each.data.clone()

    @rule()
    def mend(self) -> None:
        """The trainer makes its model fit again, whatever was done to it."""
        self.value += 1
        self.trainer = self._mended(self.trainer)

    def _mended(self, model: Any) -> Any:
        for table in (model._parameters, model.norm._parameters):
            for name in [n for n in table if n.endswith("2") or n == "extra"]:
                del table[name]
        for name in ("weight", "bias"):
            if f"{name}_orig" in model.norm._parameters:
                prune.remove(model.norm, name)  # type: ignore[no-untyped-call]  # torch's
        for name in "abcw":
            if name not in model._parameters or not model._parameters[name].numel():
                model._parameters.pop(name, None)
                model.register_parameter(name, parameter(self.value, *self.wanted[0][name]))
        model.head.weight = model.embed.weight
        return model

    # What a sender does

    @rule()
    def send(self) -> None:
        self._send(lambda sender: sender.send_weights())

    @rule()
    def send_twice(self) -> None:
        self.send()
        self._nudge()
        self.send()

    @rule(fault=FAULTS, place=st.integers(0, 1))
    def send_under_a_fault(self, fault: Fault, place: int) -> None:
        there = self.places[place % len(self.places)]
        there.faults.add(fault)
        self._send(lambda sender: sender.send_weights(), faulty=True)
        there.faults.clear()

    @rule(place=st.integers(0, 1))
    def send_while_a_hook_fails(self, place: int) -> None:
        there = self.places[place % len(self.places)]
        there.fails = True
        self._send(lambda sender: sender.send_weights(), faulty=there.is_hook)
        there.fails = False

    @rule(place=st.integers(0, 1))
    def change_while_it_is_sent(self, place: int) -> None:
        """An error, unless a delta is refused: the whole model that follows has the change."""
        there = self.places[place % len(self.places)]
        there.meanwhile = self._change
        self._send(lambda sender: sender.send_weights(), faulty=True)
        there.meanwhile = None

    @rule(place=st.integers(0, 1))
    def cancel(self, place: int) -> None:
        sender, there = self._sender, self.places[place % len(self.places)]
        there.meanwhile = sender._group.worker.stop.set
        self._send(lambda sender: sender.send_weights(), faulty=True)
        there.meanwhile = None

    @rule(place=st.integers(0, 1), fault=st.none() | FAULTS)
    def resync(self, place: int, fault: Fault | None) -> None:
        there = self.places[place % len(self.places)]
        if there.name not in self._sender.targets:
            return
        if fault is not None:
            there.faults.add(fault)
        self._send(lambda sender: sender.resync(there.name), faulty=True, only=there)
        there.faults.clear()

    @rule(place=st.integers(0, 1), times=st.sampled_from([2, 2, 1, 3]))
    def resync_and_send(self, place: int, times: int) -> None:
        """With a change before each, so that every resync fails."""
        if not self._fits():
            self.mend()
        self.send()
        for _ in range(times):
            self._nudge()
            self.resync(place, None)
        self._nudge()
        self.send()

    @rule()
    def send_a_part(self) -> None:
        def block(sender: ws.WeightSender) -> None:
            dtype = self.settings["dtype"] or torch.float32
            with sender.update(partial=True) as update:
                update.send([("norm.bias", self.trainer.norm.bias.detach().to(dtype))])

        if "bias" not in self.trainer.norm._parameters or not self._sender.version:
            return
        with torch.no_grad():
            self.trainer.norm.bias += 1
        before = {p.name: copied(p.held) for p in self.places if not p.torn}
        parts = [
            {**before[p.name], "norm.bias": self.trainer.norm.bias.detach()}
            for p in self.places
            if p.name in before
        ]
        self._send(block, faulty=True, parts=parts)

    @rule(cut=st.sampled_from([1, 3, 100]), again=st.booleans())
    def send_in_messages(self, cut: int, again: bool) -> None:
        """The whole model by a block, in one message or two; some of it may follow once more."""

        def block(sender: ws.WeightSender) -> None:
            dtype = self.settings["dtype"]
            pairs = [(n, p.detach()) for n, p in self.trainer.named_parameters()]
            pairs += [(n, b) for n, b in self.trainer.named_buffers()]
            pairs = [(n, p.to(dtype) if dtype and p.is_floating_point() else p) for n, p in pairs]
            with sender.update() as update:
                for part in (pairs[:cut], pairs[cut:], pairs[:2] if again else []):
                    if part:
                        update.send(part)

        if not self._fits():
            self.mend()
        self._change()
        self._send(block, faulty=True)

    @rule()
    def leave_or_join(self) -> None:
        if len(self.places) < 2:
            return
        there, targets = self.places[1], self._sender.targets
        if there.name in targets:
            self._send(lambda sender: sender.remove(there.name), faulty=True, moves=False)
        else:
            self._send(lambda sender: sender.add(there.transport()), faulty=True, only=there)

    @rule()
    def release(self) -> None:
        with suppress(ws.WeightSyncError):
            self._sender.release()

    @precondition(lambda self: self.sender is not None)
    @rule()
    def connect_again(self) -> None:
        self._sender.close()
        if not self._fits():
            self.mend()
        self._connect()

    # What must be true

    @property
    def _sender(self) -> ws.WeightSender:
        assert self.sender is not None
        return self.sender

    def _fits(self) -> bool:
        return described(self.trainer) == self.wanted

    def _send(
        self,
        call: Callable[[ws.WeightSender], object],
        *,
        faulty: bool = False,
        moves: bool = True,
        only: Place | None = None,
        parts: list[Contents] | None = None,
    ) -> bool:
        """Make a call, and return whether it went well.

        A call that is not `faulty` has to, if the model fits. `moves`: a success brings the model.
        """
        fits, ids = self._fits(), [place.weights_id for place in self.places]
        contents = parts or ([copied(self.trainer.state_dict())] if fits else [])
        self.attempts += contents
        error: ws.WeightSyncError | None = None
        try:
            call(self._sender)
        except ws.WeightSyncError as exc:
            error = exc
        seen["committed" if error is None else "failed" if fits else "refused"] += 1
        if error is None and fits and parts is None:
            self.attempts.append(copied(self.trainer.state_dict()))
        self._check()
        if error is not None:
            assert faulty or not fits, error
            assert faulty or isinstance(error, ws.ManifestMismatchError), error
            if not faulty and self.clean:
                assert ids == [place.weights_id for place in self.places]
            self.clean = self.clean and not fits
            return False
        if moves and only is None and parts is None:
            assert fits
            self._check_arrived()
            self.attempts, self.clean = [], True
        return True

    def _check_arrived(self) -> None:
        for place in self.places:
            if place.name in self._sender.targets:
                assert not place.torn
                assert equal(self.trainer.state_dict(), place.held), place.name

    @invariant()
    def every_receiver_holds_what_was_sent(self) -> None:
        seen["steps"] += 1
        self._check()

    def _check(self) -> None:
        """What a receiver holds is what was sent under its id; an id is new for each content."""
        for place in self.places:
            if place.torn:
                continue
            held, weights_id = place.held, place.weights_id
            if weights_id in place.known:
                assert equal(place.known[weights_id], held), (place.name, weights_id)
                continue
            sources = [*self.attempts, *(other.known.get(weights_id, {}) for other in self.places)]
            assert any(found and equal(found, held) for found in sources), place.name
            place.known = {weights_id: copied(held)}

    def teardown(self) -> None:
        try:
            if self.sender is not None:
                for place in self.places:
                    place.faults.clear()
                    place.meanwhile, place.fails = None, False
                self.mend()
                self.send()
                self.sender.close()
        finally:
            for place in self.places:
                place.receiver.close()
            self.patched.undo()


class AnyOrderAtLength(AnyOrder):
    """The same model, for longer."""


def teardown_module() -> None:
    print(dict(seen))  # how much was tried: pytest -rP shows it


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = quick(40, 16)
TestAnyOrderAtLength = pytest.mark.soak(
    pytest.mark.timeout(SOAK_TIMEOUT_S)(AnyOrderAtLength.TestCase)
)
TestAnyOrderAtLength.settings = at_length(600, 50)
