"""Updates over links with delay and loss, and hosts that are killed in the middle.

    python -m benchmarks.lossy [--hosts 8] [--kill 2] [--delay-ms 50] [--loss 0.01] [--mbit 10]
    python -m benchmarks.lossy --trainers 2 --hosts 4 --kill 1

Hosts are network namespaces; benchmarks/links.py passes their packets, each `--delay-ms` late and
lost with probability `--loss`. A round connects a new trainer and new receivers, one on each host,
and sends three updates: one that is not counted, one undisturbed, and one in the middle of which
SIGKILL ends the receivers of hosts that are drawn at random. Each tensor of all others is compared
by SHA-256 after each update. Needs root. Prints a table, or JSON with --json.

With several `--trainers` each has a rank of FSDP2 on a host of its own, which sends what it holds.
Then a fourth update follows, in the middle of which SIGKILL ends one of them and the receiver of
one more host: no receiver may commit, and each other rank has to raise an error that names it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

os.environ["OMP_NUM_THREADS"] = "1"

from benchmarks.links import Links, set_congestion
from tests.e2e import several_hosts
from tests.e2e.processes import Host as Receivers
from tests.e2e.processes import Remote, wait_until
from tests.e2e.several_hosts import Trainer, told
from tests.hosts.namespaces import HostNetwork, host_network, netns_problem
from weightsync.errors import WeightSyncError
from weightsync.shm.segment import cleanup_stale

WAIT_S = 600.0
MODEL = "wide"


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round: `killed` are places in the chain, from 1 on.

    `undisturbed_sent` and `disturbed_sent` are the bytes that left all trainer hosts, in models;
    `told_s` is the time from the death of a rank to the errors of the others and the end of the
    update on all receivers, None where one rank sends. `lost` is the share of packets, `dropped`
    those that found the queue full, and `late_ms` the mean time by which a packet was passed too
    late.
    """

    backend: str
    congestion: str
    killed: Sequence[int]
    nbytes: int
    undisturbed_s: float
    disturbed_s: float
    undisturbed_sent: float
    disturbed_sent: float
    told_s: float | None
    lost: float
    dropped: int
    late_ms: float

    @property
    def slower(self) -> float:
        """The disturbed time, in undisturbed times."""
        return self.disturbed_s / self.undisturbed_s


class Fleet:
    """A rank on each of the first `trainers` hosts, and a receiver on each other one."""

    def __init__(
        self, network: HostNetwork, links: Links, stack: ExitStack, *, trainers: int
    ) -> None:
        self._uplinks = links.uplinks[:trainers]
        ranks, receiving = network.hosts[:trainers], network.hosts[trainers:]
        self.crew: list[Trainer] = (
            stack.enter_context(several_hosts.ranks(*ranks, model=MODEL))
            if trainers > 1
            else [stack.enter_context(several_hosts.trainer(ranks[0]))]
        )
        self.hosts: list[Receivers] = []
        self.receivers: list[Remote] = []
        for host in receiving:
            self.hosts.append(stack.enter_context(several_hosts.receivers(host)))
            self.receivers.append(self.hosts[-1].receiver("http", model=MODEL))
        self._killed: set[int] = set()
        self._wanted: object = None
        self._version = 0

    def connect(self, **options: object) -> None:
        """Connect all receivers."""
        urls = [remote.url for remote in self.receivers]
        for outcome in several_hosts.together(self.crew, "connect", urls, **options):
            if isinstance(outcome, Exception):
                raise outcome

    def sent_nbytes(self) -> int:
        """Return the bytes that have left the hosts of all ranks."""
        return sum(uplink.nbytes for uplink in self._uplinks)

    def send(
        self, seed: int, kill: Sequence[int] = (), middle_nbytes: float = 0.0
    ) -> tuple[float, int]:
        """Send an update; return its seconds and its bytes.

        The receivers `kill` are killed when `middle_nbytes` have left the trainer.
        """
        several_hosts.together(self.crew, "fill", seed)
        started = time.monotonic()
        self._begin(middle_nbytes)
        self._kill(kill)
        report, *_ = [rank.end(timeout_s=WAIT_S) for rank in self.crew]
        seconds = time.monotonic() - started
        if report.gathered:
            raise RuntimeError(f"gathered {report.gathered}")
        killed = {self.receivers[number].url for number in kill}
        if set(report.dropped) != killed:
            raise RuntimeError(f"dropped {report.dropped}, where {killed} were killed")
        self._wanted, self._version = self.crew[0].do("digests"), report.version
        self._check()
        return seconds, report.nbytes

    def lose_a_rank(
        self, victim: int, seed: int, kill: Sequence[int], middle_nbytes: float
    ) -> float:
        """Kill a rank and receivers in the middle of an update; return `told_s` of a Round."""
        several_hosts.together(self.crew, "fill", seed)
        self._begin(middle_nbytes)
        died = time.monotonic()
        self.crew[victim].kill()
        self._kill(kill)
        for rank in (rank for i, rank in enumerate(self.crew) if i != victim):
            try:
                rank.end(timeout_s=WAIT_S)
            except WeightSyncError as exc:
                if f"rank {victim}" not in told(exc):
                    raise
            else:
                raise RuntimeError(f"an update succeeded without rank {victim}")
        wait_until(self._are_ready, "the update's end on all receivers")
        told_s = time.monotonic() - died
        self._check()
        return told_s

    def _begin(self, middle_nbytes: float) -> None:
        """Begin an update, and wait until as many bytes have left the trainer."""
        before, until = self.sent_nbytes(), time.monotonic() + WAIT_S
        for rank in self.crew:
            rank.begin("send", None)
        while self.sent_nbytes() - before < middle_nbytes:
            if time.monotonic() > until:
                raise RuntimeError("the update does not come to its middle")
            time.sleep(0.005)

    def _kill(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.hosts[number].process.kill()
        self._killed.update(numbers)

    def _left(self) -> Iterator[Remote]:
        return (remote for i, remote in enumerate(self.receivers) if i not in self._killed)

    def _are_ready(self) -> bool:
        return all(remote.status()["state"] == "READY" for remote in self._left())

    def _check(self) -> None:
        """Raise where a receiver has anything else than the last whole update."""
        for remote in self._left():
            if remote.reading() != self._version or remote.digests() != self._wanted:
                raise RuntimeError(f"{remote.url} does not hold version {self._version}")


def measure(network: HostNetwork, number: int, args: argparse.Namespace) -> Round:
    """Measure a round."""
    several = args.trainers > 1
    drawn = random.Random(number).sample(range(args.hosts), args.kill + several)  # noqa: S311
    killed, more = sorted(drawn[: args.kill]), drawn[args.kill :]
    told_s = None
    links = Links(
        network.hosts,
        rate=args.mbit * 1e6,
        delay_s=args.delay_ms / 1e3,
        queue_s=2 * args.delay_ms / 1e3,
        loss=args.loss,
        seed=number,
    )
    try:
        with ExitStack() as stack:
            fleet = Fleet(network, links, stack, trainers=args.trainers)
            fleet.connect(
                model=MODEL,
                backend=args.backend,
                bucket_nbytes=args.bucket_kib << 10,
                num_buckets=args.buckets,
                on_failure="drop",
                delta="off",
            )
            fleet.send(1)
            before = fleet.sent_nbytes()
            undisturbed_s, nbytes = fleet.send(2)
            between = fleet.sent_nbytes()
            middle_nbytes = (between - before) / 2
            disturbed_s, _ = fleet.send(3, killed, middle_nbytes)
            after = fleet.sent_nbytes()
            if several:
                told_s = fleet.lose_a_rank(number % args.trainers, 4, more, middle_nbytes)
    finally:
        links.close()
        for host in network.hosts:
            host.heal()
            host.call(cleanup_stale)
    packets = sum(uplink.packets for uplink in links.uplinks)
    return Round(
        backend=args.backend,
        congestion=args.congestion,
        killed=[number + 1 for number in killed],
        nbytes=nbytes,
        undisturbed_s=undisturbed_s,
        disturbed_s=disturbed_s,
        undisturbed_sent=(between - before) / nbytes,
        disturbed_sent=(after - between) / nbytes,
        told_s=told_s,
        lost=sum(uplink.lost for uplink in links.uplinks) / packets,
        dropped=sum(uplink.dropped for uplink in links.uplinks),
        late_ms=1e3 * links.late_s / packets,
    )


def table(rounds: Sequence[Round]) -> str:
    """Return the rounds, and their medians, as a Markdown table."""
    lines = [
        "| killed | undisturbed | disturbed | disturbed / undisturbed "
        "| trainers sent / model, undisturbed | disturbed | told after a rank's death |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [_row(", ".join(map(str, r.killed)), [r]) for r in rounds]
    return "\n".join([*lines, _row("medians", rounds)])


def _row(title: str, rounds: Sequence[Round]) -> str:
    undisturbed_s = statistics.median(r.undisturbed_s for r in rounds)
    disturbed_s = statistics.median(r.disturbed_s for r in rounds)
    told_s = [r.told_s for r in rounds if r.told_s is not None]
    cells = (
        title,
        f"{undisturbed_s:.1f} s",
        f"{disturbed_s:.1f} s",
        f"{disturbed_s / undisturbed_s:.2f}",
        f"{statistics.median(r.undisturbed_sent for r in rounds):.2f}",
        f"{statistics.median(r.disturbed_sent for r in rounds):.2f}",
        f"{statistics.median(told_s):.1f} s" if told_s else "",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure all rounds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trainers", type=int, default=1, help="hosts with a rank each")
    parser.add_argument("--hosts", type=int, default=8, help="that receive")
    parser.add_argument("--kill", type=int, default=2)
    parser.add_argument("--delay-ms", type=float, default=50.0, help="one way")
    parser.add_argument("--loss", type=float, default=0.01)
    parser.add_argument("--mbit", type=float, default=10.0)
    parser.add_argument("--congestion", default="bbr")
    parser.add_argument("--backend", default="tcp")
    parser.add_argument("--bucket-kib", type=int, default=128)
    parser.add_argument("--buckets", type=int, help="of each ring")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if problem := netns_problem():
        sys.exit(f"hosts cannot be made here: {problem}")
    rounds = []
    with host_network(args.hosts + args.trainers) as network:
        for host in network.hosts:
            set_congestion(host, args.congestion)
        for number in range(args.rounds):
            rounds.append(measure(network, number, args))
            print(rounds[-1], file=sys.stderr, flush=True)
    print(json.dumps([asdict(each) for each in rounds]) if args.json else table(rounds))


if __name__ == "__main__":
    main()
