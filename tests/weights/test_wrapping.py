"""What a source around another one is given: tensors in the dtypes of the manifest inside."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import weightsync as ws


class Scaled(ws.WrappingSource):
    """Computes with its tensors: the result depends on the dtype that it is given."""

    given: list[torch.dtype]

    @property
    def manifest(self) -> ws.Manifest:
        return self.source.manifest

    def convert(
        self, pairs: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        self.given = []
        for name, tensor in pairs:
            self.given.append(tensor.dtype)
            yield name, tensor * 1.001


def sent(source: object) -> tuple[dict[str, torch.Tensor], list[torch.dtype]]:
    """Return what arrives of a Scaled source in bfloat16, and the dtypes that it was given."""
    scaled = Scaled(source, dtype=torch.bfloat16)
    arrived: dict[str, torch.Tensor] = {}

    def load(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        arrived.update((name, tensor.clone()) for name, tensor in pairs)

    receiver = ws.WeightReceiver(load)
    with ws.connect(scaled, to=receiver.handle) as sender:
        sender.send_weights()
    receiver.close()
    return arrived, scaled.given


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))


def test_it_computes_with_the_same_whether_they_are_gathered_or_not(tmp_path: Path) -> None:
    whole, dtypes = sent(model())
    assert set(dtypes) == {torch.bfloat16}
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        gathered, dtypes = sent(fully_shard(model()))
    finally:
        dist.destroy_process_group()
    assert set(dtypes) == {torch.bfloat16}
    assert whole.keys() == gathered.keys()
    assert all(torch.equal(whole[name], gathered[name]) for name in whole)


def test_a_callable_that_yields_another_dtype_is_cast_first() -> None:
    tensors = dict(model().state_dict())
    _, dtypes = sent(lambda: iter(tensors.items()))
    assert set(dtypes) == {torch.bfloat16}
