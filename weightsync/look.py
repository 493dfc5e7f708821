"""One look at many tensors: what each is, and where, with as few questions as there can be.

A tensor is some hundred bytes here and there, and after a copy of a model none of them is in the
caches any more. So all that an update has to know of thousands of tensors is asked at once, a block
of them at a time, and without a loop in Python.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from weightsync.tensors import PLAIN_CLASSES

T = TypeVar("T")

BLOCK = 512
_VERSION = operator.attrgetter("_version")
_DTYPE = operator.attrgetter("dtype")
# Not in torch's reference: torch.compile compares the arguments of a compiled function with it.
_GUARDS: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)


class Look(NamedTuple):
    """The state of tensors at one time.

    `versions` are -1 for inference tensors, which have none, and empty where they were not asked
    for. `addresses` are 0 for tensors of classes without memory of their own. `known`: all have the
    forms that were noted last; `plain`: and their bytes lie in memory in the order of the tensors,
    as they are: all are contiguous, and none is a negated or conjugated view.
    """

    versions: list[int]
    addresses: list[int]
    dtypes: list[torch.dtype]
    known: bool = False
    plain: bool = False

    def differ(self, then: Look) -> bool:
        """Whether any tensor was written to, moved or cast since another look at the same ones."""
        return self[:3] != then[:3]


class KnownForms:
    """Tells whether tensors are what they were, but for their memory and its values.

    One call of torch compares shapes, strides, dtypes, devices and classes of a block of them; to
    ask one tensor for its shape takes longer than all of that. Where torch has no such call, and
    for subclasses of torch.Tensor, nothing is known.
    """

    def __init__(self) -> None:
        self._guards: list[Any] = []
        self._count = 0
        self._plain = False
        self._dtypes: list[torch.dtype] = []

    def look(
        self, tensors: Sequence[torch.Tensor], *, versions: bool = True, compares: bool = True
    ) -> Look:
        """Look at these tensors: at their `versions`, and, if it `compares`, for known forms."""
        found = Look([], [], [])
        same = compares and self._are_as_many(tensors)
        for i, block in enumerate(_blocks(tensors)):
            same = same and self._guards[i].check(*block)
            if versions:
                found.versions.extend(_of_each(_VERSION, version_of, block))
            found.addresses.extend(_of_each(torch.Tensor.data_ptr, address_of, block))
            if same:
                found.dtypes.extend(self._dtypes[i * BLOCK : i * BLOCK + len(block)])
            else:
                found.dtypes.extend(map(_DTYPE, block))
        return found._replace(known=same, plain=same and self._plain)

    def note(self, tensors: Sequence[torch.Tensor]) -> None:
        """Remember the forms of these tensors."""
        self._guards, self._count = [], len(tensors)
        make = getattr(_GUARDS, "TensorGuards", None)
        if make is None or not PLAIN_CLASSES.issuperset(map(type, tensors)):
            return
        self._plain = are_plain(tensors)
        self._dtypes = list(map(_DTYPE, tensors))
        self._guards = [
            make(
                *block,
                dynamic_dims_sizes=[list(tensor.shape) for tensor in block],
                dynamic_dims_strides=[list(tensor.stride()) for tensor in block],
            )
            for block in _blocks(tensors)
        ]

    def _are_as_many(self, tensors: Sequence[torch.Tensor]) -> bool:
        return bool(self._guards) and len(tensors) == self._count


def _blocks(tensors: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
    return [tensors[i : i + BLOCK] for i in range(0, len(tensors), BLOCK)]


def _of_each(
    fast: Callable[[torch.Tensor], T],
    careful: Callable[[torch.Tensor], T],
    block: Sequence[torch.Tensor],
) -> list[T]:
    try:
        return list(map(fast, block))
    except (RuntimeError, NotImplementedError):
        return list(map(careful, block))


def are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all are contiguous, and none is a negated or conjugated view: no loop in Python."""
    return (
        all(map(torch.Tensor.is_contiguous, tensors))
        and not any(map(torch.Tensor.is_neg, tensors))
        and not any(map(torch.Tensor.is_conj, tensors))
    )


def version_of(tensor: torch.Tensor) -> int:
    """Return the tensor's version, -1 for inference tensors, which have none."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


def address_of(tensor: torch.Tensor) -> int:
    """Return the tensor's address, 0 for tensors of classes without memory of their own."""
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
