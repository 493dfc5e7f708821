"""The status page as HTML: markup, style, charts and numbers in words."""

from __future__ import annotations

import html
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from weightsync.serve.engine_messages import EngineStats
from weightsync.serve.status_page_data import (
    NO_ANSWER,
    SHOWN_UPDATES,
    Snapshot,
    UpdateView,
    WorkerView,
)
from weightsync.update.lifecycle import State

_DAY_S = 86400


def number(value: float) -> str:
    """Three digits, or more of a large whole number."""
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def seconds(value: float) -> str:
    """How long something took: ms below a second."""
    return f"{number(value * 1e3)} ms" if value < 1 else f"{number(value)} s"


def span(value: float) -> str:
    """How long something has lasted, in whole seconds."""
    whole = max(0, int(value))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def nbytes(value: float) -> str:
    """Bytes, in powers of ten."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{number(value / size)} {unit}"
    return f"{value:.0f} B"


def rate(bytes_per_s: float) -> str:
    """Throughput: GB/s, or MB/s where that would be next to nothing."""
    if bytes_per_s >= 1e7:
        return f"{number(bytes_per_s / 1e9)} GB/s"
    return f"{number(bytes_per_s / 1e6)} MB/s"


def clock(at: float, now: float) -> str:
    """The UTC time of day, with its date if it is not of the last day."""
    form = "%H:%M:%S UTC" if now - at < _DAY_S else "%Y-%m-%d %H:%M UTC"
    return time.strftime(form, time.gmtime(at))


def iso(at: float) -> str:
    """A time as machines read it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


Attribute = str | int | float | bool | None

_VOID = frozenset({"meta", "link", "br"})
_UNPRINTABLE = dict.fromkeys(
    [*range(0x20), *range(0x7F, 0xA0), *range(0xD800, 0xE000)],
    "\N{REPLACEMENT CHARACTER}",
) | {ord("\n"): " ", ord("\t"): " "}


class Markup(str):
    """Text that is HTML already. What is cut or formatted out of it is plain text again."""

    __slots__ = ()


def escaped(text: str) -> Markup:
    """Return text as HTML, control characters made visible; Markup as it is."""
    return text if isinstance(text, Markup) else Markup(html.escape(shown(text)))


def shown(text: str) -> str:
    """Return text on one line, with a mark for each character that has no shape."""
    return text.translate(_UNPRINTABLE)


def tag(name: str, /, *children: str, **attributes: Attribute) -> Markup:
    """Return an element. `class_` is class, `aria_label` aria-label; no None, no False."""
    said = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Markup(f"<{name}{said}>")
    return Markup(f"<{name}{said}>{joined(children)}</{name}>")


def joined(parts: Iterable[str], between: str = "") -> Markup:
    """Return the parts one after another, each escaped unless it is Markup."""
    return Markup(escaped(between).join(map(escaped, parts)))


def isolated(text: str) -> Markup:
    """Return somebody else's text: whatever direction it is written in ends with it."""
    return tag("bdi", text)


def _attribute(key: str, value: Attribute) -> str:
    name = key.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{escaped(str(value))}"'


STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fbfbf9; --ink: #1b1c1e; --quiet: #5b6067; --rule: #dfdfda; --raised: #ffffff;
  --bar: #9db4d6; --accent: #1f5aa8; --ok: #17703b; --warn: #8a5200; --bad: #ab221b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #131416; --ink: #e9e9e6; --quiet: #a2a7ae; --rule: #2d3033; --raised: #1a1c1e;
    --bar: #3f5f8c; --accent: #8ab4f5; --ok: #62c98c; --warn: #e2ab52; --bad: #ff8f86;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere;
}
main, footer { max-width: 62rem; margin: 0 auto; padding: 0 1.25rem; }
main { padding-top: 2rem; }
h1, h2, p, dl, dd, figure, table { margin: 0; padding: 0; }
h1 { font-size: .9375rem; font-weight: 500; color: var(--quiet); }
h2 { font-size: .8125rem; font-weight: 600; color: var(--quiet); margin: 2.25rem 0 .625rem; }
b { font-weight: 600; }
code { font: .8125rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
a { color: var(--accent); }
.quiet { color: var(--quiet); }
.now { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; align-items: baseline; }
.now p { font-size: 1.875rem; line-height: 1.3; letter-spacing: -.01em; }
.now .label { font-size: 1.0625rem; letter-spacing: 0; }
.state { font-weight: 600; white-space: nowrap; }
.state::before {
  content: ""; display: inline-block; width: .55em; height: .55em; margin-right: .4em;
  border-radius: 50%; background: currentColor; vertical-align: .06em;
}
.ok { color: var(--ok); } .busy { color: var(--accent); }
.warn { color: var(--warn); } .bad { color: var(--bad); }
.trouble { margin-top: 1.25rem; padding: .75rem 1rem; border-left: 3px solid var(--bad);
  background: var(--raised); }
.trouble ul { margin: 0; padding: 0; list-style: none; }
.figures { display: flex; flex-wrap: wrap; justify-content: space-between; gap: .75rem 1.5rem;
  margin-top: 1.75rem; padding: .75rem 0; border: solid var(--rule); border-width: 1px 0; }
dt { font-size: .8125rem; color: var(--quiet); }
dd { font-size: 1.0625rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr));
  gap: 1.5rem 2rem; }
figcaption { display: flex; justify-content: space-between; gap: 1rem; font-size: .875rem; }
.top { font-size: .75rem; line-height: 1.2; color: var(--quiet); min-height: .9rem; }
svg { display: block; width: 100%; height: 7rem; }
svg line { stroke: var(--rule); stroke-width: 1; }
.bar { fill: var(--bar); } .bar:last-of-type, .bar:hover { fill: var(--accent); }
.ends { display: flex; justify-content: space-between; gap: 1rem; font-size: .75rem;
  color: var(--quiet); min-height: 1.2rem; }
table { width: 100%; border-collapse: collapse; font-size: .875rem; }
caption { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
th { text-align: left; font-weight: 500; color: var(--quiet); font-size: .8125rem; }
th, td { padding: .375rem 1.5rem .375rem 0; border-bottom: 1px solid var(--rule);
  vertical-align: baseline; }
td:last-child, th:last-child { padding-right: 0; }
.number { text-align: right; white-space: nowrap; }
.at { margin-top: 2.25rem; font-size: .8125rem; }
.lost { color: var(--bad); }
.lost:not(:empty) { margin-bottom: .5rem; }
footer { padding-top: .25rem; padding-bottom: 2rem; font-size: .8125rem; color: var(--quiet); }
@media (max-width: 44rem) {
  main { padding-top: 1.25rem; }
  .figures { display: grid; grid-template-columns: 1fr 1fr; }
  thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  table, tbody { display: block; }
  tr { display: flex; flex-wrap: wrap; gap: .125rem 1rem; padding: .5rem 0;
    border-bottom: 1px solid var(--rule); }
  td { border: 0; padding: 0; min-width: 0; }
  td:empty { display: none; }
  td::before { content: attr(data-label) " "; color: var(--quiet); font-size: .75rem; }
  .number { text-align: left; white-space: normal; }
}
"""

# Only what differs is put into the page, so that a reader's place and selection stay.
SCRIPT = """
"use strict";
const main = document.querySelector("main"), lost = document.getElementById("lost");
let answered = Date.now();
function show(sections) {
  for (const fresh of [...sections]) {
    const old = document.getElementById(fresh.id);
    if (old === null) main.append(fresh);
    else if (old.outerHTML !== fresh.outerHTML) old.replaceWith(fresh);
  }
  document.title = document.getElementById("now").dataset.title;
}
async function look() {
  if (!document.hidden) {
    try {
      const answer = await fetch("status/fragment",
        { cache: "no-store", signal: AbortSignal.timeout(10000) });
      if (!answer.ok) throw new Error(answer.status);
      const text = await answer.text();
      show(new DOMParser().parseFromString(text, "text/html").body.children);
      answered = Date.now();
      lost.textContent = "";
    } catch (error) {
      const age = Math.round((Date.now() - answered) / 1000);
      lost.textContent = `The server does not answer; this was so ${age} s ago.`;
    }
  }
  setTimeout(look, 1000);
}
setTimeout(look, 1000);
"""


SLOT = 10
HEIGHT = 100
_WIDTH = SLOT * SHOWN_UPDATES


def bar_chart(
    title: str,
    updates: Sequence[UpdateView],
    value_of: Callable[[UpdateView], float],
    shown: Callable[[float], str],
) -> Markup:
    """Return a figure of one value of each update; `shown` gives the value with its unit."""
    values = [value_of(update) for update in updates]
    top = round_up(max(values, default=0.0))
    latest = shown(values[-1]) if values else "none yet"
    bars = [
        _bar(place, update, value / top, f"version {update.version}: {shown(value)}")
        for place, (update, value) in enumerate(zip(updates, values, strict=True))
    ]
    return tag(
        "figure",
        tag("figcaption", tag("span", title), " ", tag("b", latest)),
        tag("p", shown(top) if values else "", class_="top", aria_hidden="true"),
        tag(
            "svg",
            _line(0),
            _line(HEIGHT / 2),
            joined(bars),
            _line(HEIGHT),
            role="img",
            viewBox=f"0 0 {_WIDTH} {HEIGHT}",
            preserveAspectRatio="none",
            aria_label=_summary(title, values, shown),
        ),
        tag(
            "p",
            tag("span", f"version {updates[0].version}" if len(updates) > 1 else ""),
            tag("span", f"version {updates[-1].version}" if updates else ""),
            class_="ends",
            aria_hidden="true",
        ),
    )


def round_up(value: float) -> float:
    """Return the next of 1, 2, 5, 10 ... that is not below a value; 1 for nothing."""
    if value <= 0:
        return 1.0
    size = 10.0 ** math.floor(math.log10(value))
    return next(step * size for step in (1, 2, 5, 10) if step * size >= value * (1 - 1e-9))


def _bar(place: int, update: UpdateView, share: float, said: str) -> Markup:
    height = max(1.0, share * HEIGHT)
    return tag(
        "rect",
        tag("title", said),
        class_="bar",
        data_version=update.version,
        x=place * SLOT + 1.5,
        y=f"{HEIGHT - height:.2f}",
        width=SLOT - 3,
        height=f"{height:.2f}",
    )


def _line(y: float) -> Markup:
    return tag("line", x1=0, y1=y, x2=_WIDTH, y2=y, vector_effect="non-scaling-stroke")


def _summary(title: str, values: Sequence[float], shown: Callable[[float], str]) -> str:
    if not values:
        return f"{title}: no updates yet"
    said = f"{title} of the last {len(values)} updates: "
    return said + f"{shown(min(values))} to {shown(max(values))}, the latest {shown(values[-1])}"


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
            tag("p", f"As of {iso(snapshot.at)}", id="at", class_="quiet at"),
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
        ("Last sync", seconds(last.duration_s) if last else "none yet"),
        ("Throughput", rate(last.bytes_per_s) if last else "none yet"),
        ("Stall", seconds(last.stall_s) if last else "none yet"),
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
            f", for {span(now - first.since)}, since {clock(first.since, now)}, ",
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
        bar_chart("Sync time", updates, lambda update: update.duration_s, seconds),
        bar_chart("Throughput", updates, lambda update: update.bytes_per_s, rate),
        bar_chart("Stall", updates, lambda update: update.stall_s, seconds),
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
            clock(update.at, snapshot.at),
            seconds(update.duration_s),
            nbytes(update.nbytes),
            rate(update.bytes_per_s),
            seconds(update.stall_s),
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
            f"{number(stats.tokens_per_s)}/s",
            f"{stats.tokens_total:,}",
            f"{stats.requests_total:,}",
            stats.paused or "none",
            ", ".join(f"{version:,}" for version in sorted(set(stats.versions))),
            seconds(stats.stall_s),
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
            nbytes(max(sizes)),
            nbytes(sum(sizes)),
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
    return f"{number(sum(stats.tokens_per_s for stats in replicas))} tokens/s"
