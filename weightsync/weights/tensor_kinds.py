"""Kinds of tensors: which can be sent or written to, and which carry state beside their bytes.

Every source and every sink of modules decides here. docs/sources.md has the table.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from weightsync.errors import ConfigError, ManifestMismatchError, VerificationError, shorten
from weightsync.tensors import (
    PLAIN_CLASSES,
    TORCH_DTYPES,
    address_of,
    contiguous_bytes,
    sent_dtype,
)
from weightsync.weights.copying.shards import is_sharded, local_of
from weightsync.weights.inner_tensors import holds_tensor, is_of_torchao, why_not_whole

logger = logging.getLogger(__name__)

Use = Literal["sent", "written to"]

_DTYPES = frozenset(TORCH_DTYPES.values())
_QUANTIZERS = frozenset({"bitsandbytes", "torchao"})
"""Packages whose tensor classes keep scales beside the bytes. They are never imported here."""
_QUANTIZATION = re.compile(
    r"quant|dequant|scales?$|scale_|zero_?points?$|zeros?$|absmax|^scb$|^cb$|codebook",
    re.IGNORECASE,
)
"""Names of attributes that change what the bytes of a weight mean, whatever their values are."""
_NO_VALUES = frozenset({"grad_acc", "main_grad", "main_param", "_local_tensor", "_spec"})
"""Attributes that hold no part of a weight's value: Megatron's gradient, and the copy that its
optimizer keeps; those of a DTensor itself."""
_NO_VALUES_OF = ("ds_", "_hp_", "_z3_", "_fsdp", "_dp_")
"""How such names begin: those of DeepSpeed and of FSDP."""
_ADVICE: Mapping[Use, str] = {
    "sent": "give connect() a callable that yields plain tensors (docs/sources.md)",
    "written to": "give WeightReceiver a load_weights hook that fills them",
}


class _Reason(NamedTuple):
    """Why the bytes of a tensor are not its values, and what to send in its place."""

    what: str
    instead: str


def check_sendable(
    named: Iterable[tuple[str, torch.Tensor]],
    cast: torch.dtype | None = None,
    *,
    or_meta: bool = False,
) -> None:
    """Raise ConfigError, naming all tensors whose bytes are not their values.

    `cast` is the dtype to which floating-point tensors are cast before they are sent. `or_meta`
    allows tensors without memory on the meta device.
    """
    found = [(n, why) for n, t in named if (why := why_unsendable(t, cast, or_meta=or_meta))]
    if found:
        raise refusal(found)


def check_writable(
    named: Iterable[tuple[str, torch.Tensor]], *, or_overlapping: bool = False
) -> None:
    """Raise ConfigError, naming all tensors into which no bytes of weights can be written.

    Tensors without memory are allowed: an offloaded module may be brought back. `or_overlapping`
    allows those whose elements share memory, in a module that may be changed for a while.
    """
    found = []
    for name, tensor in named:
        why = why_unsendable(tensor, or_meta=True)
        if why is None and not or_overlapping and overlaps(local_of(tensor)):
            why = _Reason("expanded, or a view whose elements share memory", "")
        if why is not None:
            found.append((name, why))
    if found:
        raise refusal(found, "written to")


def refusal(found: Iterable[tuple[str, _Reason]], use: Use = "sent") -> ConfigError:
    """Return the error that names these tensors, equal reasons once."""
    grouped: defaultdict[_Reason, list[str]] = defaultdict(list)
    for name, why in found:
        grouped[why].append(name)
    count = sum(map(len, grouped.values()))
    tensors = "1 tensor cannot be" if count == 1 else f"{count} tensors cannot be"
    listed = []
    for why, names in grouped.items():
        instead = f" (send {why.instead})" if use == "sent" else ""
        listed.append(f"{shorten(names)} is {why.what}{instead}")
    return ConfigError(f"{tensors} {use}: {shorten(listed)}; {_ADVICE[use]}")


def why_unsendable(
    tensor: torch.Tensor, cast: torch.dtype | None = None, *, or_meta: bool = False
) -> _Reason | None:
    """Return why the bytes of a tensor are not its values; None for tensors that can be sent.

    Also None for a plain tensor whose memory was freed (`check_readable` refuses it): its owner
    may allocate it again. Of a DTensor, the local tensor is looked at.
    """
    why = None if _is_usual(tensor) else _why(tensor, cast, or_meta=or_meta)
    if why is None and _exceeds_storage(tensor):
        return _Reason("larger than its storage, which was cut", "a tensor with all of its memory")
    return why


def _is_usual(tensor: torch.Tensor) -> bool:
    """Whether this is a plain tensor with memory: what nearly all tensors of models are."""
    return (
        type(tensor) in PLAIN_CLASSES
        and tensor.layout is torch.strided
        and tensor.dtype in _DTYPES
        and not tensor.is_nested
        and address_of(tensor) != 0
    )


def check_readable(
    name: str, tensor: torch.Tensor, cast: torch.dtype | None = None, *, or_meta: bool = False
) -> None:
    """Raise ConfigError for a tensor that cannot be sent, ManifestMismatchError for a freed one.

    Called for each tensor that is made for an update, before its bytes are read.
    """
    if _is_usual(tensor) and not _exceeds_storage(tensor):
        return
    why = why_unsendable(tensor, cast, or_meta=or_meta)
    if why is not None:
        raise refusal([(name, why)])
    if not (or_meta and tensor.is_meta) and lacks_memory(local_of(tensor)):
        raise no_memory(name)


def no_memory(name: str) -> ManifestMismatchError:
    """Return the error for a tensor whose memory was freed."""
    return ManifestMismatchError(
        f"{name} has no memory (offloaded?); bring it back before it is sent",
        mismatched=[f"{name}: no memory"],
    )


def _why(tensor: torch.Tensor, cast: torch.dtype | None, *, or_meta: bool) -> _Reason | None:
    cls = type(tensor)
    local: torch.Tensor = local_of(tensor)
    if is_sharded(tensor) and local is not tensor:
        why = _why(local, cast, or_meta=or_meta)
        return why and _Reason(f"a DTensor of {why.what}", why.instead)
    package = quantizer_of(tensor)
    if package is not None:
        what = f"a {package} {cls.__name__}, with scales beside its bytes"
        if is_of_torchao(tensor) and hasattr(cls, "__tensor_flatten__"):
            because = why_not_whole(tensor)
            what += (
                f", and is not sent whole: {because}" if because else ", and not sent whole here"
            )
        return _Reason(what, "its values, as ws.DequantizedSource(model) does")
    if hasattr(tensor, "ds_tensor"):
        return _Reason(
            "in pieces of DeepSpeed's ZeRO-3", "the engine or its model itself, to connect()"
        )
    if is_lazy(tensor):
        return _Reason(
            f"a {cls.__name__}, without shape and values yet", "it after a first forward"
        )
    # A subclass may answer for the tensors inside of it.
    with torch._C.DisableTorchFunctionSubclass():
        return _why_inner(tensor, cls) or _why_form(tensor, cast, or_meta=or_meta)


def _why_inner(tensor: torch.Tensor, cls: type[torch.Tensor]) -> _Reason | None:
    """Return why the values of a subclass are in other tensors, None where they are its own."""
    if cls in PLAIN_CLASSES or tensor.layout is not torch.strided:
        return None
    is_fake = any(base.__module__.startswith("torch._subclasses.fake_") for base in cls.__mro__)
    if is_fake:
        return _Reason(f"a {cls.__name__}, which has no values", "the real tensor")
    if not hasattr(cls, "__tensor_flatten__") and not _is_wrapper(tensor):
        return None
    inner = _inner_names(tensor)
    within = f" ({shorten(inner)})" if inner else ""
    waits = any(base.__name__ == "AsyncCollectiveTensor" for base in cls.__mro__)
    return _Reason(
        f"a {cls.__name__}, whose values are in other tensors{within}",
        "the result of its wait()" if waits else "a plain tensor of its values",
    )


def _why_form(tensor: torch.Tensor, cast: torch.dtype | None, *, or_meta: bool) -> _Reason | None:
    """Return why a tensor's layout, dtype or memory cannot be read as its values."""
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.").removeprefix("_")
        return _Reason(f"{layout}", "a dense tensor, as its to_dense() is")
    if tensor.is_nested:
        return _Reason("nested", "its parts, as unbind() returns them")
    if tensor.is_quantized:
        return _Reason(f"quantized ({tensor.dtype})", "its dequantize(), or its int_repr()")
    if sent_dtype(tensor.dtype, cast) not in _DTYPES:
        return _Reason(f"of dtype {tensor.dtype}", "view(torch.uint8), on both sides")
    if tensor.is_meta:
        return None if or_meta else _Reason("on the meta device, without values", "the real tensor")
    if _is_wrapper(tensor):
        return _Reason("without memory of its own, as inside of torch.func", "its plain value")
    return None


def lacks_memory(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor has elements and no memory: it was freed, or is on the meta device."""
    return not address_of(tensor) and tensor.numel() > 0


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor share memory: it is expanded, or a window over less memory."""
    if tensor.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def find_sharing(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the positions of tensors that reach into each other's memory, in groups.

    The spans of their addresses are compared: views whose elements alternate are one group, too.
    """
    spans = []
    for i, tensor in enumerate(tensors):
        start, end = _span(tensor)
        if start:
            spans.append((tensor.device.type, tensor.device.index or 0, start, end, i))
    groups: list[list[int]] = []
    group: list[int] = []
    last: tuple[str, int] | None = None
    reach = 0
    for device_type, device, start, end, i in sorted(spans):
        if last != (device_type, device) or start >= reach:
            group, reach, last = [], end, (device_type, device)
        group.append(i)
        reach = max(reach, end)
        if len(group) == 2:
            groups.append(group)
    return groups


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first byte and the one after its last; zeros without any."""
    start = address_of(tensor)
    if not start or not tensor.numel():
        return 0, 0
    if tensor.is_contiguous():
        return start, start + tensor.numel() * tensor.element_size()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in pairs)
    return start, start + (last + 1) * tensor.element_size()


class Shared(NamedTuple):
    """A tensor of a module that shares memory with another one, and the value for it."""

    name: str
    tensor: torch.Tensor
    value: torch.Tensor


def check_agreement(listed: Sequence[Shared]) -> None:
    """Raise VerificationError, naming tensors that share memory and whose values differ there.

    All values are written to memory like that of the module, one after the other, and read again.
    """
    tensors = [each.tensor for each in listed]
    wrong: dict[str, list[str]] = {}
    for group in find_sharing(tensors):
        wrong.update(_disagreeing([listed[i] for i in group]))
    if wrong:
        pairs = shorten(f"{name} with {', '.join(others)}" for name, others in wrong.items())
        names = dict.fromkeys(name for pair in wrong.items() for name in (pair[0], *pair[1]))
        raise VerificationError(
            "tensors of the receiving module share memory, and cannot hold what was sent, since "
            f"their values contradict each other there: {pairs}; send values that agree, or give "
            "each of them memory of its own before WeightReceiver is made",
            names=list(names),
        )


def _disagreeing(group: Sequence[Shared]) -> dict[str, list[str]]:
    """Return the tensors of a group that would be overwritten, and those that share memory."""
    spans = [_span(each.tensor) for each in group]
    base, end = min(start for start, _ in spans), max(end for _, end in spans)
    memory = torch.empty(end - base, dtype=torch.uint8, device=group[0].tensor.device)
    written = []
    for (_, tensor, value), (start, _) in zip(group, spans, strict=True):
        width = tensor.element_size()
        strides = [stride * width for stride in tensor.stride()]
        # In bytes, since tensors that share memory may have different dtypes.
        place = memory.as_strided((*tensor.shape, width), (*strides, 1), start - base)
        stored = value.to(tensor.device, tensor.dtype)  # as `copy_` stores it
        stored = stored.conj() if tensor.is_conj() else stored
        stored = stored.neg() if tensor.is_neg() else stored
        place.copy_(contiguous_bytes(stored).view(place.shape))
        written.append((place, stored))
    wrong: dict[str, list[str]] = {}
    for i, (place, stored) in enumerate(written):
        if not torch.equal(place, contiguous_bytes(stored).view(place.shape)):
            start, end = spans[i]
            others = {
                each.name: None
                for each, (begin, until) in zip(group, spans, strict=True)
                if each.name != group[i].name and begin < end and start < until
            }
            wrong[group[i].name] = list(others)
    return wrong


def _exceeds_storage(tensor: torch.Tensor) -> bool:
    """Whether torch would read beyond the end of a tensor's storage, which was resized."""
    if not address_of(tensor) or not tensor.numel():
        return False
    if tensor.is_contiguous():
        last = tensor.numel() - 1
    else:
        last = sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
    end = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return end > tensor.untyped_storage().nbytes()


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a size of memory and none; False where its storage was freed."""
    try:
        return bool(not tensor.data_ptr() and tensor.numel() and tensor.untyped_storage().nbytes())
    except (RuntimeError, NotImplementedError):
        return True


def warn_of_state(
    states: Mapping[str, Iterable[str]],
    use: Literal["sent", "written"],
    modules: Iterable[nn.Module] = (),
) -> None:
    """Log a warning that names state beside the bytes of tensors, which no update carries.

    `states` are the names of tensors with what `state_beside` returns. `modules` are looked at for
    extra state, which is in their state dict and in none of their tensors.
    """
    if states:
        listed = shorten(f"{name} ({', '.join(keys)})" for name, keys in states.items())
        logger.warning(
            "%d tensors have state beside their bytes, which is not %s: %s; an update carries the "
            "bytes alone, and what they mean may differ between trainer and server",
            len(states),
            use,
            listed,
        )
    extra = sorted({type(m).__name__ for m in modules if _has_extra_state(m)})
    if extra:
        logger.warning(
            "the extra state (get_extra_state) of these modules is not %s: %s", use, shorten(extra)
        )


def warn_of_derived(module: nn.Module) -> None:
    """Log a warning that names the buffers that may be derived from weights, and are not sent.

    These are floating-point buffers that are not persistent, of modules that have parameters: the
    others, as the frequencies of rotary embeddings, come from a config.
    """
    names = [
        f"{path}.{key}" if path else key
        for path, owner in module.named_modules()
        if owner._non_persistent_buffers_set
        for key in sorted(owner._non_persistent_buffers_set)
        if _may_be_derived(owner, owner._buffers.get(key))
    ]
    if names:
        logger.warning(
            "%d buffers are not in the state dict, so no update carries them, and may be derived "
            "from weights: %s; derive them in WeightReceiver(on_commit=...), or give an on_commit "
            "that does nothing",
            len(names),
            shorten(names),
        )


def _may_be_derived(owner: nn.Module, buffer: torch.Tensor | None) -> bool:
    if buffer is None or not buffer.dtype.is_floating_point:
        return False
    return next(owner.parameters(), None) is not None


def states_beside(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, list[str]]:
    """Return `state_beside` of those tensors that have any, by name."""
    return {name: keys for name, tensor in named if (keys := state_beside(tensor))}


def state_beside(tensor: torch.Tensor) -> list[str]:
    """Return the names of a tensor's attributes that hold a part of what its bytes mean.

    Such are the scales of quantized bytes, which other code keeps as attributes of the tensor.
    """
    local = local_of(tensor)
    found = [key for key, value in vars(tensor).items() if _is_state(key, value)]
    if local is not tensor:
        found += [key for key, value in vars(local).items() if _is_state(key, value)]
    return found


def _is_state(key: str, value: object) -> bool:
    if key in _NO_VALUES or key.startswith(_NO_VALUES_OF) or value is None or value is False:
        return False
    if isinstance(value, FunctionType | MethodType | type | nn.Module):
        return False
    return _QUANTIZATION.search(key) is not None or holds_tensor(value)


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _inner_names(tensor: Any) -> list[str]:
    """Return the names of a subclass's inner tensors, as far as it tells them."""
    try:
        names, _ = tensor.__tensor_flatten__()
    except Exception:  # noqa: BLE001  # a foreign class, asked for a message only
        names = [key for key, value in vars(tensor).items() if isinstance(value, torch.Tensor)]
    return list(map(str, names))


def quantizer_of(tensor: torch.Tensor) -> str | None:
    """Return the package that keeps scales beside the bytes of this tensor, None for others."""
    packages = (cls.__module__.partition(".")[0] for cls in type(tensor).__mro__)
    return next((package for package in packages if package in _QUANTIZERS), None)
