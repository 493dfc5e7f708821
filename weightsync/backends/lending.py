"""Whole tensors for hooks: views of a bucket where a tensor is whole in it, assembled otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weightsync.backends.base import LoadContext
from weightsync.specs import TensorSpec
from weightsync.tensors import TORCH_DTYPES, from_bytes
from weightsync.weights import arena
from weightsync.weights.copy_plan import Memory
from weightsync.weights.fingerprint import xxh3
from weightsync.weights.fused import slot_reader
from weightsync.weights.layout import Chunk, StreamLayout, TensorSlice
from weightsync.weights.packer import slot_views
from weightsync.weights.sink import LoadTarget, own_storage, refuse_kept, uses


class Assembly:
    """Where tensors larger than a bucket are put together, one after the other.

    On the host it is kept from update to update, since memory that is touched for the first time
    costs ten times a warm copy; torch keeps a GPU's by itself.
    """

    def __init__(self) -> None:
        self._kept: torch.Tensor | None = None

    def take(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return `uint8[nbytes]` with anything in it, for one update. Raises TransferError."""
        if device.type != "cpu":
            with arena.no_room(nbytes, device):
                return torch.empty(nbytes, dtype=torch.uint8, device=device)
        if self._kept is None or self._kept.numel() < nbytes:
            self._kept = None  # before there are two
            self._kept = arena.allocate(nbytes, device)
        return self._kept[:nbytes]

    def clear(self) -> None:
        """Let the memory go."""
        self._kept = None


class HookFeeder:
    """Lends tensors to `landing.load`, in the manifest's order, each valid until that returns.

    A tensor larger than a bucket is put together in `assembly`, `uint8[plan.largest_cut_nbytes]`. A
    hook that kept a view is found out by its storage's use count: TransferError names the tensors.
    """

    def __init__(
        self,
        plan: StreamLayout,
        load_target: LoadTarget,
        reception: LoadContext,
        assembly: torch.Tensor | None = None,
    ) -> None:
        self._plan = plan
        self._load_target = load_target
        self._checks_views = reception.lends_views
        self._kept_advice = reception.kept_advice
        self._assembly = assembly
        self._next = 0

    def fingerprints(self, chunk: Chunk, slot: torch.Tensor, *, verify: bool) -> list[int]:
        """Fingerprint what arrived in a slot."""
        if not verify:
            return []
        if slot.device.type == "cpu":
            return [xxh3(view) for view in slot_views(self._plan, chunk, slot)]
        return slot_reader(self._plan, chunk, slot)()

    def deliver(self, chunk: Chunk, slot: torch.Tensor) -> None:
        """Lend every tensor that this chunk completes."""
        pairs: list[tuple[int, torch.Tensor]] = []
        for piece in self._plan.pieces(chunk.start, chunk.stop):
            spec = self._plan.manifest.specs[piece.index]
            begin = piece.start - chunk.start
            flat = slot[begin : begin + piece.nbytes]
            if piece.nbytes < spec.nbytes:
                if piece.begin == 0 and pairs:  # the tensor before it may lie in the assembly
                    self._lend(pairs, upto=piece.index)
                    pairs.clear()
                whole = self._assemble(piece, flat)
                if whole is None:
                    continue
                flat = whole
            pairs.append((piece.index, flat))
        self._lend(pairs, upto=pairs[-1][0] + 1 if pairs else self._next)
        _wait_for_copies(slot.device)

    def deliver_whole(self, memory: Memory) -> None:
        """Lend every tensor of registered memory at once."""
        self._lend(list(enumerate(memory.tensors)), upto=len(memory.tensors))
        for device in {tensor.device for tensor in memory.tensors}:
            _wait_for_copies(device)

    def finish(self) -> None:
        """Lend the tensors without bytes that no chunk completed."""
        self._lend([], upto=len(self._plan.manifest.specs))
        self._assembly = None

    def _lend(self, filled: Sequence[tuple[int, torch.Tensor]], *, upto: int) -> None:
        """Lend these tensors, and those without bytes that stand before `upto` in the manifest."""
        given = dict(filled)
        indices = range(self._next, upto)
        self._next = upto
        specs = self._plan.manifest.specs
        lent = [(specs[i].name, self._loan(specs[i], given.get(i))) for i in indices]
        if not lent:
            return
        counts = [uses(base) for _, base in lent]
        self._load_target.load(
            [
                (name, from_bytes(base, specs[i]))
                for i, (name, base) in zip(indices, lent, strict=True)
            ]
        )
        if self._checks_views:
            refuse_kept(lent, counts, self._kept_advice)

    def _loan(self, spec: TensorSpec, flat: torch.Tensor | None) -> torch.Tensor:
        if flat is None:
            flat = torch.empty(0, dtype=torch.uint8)
        elif flat.device.type == "cpu" and flat.numel():
            # A storage of its own for each, so that the count of its uses names this tensor.
            flat = own_storage(flat)
        elif flat.storage_offset() % TORCH_DTYPES[spec.dtype].itemsize:
            flat = flat.clone()  # tensors that lie one after another need not be aligned
        return flat

    def _assemble(self, piece: TensorSlice, flat: torch.Tensor) -> torch.Tensor | None:
        spec = self._plan.manifest.specs[piece.index]
        if self._assembly is None:
            raise ValueError("this plan cuts tensors; the lender needs a place to join them")
        whole = self._assembly[: spec.nbytes]
        whole[piece.begin : piece.begin + piece.nbytes].copy_(flat)
        return whole if piece.begin + piece.nbytes == spec.nbytes else None


def _wait_for_copies(device: torch.device) -> None:
    """Wait for what a hook has enqueued: the memory that it copies from is about to be released."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
