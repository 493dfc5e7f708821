"""`weightsync doctor`: which paths work on this machine, and why others do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from weightsync.cli.answers import FAILED, OK, ending, print_json
from weightsync.cli.doctor_findings import Check, Finding, Level, examine
from weightsync.cli.doctor_gpu import has_gpu, look_at_gpus, try_cuda_ipc
from weightsync.cli.doctor_host import (
    look_at_cpu,
    look_at_host,
    look_at_leftovers,
    look_at_limits,
    look_at_namespaces,
    look_at_ports,
    look_at_ray,
    look_at_shm,
    look_at_versions,
)
from weightsync.cli.doctor_pairs import (
    CUDA_IPC,
    DISTRIBUTED,
    PTRACE,
    SHARED_MEMORY,
    TRIAL_S,
    try_gloo,
    try_ptrace,
    try_shared_memory,
)

LOOK_S = 20.0
PATHS = (CUDA_IPC, SHARED_MEMORY, DISTRIBUTED)
_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "red"}


def doctor(
    clean: Annotated[
        bool, typer.Option("--clean", help="remove shared memory whose owner is dead")
    ] = False,
    port: Annotated[
        list[int] | None,
        typer.Option(min=1, max=65535, help="see whether a server can listen there"),
    ] = None,
    host: Annotated[str, typer.Option(help="address for --port")] = "127.0.0.1",
    json_: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Look at this machine and try every path, and say what to do where one fails."""
    with ending(as_json=json_):
        findings: list[Finding] = []
        console = Console(soft_wrap=True, highlight=False, markup=False)
        for finding in examine(make_checks(clean=clean, host=host, ports=port or [])):
            findings.append(finding)
            if not json_:
                _print_finding(console, finding)
    level = worst(findings)
    if json_:
        answer = {
            "level": level.value,
            "paths": {path: _works(path, findings) for path in PATHS},
            "findings": [finding.to_dict() for finding in findings],
        }
        print_json(answer)
    else:
        console.print(_summary(findings), style=_STYLES[level])
    raise typer.Exit(FAILED if level is Level.PROBLEM else OK)


def make_checks(*, clean: bool, host: str, ports: Sequence[int]) -> list[Check]:
    """Return every check, those that try paths last."""
    gpu = has_gpu()
    return [
        Check("cpu", look_at_cpu, LOOK_S),
        Check("versions", look_at_versions, LOOK_S),
        Check("host", look_at_host, LOOK_S),
        Check("gpu", look_at_gpus, TRIAL_S),
        Check("shm", look_at_shm, LOOK_S),
        Check("leftovers", lambda: look_at_leftovers(clean=clean), LOOK_S),
        Check("namespaces", lambda: look_at_namespaces(gpu=gpu), LOOK_S),
        Check("limits", lambda: look_at_limits(gpu=gpu), LOOK_S),
        Check("ray", look_at_ray, LOOK_S),
        Check("port", lambda: look_at_ports(host, ports), LOOK_S),
        Check(PTRACE, lambda: try_ptrace(gpu=gpu), TRIAL_S),
        Check(CUDA_IPC, try_cuda_ipc, 2 * TRIAL_S),
        Check(SHARED_MEMORY, try_shared_memory, TRIAL_S),
        Check(DISTRIBUTED, try_gloo, TRIAL_S),
    ]


def worst(findings: Sequence[Finding]) -> Level:
    """Return the level of the worst finding."""
    levels = [finding.level for finding in findings]
    return max(levels, key=list(Level).index, default=Level.OK)


def _works(path: str, findings: Sequence[Finding]) -> bool:
    return any(finding.works for finding in findings if finding.check == path)


def _print_finding(console: Console, finding: Finding) -> None:
    line = Text(f"{finding.level:<8} ", style=_STYLES[finding.level])
    line.append(f"{finding.check:<14} ", style="bold").append(finding.seen, style="default")
    console.print(line)
    if finding.remedy:
        console.print(f"{'':<24}-> {finding.remedy}", style="default")


def _summary(findings: Sequence[Finding]) -> str:
    working = [path for path in PATHS if _works(path, findings)]
    counted = [(sum(f.level is level for f in findings), level) for level in Level]
    counts = ", ".join(
        f"{count} {level}{'s' if count > 1 and level is not Level.OK else ''}"
        for count, level in counted
        if count
    )
    return f"paths that work here: {', '.join(working) or 'none'} ({counts})"
