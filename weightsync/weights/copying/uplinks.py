"""Bytes on the links between several trainer hosts and several receiving hosts.

Pure data, made from a reshard plan. A receiving host asks each trainer host once for the union of
the boxes of its workers. Hosts that want the same are a *chain*: a trainer host sends to one of
them, which forwards to the next. So each byte leaves a trainer host once for each chain.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weightsync.weights.copying.rank_streams import cut_box
from weightsync.weights.copying.reshard import (
    Boxes,
    LocalBox,
    Placed,
    ReshardPlan,
    has_common,
    plan_reshard,
)
from weightsync.weights.copying.shards import Slice

CHUNK_NBYTES = 4 << 20
"""A bucket between hosts: what a host receives before it forwards it."""
TENSOR_S = 1e-6
"""Time for each tensor beside its bytes, as docs/scaling.md has it."""
MESSAGES_S = 1e-3
"""Time of the two messages of an update, likewise."""


@dataclass(frozen=True)
class HostLinks:
    """Bytes of one update between hosts.

    `chains[c]` are the receiving hosts of a chain, and `nbytes[host, c]` what a trainer host sends
    to it; what a host reads from ranks of its own is not in there. `tensors` are those of the
    model, and `trainers` the hosts of the trainer. At least `least_sent` bytes leave the busiest of
    them, whichever owners are chosen: some boxes only a few hosts hold.
    """

    trainers: tuple[str, ...]
    chains: tuple[tuple[str, ...], ...]
    nbytes: Mapping[tuple[str, int], int]
    tensors: int
    least_sent: float = 0.0

    @property
    def sent(self) -> dict[str, int]:
        """Bytes that leave each trainer host."""
        sent = dict.fromkeys(self.trainers, 0)
        for (host, _), nbytes in self.nbytes.items():
            sent[host] += nbytes
        return sent

    @property
    def received(self) -> dict[str, int]:
        """Bytes that reach each receiving host; all but the last of a chain forward as many."""
        into = Counter[int]()
        for (_, chain), nbytes in self.nbytes.items():
            into[chain] += nbytes
        return {host: into[c] for c, hosts in enumerate(self.chains) for host in hosts}

    @property
    def imbalance(self) -> float:
        """The largest number of bytes that leave a trainer host over the mean; 1 for none."""
        return self._of_mean(max(self.sent.values(), default=0))

    @property
    def least_imbalance(self) -> float:
        """The smallest `imbalance` that any choice of owners can have."""
        return self._of_mean(self.least_sent)

    def _of_mean(self, nbytes: float) -> float:
        sent = list(self.sent.values())
        mean = statistics.fmean(sent) if sent else 0.0
        return nbytes / mean if mean else 1.0

    def seconds(self, gbit: float) -> float:
        """Return the time of an update by the model of docs/scaling.md.

        Every host has one link of `gbit` Gbit/s in each direction, and all links work at once.
        """
        rate = gbit * 1e9 / 8
        most = max([*self.sent.values(), *self.received.values()], default=0)
        longest = max(map(len, self.chains), default=1)
        chain = 2 * (longest - 1) * CHUNK_NBYTES / rate
        return MESSAGES_S + self.tensors * TENSOR_S + most / rate + chain


def plan_links(
    held: Iterable[Placed],
    wanted: Sequence[Placed],
    *,
    rank_hosts: Mapping[int, str],
    receiver_hosts: Mapping[int, str],
) -> HostLinks:
    """Return the bytes between hosts of an update of these holdings and wants.

    Every rank and receiver needs a host. Raises what `plan_reshard` raises.
    """
    trainers = tuple(dict.fromkeys(rank_hosts[rank] for rank in sorted(rank_hosts)))
    chains, wants = _chained(wanted, receiver_hosts, frozenset(trainers))
    names = {c: hosts[0] for c, hosts in enumerate(chains)}
    holdings = list(held)
    plan = plan_reshard(holdings, wants, rank_hosts=rank_hosts, receiver_hosts=names)
    nbytes: Counter[tuple[str, int]] = Counter()
    for (rank, chain), count in plan.totals.nbytes.items():
        if rank_hosts[rank] != names[chain]:
            nbytes[rank_hosts[rank], chain] += count
    least = _least_sent(plan, holdings, rank_hosts, names)
    return HostLinks(trainers, chains, dict(nbytes), len(plan.specs), least)


def _least_sent(
    plan: ReshardPlan,
    held: Sequence[Placed],
    rank_hosts: Mapping[int, str],
    chains: Mapping[int, str],
) -> float:
    """Return a bound of what leaves the busiest host: what only some hold, evenly on these."""
    boxes = {one.spec.name: one.boxes for one in held}
    names = dict(zip(plan.entries, (spec.name for spec in plan.specs), strict=True))
    by_holders: Counter[frozenset[str]] = Counter()
    for entry, count in Counter(plan.entries).items():
        route, members = plan.routes[entry], boxes[names[entry]].members
        holders = [
            frozenset(rank_hosts[rank] for i in group for rank in members[i])
            for group in route.pattern.groups
        ]
        for pairs, readers in zip(route.pattern.pairs, route.wanted.members, strict=True):
            for group, nbytes in pairs:
                far = sum(chains[chain] not in holders[group] for chain in readers)
                by_holders[holders[group]] += count * nbytes * far
    return max(
        (
            sum(nbytes for inner, nbytes in by_holders.items() if inner <= hosts) / len(hosts)
            for hosts in by_holders
        ),
        default=0.0,
    )


def _chained(
    wanted: Sequence[Placed], hosts: Mapping[int, str], trainers: frozenset[str]
) -> tuple[tuple[tuple[str, ...], ...], list[Placed]]:
    """Return the chains of hosts, and the boxes that each wants as if it were one receiver.

    A host with ranks of the trainer is a chain by itself: it reads what these hold.
    """
    unlike = {id(one.boxes): one.boxes for one in wanted}
    by_host: dict[int, dict[str, frozenset[Slice]]] = {
        key: _boxes_of_hosts(boxes, hosts) for key, boxes in unlike.items()
    }
    chains: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for host in dict.fromkeys(hosts[receiver] for receiver in sorted(hosts)):
        alone = host if host in trainers else None
        chains[alone, *(found.get(host) for found in by_host.values())].append(host)
    listed = tuple(map(tuple, chains.values()))
    boxes = {
        key: Boxes(
            unlike[key].shape,
            [
                (c, LocalBox(box))
                for c, chain in enumerate(listed)
                for box in found.get(chain[0], ())
            ],
        )
        for key, found in by_host.items()
    }
    return listed, [Placed(one.spec, boxes[id(one.boxes)]) for one in wanted]


def _boxes_of_hosts(boxes: Boxes, hosts: Mapping[int, str]) -> dict[str, frozenset[Slice]]:
    """Return the boxes of a tensor that the workers of each host want together, each byte once."""
    found: dict[str, set[Slice]] = defaultdict(set)
    for part, receivers in zip(boxes.parts, boxes.members, strict=True):
        for receiver in receivers:
            found[hosts[receiver]].add(part.box)
    return {host: _apart(wants) for host, wants in found.items()}


def _apart(wants: set[Slice]) -> frozenset[Slice]:
    if any(has_common(one, other) for one, other in itertools.combinations(wants, 2)):
        return frozenset(part for box in wants for part, _ in cut_box(box, list(wants)))
    return frozenset(wants)
