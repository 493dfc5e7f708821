"""What is known of tensors without asking each of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from weightsync import look
from weightsync.look import KnownForms

ROWS, COLUMNS, COUNT = 4, 4, 3


def some() -> list[torch.Tensor]:
    return [nn.Parameter(torch.randn(ROWS, COLUMNS), requires_grad=False) for _ in range(COUNT)]


def noted(found: list[torch.Tensor]) -> KnownForms:
    forms = KnownForms()
    assert not forms.look(found).known
    forms.note(found)
    assert forms.look(found).known
    return forms


def test_other_values_and_other_memory_are_the_same_form() -> None:
    found = some()
    forms = noted(found)
    found[0].add_(1)
    found[1].data = torch.zeros(ROWS, COLUMNS)
    assert forms.look(found).known
    assert forms.look(some()).known


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "shape": lambda t: t.view(2, 8),
    "rank": lambda t: t.view(1, ROWS, COLUMNS),
    "strides": lambda t: t.t(),
    "expanded": lambda t: t[:1].expand(ROWS, COLUMNS),
    "dtype of the same size": lambda t: t.view(torch.int32),
    "dtype": lambda t: t.double(),
    "empty": lambda _: torch.empty(0),
    "device": lambda t: t.to("meta"),
    "negated": torch._neg_view,
}


@pytest.mark.parametrize("at", range(COUNT))
@pytest.mark.parametrize("what", CHANGES)
def test_another_form_of_one_is_seen(what: str, at: int) -> None:
    found = some()
    forms = noted(found)
    found[at] = nn.Parameter(CHANGES[what](found[at].data), requires_grad=False)
    assert not forms.look(found).known
    forms.note(found)
    assert forms.look(found).known


def test_another_number_or_class_is_seen() -> None:
    found = some()
    forms = noted(found)
    assert not forms.look(found[:-1]).known
    assert not forms.look([*found, found[0]]).known
    assert not forms.look([*found[:-1], nn.Buffer(found[-1].detach())]).known
    assert not forms.look([]).known


class Scaled(torch.Tensor):
    """A subclass that may keep anything beside its bytes."""


def test_of_subclasses_nothing_is_known() -> None:
    found = [torch.zeros(2).as_subclass(Scaled)]
    forms = KnownForms()
    forms.note(found)
    assert not forms.look(found).known


def test_where_torch_has_no_such_call_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "_GUARDS", None)
    found, forms = some(), KnownForms()
    forms.note(found)
    assert not forms.look(found).known


def test_grad_mode_is_no_form() -> None:
    found: list[torch.Tensor] = [nn.Parameter(tensor) for tensor in some()]
    with torch.enable_grad():
        forms = noted(found)
    with torch.no_grad():
        assert forms.look(found).known


@pytest.mark.parametrize("of", ["transposed", "negated", "conjugated"])
def test_only_bytes_in_the_order_of_the_tensor_are_plain(of: str) -> None:
    made: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "transposed": lambda t: t.t(),
        "negated": torch._neg_view,
        "conjugated": lambda t: t.to(torch.complex64).conj(),
    }
    found = some()
    assert noted(found).look(found).plain
    found[1].data = made[of](found[1].data)
    seen = noted(found).look(found)
    assert seen.known
    assert not seen.plain
