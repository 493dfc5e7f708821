"""Writes the results of `benchmarks.compare` into docs/performance.md, README.md and docs/images/.

    python -m benchmarks.tables benchmarks/results.json

Only the text between the markers is replaced. Every figure in the README links to its row.
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
MANY_TENSORS = 2_000
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
    """Return the part of docs/performance.md: machine, summary, plots, every row."""
    parts = [
        where(results),
        *(f"![{title}](images/{name})" for name, title in pictures),
        *by_workload(results),
        *by_readers(results),
        *deltas(results),
        "### Every row",
        *(every_row(results, workload, readers) for workload, readers in groups(results)),
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
                    WORKLOADS[workload]().title,
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


def by_readers(results: Results) -> Iterator[str]:
    """Yield one line per rival and way, and a column per number of readers."""
    main = main_workload(results)
    rows = [row for row in results.rows if row.workload == main]
    counts = sorted({row.readers for row in rows})
    if len(counts) < 2:
        return
    ways = dict.fromkeys((row.rival, row.way) for row in rows if row.readers == counts[-1])
    lines = [
        (
            f"{RIVALS[rival].title}, {way}",
            *(cell(results.find(main, count, rival, way)) for count in counts),
        )
        for rival, way in ways
    ]
    yield "### One, two and four readers"
    yield table((WORKLOADS[main]().title, *map(str, counts)), lines)


def every_row(results: Results, workload: str, readers: int) -> str:
    """Return the table of one workload and number of readers, fastest first, failures last."""
    rows = fastest_first(results, workload, readers)
    many = rows[0].tensors >= MANY_TENSORS
    more = ("us a tensor over the copy",) if many else ()
    return f"{heading(rows[0])}\n\n{table((*HEAD, *more), [full(r, many) for r in rows])}"


def deltas(results: Results) -> Iterator[str]:
    """Yield the part about workloads of which few values change, if there are such rows."""
    found = groups(results, changing=True)
    tables = [changing_rows(results, workload, readers) for workload, readers in found]
    if tables:
        yield "### Few values change: deltas, and the codings of others"
        yield wrapped(
            "Some values change between updates, by one unit in the last place at random, or as "
            "recorded in steps of reinforcement learning. weightsync sends the lines of 64 bytes "
            "that changed, or coded values as if to another host. An HTTP body has what changed, "
            "coded as the named library does it: written anew and in place, not verified."
        )
        yield from tables


def changing_rows(results: Results, workload: str, readers: int) -> str:
    """Return the table of one workload of which few values change."""
    rows = fastest_first(results, workload, readers)
    said = heading(rows[0])
    if known := [row for row in rows if row.changed_values]:
        values, lines = known[0].changed_values, known[0].changed_lines
        said += (
            f"; {values / (known[0].nbytes / VALUE_NBYTES):.1%} of the values change, "
            f"in {lines / (known[0].nbytes / LINE_NBYTES):.1%} of the lines"
        )
    lines_of = [(*full(row, many=False), *sent(row)) for row in rows]
    return f"{said}\n\n{table((*HEAD, 'MB to a reader', 'bytes for each value'), lines_of)}"


def sent(row: Row) -> tuple[str, str]:
    """Return the cells about the bytes of an update."""
    if row.failed or not row.changed_values:
        return "", ""
    return f"{row.sent_nbytes / 1e6:.1f}", f"{row.sent_nbytes / row.changed_values:.2f}"


def heading(row: Row) -> str:
    """Return the heading of the table of a row's workload and readers, and its size."""
    plural = "s" if row.readers > 1 else ""
    return (
        f"#### {WORKLOADS[row.workload]().title}, {row.readers} reader{plural}\n\n"
        f"{row.nbytes / 1e6:.0f} MB, {row.tensors:,} tensors, {row.dtype}"
    )


def fastest_first(results: Results, workload: str, readers: int) -> list[Row]:
    """Return the rows of one workload and number of readers, failures last."""
    rows = [row for row in results.rows if (row.workload, row.readers) == (workload, readers)]
    return sorted(rows, key=lambda row: (bool(row.failed), 0 if row.failed else row.ratio.median))


def full(row: Row, many: bool) -> tuple[str, ...]:
    """Return the cells of one row; a failure has its reason where figures would be."""
    named = f'<a id="{anchor(row)}"></a>{title(row)}'
    if row.failed:
        return (named, f"no figure: {plain(row.failed)}", *[""] * (6 if many else 5))
    ratio = row.ratio
    took, copy = statistics.median(row.update), statistics.median(row.memcpy)
    cells = [
        named,
        f"{ratio.median:.2f}",
        f"{ratio.least:.2f}",
        f"{ratio.most:.2f}",
        f"{took * 1e3:.1f}",
        f"{copy * 1e3:.1f}",
        str(len(row.update)),
    ]
    return tuple([*cells, f"{(took - copy) / row.tensors * 1e6:.1f}"] if many else cells)


def readme(results: Results) -> str:
    """Return the README's part: a line per workload, each figure a link to its row."""
    machine = results.machine
    page_name = "docs/performance.md"

    def link(row: Row | None) -> str:
        return f"[{cell(row)}]({page_name}#{anchor(row)})" if row else ""

    head = ("what moved", "unpacked", "verified", "packed", "verified", "best of the others")
    lines = []
    for workload in README_WORKLOADS:
        ours = [results.find(workload, 1, *column) for column in COLUMNS]
        best = best_of_others(results, workload, 1)
        if any(ours):
            other = f"{link(best)} {title(best)}" if best else ""
            lines.append((WORKLOADS[workload]().title, *map(link, ours), other))
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


def wrapped(text: str) -> str:
    """Return text in lines of 120 columns."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def anchor(row: Row) -> str:
    """Return the anchor of a row."""
    return re.sub(r"[^a-z0-9]+", "-", row.key.lower()).strip("-")


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
