"""What crosses the links of clusters that nobody here has: published models, planned on paper.

Run with `python -m benchmarks.clusters [--model NAME ...]`. Each row is planned in full, tensor by
tensor; seconds are those of the cost model of docs/scaling.md for one link of each host. Beside
them stands what one uplink needs for the whole model, to the chain of all receiving hosts. "At
least" is a bound for any choice of which replicas send: some boxes are held by a few hosts alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

from weightsync.cli.mapping import Parallel, parse_mapping, place_model
from weightsync.cli.models import CONFIGS, published
from weightsync.weights.copying.uplinks import HostLinks, plan_links

PER_HOST = 8
RATES = (25, 100, 400)
MODELS = ("qwen3-235b", "deepseek-v3", "kimi-k2")
LAYOUTS = (
    ("fsdp=64", "tp=8,dp=8"),
    ("dp=2,fsdp=128", "tp=8,dp=32"),
    ("dp=64,fsdp=64", "tp=8,dp=128"),
    ("fsdp=256", "ep=32,dp=4"),
    ("pp=8,ep=8", "ep=32,dp=2"),
    ("pp=16,ep=16", "tp=32,dp=8"),
    ("pp=16,ep=16", "tp=2,ep=32,dp=2"),
    ("pp=16,dp=8,ep=32", "ep=64,dp=16"),
)
HEAD = (
    "from",
    "hosts",
    "to",
    "hosts",
    "chains",
    "GB from a trainer host",
    "of the mean",
    "at least",
    "GB to a receiving host",
    *(f"s at {rate}" for rate in RATES),
    f"one uplink, s at {RATES[-1]}",
    "planned in, s",
)


def hosts_of(parallel: Parallel, name: str) -> dict[int, str]:
    """Return the host of each rank, or receiver."""
    return {number: f"{name} {number // PER_HOST}" for number in range(parallel.ranks)}


def rows(model: str) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each layout of a model."""
    config = CONFIGS[model]
    specs = published(config)
    heads = None if config.kv_lora_rank else config.num_key_value_heads
    whole = sum(spec.nbytes for spec in specs)
    for layout in LAYOUTS:
        trainer, receivers = map(parse_mapping, layout)
        begin = time.perf_counter()
        links = plan_links(
            place_model(specs, trainer, key_heads=heads),
            place_model(specs, receivers, key_heads=heads),
            rank_hosts=hosts_of(trainer, "trainer"),
            receiver_hosts=hosts_of(receivers, "receiving"),
        )
        seconds = time.perf_counter() - begin
        everyone = tuple(links.received)
        today = HostLinks(("trainer",), (everyone,), {("trainer", 0): whole}, len(specs))
        yield (
            layout[0],
            str(len(links.trainers)),
            layout[1],
            str(len(everyone)),
            str(len(links.chains)),
            f"{max(links.sent.values()) / 1e9:.2f}",
            f"{links.imbalance:.2f}",
            f"{links.least_imbalance:.2f}",
            f"{max(links.received.values()) / 1e9:.1f}",
            *(f"{links.seconds(rate):.2f}" for rate in RATES),
            f"{today.seconds(RATES[-1]):.1f}",
            f"{seconds:.1f}",
        )


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=CONFIGS, nargs="+", default=MODELS)
    for model in parser.parse_args().model:
        specs = published(CONFIGS[model])
        size = sum(spec.nbytes for spec in specs) / 1e9
        print(f"\n{model}: {len(specs):,} tensors, {size:,.0f} GB, {PER_HOST} GPUs a host\n")
        print(f"| {' | '.join(HEAD)} |")
        print("|---|---:|---|" + "---:|" * (len(HEAD) - 3), flush=True)
        for row in rows(model):
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
