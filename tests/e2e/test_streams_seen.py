"""An update that several ranks send, as users see it: status, metrics, spans and progress."""

from __future__ import annotations

import json
from contextlib import closing

from tests.cli.running import answer_of, weightsync
from tests.crew import Crew
from tests.e2e import traced
from tests.e2e.processes import Host
from tests.e2e.test_ranks import check_sent, receivers, start
from weightsync.cli.status import fetch_last_updates
from weightsync.transports.http import HttpTransport


def test_bytes_from_each_rank(ranks: Crew, host: Host) -> None:
    """The report, a receiver's metrics, the status command and the spans have the same bytes."""
    to = receivers(host, 2)
    start(ranks, to, "fsdp")
    sent = ranks.run(traced.send_traced)
    check_sent([(outcome, full) for outcome, full, *_ in sent], to, 1)
    outcome, _, spans, shown = sent[0]
    report = outcome.result
    first = report.receivers[0].sources
    assert set(first) == {0, 1}
    assert sum(first.values()) == report.nbytes
    assert report.sources == {rank: 2 * nbytes for rank, nbytes in first.items()}

    with closing(HttpTransport(to[0].url, "")) as transport:
        updates = fetch_last_updates(transport, 5)
    assert updates.from_ranks == first
    lines = weightsync("status", to[0].url).stdout.splitlines()
    listed = ", ".join(f"rank {rank} {nbytes / 1e6:.1f} MB" for rank, nbytes in first.items())
    assert f"  from      {listed}" in lines
    (server,) = answer_of(weightsync("status", to[0].url, "--json"))["servers"]
    by_rank = {int(rank): nbytes for rank, nbytes in server["updates"]["from_ranks"].items()}
    assert by_rank == first

    assert spans["weightsync.send_weights"] == [(0, 1), tuple(report.sources.values())]
    assert spans["weightsync.update_weights"] == [(0, 1), tuple(first.values())]
    assert json.loads(report.to_json())["receivers"][0]["sources"] == {
        str(rank): nbytes for rank, nbytes in first.items()
    }

    phase, done, total, each = shown[-1]
    assert (phase, done, total) == ("done", report.nbytes, report.nbytes)
    assert each == {remote.url: report.nbytes for remote in to}
    assert all(0 <= have <= total for _, have, *_ in shown)
