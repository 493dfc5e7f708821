"""`weightsync plan`: what a reshard plan would read from whom, for a model and two mappings."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from weightsync.cli.checkpoint import open_checkpoint
from weightsync.cli.mapping import HELP, Parallel, parse_mapping, place_model, stack_experts
from weightsync.cli.models import CONFIGS, published
from weightsync.cli.output import ending, print_json
from weightsync.errors import ConfigError
from weightsync.specs import TensorSpec
from weightsync.weights.copying.reshard import Placed, ReshardPlan, plan_reshard
from weightsync.weights.copying.uplinks import HostLinks, plan_links

RATES = (25, 100, 400)
"""Gbit/s of a host's link for which a time is shown."""
SHOWN_LINKS = 8


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Result that the verb prints. `links` are pairs of a rank and a receiver that reads from it.

    `nbytes_*` are bytes of one update; the largest ones are those of one rank, receiver or link.
    """

    model: str
    tensors: int
    model_nbytes: int
    ranks: int
    receivers: int
    patterns: int
    regions: int
    runs: int
    nbytes: int
    links: int
    link_nbytes: int
    rank_nbytes: int
    receiver_nbytes: int
    between_hosts_nbytes: int
    seconds: float
    digest: str


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """Bytes and times of the links between hosts, for `--links`.

    `seconds` are those of an update by the rate of a host's link, in Gbit/s. `links` have the bytes
    from a trainer host to the receiving hosts of a chain.
    """

    trainer_hosts: int
    receiving_hosts: int
    chains: int
    sent_nbytes: int
    imbalance: float
    received_nbytes: int
    seconds: dict[int, float]
    links: list[dict[str, Any]] = field(repr=False)


def plan(
    from_: Annotated[str, typer.Option("--from", help=f"the trainer: {HELP}")],
    to: Annotated[str, typer.Option(help="the receivers, likewise")],
    model: Annotated[
        str, typer.Option(help=f"{', '.join(CONFIGS)}, or a directory with safetensors")
    ],
    per_host: Annotated[int, typer.Option(min=1, help="ranks, or receivers, on one host")] = 8,
    same_hosts: Annotated[
        bool, typer.Option("--same-hosts", help="receiver N is on the host of rank N")
    ] = False,
    stacked: Annotated[
        bool, typer.Option("--stacked", help="all experts of a layer are one tensor on both sides")
    ] = False,
    links: Annotated[
        bool, typer.Option("--links", help="also bytes and time of the links between hosts")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Show what receivers would read from which ranks, without a gather. Nothing is sent."""
    with ending(as_json=as_json):
        trainer, receivers = parse_mapping(from_), parse_mapping(to)
        specs, heads = _read_model(model)
        if stacked:
            specs = stack_experts(specs)
        held = place_model(specs, trainer, key_heads=heads)
        wanted = place_model(specs, receivers, key_heads=heads)
        hosts = (
            _hosts(trainer, per_host, "host"),
            _hosts(receivers, per_host, "host" if same_hosts else "receiving"),
        )
        begin = time.perf_counter()
        made = plan_reshard(held, wanted, rank_hosts=hosts[0], receiver_hosts=hosts[1])
        digest = made.digest
        seconds = time.perf_counter() - begin
        found = _describe(made, specs, (trainer, receivers), per_host, same_hosts)
        planned = Planned(model=model, seconds=seconds, digest=digest, **found)
        crossing = _crossing(held, wanted, *hosts) if links else None
        if as_json:
            more = {} if crossing is None else {"between_hosts": asdict(crossing)}
            print_json(asdict(planned) | more)
            return
        _print(planned, from_, to)
        if crossing is not None:
            _print_links(crossing)


def _read_model(model: str) -> tuple[list[TensorSpec], int | None]:
    """Return the tensors of a model, and its number of key heads where that is known."""
    if model in CONFIGS:
        config = CONFIGS[model]
        return published(config), None if config.kv_lora_rank else config.num_key_value_heads
    path = Path(model)
    if not path.exists():
        raise ConfigError(f"{model} is no directory, and none of {', '.join(CONFIGS)}")
    return list(open_checkpoint(path, None).manifest.specs), _key_heads(path)


def _key_heads(path: Path) -> int | None:
    try:
        config: Any = json.loads((path / "config.json").read_bytes())
        heads = config.get("text_config", config).get("num_key_value_heads")
    except (OSError, ValueError, AttributeError):
        return None
    return heads if isinstance(heads, int) and heads > 0 else None


def _hosts(parallel: Parallel, per_host: int, name: str) -> dict[int, str]:
    return {number: f"{name} {number // per_host}" for number in range(parallel.ranks)}


def _describe(
    made: ReshardPlan,
    specs: list[TensorSpec],
    sides: tuple[Parallel, Parallel],
    per_host: int,
    same_hosts: bool,
) -> dict[str, Any]:
    ranks: Counter[int] = Counter()
    receivers: Counter[int] = Counter()
    between = 0
    links = made.totals.nbytes
    for (rank, receiver), nbytes in links.items():
        ranks[rank] += nbytes
        receivers[receiver] += nbytes
        if not same_hosts or rank // per_host != receiver // per_host:
            between += nbytes
    return {
        "tensors": len(specs),
        "model_nbytes": sum(spec.nbytes for spec in specs),
        "ranks": sides[0].ranks,
        "receivers": sides[1].ranks,
        "patterns": len(made.patterns),
        "regions": made.totals.regions,
        "runs": made.totals.runs,
        "nbytes": sum(links.values()),
        "links": len(links),
        "link_nbytes": max(links.values(), default=0),
        "rank_nbytes": max(ranks.values(), default=0),
        "receiver_nbytes": max(receivers.values(), default=0),
        "between_hosts_nbytes": between,
    }


def _crossing(
    held: list[Placed],
    wanted: list[Placed],
    rank_hosts: dict[int, str],
    receiver_hosts: dict[int, str],
) -> Crossing:
    found = plan_links(held, wanted, rank_hosts=rank_hosts, receiver_hosts=receiver_hosts)
    return Crossing(
        trainer_hosts=len(found.trainers),
        receiving_hosts=len(found.received),
        chains=len(found.chains),
        sent_nbytes=max(found.sent.values(), default=0),
        imbalance=round(found.imbalance, 4),
        received_nbytes=max(found.received.values(), default=0),
        seconds={rate: found.seconds(rate) for rate in RATES},
        links=_listed(found),
    )


def _listed(found: HostLinks) -> list[dict[str, Any]]:
    return [
        {"from": host, "to": list(found.chains[chain]), "nbytes": nbytes}
        for (host, chain), nbytes in sorted(found.nbytes.items(), key=lambda one: -one[1])
    ]


def _print_links(found: Crossing) -> None:
    times = ", ".join(f"{found.seconds[rate]:,.3g} s at {rate}" for rate in RATES)
    print(
        f"  hosts     {found.trainer_hosts} send, {found.receiving_hosts} receive, "
        f"in {found.chains} chains of hosts that want the same"
    )
    print(
        f"  uplinks   at most {_size(found.sent_nbytes)} leave a trainer host, "
        f"{found.imbalance:.2f} of the mean"
    )
    print(f"  downlinks at most {_size(found.received_nbytes)} reach a receiving host")
    print(f"  time      {times} Gbit/s a host, by the model of docs/scaling.md")
    for link in found.links[:SHOWN_LINKS]:
        first, *others = link["to"]
        more = f" and {len(others)} after it" if others else ""
        print(f"  link      {_size(link['nbytes'])} from {link['from']} to {first}{more}")
    if len(found.links) > SHOWN_LINKS:
        print(f"            and {len(found.links) - SHOWN_LINKS} links with less; --json has all")


def _print(found: Planned, from_: str, to: str) -> None:
    most = [_size(n) for n in (found.link_nbytes, found.rank_nbytes, found.receiver_nbytes)]
    between = _size(found.between_hosts_nbytes)
    print(f"{found.model}: {found.tensors:,} tensors, {_size(found.model_nbytes)}")
    print(f"from {from_} ({found.ranks} ranks) to {to} ({found.receivers} receivers)")
    print(f"  patterns  {found.patterns}")
    print(f"  regions   {found.regions:,}, of {found.runs:,} contiguous runs")
    print(f"  bytes     {_size(found.nbytes)} read, {between} of them between hosts")
    print(f"  links     {found.links:,}, with at most {most[0]} on one")
    print(f"  most      {most[1]} from a rank, {most[2]} to a receiver")
    print(f"  planned   in {found.seconds:.2f} s; each wanted element is read from one rank")
    print(f"  digest    {found.digest}")


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:,.1f} MB"
