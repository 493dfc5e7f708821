"""Costs of serving beside the model: stalls, tokens, requests, images, and each process.

    python -m benchmarks.serving [--parts updates,latency,health,images] [--json]

Every part starts `weightsync serve` and uses it over HTTP. Compared variants take turns within one
run, round by round; figures are medians of the rounds. Models have random weights. The parts:

updates   what a staged update stalls, at every size, with requests running: by the sender's report
          and by the engine core's own clock; then (first size) tokens a second without updates,
          with one every two seconds and with one after the other
latency   one client, one request: what a token costs beyond the model's own step, tiny and of the
          first size
health    GET /health: two API processes beside one
images    chat requests with an image, its pixels through the tensor queue and in the message
"""

from __future__ import annotations

import argparse
import base64
import http.client
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from PIL import Image

import weightsync as ws
from benchmarks.http_load import Load, Run, runs_of
from benchmarks.served import PROMPT, START_S, Found, Server, server, write_llama, write_llava
from weightsync.serve.messages import NewRows, SamplingParams, Step
from weightsync.serve.model import load_model
from weightsync.serve.model_runner import ModelRunner

PACE_S = 2.0
SHORT, LONG = 1, 65
CLIENTS = 4
CONNECTIONS = 16
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


# Updates while requests run.


def updates_part(args: argparse.Namespace, folder: Path) -> Found:
    found: Found = {"bars": {"stall_ms": 20, "stall_growth": 1.5, "tokens_ratio": 0.9}}
    for place, mbytes in enumerate(args.mbytes):
        directory = write_llama(folder, mbytes, args.dtype)
        trainer = load_model(directory, dtype=getattr(torch, args.dtype)).model
        with (
            server(directory, "--dtype", args.dtype) as served,
            Load(
                served.url, "/v1/completions", served.completion(LONG), connections=CLIENTS
            ) as load,
            ws.connect(trainer, to=served.url, delta="off") as sender,
        ):
            load.go()
            sender.send_weights()
            found[f"stall, {mbytes} MB"] = stalls(served, sender, args.rounds)
            if place == 0:
                found["tokens"] = token_rates(served, sender, args)
            load.halt()
    stall_ms = [found[f"stall, {mbytes} MB"]["by_sender_ms"] for mbytes in args.mbytes]
    core_ms = [found[f"stall, {mbytes} MB"]["by_core_ms"] for mbytes in args.mbytes]
    if len(args.mbytes) > 1:
        found["stall_growth"] = stall_ms[-1] / max(stall_ms[0], 1e-9)
        found["stall_growth_by_core"] = core_ms[-1] / max(core_ms[0], 1e-9)
    return found


def stalls(served: Server, sender: ws.WeightSender, rounds: int) -> Found:
    by_sender, by_core, total = [], [], []
    for _ in range(rounds):
        report = sender.send_weights()
        _, stats = served.stats(report.version)
        if not stats["running"]:
            raise RuntimeError("no request ran during an update; ask for more tokens")
        by_sender.append(report.stall_s * 1e3)
        by_core.append(stats["stall_s"] * 1e3)
        total.append(report.seconds["total"])
    return {
        "by_sender_ms": median(by_sender),
        "by_sender_most_ms": max(by_sender),
        "by_core_ms": median(by_core),
        "by_core_most_ms": max(by_core),
        "update_s": median(total),
        "nbytes": report.nbytes,
        "tensors": report.tensors,
        "path": report.path,
        "apply": report.apply,
    }


def token_rates(served: Server, sender: ws.WeightSender, args: argparse.Namespace) -> Found:
    """Measure tokens a second: undisturbed, and beside updates at two paces, in turns."""
    paces: dict[str, float | None] = {"none": None, "every_2s": PACE_S, "back_to_back": 0.0}
    rates: dict[str, list[float]] = {name: [] for name in paces}
    updates: dict[str, list[int]] = {name: [] for name in paces}
    idle: list[float] = []
    for _ in range(args.rounds):
        for name, pace_s in paces.items():
            idle_before = idle_s()
            rate, made, seconds = one_window(served, sender, args.seconds, pace_s)
            rates[name].append(rate)
            updates[name].append(made)
            if pace_s is None:
                idle.append((idle_s() - idle_before) / seconds)
    ratios = {
        f"ratio_{name}": median(
            [mine / plain for mine, plain in zip(rates[name], rates["none"], strict=True)]
        )
        for name in ("every_2s", "back_to_back")
    }
    return {
        **{f"per_s_{name}": median(values) for name, values in rates.items()},
        **{f"updates_{name}": median(made) for name, made in updates.items()},
        **ratios,
        "idle_cores_without_updates": median(idle),
        "a_core_to_spare": median(idle) >= 1.0,
    }


def one_window(
    served: Server, sender: ws.WeightSender, seconds: float, pace_s: float | None
) -> tuple[float, int, float]:
    """Return tokens per second, the number of concurrent updates, and the duration."""
    at, before = served.stats()
    began, made = time.monotonic(), 0
    while (left_s := began + seconds - time.monotonic()) > 0:
        if pace_s is None:
            time.sleep(left_s)
            continue
        due = time.monotonic() + pace_s
        sender.send_weights()
        made += 1
        time.sleep(max(0.0, min(due, began + seconds) - time.monotonic()))
    time.sleep(0.6)  # a status is kept for half a second
    until, after = served.stats()
    return (after["tokens_total"] - before["tokens_total"]) / (until - at), made, until - at


def idle_s() -> float:
    """Idle processor time, summed over the cores."""
    return float(Path("/proc/stat").read_text().split(maxsplit=5)[4]) * TICK_S


# One request through all processes, beside the model alone.


def latency_part(args: argparse.Namespace, folder: Path) -> Found:
    directory = write_llama(folder, args.mbytes[0], args.dtype)
    return {
        "tiny": overhead("tiny", "float32", args),
        f"{args.mbytes[0]} MB": overhead(directory, args.dtype, args),
    }


def overhead(model: str, dtype: str, args: argparse.Namespace) -> Found:
    """Measure the time of a token through all processes, and the model's own step."""
    runner = ModelRunner(load_model(model, dtype=getattr(torch, dtype)).model)
    with server(model, "--dtype", dtype) as served:
        place = urlsplit(served.url)
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=START_S)
        ask_for(connection, served, LONG)
        own_steps(runner, 0)
        own, short, long = [], [], []
        for number in range(args.rounds):
            own.append(median(own_steps(runner, number + 1)))
            repeats = range(args.repeats)
            short.append(median([ask_for(connection, served, SHORT) for _ in repeats]))
            long.append(median([ask_for(connection, served, LONG) for _ in repeats]))
        connection.close()
    tokens = [(b - a) / (LONG - SHORT) for a, b in zip(short, long, strict=True)]
    return {
        "own_step_us": median(own) * 1e6,
        "token_us": median(tokens) * 1e6,
        "overhead_us": median([t - o for t, o in zip(tokens, own, strict=True)]) * 1e6,
        "token_over_step": median([t / o for t, o in zip(tokens, own, strict=True)]),
        "one_token_request_ms": median(short) * 1e3,
        "tokens_per_s": (LONG - SHORT) / (median(long) - median(short)),
    }


def ask_for(connection: http.client.HTTPConnection, served: Server, tokens: int) -> float:
    """Request a completion; return its duration."""
    body = json.dumps(served.completion(tokens))
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    answer = connection.getresponse().read()
    seconds = time.perf_counter() - began
    if (made := json.loads(answer).get("usage", {}).get("completion_tokens")) != tokens:
        raise RuntimeError(f"{made} tokens were made, {tokens} asked for: {answer[:500]!r}")
    return seconds


def own_steps(runner: ModelRunner, row: int) -> list[float]:
    """Generate with the model alone; return the time of each token but the first."""
    new = NewRows(rows=[row], prompt=PROMPT, sampling_params=SamplingParams(temperature=0.0))
    result = runner.execute(Step(number=1, new=[new]), 0)
    seconds = []
    for number in range(2, LONG + 1):
        tokens = [chosen.token for chosen in result.sampled]
        began = time.perf_counter()
        result = runner.execute(Step(number=number, rows=[row], tokens=tokens), 0)
        seconds.append(time.perf_counter() - began)
    runner.execute(Step(number=LONG + 1, drop=[row]), 0)
    return seconds


# Requests that cost nothing.


def health_part(args: argparse.Namespace, _folder: Path) -> Found:
    """Load one API process and then two, in turns; estimate the limit of the cores."""
    cores = len(os.sched_getaffinity(0))
    rates: dict[int, list[float]] = {1: [], 2: []}
    server_s: list[float] = []
    client_s: list[float] = []
    with ExitStack() as stack:
        served = {n: stack.enter_context(server("tiny", "--api-servers", str(n))) for n in rates}
        loads = {
            n: [
                stack.enter_context(Load(one.url, "/health", connections=CONNECTIONS))
                for _ in range(2)
            ]
            for n, one in served.items()
        }
        for _ in range(args.rounds):
            for n, one in served.items():
                busy = tree_cpu_s(one.pid)
                runs = runs_of(loads[n], args.seconds)
                busy = tree_cpu_s(one.pid) - busy
                rates[n].append(sum(run.per_s for run in runs))
                if n == 1:
                    server_s.append(busy / count_of(runs))
                    client_s.append(sum(run.cpu_s for run in runs) / count_of(runs))
    one_rate, two_rate = median(rates[1]), median(rates[2])
    most = cores / (median(server_s) + median(client_s))
    return {
        "bars": {"ratio": 1.6},
        "per_s_of_one": one_rate,
        "per_s_of_two": two_rate,
        "ratio": median([two / one for one, two in zip(rates[1], rates[2], strict=True)]),
        "ratio_the_cores_allow": min(2.0, most / one_rate),
        "server_us_a_request": median(server_s) * 1e6,
        "client_us_a_request": median(client_s) * 1e6,
    }


def count_of(runs: Sequence[Run]) -> int:
    return max(1, sum(run.count for run in runs))


def tree_cpu_s(pid: int) -> float:
    """Return the processor time of a process and all its descendants."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        number = int(path.parent.name)
        parents[number], ticks[number] = int(fields[1]), int(fields[11]) + int(fields[12])
    below = {pid}
    while more := {child for child, parent in parents.items() if parent in below} - below:
        below |= more
    return sum(ticks.get(one, 0) for one in below) * TICK_S


# Images.


def images_part(args: argparse.Namespace, folder: Path) -> Found:
    """Send one image to a vision model; its pixels use both channels in turns."""
    directory = write_llava(folder, args.side)
    ways = ("torch_shm", "direct_rpc")
    latency: dict[str, list[float]] = {way: [] for way in ways}
    rate: dict[str, list[float]] = {way: [] for way in ways}
    with ExitStack() as stack:
        alone, many = {}, {}
        for way in ways:
            served = stack.enter_context(server(directory, "--tensor-ipc", way))
            asked = (served.url, "/v1/chat/completions", image_request(served, args.side))
            alone[way] = stack.enter_context(Load(*asked))
            many[way] = stack.enter_context(Load(*asked, connections=CLIENTS))
        for _ in range(args.rounds):
            for way in ways:
                latency[way].append(runs_of([alone[way]], args.seconds)[0].median_s)
                rate[way].append(runs_of([many[way]], args.seconds)[0].per_s)
    shm, rpc = ways
    return {
        "tensor_nbytes": 3 * args.side**2 * 4,
        **{f"latency_ms_{way}": median(latency[way]) * 1e3 for way in ways},
        **{f"per_s_{way}": median(rate[way]) for way in ways},
        "latency_ratio": median([a / b for a, b in zip(latency[rpc], latency[shm], strict=True)]),
        "rate_ratio": median([a / b for a, b in zip(rate[shm], rate[rpc], strict=True)]),
    }


def image_request(served: Server, side: int) -> Found:
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((side, side)).convert("RGB").save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
    messages = [{"role": "user", "content": parts}]
    return {"model": served.model, "messages": messages, "max_tokens": 1, "temperature": 0}


PARTS: dict[str, Callable[[argparse.Namespace, Path], Found]] = {
    "updates": updates_part,
    "latency": latency_part,
    "health": health_part,
    "images": images_part,
}


def show(results: Found, indent: str = "") -> None:
    for name, value in results.items():
        if isinstance(value, dict):
            print(f"{indent}{name}")
            show(value, indent + "  ")
        else:
            print(f"{indent}{name:28}{f'{value:.4g}' if isinstance(value, float) else value}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="which to measure")
    parser.add_argument("--mbytes", default="270,1000", help="sizes of the models, in 1e6 bytes")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--side", type=int, default=768, help="pixels of an image's side")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5, help="requests of each length a round")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each window")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.mbytes = [int(size) for size in args.mbytes.split(",")]
    names = args.parts.split(",")
    if unknown := sorted(set(names) - set(PARTS)):
        parser.error(f"no such parts: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    torch.set_num_threads(1)
    results: Found = {"cores": len(os.sched_getaffinity(0)), "load_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="serving-") as folder:
        for name in names:
            results[name] = PARTS[name](args, Path(folder))
    results["load_after"] = os.getloadavg()[0]
    print(json.dumps(results)) if args.json else show(results)


if __name__ == "__main__":
    main()
