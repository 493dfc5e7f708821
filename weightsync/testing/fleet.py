"""Receivers in this process, behind transports that can fail: a fleet to test a loop against."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

import torch
from torch import nn

from weightsync.errors import ConfigError
from weightsync.receiver import WeightReceiver
from weightsync.testing.faults import Act, Fault, Faults
from weightsync.testing.faulty_transport import FaultyTransport
from weightsync.transports.base import Transport
from weightsync.transports.callback import CallbackTransport
from weightsync.update.lifecycle import ApplyChoice

_LEASE_S = 30.0


class TinyModel(nn.Module):
    """Three tensors, of 16 KiB, 1 KiB and 4 bytes: enough for several chunks of 4 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.zeros(64, 64))
        self.norm = nn.Parameter(torch.zeros(256))
        self.scale = nn.Parameter(torch.zeros(()))


class FleetMember:
    """One receiver of the fleet: `receiver`, the `module` it loads into, and its `faults`."""

    def __init__(
        self, name: str, make: Callable[[], tuple[nn.Module, WeightReceiver]], faults: Faults
    ) -> None:
        self.name = name
        self.faults = faults
        self._make = make
        self.module, self.receiver = make()
        self._transports: list[FaultyTransport] = []

    def transport(self) -> FaultyTransport:
        """Return a new transport to it; a sender closes the one it was given."""
        carried = CallbackTransport(self._handle, self.name)
        self._transports.append(FaultyTransport(carried, self.faults))
        return self._transports[-1]

    def fail(
        self,
        act: Act,
        call: str | None = None,
        *,
        nth: int = 1,
        times: int = 1,
        seconds: float = 0.0,
        after: int = 1,
    ) -> None:
        """Arm a fault; see Fault. `member.fail("drop", "finish_weight_update")`."""
        self.faults.add(Fault(act, call, nth=nth, times=times, seconds=seconds, after=after))

    def restart(self) -> None:
        """Be another process: a new module, a new receiver without a version, reachable again."""
        self.receiver.close()
        self.module, self.receiver = self._make()
        for transport in self._transports:
            transport.revive()

    @property
    def unreachable(self) -> bool:
        """Whether a fault has killed it and it was not restarted."""
        return any(transport.killed for transport in self._transports)

    def deliver_late(self) -> int:
        """Have every message that is still on its way to it arrive now; return how many did."""
        return sum(transport.deliver_late() for transport in self._transports)

    def tensors(self, *, timeout_s: float = 1.0) -> tuple[int, dict[str, torch.Tensor]]:
        """Return the version in use and a copy of its tensors, as a decode step would see them.

        Raises NotReadyError where the receiver refuses to generate.
        """
        with self.receiver.reading(timeout_s=timeout_s) as version, torch.no_grad():
            state = self.module.state_dict()
            return version, {name: tensor.clone() for name, tensor in state.items()}

    def holds(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether the weights in use are these, bit for bit. Raises NotReadyError."""
        _, held = self.tensors()
        return held.keys() == tensors.keys() and all(
            _same_bits(tensor, tensors[name]) for name, tensor in held.items()
        )

    def _handle(self, message: Mapping[str, object]) -> object:
        return self.receiver.handle(message)


class InProcessFleet:
    """`size` receivers in this process, each for a module of `make_module()`; a context manager.

    `apply` as WeightReceiver has it, one for all or one for each. With `seed` and `chances` every
    member's messages fail by chance, each in its own way; see Faults. Bytes move as they do between
    processes: through shared memory, verified. Raises ConfigError.

        with InProcessFleet(3) as fleet, ws.connect(model, to=fleet.to()) as sender:
            fleet[1].fail("drop_reply", "finish_weight_update")
            sender.send_weights()
    """

    def __init__(
        self,
        size: int,
        make_module: Callable[[], nn.Module] = TinyModel,
        *,
        apply: ApplyChoice | Sequence[ApplyChoice] = "auto",
        lease_s: float = _LEASE_S,
        seed: int | None = None,
        chances: Mapping[Act, float] | None = None,
    ) -> None:
        applies = [apply] * size if isinstance(apply, str) else list(apply)
        if size < 1 or len(applies) != size:
            raise ConfigError(f"{size} receivers want {size} times apply, not {len(applies)}")

        def maker(choice: ApplyChoice) -> Callable[[], tuple[nn.Module, WeightReceiver]]:
            def make() -> tuple[nn.Module, WeightReceiver]:
                module = make_module()
                return module, WeightReceiver(module, apply=choice, lease_s=lease_s)

            return make

        self.members = [
            FleetMember(
                f"receiver-{i}",
                maker(choice),
                Faults(seed=None if seed is None else f"{seed}/{i}", chances=chances),
            )
            for i, choice in enumerate(applies)
        ]

    def to(self) -> list[Transport]:
        """Return what `connect(to=…)` takes: a new transport to every member."""
        return [member.transport() for member in self.members]

    @property
    def versions(self) -> list[int]:
        """The version that each member holds."""
        return [member.receiver.version for member in self.members]

    def heal(self) -> None:
        """Let every later message through, and those arrive that are on their way."""
        for member in self.members:
            member.faults.clear()
            member.deliver_late()

    def close(self) -> None:
        """Close every receiver."""
        for member in self.members:
            member.receiver.close()

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, index: int) -> FleetMember:
        return self.members[index]

    def __iter__(self) -> Iterator[FleetMember]:
        return iter(self.members)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bytes: NaNs are equal to themselves, zeros are not to negative ones."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    flat = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(flat[0], flat[1])
