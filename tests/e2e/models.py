"""A model with every kind of tensor that weights come in, and its bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
)
SHAPES = {"matrix": (33, 7), "scalar": (), "empty": (0, 3), "one": (1,)}
BUCKET_NBYTES = 128 << 10
"""Small, so that a model of a megabyte fills many chunks and has a tensor larger than one."""
LARGE = (211, 701)


class Everything(nn.Module):
    """Every dtype in every shape, and each way in which tensors share memory or lie oddly."""

    def __init__(self) -> None:
        super().__init__()
        for dtype in DTYPES:
            for label, shape in SHAPES.items():
                name = f"{str(dtype).removeprefix('torch.')}_{label}"
                self.register_buffer(name, torch.zeros(shape, dtype=dtype))
        self.large = nn.Parameter(torch.zeros(LARGE))
        self.turned = nn.Parameter(torch.zeros(40, 31).t())
        pool = torch.zeros(900)
        self.left, self.right = nn.Parameter(pool[:400]), nn.Parameter(pool[400:].view(20, 25))
        self.register_buffer("every_other", torch.zeros(50, 2)[:, 0])
        self.embedding = nn.Embedding(64, 24)
        self.head = nn.Linear(24, 64, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scratch", torch.zeros(5), persistent=False)


class Plain(nn.Module):
    """Float parameters alone, many small ones and one that no bucket holds."""

    def __init__(self, layers: int = 12, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(40, 50, dtype=dtype) for _ in range(layers))
        self.large = nn.Parameter(torch.zeros(LARGE, dtype=dtype))


def _tied() -> nn.Module:
    model = nn.ModuleDict({"embedding": nn.Embedding(64, 24), "head": nn.Linear(24, 64, False)})
    model["head"].weight = model["embedding"].weight
    return model


def _decoder() -> nn.Module:
    from tests.weights.trainer_models import plain

    return plain()


def _equal() -> nn.Module:
    from tests.e2e.ranks_at_work import Equal

    return Equal()


def _mixed() -> nn.Module:
    model = _decoder().bfloat16()
    model.get_submodule("layers.1").float()
    return model


def _rows() -> nn.Module:
    from tests.e2e.stream_faults import Rows

    return Rows()


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "everything": Everything,
    "plain": Plain,
    "bfloat16": lambda: Plain(dtype=torch.bfloat16),
    "tied": _tied,
    "decoder": _decoder,
    "equal": _equal,
    "rows": _rows,
    "wide": lambda: nn.ParameterDict({f"t{i}": torch.zeros(1 << 18) for i in range(16)}),
    "squares": lambda: nn.ParameterDict({f"t{i}": torch.zeros(512, 512) for i in range(16)}),
    "broad": lambda: nn.ParameterDict(
        {f"t{i}": torch.zeros(*((32, 16 << 10) if i < 4 else (512, 512))) for i in range(12)}
    ),
    "pages": lambda: nn.ParameterDict({f"t{i}": torch.zeros(64, 64) for i in range(4)}),
    "decoder-mixed": _mixed,
    "decoder-bfloat16": lambda: _decoder().bfloat16(),
    "untied": lambda: nn.ModuleDict(
        {"embedding": nn.Embedding(64, 24), "head": nn.Linear(24, 64, bias=False)}
    ),
}


def make(name: str, seed: int = 0) -> nn.Module:
    """Return a model of MODELS, filled."""
    model = MODELS[name]()
    fill(model, seed)
    return model


def keep_columns(model: nn.Module, part: int, count: int) -> None:
    """Make each parameter a DTensor that has part `part` of `count` of its columns.

    In a process group of its own, which nothing is ever sent in.
    """
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=part, world_size=count, store=FakeStore())
    mesh = init_device_mesh("cpu", (count,))
    for name, parameter in list(model.named_parameters()):
        columns = distribute_tensor(parameter.detach(), mesh, [Shard(1)], src_data_rank=None)
        setattr(model, name, nn.Parameter(columns))


def columns_of(model: nn.Module, part: int, count: int) -> dict[str, torch.Tensor]:
    """Return what `keep_columns` keeps."""
    state = model.state_dict().items()
    return {name: tensor.chunk(count, 1)[part].contiguous() for name, tensor in state}


def fill(model: nn.Module, seed: int) -> None:
    """Overwrite every tensor in place with its own bits, NaNs and denormals among them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            top = 2 if tensor.dtype is torch.bool else 256
            nbytes = tensor.numel() * tensor.element_size()
            bits = torch.randint(top, (nbytes,), dtype=torch.uint8, generator=generator)
            tensor.copy_(bits.view(tensor.dtype).view(tensor.shape))


def touch(model: nn.Module, seed: int) -> None:
    """Overwrite one value in a hundred of every tensor, and at least one, with random bits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            size = tensor.element_size()
            count = min(1 + tensor.numel() // 100, tensor.numel())
            at = torch.randperm(tensor.numel(), generator=generator)[:count]
            top = 2 if tensor.dtype is torch.bool else 256
            bits = torch.randint(top, (count * size,), dtype=torch.uint8, generator=generator)
            new = tensor.contiguous().view(-1)
            new.view(torch.uint8).view(-1, size)[at] = bits.view(-1, size)
            tensor.copy_(new.view(tensor.shape))


def soften(model: nn.Module, seed: int) -> None:
    """Overwrite every tensor with ordinary numbers, for casts."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))


def digest(tensor: torch.Tensor) -> str:
    """Return dtype, shape and every byte, as text."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    state = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    state.update(flat.numpy().tobytes())
    return state.hexdigest()


def digests(tensors: nn.Module | Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return the digest of every tensor, tied names included."""
    pairs = tensors.state_dict().items() if isinstance(tensors, nn.Module) else tensors
    return {name: digest(tensor) for name, tensor in pairs}
