"""Parameters that move into shared memory and back, and the model that must not notice."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.segments import opened_since
from weightsync.errors import ManifestMismatchError
from weightsync.look import KnownForms
from weightsync.runtime import optimizer_steps
from weightsync.shm import shared_stream
from weightsync.shm.segment import live_segments
from weightsync.shm.shared_stream import SharedStream

ALIGNMENT = 64


def stream_of(
    tensors: Sequence[torch.Tensor], *, adopt: bool = True, dtype: torch.dtype | None = None
) -> SharedStream:
    dtypes = [dtype or t.dtype for t in tensors]
    offsets, at = [], 0
    for tensor, sent in zip(tensors, dtypes, strict=True):
        offsets.append(at)
        at += -(-tensor.numel() * sent.itemsize // ALIGNMENT) * ALIGNMENT
    return SharedStream(offsets, dtypes, [t.shape for t in tensors], at, adopt=adopt)


def seen(stream: SharedStream, index: int, like: torch.Tensor) -> torch.Tensor:
    """What a receiver reads: the segment itself, not the stream's own views."""
    offset = stream._addresses[index] - stream.segment.address
    flat = stream.segment.tensor(offset, like.numel() * like.element_size())
    return flat.view(like.dtype).view(like.shape).clone()


def held(stream: SharedStream, tensor: torch.Tensor) -> bool:
    start = stream.segment.address
    return start <= tensor.data_ptr() < start + stream.segment.nbytes


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    before = live_segments()
    yield
    assert not opened_since(before)


def is_shared(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_shared())  # type: ignore[no-untyped-call]  # torch leaves it untyped


def linear(value: float = 1.0) -> nn.Linear:
    made = nn.Linear(4, 3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(value)
    return made


@pytest.mark.parametrize(
    "turned", [lambda t: t.t(), torch._neg_view, lambda t: t.view(torch.int32)]
)
def test_a_look_at_another_form_does_not_tell_that_a_place_is_free(turned: Any) -> None:
    """Also where these forms were noted: they are not those of the place."""
    tensor = nn.Parameter(torch.ones(4, 4), requires_grad=False)
    stream = stream_of([tensor])
    stream.refresh([tensor])
    forms = KnownForms()
    forms.note([tensor])
    assert not stream.occupied([tensor], forms.look([tensor]))
    tensor.data = turned(tensor.data)
    forms.note([tensor])
    assert forms.look([tensor]).known
    assert stream.occupied([tensor], forms.look([tensor]))
    stream.close()


class TestAdoption:
    def test_moves_once_and_then_copies_nothing(self) -> None:
        module = linear()
        tensors = list(module.parameters())
        stream = stream_of(tensors)
        assert stream.refresh(tensors) == 60
        assert stream.adopted == {0, 1}
        assert all(held(stream, t) for t in tensors)
        with torch.no_grad():
            module.weight.mul_(3)
        assert stream.refresh(tensors) == 0
        assert torch.equal(seen(stream, 0, module.weight), torch.full((3, 4), 3.0))
        stream.close()

    def test_close_moves_back(self) -> None:
        module = linear(2.0)
        tensors = list(module.parameters())
        stream = stream_of(tensors)
        stream.refresh(tensors)
        stream.close()
        stream.close()
        assert not any(held(stream, t) for t in tensors)
        assert torch.equal(module.weight, torch.full((3, 4), 2.0))

    def test_replaced_data_is_adopted_again(self) -> None:
        module = linear()
        tensors = list(module.parameters())
        stream = stream_of(tensors)
        stream.refresh(tensors)
        module.weight.data = torch.full((3, 4), 5.0)
        assert stream.refresh(tensors) == 48
        assert held(stream, module.weight)
        assert torch.equal(seen(stream, 0, module.weight), torch.full((3, 4), 5.0))
        assert stream.refresh(tensors) == 0
        stream.close()

    def test_a_refused_adoption_copies_every_time(self) -> None:
        module = linear()
        tensors = list(module.parameters())
        stream = stream_of(tensors, adopt=False)
        for value in (1.0, 2.0):
            with torch.no_grad():
                module.weight.fill_(value)
            assert stream.refresh(tensors) == 60
            assert torch.equal(seen(stream, 0, module.weight), torch.full((3, 4), value))
        assert stream.adopted == frozenset()
        assert not held(stream, module.weight)
        stream.close()

    def test_another_shape_is_an_error(self) -> None:
        module = linear()
        stream = stream_of([module.weight])
        stream.refresh([module.weight])
        module.weight.data = torch.ones(2, 2)
        with pytest.raises(ManifestMismatchError, match=r"has the shape \[2, 2\] and had \[3, 4\]"):
            stream.refresh([module.weight])
        stream.close()


class TestNotMoved:
    """What shares its memory with something else is copied, so that nothing is torn apart."""

    def check_copied(self, tensor: torch.Tensor, stream: SharedStream) -> None:
        address = tensor.data_ptr()
        stream.refresh([tensor])
        assert tensor.data_ptr() == address
        assert stream.adopted == frozenset()
        with torch.no_grad():
            tensor.fill_(7)
        assert stream.refresh([tensor]) > 0
        like = tensor.contiguous()
        assert torch.equal(seen(stream, 0, like), torch.full_like(like, 7))
        stream.close()

    def test_a_view_of_something_larger(self) -> None:
        whole = torch.zeros(10)
        self.check_copied(whole[2:6], stream_of([whole[2:6]]))
        assert whole.tolist() == [0, 0, 7, 7, 7, 7, 0, 0, 0, 0]

    def test_two_parameters_over_one_memory(self) -> None:
        first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        second.weight.data = first.weight.data
        self.check_copied(first.weight, stream_of([first.weight]))
        assert torch.equal(second.weight, first.weight)

    def test_another_stride(self) -> None:
        tensor = torch.zeros(4, 3).t()
        stream = stream_of([tensor])
        self.check_copied(tensor, stream)

    def test_a_cast(self) -> None:
        module = linear(1.5)
        stream = stream_of([module.weight], dtype=torch.bfloat16)
        stream.refresh([module.weight])
        assert module.weight.dtype is torch.float32
        assert not held(stream, module.weight)
        like = torch.empty(3, 4, dtype=torch.bfloat16)
        assert torch.equal(seen(stream, 0, like), torch.full_like(like, 1.5))
        stream.close()

    def test_what_another_sender_adopted(self) -> None:
        module = linear()
        first, second = stream_of([module.weight]), stream_of([module.weight])
        first.refresh([module.weight])
        second.refresh([module.weight])
        assert held(first, module.weight)
        assert second.adopted == frozenset()
        first.close()
        second.close()


class TestTheModelDoesNotNotice:
    @pytest.fixture
    def module(self) -> nn.Linear:
        return linear(2.0)

    @pytest.fixture
    def stream(self, module: nn.Linear) -> Iterator[SharedStream]:
        made = stream_of(list(module.parameters()))
        made.refresh(list(module.parameters()))
        assert made.adopted == {0, 1}
        yield made
        made.close()

    def test_optimizer_steps_are_seen(self, module: nn.Linear, stream: SharedStream) -> None:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        module(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert stream.refresh(list(module.parameters())) == 0
        assert torch.equal(seen(stream, 0, module.weight), module.weight.detach())
        assert not torch.equal(module.weight, torch.full((3, 4), 2.0))

    def test_copies_have_memory_of_their_own(self, module: nn.Linear, stream: SharedStream) -> None:
        twin = copy.deepcopy(module)
        state = {name: t.clone() for name, t in module.state_dict().items()}
        assert not held(stream, twin.weight)
        with torch.no_grad():
            module.weight.fill_(9)
        assert torch.equal(twin.weight, torch.full((3, 4), 2.0))
        module.load_state_dict(state)
        assert stream.refresh(list(module.parameters())) == 0
        assert torch.equal(seen(stream, 0, module.weight), torch.full((3, 4), 2.0))

    def test_a_tied_parameter_stays_tied(self) -> None:
        embed, head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        head.weight = embed.weight
        stream = stream_of([embed.weight])
        stream.refresh([embed.weight])
        assert stream.adopted == {0}
        with torch.no_grad():
            embed.weight.fill_(4)
        assert torch.equal(head.weight, embed.weight)
        stream.close()
        assert head.weight.data_ptr() == embed.weight.data_ptr()

    def test_sharing_the_model_with_torch_loses_no_update(
        self, module: nn.Linear, stream: SharedStream
    ) -> None:
        module.share_memory()
        assert is_shared(module.weight)
        for value in (3.0, 4.0):
            with torch.no_grad():
                module.weight.fill_(value)
            stream.refresh(list(module.parameters()))
            assert torch.equal(seen(stream, 0, module.weight), torch.full((3, 4), value))
        assert is_shared(module.weight)

    def test_tensors_outlive_the_stream(self, module: nn.Linear, stream: SharedStream) -> None:
        kept = module.weight.detach()
        stream.close()
        kept.add_(1)
        assert kept.tolist() == [[3.0] * 4] * 3


def test_in_inference_mode_parameters_stay_trainable() -> None:
    """Whoever calls the sender in that mode gets no parameters that refuse gradients."""
    module = linear()
    tensors = list(module.parameters())
    with torch.inference_mode():
        stream = stream_of(tensors)
        stream.refresh(tensors)
    assert stream.adopted == {0, 1}
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)

    def train() -> None:
        module(torch.ones(1, 4, requires_grad=True)).sum().backward()
        optimizer.step()
        assert not module.weight.data.is_inference()

    train()
    with torch.inference_mode():
        stream.close()
    train()
    assert not held(stream, module.weight)


class TestBesideAStep:
    """A step writes to the memory that it began with: nothing moves or frees that meanwhile."""

    class Step(torch.optim.SGD):
        """A step that does `middle` first."""

        middle = staticmethod(lambda: None)

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """As SGD's."""
            self.middle()
            super().step(closure)

    @pytest.fixture
    def module(self) -> nn.Linear:
        made = linear(2.0)
        for parameter in made.parameters():
            parameter.grad = torch.ones_like(parameter)
        return made

    @pytest.fixture
    def stream(self, module: nn.Linear) -> SharedStream:
        optimizer_steps.install()
        made = stream_of(list(module.parameters()))
        made.refresh(list(module.parameters()))
        assert made.adopted == {0, 1}
        return made

    @pytest.mark.parametrize("ends", [True, False])
    def test_close_waits_for_another_threads_step(
        self, module: nn.Linear, stream: SharedStream, ends: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shared_stream, "_STEP_S", 60.0 if ends else 0.1)
        entered, go = threading.Event(), threading.Event()

        def middle() -> None:
            entered.set()
            go.wait(60)

        optimizer = self.Step(module.parameters(), lr=1.0)
        optimizer.middle = middle
        threads = [threading.Thread(target=optimizer.step), threading.Thread(target=stream.close)]
        try:
            threads[0].start()
            assert entered.wait(60)
            threads[1].start()
            threads[1].join(0.2 if ends else 60)
            assert threads[1].is_alive() is ends
            assert held(stream, module.weight)
        finally:
            go.set()
            for thread in threads:
                thread.join(60)
        assert held(stream, module.weight) is not ends
        assert module.weight.tolist() == [[1.0] * 4] * 3

    def test_the_collector_moves_nothing_in_the_middle_of_a_step(
        self, module: nn.Linear, stream: SharedStream
    ) -> None:
        stream.finalizing = True
        optimizer = self.Step(module.parameters(), lr=1.0)
        optimizer.middle = stream.close
        optimizer.step()
        assert stream.segment not in live_segments()
        assert held(stream, module.weight)
        assert module.weight.tolist() == [[1.0] * 4] * 3


def test_scalars_and_empty_tensors() -> None:
    tensors = [torch.tensor(3.0), torch.zeros(0, 4), torch.tensor(5, dtype=torch.int64)]
    stream = stream_of(tensors)
    stream.refresh(tensors)
    assert stream.adopted == {0, 2}
    assert stream.refresh(tensors) == 0
    assert seen(stream, 2, tensors[2]).item() == 5
    stream.close()
    assert [t.numel() for t in tensors] == [1, 0, 1]
