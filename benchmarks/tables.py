"""Writes the results of `benchmarks.compare` into docs/performance.md, README.md and docs/images/.

    python -m benchmarks.tables benchmarks/results.json

Only the text between the markers is replaced. Every line of the README's table links to its line.
"""

from __future__ import annotations

import argparse
import re
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.plan import CHANGING, PRESETS, WORKLOADS
from benchmarks.results import Results, Row
from benchmarks.rivals.registry import RIVALS

ROOT = Path(__file__).resolve().parents[1]
MAIN = "512M-300"
UNPACKED, PACKED = "weightsync/unpacked/staged", "weightsync/packed/staged"
COLUMNS = (
    (UNPACKED, "not verified"),
    (UNPACKED, "verified"),
    (PACKED, "not verified"),
    (PACKED, "verified"),
)
README_WORKLOADS = (MAIN, "smollm2", "qwen3-8b-w8", "qwen3-30b-a3b-w16", "4K-37000")
VALUE_NBYTES, LINE_NBYTES = 2, 64
HEAD = ("way", "x memcpy", "min", "max", "ms", "copy, ms", "rounds")
COMMAND = "make bench"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write pages and plots from one file of results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("--root", type=Path, default=ROOT, help="of the project")
    options = parser.parse_args(arguments)
    results = Results.read(options.results)
    if not results.rows:
        raise SystemExit(f"{options.results} has no rows yet: `{COMMAND}` continues it")
    write(results, options.root)
    return 0


def write(results: Results, root: Path) -> None:
    """Replace the parts between markers, and the plots."""
    from benchmarks.plots import draw  # noqa: PLC0415 # matplotlib, which pages do without

    pictures = draw(results, root / "docs" / "images", main_workload(results))
    replace(root / "docs" / "performance.md", "bench", page(results, pictures))
    replace(root / "README.md", "numbers", readme(results))


def replace(path: Path, name: str, text: str) -> None:
    """Put `text` between `<!-- NAME: begin … -->` and `<!-- NAME: end -->`, which must be there."""
    before = path.read_text(encoding="utf-8")
    block = re.compile(rf"(<!-- {name}: begin[^>]*-->\n).*?(<!-- {name}: end -->)", re.DOTALL)
    after, count = block.subn(lambda found: f"{found[1]}{text.strip()}\n{found[2]}", before)
    if count != 1:
        raise SystemExit(f"{path} has {count} places between {name}: begin and {name}: end, not 1")
    path.write_text(after, encoding="utf-8")


def page(results: Results, pictures: Sequence[tuple[str, str]]) -> str:
    """Return the part of docs/performance.md: machine, plots, a summary, every way."""
    parts = [
        where(results),
        *(f"![{title}](images/{name})" for name, title in pictures),
        *by_workload(results),
        *every_way(results),
        *other_workloads(results),
        *deltas(results),
    ]
    return "\n\n".join(parts)


def where(results: Results) -> str:
    """Return the paragraph about the machine and its settings."""
    machine, preset = results.machine, PRESETS[results.preset]
    packages = ", ".join(f"{name} {found}" for name, found in machine["packages"].items())
    dates = sorted({row.date for row in results.rows})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    loads = [row.load for row in results.rows if not row.failed]
    command = (
        COMMAND if results.preset == "standard" else f'{COMMAND} ARGS="--preset {preset.name}"'
    )
    return wrapped(
        f"{when}: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:g} GiB, "
        f"{machine['system']}, Python {machine['python']}, {packages}; one thread in each process "
        f"(`OMP_NUM_THREADS=1`); transparent huge pages: {machine.get('huge_pages', 'unknown')}, "
        f"of shared memory: {machine.get('huge_pages_of_shared_memory', 'unknown')}. "
        f"{unfinished(results)}`{command}`: up to "
        f"{preset.rounds} rounds after {preset.warm_ups} that do not count, fewer where they take "
        f"long. The machine's load was {min(loads, default=0):.1f} to "
        f"{max(loads, default=0):.1f}, the trainer and its readers included."
    )


def unfinished(results: Results) -> str:
    """Return the note about missing rows, empty if none is missing."""
    if results.finished:
        return ""
    there = len({(row.workload, row.readers, row.rival) for row in results.rows})
    wanted = sum(len(trial.rivals) for trial in PRESETS[results.preset].trials)
    return f"**Unfinished: {there} of {wanted} trials.** "


def by_workload(results: Results) -> Iterator[str]:
    """Yield one line per workload: ours, the best of the others, and the time to connect."""
    head = (
        *("what moved", "unpacked", "verified", "packed", "verified", "best of the others", "x"),
        "connect, ms",
    )
    lines = []
    for workload in dict(groups(results)):
        ours = [results.find(workload, 1, *column) for column in COLUMNS]
        best = best_of_others(results, workload, 1)
        if any(ours):
            lines.append(
                (
                    f'<a id="{place(workload)}"></a>{WORKLOADS[workload]().title}',
                    *(cell(row) for row in ours),
                    f"{cell(best)} ({title(best)})" if best else "",
                    ahead(ours[1::2], best),
                    " and ".join(f"{row.connect_s * 1e3:.0f}" for row in ours[::2] if row),
                )
            )
    if lines:
        yield "### Real models and other sizes, one reader"
        yield wrapped(
            "Medians; every cell is a multiple of the plain copy. Column x is how many times as "
            "long the fastest of the others takes as the faster verified column. "
            "Connecting, unpacked and packed, allocates and maps all memory, once."
        )
        yield table(head, lines)


def every_way(results: Results) -> Iterator[str]:
    """Yield the table of the main workload, fastest first: one reader, then more of them."""
    main = main_workload(results)
    counts = sorted({readers for workload, readers in groups(results) if workload == main})
    if not counts:
        return
    rows = fastest_first(results, main, counts[0])
    more = [f"{count} readers" for count in counts[1:]]
    lines = [
        (*full(row), *(cell(results.find(main, n, row.rival, row.way)) for n in counts[1:]))
        for row in rows
    ]
    yield f"### Every way: {heading(rows[0])}"
    yield wrapped(
        "Multiples of the plain copy; medians, and least and most of one reader's rounds."
    )
    yield table((*HEAD, *more), lines)


def other_workloads(results: Results) -> Iterator[str]:
    """Yield the table of all other workloads: a line per way, a column per workload."""
    main = main_workload(results)
    names = [name for name, count in groups(results) if count == 1 and name != main]
    rows = [row for row in results.rows if row.workload in names and row.readers == 1]
    if not rows:
        return
    ways = dict.fromkeys((row.rival, row.way) for row in sorted(rows, key=fastest))
    lines = [
        (
            title(next(row for row in rows if (row.rival, row.way) == (rival, way))),
            *(cell(results.find(name, 1, rival, way)) for name in names),
        )
        for rival, way in ways
    ]
    yield "### Other sizes and models, one reader"
    yield wrapped("Medians, multiples of the plain copy; a dash has its reason below. Columns are:")
    yield wrapped("; ".join(f"`{name}` {short(name)}" for name in names) + ".")
    yield table(("way", *(name.replace("-", " ") for name in names)), lines)
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.failed:
            said = f"{title(row)} ({short(row.workload)})"
            reasons.setdefault(plain(row.failed), []).append(said)
    if reasons:
        yield "\n".join(item(f"{', '.join(said)}: {why}") for why, said in reasons.items())


def fastest(row: Row) -> float:
    """Return what sorts a row: its ratio, after all others where it has none."""
    return float("inf") if row.failed else row.ratio.median


def short(workload: str) -> str:
    """Return the title of a workload for the head of a column."""
    return WORKLOADS[workload]().title.replace(" in 300 bf16 tensors", "")


def deltas(results: Results) -> Iterator[str]:
    """Yield the part about workloads of which few values change, if there are such rows."""
    found = list(groups(results, changing=True))
    if not found:
        return
    yield "### Few values change: deltas, and the codings of others"
    yield wrapped(
        "Some values change between updates, by one unit in the last place at random, or as "
        "recorded in steps of reinforcement learning. weightsync sends the lines of 64 bytes "
        "that changed, or coded values as if to another host. An HTTP body has what changed, "
        "coded as the named library does it: written anew and in place, not verified. A cell has "
        "the multiple of the plain copy, and the bytes sent for each value that changed."
    )
    rows = [row for group in found for row in fastest_first(results, *group)]
    ways = dict.fromkeys((row.rival, row.way) for row in rows)
    lines = [
        (
            title(next(row for row in rows if (row.rival, row.way) == (rival, way))),
            *(sent(results.find(*group, rival, way)) for group in found),
        )
        for rival, way in ways
    ]
    yield table(("way", *(f"{short(name)}, {counted(count)}" for name, count in found)), lines)
    yield "\n".join(item(changed(results, *group)) for group in found)


def changed(results: Results, workload: str, readers: int) -> str:
    """Return the size of a workload of which few values change, and the share that does."""
    rows = fastest_first(results, workload, readers)
    said = f"{short(workload)}, {counted(readers)}: {size(rows[0])}"
    if known := [row for row in rows if row.changed_values]:
        values, lines = known[0].changed_values, known[0].changed_lines
        said += (
            f"; {values / (known[0].nbytes / VALUE_NBYTES):.1%} of the values change, "
            f"in {lines / (known[0].nbytes / LINE_NBYTES):.1%} of the lines"
        )
    return said


def sent(row: Row | None) -> str:
    """Return the cell about an update of which few values change."""
    if row is None or row.failed or not row.changed_values:
        return cell(row)
    return f"{cell(row)} ({row.sent_nbytes / row.changed_values:.2f})"


def counted(readers: int) -> str:
    """Return a number of readers in words."""
    return f"{readers} reader{'s' if readers > 1 else ''}"


def heading(row: Row) -> str:
    """Return the heading of the table of a row's workload, and its size."""
    return f"{WORKLOADS[row.workload]().title}\n\n{size(row)}."


def size(row: Row) -> str:
    """Return the size of a row's workload."""
    return f"{row.nbytes / 1e6:.0f} MB, {row.tensors:,} tensors, {row.dtype}"


def fastest_first(results: Results, workload: str, readers: int) -> list[Row]:
    """Return the rows of one workload and number of readers, failures last."""
    rows = [row for row in results.rows if (row.workload, row.readers) == (workload, readers)]
    return sorted(rows, key=fastest)


def full(row: Row) -> tuple[str, ...]:
    """Return the cells of one row; a failure has its reason where figures would be."""
    named = f'<a id="{anchor(row)}"></a>{title(row)}'
    if row.failed:
        return (named, f"no figure: {plain(row.failed)}", *[""] * 5)
    ratio = row.ratio
    took, copy = statistics.median(row.update), statistics.median(row.memcpy)
    return (
        named,
        f"{ratio.median:.2f}",
        f"{ratio.least:.2f}",
        f"{ratio.most:.2f}",
        f"{took * 1e3:.1f}",
        f"{copy * 1e3:.1f}",
        str(len(row.update)),
    )


def readme(results: Results) -> str:
    """Return the README's part: a line per workload, a link to its line here."""
    machine = results.machine
    page_name = "docs/performance.md"
    head = ("what moved", "unpacked", "verified", "packed", "verified", "best of the others")
    lines = []
    for workload in README_WORKLOADS:
        ours = [results.find(workload, 1, *column) for column in COLUMNS]
        best = best_of_others(results, workload, 1)
        if any(ours):
            named = f"[{WORKLOADS[workload]().title}]({page_name}#{place(workload)})"
            other = f"{cell(best)} {title(best)}" if best else ""
            lines.append((named, *map(cell, ours), other))
    said = wrapped(
        "Whole updates to one reader as multiples of copying the same parameters once inside one "
        f"process, medians of one run of `{COMMAND}` ({machine['cores']} cores, no GPU; "
        f"[the machine, all rivals and rows]({page_name})):"
    )
    return f"{said}\n\n{table(head, lines)}"


def main_workload(results: Results) -> str:
    """Return the main workload of the page; the first one in results without it."""
    names = [workload for workload, _ in groups(results)]
    return MAIN if MAIN in names or not names else names[0]


def groups(results: Results, *, changing: bool = False) -> Iterator[tuple[str, int]]:
    """Yield each workload and number of readers once, in the order of the results.

    `changing`: those of which few values change, else all others.
    """
    found = dict.fromkeys((row.workload, row.readers) for row in results.rows)
    yield from (group for group in found if (group[0] in CHANGING) == changing)


def best_of_others(results: Results, workload: str, readers: int) -> Row | None:
    """Return the fastest row that is not ours."""
    rows = [
        row
        for row in results.rows
        if (row.workload, row.readers) == (workload, readers)
        and not RIVALS[row.rival].ours
        and not row.failed
    ]
    return min(rows, key=lambda row: row.ratio.median, default=None)


def ahead(ours: Sequence[Row | None], best: Row | None) -> str:
    """Return the factor between the best of the others and the best of ours."""
    found = [row.ratio.median for row in ours if row and not row.failed]
    return f"{best.ratio.median / min(found):.1f}" if best and found else ""


def cell(row: Row | None) -> str:
    """Return the median ratio, or a dash where there is none."""
    if row is None:
        return ""
    return "-" if row.failed else f"{row.ratio.median:.2f}"


def title(row: Row) -> str:
    """Return the name of a row."""
    entry = RIVALS[row.rival]
    return f"{entry.title}, {row.way}" if len(entry.ways) > 1 else entry.title


def wrapped(text: str, first: str = "", others: str = "") -> str:
    """Return text in lines of 120 columns, each after its indent."""
    return textwrap.fill(
        text,
        120,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def anchor(row: Row) -> str:
    """Return the anchor of a row."""
    return place(row.key)


def item(text: str) -> str:
    """Return an item of a list in lines of 120 columns."""
    return wrapped(text, "- ", "  ")


def place(name: str) -> str:
    """Return the anchor of a workload's line, or of a row's."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def plain(text: str) -> str:
    """Return a reason that fits into a cell."""
    return " ".join(text.replace("|", "/").replace("<", "(").replace(">", ")").split())[:160]


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    rule = "|---|" + "---:|" * (len(head) - 1)
    rows = [f"| {' | '.join(cells)} |" for cells in (head, *lines)]
    return "\n".join([rows[0], rule, *rows[1:]])


if __name__ == "__main__":
    raise SystemExit(main())
