"""An in-process fleet of receivers behind transports with faults, to test a training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self

import torch
from torch import nn

from weightsync.errors import ConfigError
from weightsync.receiver import WeightReceiver
from weightsync.tensors import contiguous_bytes
from weightsync.testing.faults import Act, Fault, Faults
from weightsync.testing.faulty_transport import FaultyTransport
from weightsync.transports.base import Transport
from weightsync.transports.callback import CallbackTransport
from weightsync.update.lifecycle import ApplyChoice

_LEASE_S = 30.0


class TinyModel(nn.Module):
    """A module of three tensors: 16 KiB, 1 KiB and 4 bytes, so several chunks of 4 KiB."""

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
        """Return a new transport to this receiver; the sender that gets it closes it."""
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
        """Add a fault; see Fault. Example: `member.fail("drop", "finish_weight_update")`."""
        self.faults.add(Fault(act, call, nth=nth, times=times, seconds=seconds, after=after))

    def restart(self) -> None:
        """Replace module and receiver, as a restarted process does; messages arrive again."""
        self.receiver.close()
        self.module, self.receiver = self._make()
        for transport in self._transports:
            transport.revive()

    @property
    def unreachable(self) -> bool:
        """Whether a fault killed this receiver, and it was not restarted."""
        return any(transport.killed for transport in self._transports)

    def deliver_late(self) -> int:
        """Deliver all `late` messages to this receiver now; return their number."""
        return sum(transport.deliver_late() for transport in self._transports)

    def tensors(self, *, timeout_s: float = 1.0) -> tuple[int, dict[str, torch.Tensor]]:
        """Return the version in use, and a copy of its tensors as a decode step reads them.

        Raises NotReadyError where the receiver may not generate.
        """
        with self.receiver.reading(timeout_s=timeout_s) as version, torch.no_grad():
            state = self.module.state_dict()
            return version, {name: tensor.clone() for name, tensor in state.items()}

    def holds(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether the weights in use equal `tensors`, bit for bit. Raises NotReadyError."""
        _, held = self.tensors()
        return held.keys() == tensors.keys() and all(
            _same_bits(tensor, tensors[name]) for name, tensor in held.items()
        )

    def _handle(self, message: Mapping[str, object]) -> object:
        return self.receiver.handle(message)


class InProcessFleet:
    """`size` receivers in this process, each of a module of `make_module()`; a context manager.

    `apply` is WeightReceiver's, one value for all members or one for each. With `seed` and
    `chances` every member has random faults of its own; see Faults. Bytes move as between
    processes: through shared memory, verified. Raises ConfigError where `apply` does not have one
    value for each member.

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
        """Return a new transport to every member, for `connect(to=…)`."""
        return [member.transport() for member in self.members]

    @property
    def versions(self) -> list[int]:
        """The version of each member's weights."""
        return [member.receiver.version for member in self.members]

    def heal(self) -> None:
        """Remove all faults, and deliver all `late` messages."""
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

    def __exit__(self, *_: object) -> None:
        self.close()


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the bytes are equal: NaN equals itself, and 0.0 differs from -0.0."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(contiguous_bytes(one), contiguous_bytes(other))
