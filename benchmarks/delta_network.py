"""Time of deltas over a slow link, beside payload over rate and two round trips.

    python -m benchmarks.delta_network [--mbit 100] [--round-trip-ms 50] [--congestion cubic+kept]

The trainer and the receiver are network namespaces. A thread of this process passes packets between
them, at a rate and with a delay (kernels of small machines have no netem). The model is bf16 with
the shapes of SmolLM2-135M; before each delta a share of its values moves to a neighbour, up or
down, at random places. A congestion control "NAME+kept" has no slow start after idle: the sysctl
tcp_slow_start_after_idle of the hosts is 0. A raw exchange is the same number of bytes over one TCP
connection that is in use already, and one byte back. Needs root. Prints tables, or JSON with
--json.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import nn

import weightsync as ws
from benchmarks.changes import at_random
from benchmarks.links import Links, set_congestion
from benchmarks.receiving import serve_until_killed
from tests.hosts.namespaces import Host, HostNetwork, host_network, netns_problem
from weightsync.cli.bench_receiver import make_model, smollm2, total_nbytes
from weightsync.server.listening import listen

PORT, RAW_PORT = 8600, 8601
TOKEN = "delta"  # noqa: S105  # a private network
WAIT_S = 600.0
SHM_NBYTES = 1 << 30
WARM_DELTAS = 2
"""Deltas that are not counted: the first ones compile loops and touch memory."""
RAW_NBYTES = 16 << 20
"""Bytes of the raw exchange that is not counted: TCP learns the rate of the link."""
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True)
class Update:
    """One update: its time, its payload, and its phases as the report has them."""

    seconds: float
    nbytes: int
    is_delta: bool
    messages: int
    phases: dict[str, float]
    receiver: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Result:
    """The measurements with one congestion control; seconds are medians."""

    congestion: str
    mbit: float
    round_trip_s: float
    share: float
    full_nbytes: int
    full_s: float
    delta_nbytes: int
    delta_s: float
    raw_s: float
    messages: int
    wire_nbytes: int
    updates: list[Update]

    @property
    def floor_s(self) -> float:
        """Payload over rate, and two round trips."""
        return self.delta_nbytes * 8 / (self.mbit * 1e6) + 2 * self.round_trip_s


def model() -> nn.Module:
    """Return a model of SmolLM2's shapes, with the weights that an initialisation has."""
    random = torch.Generator().manual_seed(0)
    made = make_model(smollm2(), torch.bfloat16, value=0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.02, generator=random)
    return made


def receive(address: str) -> None:
    """Serve one worker, and raw exchanges, until killed."""
    threading.Thread(target=_answer_raw, args=(listen(address, RAW_PORT),), daemon=True).start()
    receiver = ws.WeightReceiver(make_model(smollm2(), torch.bfloat16, value=0))
    serve_until_killed(receiver, address, PORT, TOKEN)


def send(address: str, share: float, fulls: int, deltas: int, pause_s: float) -> None:
    """Send full updates, deltas and raw exchanges; print them as JSON."""
    torch.set_num_threads(1)
    sent, change = model(), at_random(share)
    url, updates = f"http://{address}:{PORT}", []
    with ws.connect(sent, to=url, token=TOKEN, timeout_s=WAIT_S, delta="auto") as sender:
        sender.verify = True
        for number in range(WARM_DELTAS + deltas + 1):
            if number:
                change(dict(sent.named_parameters()), number)
            time.sleep(pause_s)
            update = _timed(sender.send_weights)
            if number == 0 or number > WARM_DELTAS:
                updates.append(update)
    if fulls > 1:
        with ws.connect(sent, to=url, token=TOKEN, timeout_s=WAIT_S, delta="off") as sender:
            updates += [_timed(sender.send_weights) for _ in range(fulls - 1)]
    nbytes = round(statistics.median(u.nbytes for u in updates if u.is_delta))
    raw = list(_raw_exchanges(address, nbytes, deltas, pause_s))
    print(json.dumps({"updates": [asdict(update) for update in updates], "raw": raw}))


def _timed(update: Callable[[], ws.SyncReport]) -> Update:
    started = time.perf_counter()
    report = update()
    seconds = time.perf_counter() - started
    delta = report.delta
    is_delta = delta is not None and delta.sent
    print(f"{seconds:.3f} s: {report}", file=sys.stderr, flush=True)
    return Update(
        seconds=seconds,
        nbytes=delta.nbytes if delta is not None and is_delta else report.nbytes,
        is_delta=is_delta,
        messages=report.control_messages,
        phases=dict(report.seconds),
        receiver=dict(report.receivers[0].seconds),
    )


def _raw_exchanges(address: str, nbytes: int, count: int, pause_s: float) -> Iterator[float]:
    """Yield the seconds of raw exchanges of `nbytes`."""
    with socket.create_connection((address, RAW_PORT)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for size in [RAW_NBYTES, *[nbytes] * count]:
            time.sleep(pause_s)
            data = bytes(size)
            started = time.perf_counter()
            connection.sendall(_LENGTH.pack(size) + data)
            connection.recv(1)
            if size == nbytes:
                yield time.perf_counter() - started


def _answer_raw(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as stream:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while head := stream.read(_LENGTH.size):
                stream.read(_LENGTH.unpack(head)[0])
                connection.sendall(b"+")


@contextmanager
def linked(network: HostNetwork, args: argparse.Namespace, congestion: str) -> Iterator[Links]:
    """Lay the link between the two hosts of a network, and set their congestion control."""
    round_trip_s = args.round_trip_ms / 1e3
    trainer, receiver = network.hosts
    for host in (trainer, receiver):
        set_congestion(host, congestion)
    link = Links(
        (trainer, receiver),
        rate=args.mbit * 1e6,
        delay_s=round_trip_s / 2,
        queue_s=max(round_trip_s, 0.01),
    )
    try:
        yield link
    finally:
        link.close()


def measure(args: argparse.Namespace, congestion: str) -> Result:
    """Measure full updates, deltas and raw exchanges with one congestion control."""
    with (
        host_network(2, shm_nbytes=SHM_NBYTES) as network,
        linked(network, args, congestion) as link,
    ):
        trainer, receiver = network.hosts
        server = start(receiver, "receive", receiver.address)
        if server.stdout is None or server.stdout.readline().strip() != "ready":
            raise RuntimeError("the receiver did not start")
        numbers = [str(n) for n in (args.share, args.fulls, args.deltas, args.pause_s)]
        client = start(trainer, "send", receiver.address, *numbers)
        out, _ = client.communicate(timeout=WAIT_S)
        if client.returncode:
            raise RuntimeError(f"{client.args!r} ended with {client.returncode}")
        told = json.loads(out.strip().splitlines()[-1])
        dropped = sum(uplink.dropped for uplink in link.uplinks)
        nbytes = sum(uplink.nbytes for uplink in link.uplinks)
        print(f"{congestion}: {nbytes} bytes on the link, {dropped} drops", file=sys.stderr)
    updates = [Update(**update) for update in told["updates"]]
    deltas = [update for update in updates if update.is_delta]
    fulls = [update for update in updates if not update.is_delta]
    return Result(
        congestion=congestion,
        mbit=args.mbit,
        round_trip_s=args.round_trip_ms / 1e3,
        share=args.share,
        full_nbytes=total_nbytes(smollm2(), torch.bfloat16),
        full_s=statistics.median(update.seconds for update in fulls),
        delta_nbytes=round(statistics.median(update.nbytes for update in deltas)),
        delta_s=statistics.median(update.seconds for update in deltas),
        raw_s=statistics.median(told["raw"]),
        messages=deltas[-1].messages,
        wire_nbytes=nbytes,
        updates=updates,
    )


def start(host: Host, *argv: str) -> subprocess.Popen[str]:
    """Run this module's `argv` on a host."""
    root = str(Path(__file__).resolve().parent.parent)
    return host.popen(
        [sys.executable, "-m", "benchmarks.delta_network", *argv],
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
    )


def table(results: Sequence[Result]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| congestion control | full update | payload of a delta | payload/rate + 2 round trips "
        "| delta | delta / that | one raw exchange | delta / raw | full / delta |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {r.congestion} | {r.full_s:.1f} s | {r.delta_nbytes / 1e6:.2f} MB | "
        f"{r.floor_s * 1e3:.0f} ms | {r.delta_s * 1e3:.0f} ms | {r.delta_s / r.floor_s:.2f} | "
        f"{r.raw_s * 1e3:.0f} ms | {r.delta_s / r.raw_s:.2f} | {r.full_s / r.delta_s:.1f} |"
        for r in results
    ]
    return "\n".join(lines)


def phases(results: Sequence[Result]) -> str:
    """Return where the time of deltas goes: medians, as the sender and the receiver report it."""
    lines = ["| congestion control | side | phase | ms |", "|---|---|---|---:|"]
    for result in results:
        deltas = [update for update in result.updates if update.is_delta]
        for side, named in (
            ("sender", [update.phases for update in deltas]),
            ("receiver", [update.receiver for update in deltas]),
        ):
            for phase in named[-1]:
                median = statistics.median(seconds.get(phase, 0.0) for seconds in named)
                lines.append(f"| {result.congestion} | {side} | {phase} | {median * 1e3:.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure with each congestion control."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--round-trip-ms", type=float, default=50.0)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--fulls", type=int, default=1)
    parser.add_argument("--deltas", type=int, default=5)
    parser.add_argument("--pause-s", type=float, default=2.0, help="a training step")
    parser.add_argument("--congestion", default="cubic,cubic+kept,bbr")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if problem := netns_problem():
        sys.exit(f"hosts cannot be made here: {problem}")
    results = [measure(args, congestion) for congestion in args.congestion.split(",")]
    if args.json:
        found: list[dict[str, Any]] = [{**asdict(r), "floor_s": r.floor_s} for r in results]
        print(json.dumps(found))
    else:
        print(table(results), "", phases(results), sep="\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["receive"]:
        receive(sys.argv[2])
    elif sys.argv[1:2] == ["send"]:
        address, share, fulls, deltas, pause_s = sys.argv[2:]
        send(address, float(share), int(fulls), int(deltas), float(pause_s))
    else:
        main()
