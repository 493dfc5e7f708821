"""Updates over links with delay and loss, and hosts that are killed in the middle.

    python -m benchmarks.lossy [--hosts 8] [--kill 2] [--delay-ms 50] [--loss 0.01] [--mbit 10]

Hosts are network namespaces; benchmarks/links.py passes their packets, each `--delay-ms` late and
lost with probability `--loss`. A round connects a new trainer and new receivers, one on each host,
and sends three updates: one that is not counted, one undisturbed, and one in the middle of which
SIGKILL ends the receivers of hosts that are drawn at random. Each tensor of all others is compared
by SHA-256 after each update. Needs root. Prints a table, or JSON with --json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

os.environ["OMP_NUM_THREADS"] = "1"

from benchmarks.links import Links, set_congestion
from tests.e2e import several_hosts
from tests.e2e.processes import Host as Receivers
from tests.e2e.processes import Remote
from tests.e2e.several_hosts import Trainer
from tests.hosts.namespaces import HostNetwork, host_network, netns_problem
from weightsync.shm.segment import cleanup_stale

WAIT_S = 600.0
MODEL = "wide"


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round: `killed` are places in the chain, from 1 on.

    `undisturbed_sent` and `disturbed_sent` are the bytes that left the trainer's host, in models;
    `lost` is the share of packets, `dropped` those that found the queue full, and `late_ms` the
    mean time by which a packet was passed too late.
    """

    backend: str
    congestion: str
    killed: Sequence[int]
    nbytes: int
    undisturbed_s: float
    disturbed_s: float
    undisturbed_sent: float
    disturbed_sent: float
    lost: float
    dropped: int
    late_ms: float

    @property
    def slower(self) -> float:
        """The disturbed time, in undisturbed times."""
        return self.disturbed_s / self.undisturbed_s


class Fleet:
    """A trainer on the first host, and a receiver on each other one."""

    def __init__(self, network: HostNetwork, stack: ExitStack) -> None:
        trainer, *receiving = network.hosts
        self.trainer: Trainer = stack.enter_context(several_hosts.trainer(trainer))
        self.hosts: list[Receivers] = []
        self.receivers: list[Remote] = []
        for host in receiving:
            self.hosts.append(stack.enter_context(several_hosts.receivers(host)))
            self.receivers.append(self.hosts[-1].receiver("http", model=MODEL))

    def send(self, seed: int, kill: Sequence[int] = (), after_s: float = 0.0) -> tuple[float, int]:
        """Send an update, and kill hosts in the middle; return its seconds and its bytes."""
        self.trainer.do("fill", seed)
        started = time.monotonic()
        self.trainer.begin("send", None)
        if kill:
            time.sleep(after_s)
            for number in kill:
                self.hosts[number].process.kill()
        report = self.trainer.end(timeout_s=WAIT_S)
        seconds = time.monotonic() - started
        wanted = self.trainer.do("digests")
        killed = {self.receivers[number].url for number in kill}
        if set(report.dropped) != killed:
            raise RuntimeError(f"dropped {report.dropped}, where {killed} were killed")
        for remote in self.receivers:
            if remote.url not in killed and (
                remote.reading() != report.version or remote.digests() != wanted
            ):
                raise RuntimeError(f"{remote.url} does not hold what was sent")
        return seconds, report.nbytes


def measure(network: HostNetwork, number: int, args: argparse.Namespace) -> Round:
    """Measure a round."""
    killed = sorted(random.Random(number).sample(range(args.hosts), args.kill))  # noqa: S311
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
            fleet = Fleet(network, stack)
            fleet.trainer.do(
                "connect",
                [remote.url for remote in fleet.receivers],
                model=MODEL,
                backend=args.backend,
                bucket_nbytes=args.bucket_kib << 10,
                num_buckets=args.buckets,
                on_failure="drop",
                delta="off",
            )
            fleet.send(1)
            before = links.uplinks[0].nbytes
            undisturbed_s, nbytes = fleet.send(2)
            between = links.uplinks[0].nbytes
            disturbed_s, _ = fleet.send(3, killed, undisturbed_s / 2)
            after = links.uplinks[0].nbytes
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
        lost=sum(uplink.lost for uplink in links.uplinks) / packets,
        dropped=sum(uplink.dropped for uplink in links.uplinks),
        late_ms=1e3 * links.late_s / packets,
    )


def table(rounds: Sequence[Round]) -> str:
    """Return the rounds, and their medians, as a Markdown table."""
    lines = [
        "| killed | undisturbed | disturbed | disturbed / undisturbed "
        "| trainer sent / model, undisturbed | disturbed |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {', '.join(map(str, r.killed))} | {r.undisturbed_s:.1f} s | {r.disturbed_s:.1f} s | "
        f"{r.slower:.2f} | {r.undisturbed_sent:.2f} | {r.disturbed_sent:.2f} |"
        for r in rounds
    ]
    undisturbed_s = statistics.median(r.undisturbed_s for r in rounds)
    disturbed_s = statistics.median(r.disturbed_s for r in rounds)
    lines.append(
        f"| medians | {undisturbed_s:.1f} s | {disturbed_s:.1f} s | "
        f"{disturbed_s / undisturbed_s:.2f} | "
        f"{statistics.median(r.undisturbed_sent for r in rounds):.2f} | "
        f"{statistics.median(r.disturbed_sent for r in rounds):.2f} |"
    )
    return "\n".join(lines)


def main() -> None:
    """Measure all rounds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=8)
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
    with host_network(args.hosts + 1) as network:
        for host in network.hosts:
            set_congestion(host, args.congestion)
        for number in range(args.rounds):
            rounds.append(measure(network, number, args))
            print(rounds[-1], file=sys.stderr, flush=True)
    print(json.dumps([asdict(each) for each in rounds]) if args.json else table(rounds))


if __name__ == "__main__":
    main()
