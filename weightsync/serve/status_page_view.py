"""The status page as HTML, section by section; pure functions of a Snapshot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from weightsync.serve import status_page_figures as figures
from weightsync.serve.engine_messages import EngineStats
from weightsync.serve.status_page_chart import bar_chart
from weightsync.serve.status_page_data import NO_ANSWER, Snapshot, UpdateView, WorkerView
from weightsync.serve.status_page_markup import Markup, isolated, joined, tag
from weightsync.serve.status_page_style import SCRIPT, STYLE
from weightsync.update.lifecycle import State

LISTED_UPDATES = 8
NOSCRIPT_REFRESH_S = 2

_LOOK = {
    State.READY: "ok",
    State.UPDATING: "busy",
    State.PREPARED: "busy",
    State.JOINING: "warn",
    State.ABORTING: "warn",
    State.TORN: "bad",
    NO_ANSWER: "bad",
}


def render_page(snapshot: Snapshot, nonce: str) -> Markup:
    """Return the whole document; `nonce` is that of its Content-Security-Policy."""
    refresh = tag("meta", http_equiv="refresh", content=NOSCRIPT_REFRESH_S)
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title_of(snapshot)),
        tag("link", rel="icon", href="data:,"),
        tag("style", Markup(STYLE), nonce=nonce),
        tag("noscript", refresh),
    )
    body = tag(
        "body",
        tag("main", render_fragment(snapshot)),
        tag(
            "footer",
            tag("p", "", id="lost", class_="lost", role="status"),
            tag("a", "status.json", href="status.json"),
            " \N{MIDDLE DOT} ",
            tag("a", "metrics", href="metrics"),
        ),
        tag("script", Markup(SCRIPT), nonce=nonce),
    )
    return joined([Markup("<!doctype html>"), tag("html", head, body, lang="en")])


def render_fragment(snapshot: Snapshot) -> Markup:
    """Return what changes: sections, each with an id of its own, always all of them."""
    return joined(
        [
            _now(snapshot),
            _trouble(snapshot),
            _figures(snapshot),
            _open_updates(snapshot),
            _charts(snapshot.updates),
            _recent(snapshot),
            _workers(snapshot),
            _replicas(snapshot.replicas),
            _memory(snapshot.workers),
            tag("p", f"As of {figures.iso(snapshot.at)}", id="at", class_="quiet at"),
        ],
        "\n",
    )


def title_of(snapshot: Snapshot) -> str:
    """Return what a browser's tab says."""
    return (
        f"{snapshot.state} \N{MIDDLE DOT} {_versions(snapshot.versions)} \N{MIDDLE DOT} weightsync"
    )


def _now(snapshot: Snapshot) -> Markup:
    return tag(
        "header",
        tag("h1", "weightsync serve \N{MIDDLE DOT} ", isolated(snapshot.model)),
        tag(
            "div",
            tag("p", _state(snapshot.state)),
            tag("p", _versions(snapshot.versions)),
            tag("p", *_label(snapshot.label), class_="label"),
            class_="now",
            role="status",
        ),
        id="now",
        data_title=title_of(snapshot),
    )


def _trouble(snapshot: Snapshot) -> Markup:
    found = list(_troubles(snapshot))
    return tag(
        "section",
        tag("ul", *(tag("li", line) for line in found)),
        id="trouble",
        class_="trouble",
        role="alert",
        hidden=not found,
    )


def _troubles(snapshot: Snapshot) -> Iterator[str]:
    for worker in snapshot.workers:
        if worker.error:
            yield f"worker {worker.name}: {worker.error}"
    if snapshot.engine_error:
        yield f"engine: {snapshot.engine_error}"
    if snapshot.detail:
        yield snapshot.detail
    for index, replica in enumerate(snapshot.replicas):
        if replica.why_not:
            yield f"replica {index} does not generate: {replica.why_not}"


def _figures(snapshot: Snapshot) -> Markup:
    replicas, last = snapshot.replicas, snapshot.updates[-1] if snapshot.updates else None
    paused = sorted({replica.paused for replica in replicas if replica.paused})
    known = bool(replicas)
    pairs = [
        ("Requests running", _sum(replica.running for replica in replicas) if known else "?"),
        ("Requests waiting", _sum(replica.waiting for replica in replicas) if known else "?"),
        ("Generation", _speed(replicas) if known else "?"),
        ("Pause", ", ".join(paused) or ("none" if known else "?")),
        ("Last sync", figures.seconds(last.duration_s) if last else "none yet"),
        ("Throughput", figures.rate(last.bytes_per_s) if last else "none yet"),
        ("Stall", figures.seconds(last.stall_s) if last else "none yet"),
    ]
    return tag(
        "dl",
        *(tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs),
        id="figures",
        class_="figures",
    )


def _open_updates(snapshot: Snapshot) -> Markup:
    groups: dict[str, list[WorkerView]] = defaultdict(list)
    for worker in snapshot.workers:
        if worker.open_update is not None:
            groups[worker.open_update.update_id].append(worker)
    shown = [_open_update(group, snapshot.at) for group in groups.values()]
    return _section("update", "Update in progress", *(shown or [tag("p", "None.", class_="quiet")]))


def _open_update(workers: Sequence[WorkerView], now: float) -> Markup:
    opened = [worker.open_update for worker in workers if worker.open_update is not None]
    first = min(opened, key=lambda update: update.since)
    waits: dict[str, list[str]] = defaultdict(list)
    for worker in workers:
        waits[waits_for(worker)].append(worker.name)
    everyone = len(waits) == 1
    lines = [
        tag("p", reason if everyone else f"{_named(names)}: {reason}", class_="quiet")
        for reason, names in waits.items()
    ]
    return tag(
        "div",
        tag(
            "p",
            tag("b", f"version {first.version}"),
            *([" ", *_label(first.label)] if first.label else []),
            " (part of the model)" if first.partial else "",
            f", for {figures.span(now - first.since)}, since {figures.clock(first.since, now)}, ",
            "update ",
            tag("code", isolated(first.update_id)),
        ),
        *lines,
    )


def waits_for(worker: WorkerView) -> str:
    """Say what an open update is at, or what it waits for."""
    if worker.state == State.ABORTING:
        return "is given up; waits for the loader to stop"
    if worker.orphaned:
        return "its sender is dead; waits for a successor to end it"
    if worker.state == State.PREPARED:
        if worker.busy:
            return "waits for the decode step at work to end, then swaps"
        return "everything arrived and was checked; waits for its sender to finish it"
    return "loads what its sender shared" if worker.busy else "waits for its sender to send more"


def _charts(updates: Sequence[UpdateView]) -> Markup:
    charts = tag(
        "div",
        bar_chart("Sync time", updates, lambda update: update.duration_s, figures.seconds),
        bar_chart("Throughput", updates, lambda update: update.bytes_per_s, figures.rate),
        bar_chart("Stall", updates, lambda update: update.stall_s, figures.seconds),
        class_="charts",
    )
    count = len(updates)
    heading = f"Last {count} updates" if count > 1 else "Last updates"
    return _section("charts", heading, charts)


def _recent(snapshot: Snapshot) -> Markup:
    rows = [
        [
            f"{update.version:,}",
            joined(_label(update.label)) if update.label else "",
            figures.clock(update.at, snapshot.at),
            figures.seconds(update.duration_s),
            figures.nbytes(update.nbytes),
            figures.rate(update.bytes_per_s),
            figures.seconds(update.stall_s),
            _checked(update),
        ]
        for update in reversed(snapshot.updates[-LISTED_UPDATES:])
    ]
    columns = ("Version", "Label", "At", "#Time", "#Size", "#Throughput", "#Stall", "Checked")
    return _table_section("recent", "Recent updates", columns, rows, none="None since the start.")


def _workers(snapshot: Snapshot) -> Markup:
    rows = [
        [
            worker.name,
            _state(worker.state),
            "" if worker.version is None else f"{worker.version:,}",
            joined(_label(worker.label)) if worker.label else "",
            _ended(worker.updates_total),
            worker.error or worker.detail or ("paused" if worker.paused else ""),
        ]
        for worker in snapshot.workers
    ]
    columns = ["Worker", "State", "Version", "Label", "Updates", "Remark"]
    if not any(row[-1] for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return _table_section("workers", "Workers, by replica and rank", columns, rows, none="None.")


def _replicas(replicas: Sequence[EngineStats]) -> Markup:
    rows = [
        [
            str(index),
            f"{stats.running:,}",
            f"{stats.waiting:,}",
            f"{figures.number(stats.tokens_per_s)}/s",
            f"{stats.tokens_total:,}",
            f"{stats.requests_total:,}",
            stats.paused or "none",
            ", ".join(f"{version:,}" for version in sorted(set(stats.versions))),
            figures.seconds(stats.stall_s),
        ]
        for index, stats in enumerate(replicas)
    ]
    columns = (
        "Replica",
        "#Running",
        "#Waiting",
        "#Tokens",
        "#Tokens in all",
        "#Requests in all",
        "Pause",
        "Version",
        "#Stall",
    )
    return _table_section("replicas", "Replicas", columns, rows, none="No answer.")


def _memory(workers: Sequence[WorkerView]) -> Markup:
    held: dict[str, list[int]] = defaultdict(list)
    paths: dict[str, set[str]] = defaultdict(set)
    for worker in workers:
        for mapped in worker.mapped:
            held[mapped.sender].append(mapped.nbytes)
            paths[mapped.sender].add(mapped.path)
    rows = [
        [
            tag("code", isolated(sender)) if sender else "control segments, of all senders",
            isolated(", ".join(sorted(filter(None, paths[sender]))) or "any"),
            figures.nbytes(max(sizes)),
            figures.nbytes(sum(sizes)),
            str(len(sizes)),
        ]
        for sender, sizes in sorted(held.items(), reverse=True)
    ]
    columns = ("Sender", "Path", "#Largest of a worker", "#Mapped by all", "#Workers")
    return _table_section("memory", "Memory mapped of senders", columns, rows, none="None.")


def _table_section(
    name: str, heading: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, none: str
) -> Markup:
    """A table, with roles since narrow pages undo its layout; # marks columns of numbers."""
    if not rows:
        return _section(name, heading, tag("p", none, class_="quiet"))
    kinds = ["number" if column.startswith("#") else None for column in columns]
    labels = [column.removeprefix("#") for column in columns]
    head = tag(
        "tr",
        *(
            tag("th", label, scope="col", role="columnheader", class_=kind)
            for label, kind in zip(labels, kinds, strict=True)
        ),
        role="row",
    )
    body = [
        tag(
            "tr",
            *(
                tag("td", cell, role="cell", class_=kind, data_label=label)
                for cell, label, kind in zip(row, labels, kinds, strict=True)
            ),
            role="row",
        )
        for row in rows
    ]
    table = tag(
        "table",
        tag("caption", heading),
        tag("thead", head, role="rowgroup"),
        tag("tbody", *body, role="rowgroup"),
        role="table",
    )
    return _section(name, heading, table)


def _section(name: str, heading: str, *content: str) -> Markup:
    title = tag("h2", heading, id=f"{name}-heading")
    return tag("section", title, *content, id=name, aria_labelledby=f"{name}-heading")


def _state(state: str) -> Markup:
    return tag("span", state, class_=f"state {_LOOK.get(state, 'warn')}")


def _label(label: str | None) -> list[str]:
    return [isolated(label)] if label else []


def _versions(versions: Sequence[int]) -> str:
    if not versions:
        return "version unknown"
    name = "version" if len(versions) == 1 else "versions"
    return f"{name} {', '.join(f'{version:,}' for version in versions)}"


def _checked(update: UpdateView) -> str:
    how = {"none": "not checked", "arrived": "as it arrived", "held": "as it is held"}
    return how.get(update.verified, update.verified)


def _ended(totals: Mapping[str, int]) -> str:
    """Say how updates ended, the usual way first."""
    order = sorted(totals, key=lambda result: (result != "committed", result))
    return ", ".join(f"{totals[result]:,} {result}" for result in order)


def _named(names: Sequence[str]) -> str:
    return ("worker " if len(names) == 1 else "workers ") + ", ".join(names)


def _sum(counts: Iterable[int]) -> str:
    return f"{sum(counts):,}"


def _speed(replicas: Sequence[EngineStats]) -> str:
    return f"{figures.number(sum(stats.tokens_per_s for stats in replicas))} tokens/s"
