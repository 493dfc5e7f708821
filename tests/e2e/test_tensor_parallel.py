"""A trainer and a tensor-parallel pair of receivers, sharded by transformers itself.

The reference for what a rank holds is what transformers loads there from a checkpoint of the same
weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import weightsync as ws
from tests.e2e.models import soften
from tests.e2e.processes import Apply
from tests.e2e.tensor_parallel import NEW_TOKENS, PROMPT, Group, group

transformers = pytest.importorskip("transformers", reason="needs the hf extra")

UPDATES = 2
BUCKET_NBYTES = 8256
"""Small, so that tensors span chunks, and no multiple of a row, so that chunks cut rows."""
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, tuple[str, dict[str, object], str, str]] = {
    "qwen3": ("Qwen3Config", {"head_dim": 16}, "mlp.down_proj.weight", "Shard(dim=1)"),
    "tied": ("LlamaConfig", {"tie_word_embeddings": True}, "embed_tokens.weight", "Shard(dim=0)"),
    "fused rows": ("Phi3Config", {}, "mlp.gate_up_proj.weight", "Shard(dim=0)"),
    "fused and strided": (
        "MixtralConfig",
        {"num_local_experts": 3, "num_experts_per_tok": 2},
        "mlp.experts.gate_up_proj",
        "_StridedShard(dim=1, sf=2)",
    ),
}
"""Config class, what is special, and a parameter of which the placement is known."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    with group(2, tmp_path_factory.mktemp("ranks")) as made:
        yield made


@pytest.fixture
def ranks(pair: Group, shm_clean: None) -> Iterator[Group]:
    """The pair; what it received is closed after each test."""
    yield pair
    pair.ask("close")


def make(label: str, dtype: torch.dtype = torch.float32) -> Any:
    name, special, *_ = CONFIGS[label]
    config = getattr(transformers, name)(**SIZES, **special)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def save(model: Any, folder: Path, label: str) -> str:
    path = folder / label
    model.save_pretrained(path)
    return str(path)


@pytest.mark.timeout(560)
@pytest.mark.parametrize(
    ("label", "packed", "apply", "delta"),
    [
        ("qwen3", True, "staged", True),
        ("qwen3", False, "in_place", False),
        ("tied", True, "in_place", True),
        ("tied", False, "staged", False),
        ("fused rows", True, "staged", False),
        ("fused rows", False, "in_place", True),
        ("fused and strided", True, "in_place", False),
        ("fused and strided", False, "staged", True),
    ],
)
def test_every_rank_gets_what_a_checkpoint_would_give_it(
    ranks: Group, tmp_path: Path, label: str, packed: bool, apply: Apply, delta: bool
) -> None:
    trained = make(label)
    ranks.ask("load", {"path": save(trained, tmp_path, "start"), "apply": apply})
    *_, known, placement = CONFIGS[label]
    for placements in ranks.ask("placements"):
        assert {p for name, p in placements.items() if name.endswith(known)} == {f"[{placement}]"}
    with ws.connect(
        trained,
        to=list(ranks.ranks),
        packed=packed,
        bucket_nbytes=BUCKET_NBYTES,
        num_buckets=2,
        delta="always" if delta else "off",
    ) as sender:
        for version in range(1, UPDATES + 1):
            soften(trained, seed=version)
            report = sender.send_weights()
            sent = report.delta is not None and report.delta.sent
            assert sent == (delta and version > 1), report.delta
            assert (report.packed, report.apply, report.verified) == (packed, apply, "held")
            held = ranks.ask("compare", save(trained, tmp_path, f"step-{version}"))
            for rank in held:
                assert rank["version"] == version
                assert rank["names"]
                assert rank["different"] == []
                have, want = rank["tokens"]
                assert have == want
                assert len(have) == len(PROMPT) + NEW_TOKENS
                assert rank["error"] < 1e-4
            assert held[0]["tokens"] == held[1]["tokens"]


@pytest.mark.timeout(560)
def test_a_cast_on_the_way(ranks: Group, tmp_path: Path) -> None:
    """A float32 master, and a server in bfloat16: the common case."""
    trained = make("fused and strided")
    served = save(make("fused and strided", torch.bfloat16), tmp_path, "start")
    ranks.ask("load", {"path": served, "apply": "staged"})
    with ws.connect(
        trained, to=list(ranks.ranks), dtype=torch.bfloat16, bucket_nbytes=BUCKET_NBYTES
    ) as sender:
        soften(trained, seed=1)
        assert sender.send_weights().verified == "held"
    cast = make("fused and strided", torch.bfloat16)
    cast.load_state_dict(trained.state_dict())
    for rank in ranks.ask("compare", save(cast, tmp_path, "cast")):
        assert rank["different"] == []


@pytest.mark.timeout(560)
def test_ranks_need_not_be_in_step(ranks: Group, tmp_path: Path) -> None:
    """No collective runs: a rank gets its slice while the other one waits for a message."""
    trained = make("fused and strided")
    start = {"path": save(trained, tmp_path, "start"), "apply": "staged"}
    ranks.ask("load", start)
    for seed, rank in enumerate(ranks.ranks, start=1):
        with ws.connect(trained, to=rank, packed=True, bucket_nbytes=BUCKET_NBYTES) as sender:
            soften(trained, seed)
            sender.send_weights()
            assert [other.ask("status")["version"] for other in ranks.ranks] == [1, seed - 1]
    soften(trained, seed=1)
    first = ranks.ask("compare", save(trained, tmp_path, "first"))
    soften(trained, seed=2)
    second = ranks.ask("compare", save(trained, tmp_path, "second"))
    assert (first[0]["different"], second[1]["different"]) == ([], [])
    assert first[1]["different"]
    assert second[0]["different"]


def test_sums_of_shards_are_refused_in_words(ranks: Group, tmp_path: Path) -> None:
    ranks.ask("load", {"path": save(make("qwen3"), tmp_path, "start"), "apply": "staged"})
    rank = ranks.ranks[0]
    check = {"call": "weight_checker", "body": {"action": "checksum", "names": ["lm_head.weight"]}}
    with pytest.raises(ws.ConfigError, match="1 tensors are sharded"):
        rank(check)
    check["body"] = {"action": "checksum", "names": ["model.norm.weight"]}
    answer: Any = rank(check)
    assert list(answer["checksums"]) == ["model.norm.weight"]
