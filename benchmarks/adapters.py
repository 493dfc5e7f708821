"""Updates of an adapter beside updates of the base with that adapter merged, to a vLLM server.

`python -m benchmarks.adapters`, where vLLM is installed (`make test-vllm` makes such an environment
in .venv-vllm-0.32.0). The model has the sizes of SmolLM2-135M in bf16, and its adapter rank 8 on
all linear layers. Three kinds of update take turns: the adapter in float32, in bf16, and merged.
`--versions 1000` then sends as many versions in a row, and prints what the processes of the server
hold after some of them. `--tiny` is for a test of this program.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import peft
import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import weightsync as ws
from tests.vllm.adapted import LINEAR, RANK, adapter_nbytes, train
from tests.vllm.served import Served, vllm_server
from tests.vllm.tiny import save
from weightsync.integrations.huggingface import MergedSource

OPTIONS = {
    "--enable-lora": "",
    "--max-loras": "2",
    "--max-cpu-loras": "2",
    "--max-lora-rank": str(RANK),
    "--dtype": "bfloat16",
}


def make_base(folder: Path, *, tiny: bool) -> Any:
    """Save a model of random weights, and return it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320 if tiny else 49152,
        hidden_size=64 if tiny else 576,
        intermediate_size=128 if tiny else 1536,
        num_hidden_layers=2 if tiny else 30,
        num_attention_heads=1 if tiny else 9,
        num_key_value_heads=1 if tiny else 3,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    made: Any = LlamaForCausalLM(config).to(torch.bfloat16).eval()  # type: ignore[arg-type]  # transformers wraps `to`
    save(made, folder)
    return made


def main() -> None:
    """Print a table, and what versions in a row leave behind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--versions", type=int, default=0)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        base = make_base(folder, tiny=given.tiny)
        config = peft.LoraConfig(r=RANK, lora_alpha=16, target_modules=LINEAR)
        model: Any = peft.get_peft_model(base, config)
        train(model, 0)
        with vllm_server(folder, folder / "server.log", options=OPTIONS) as served:
            if given.turns:
                compare(model, served, given.turns)
            if given.versions:
                send_in_a_row(model, served, given.versions)


def compare(model: Any, served: Served, turns: int) -> None:
    """Measure updates in turns, each over a connection that has had two."""
    senders = {
        "the adapter, float32": ws.connect(ws.AdapterSource(model, "policy"), served.url),
        "the adapter, bfloat16": ws.connect(
            ws.AdapterSource(model, "half", dtype="bfloat16"), served.url
        ),
        "the base with the adapter merged": ws.connect(MergedSource(model), served.url),
    }
    seconds: dict[str, list[float]] = {name: [] for name in senders}
    reports: dict[str, ws.SyncReport] = {}
    for turn in range(turns + 2):
        for name, sender in senders.items():
            train(model, turn)
            started = time.perf_counter()
            reports[name] = sender.send_weights()
            if turn > 1:
                seconds[name].append(time.perf_counter() - started)
    print(f"vLLM at {served.url}; the adapter's tensors in float32: {adapter_nbytes(model)} bytes")
    print("| sent | bytes | messages | median ms | min ms | max ms |\n|---|---|---|---|---|---|")
    for name, report in reports.items():
        measured = [1e3 * value for value in seconds[name]]
        figures = statistics.median(measured), min(measured), max(measured)
        print(f"| {name} | {report.nbytes} | {report.control_messages} | ", end="")
        print(" | ".join(f"{value:.1f}" for value in figures), "|")
    adapter, _, merged = (statistics.median(each) for each in seconds.values())
    print(f"the adapter takes {adapter / merged:.3f} of the merged update", end="; ")
    merge = reports["the base with the adapter merged"].merge
    print(f"the merged one lost it in {merge.share:.1%} of the elements" if merge else "")
    for sender in senders.values():
        sender.close()


def send_in_a_row(model: Any, served: Served, versions: int) -> None:
    """Send versions, request each hundredth, and print what the server's processes hold."""
    root = psutil.Process(served.process.pid)
    processes = [root, *root.children(recursive=True)]
    with ws.connect(ws.AdapterSource(model, "policy"), served.url) as sender:
        for i in range(1, versions + 1):
            train(model, i)
            sender.send_weights()
            if i % max(versions // 10, 1) and i != versions // 5:
                continue
            served.complete(2, model="policy")
            memory = sum(process.memory_info().rss for process in processes)
            files = sum(process.num_fds() for process in processes)
            threads = sum(process.num_threads() for process in processes)
            names = [entry["id"] for entry in served.get("v1/models")["data"]]
            held = sum(name.startswith("policy@") for name in names)
            print(f"after {i} versions: {memory // 1024} kB, {files} open files, ", end="")
            print(f"{threads} threads, {held} versions listed", flush=True)


if __name__ == "__main__":
    main()
