"""A transformers Trainer that FSDP2 shards, under torchrun, as a user runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.test_fsdp2_example import torchrun
from weightsync.serve.model import make_tiny_model


@pytest.mark.soak
@pytest.mark.usefixtures("shm_clean")
def test_a_sharded_trainer_sends_whole_tensors(tmp_path: Path) -> None:
    make_tiny_model().model.save_pretrained(tmp_path)
    said = torchrun(str(tmp_path), example="trainer_fsdp2.py")
    for rank in (0, 1):
        (report,) = [line for line in said if line.startswith(f"rank {rank}: ")]
        assert "version 4 in " in report
        assert "packed" in report
        assert "verified: held" in report
    assert said[-1] == "the receiver holds 20 tensors of the trainer: True"
