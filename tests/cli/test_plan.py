"""`weightsync plan`: mappings as text, models by name or from a directory, and what it prints."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.running import ROOT, answer_of, weightsync
from weightsync.cli.mapping import Parallel, parse_mapping, place_model, stack_experts
from weightsync.cli.models import CONFIGS, published
from weightsync.cli.output import USAGE
from weightsync.errors import ConfigError
from weightsync.specs import TensorSpec
from weightsync.weights.copying.reshard import plan_reshard

COUNTS = {"llama3-70b": 723, "qwen3-235b": 36_945, "deepseek-v3": 45_395, "kimi-k2": 69_975}
ORACLES = [
    ("llama3-70b", "fsdp=256", "tp=7"),
    ("qwen3-235b", "fsdp=32,tp=8", "tp=8,dp=4"),
    ("deepseek-v3", "dp=2,fsdp=4", "ep=32"),
    ("kimi-k2", "pp=16,ep=16", "tp=32,dp=8"),
]
_SECONDS = re.compile(r"in [0-9.]+ s")


def shapes(
    parallel: str, spec: TensorSpec, others: list[TensorSpec], heads: int | None = None
) -> dict[int, tuple[int, ...]]:
    """Return the local shape of a tensor on each rank that holds it."""
    (placed,) = [
        one
        for one in place_model([spec, *others], parse_mapping(parallel), key_heads=heads)
        if one.spec is spec
    ]
    pairs = zip(placed.boxes.parts, placed.boxes.members, strict=True)
    return {rank: part.box.local_shape for part, ranks in pairs for rank in ranks}


def tensor(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, "bfloat16", shape)


def test_models_have_as_many_tensors_as_their_checkpoints() -> None:
    assert {name: len(published(config)) for name, config in CONFIGS.items()} == COUNTS


@pytest.mark.parametrize(("model", "held", "wanted"), ORACLES)
def test_published_models_are_planned_by_few_patterns(model: str, held: str, wanted: str) -> None:
    specs = published(CONFIGS[model])
    heads = CONFIGS[model].num_key_value_heads
    sides = [place_model(specs, parse_mapping(text), key_heads=heads) for text in (held, wanted)]
    plan = plan_reshard(*sides)
    assert len(plan.patterns) <= 17
    assert len(plan.entries) == len(specs)
    read: Counter[int] = Counter()
    for (_, receiver), nbytes in plan.totals.nbytes.items():
        read[receiver] += nbytes
    kept: Counter[int] = Counter()
    for (boxes, dtype), count in Counter((p.boxes, p.spec.dtype) for p in sides[1]).items():
        for part, members in zip(boxes.parts, boxes.members, strict=True):
            nbytes = TensorSpec("x", dtype, part.box.local_shape).nbytes
            kept.update(dict.fromkeys(members, nbytes * count))
    assert read == kept


class TestMappings:
    def test_sizes_are_read_from_text(self) -> None:
        assert parse_mapping("tp=8, dp=4") == Parallel(tp=8, dp=4)
        assert parse_mapping("pp=16,ep=16").ranks == 256

    @pytest.mark.parametrize("text", ["", "tp", "tp=0", "tp=-1", "tq=2", "tp=2,tp=4", "tp=2;dp=2"])
    def test_other_texts_are_refused_with_the_form(self, text: str) -> None:
        with pytest.raises(ConfigError, match="is no mapping; give sizes of pp, dp, fsdp, ep"):
            parse_mapping(text)

    def test_more_ranks_than_are_planned(self) -> None:
        with pytest.raises(ConfigError, match="has 1000000 ranks; at most 100000"):
            parse_mapping("tp=1000,dp=1000")

    def test_rows_and_columns(self) -> None:
        up, down = (
            tensor("layers.0.up_proj.weight", 10, 6),
            tensor("layers.0.down_proj.weight", 6, 10),
        )
        assert shapes("tp=2", up, [down]) == {0: (5, 6), 1: (5, 6)}
        assert shapes("tp=2", down, [up]) == {0: (6, 5), 1: (6, 5)}
        assert shapes("tp=2", tensor("norm.weight", 6), []) == {0: (6,), 1: (6,)}

    def test_few_key_heads_are_repeated(self) -> None:
        keys = tensor("layers.0.k_proj.weight", 8, 6)
        assert shapes("tp=8", keys, [], heads=4) == dict.fromkeys(range(8), (2, 6))
        (placed,) = place_model([keys], Parallel(tp=8), key_heads=4)
        assert placed.boxes.members == ((0, 1), (2, 3), (4, 5), (6, 7))

    def test_fsdp_cuts_what_tp_left(self) -> None:
        """As torch does: each rank of tp has half of the rows, and fsdp cuts those."""
        (placed,) = place_model([tensor("up_proj.weight", 8, 3)], Parallel(fsdp=2, tp=2))
        spans = {
            m: part.box.spans[0]
            for part, (m,) in zip(placed.boxes.parts, placed.boxes.members, strict=True)
        }
        assert spans == {0: ((0, 2),), 1: ((4, 6),), 2: ((2, 4),), 3: ((6, 8),)}

    def test_stages_and_experts_have_owners(self) -> None:
        names = [f"layers.{i}.mlp.experts.{e}.up_proj.weight" for i in range(2) for e in range(4)]
        specs = [tensor(name, 4, 2) for name in names]
        placed = place_model(specs, Parallel(pp=2, ep=2))
        assert [p.boxes.members for p in placed] == [((n,),) for n in (0, 0, 1, 1, 2, 2, 3, 3)]
        ends = place_model(
            [tensor("embed_tokens.weight", 4, 2), *specs, tensor("norm.weight", 2)],
            Parallel(pp=2, ep=2),
        )
        assert (ends[0].boxes.members, ends[-1].boxes.members) == (((0, 1),), ((2, 3),))

    def test_stacked_experts(self) -> None:
        names = [
            f"layers.0.mlp.experts.{e}.{p}.weight"
            for e in range(4)
            for p in ("gate_proj", "up_proj", "down_proj")
        ]
        specs = [tensor(name, *((6, 2) if "down" in name else (2, 6))) for name in names]
        gate_up, down = stack_experts(specs)
        assert (gate_up.shape, down.shape) == ((4, 4, 6), (4, 6, 2))
        assert shapes("ep=2", gate_up, []) == {0: (2, 4, 6), 1: (2, 4, 6)}
        (placed,) = place_model([gate_up], Parallel(tp=2))
        assert placed.boxes.parts[0].box.spans[1] == ((0, 1), (2, 3))  # of gate, and of up

    def test_more_stages_than_layers(self) -> None:
        with pytest.raises(ConfigError, match=r"pp=3 is more than the model's 2 layers"):
            place_model([tensor("layers.1.up_proj.weight", 4, 2)], Parallel(pp=3))

    def test_more_ranks_than_experts(self) -> None:
        with pytest.raises(ConfigError, match=r"ep=3 is more than the model's 2 experts"):
            place_model([tensor("layers.0.experts.1.up_proj.weight", 4, 2)], Parallel(ep=3))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tensors = {
        "model.embed_tokens.weight": torch.zeros(8, 4),
        "model.layers.0.self_attn.k_proj.weight": torch.zeros(4, 4),
        "model.layers.0.mlp.down_proj.weight": torch.zeros(4, 8),
        "model.norm.weight": torch.zeros(4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"num_key_value_heads": 2}))
    return tmp_path


def test_a_directory_is_planned(directory: Path) -> None:
    result = weightsync("plan", "--from", "fsdp=2", "--to", "tp=4", "--model", directory, "--json")
    answer = answer_of(result)
    # Two ranks of tp hold each key head, and all hold the norm.
    assert (answer["tensors"], answer["model_nbytes"]) == (4, 4 * (32 + 16 + 32 + 4))
    assert answer["nbytes"] == 4 * (32 + 2 * 16 + 32 + 4 * 4)
    assert answer["between_hosts_nbytes"] == answer["nbytes"]


def test_on_the_same_hosts_nothing_is_read_from_another(directory: Path) -> None:
    words = ("plan", "--from", "dp=2", "--to", "tp=4", "--model", directory, "--json")
    apart = answer_of(weightsync(*words, "--per-host", "1"))
    together = answer_of(weightsync(*words, "--per-host", "2", "--same-hosts"))
    assert apart["between_hosts_nbytes"] == apart["nbytes"]
    assert together["nbytes"] == apart["nbytes"]
    # Hosts: ranks 0 and 1, receivers 0 and 1; receivers 2 and 3 are alone.
    assert together["between_hosts_nbytes"] == together["nbytes"] / 2


def test_it_prints_what_the_page_shows() -> None:
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    shown = re.findall(r"\$ weightsync (plan .*)\n((?:.*\n)*?)```", page)
    assert ["--links" in words for words, _ in shown] == [False, True]
    for words, printed in shown:
        result = weightsync(*words.split())
        assert result.exit_code == 0, result.output
        assert _SECONDS.sub("", result.stdout) == _SECONDS.sub("", printed)


def test_links_between_hosts(directory: Path) -> None:
    words = ("plan", "--from", "fsdp=4", "--to", "tp=2,dp=2", "--model", directory)
    found = answer_of(weightsync(*words, "--per-host", "2", "--links", "--json"))["between_hosts"]
    assert (found["trainer_hosts"], found["receiving_hosts"], found["chains"]) == (2, 2, 1)
    whole = 4 * (32 + 16 + 32 + 4)
    assert found["received_nbytes"] == whole
    assert sum(link["nbytes"] for link in found["links"]) == whole
    assert {link["from"] for link in found["links"]} == {"host 0", "host 1"}
    assert all(link["to"] == ["receiving 0", "receiving 1"] for link in found["links"])
    assert found["seconds"]["25"] > found["seconds"]["100"] > found["seconds"]["400"]
    assert "between_hosts" not in answer_of(weightsync(*words, "--json"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--from", "fsdp", "--to", "tp=2", "--model", "kimi-k2"), "'fsdp' is no mapping"),
        (("--from", "fsdp=2", "--to", "tp=2", "--model", "nowhere"), "and none of llama3-70b"),
        (("--from", "ep=8", "--to", "tp=2", "--model", "llama3-70b"), "0 experts"),
        (("--from", "ep=8", "--to", "tp=2"), "Missing option"),
    ],
)
def test_wrong_arguments(words: tuple[str, ...], told: str) -> None:
    result = weightsync("plan", *words)
    assert result.exit_code == USAGE
    assert told in result.output
