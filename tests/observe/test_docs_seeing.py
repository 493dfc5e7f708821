"""Every example of docs/seeing.md, run as it stands, and its table of metrics."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import weightsync as ws
from weightsync.serve.engine_client import metrics_of
from weightsync.serve.messages import EngineStats
from weightsync.server.metrics import render

PAGE = (Path(__file__).parents[2] / "docs" / "seeing.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("shm_clean")
def test_the_examples(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    caplog.set_level(logging.INFO, "train")
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 7
    for block in blocks:
        url = ws.WeightReceiver(nn.Linear(4, 4)).handle
        exec(compile(block, "seeing.md", "exec"), {"ws": ws, "model": nn.Linear(4, 4), "url": url})
    assert "done 1 80 80" in capsys.readouterr().out
    assert json.loads((tmp_path / "reports.jsonl").read_text())["version"] == 1
    assert "sync: version 1 in " in caplog.text
    names = {"sync/version", "sync/seconds", "sync/gbps", "sync/stall_s"}
    assert scalars(tmp_path / "runs") == names
    assert scalars(tmp_path / "runs" / "run") == names
    (logged,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert all(name.encode() in logged.read_bytes() for name in names)


def scalars(folder: Path) -> set[str]:
    """The names in the event files of TensorBoard directly in `folder`."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return set(events.Tags()["scalars"])


def _shown_as(metric: Metric) -> str:
    return f"{metric.name}_total" if metric.type == "counter" else metric.name


def test_the_table_names_the_metrics() -> None:
    receiver = ws.WeightReceiver(nn.Linear(4, 4))
    with ws.connect(nn.Linear(4, 4), to=receiver.handle) as sender:
        sender.send_weights()
    shown = re.findall(r"^# TYPE (\w+)", render(receiver.report()).decode(), re.MULTILINE)
    shown += [_shown_as(metric) for metric in metrics_of([EngineStats()])]
    named = set(re.findall(r"`(weightsync_\w+)", PAGE))
    of_several = {"weightsync_workers", "weightsync_last_update_bytes_from_rank"}
    assert named - of_several == set(shown)
