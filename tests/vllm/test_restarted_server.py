"""A real vLLM server started again at its URL: with fewer workers, then without our engine."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest

import weightsync as ws
from tests.vllm.served import vllm_server
from tests.vllm.tiny import change, make_model
from weightsync.errors import BackendUnavailableError

pytestmark = pytest.mark.timeout(900)


def test_a_server_is_met_again_with_what_it_has_now(tmp_path: Path) -> None:
    model = make_model(tmp_path, tied=False)
    with vllm_server(tmp_path, tmp_path / "two.log", workers=2) as two:
        sender = ws.connect(model, to=two.url, timeout_s=60)
        sender.send_weights()
        port = urlsplit(two.url).port
    with sender:
        with vllm_server(tmp_path, tmp_path / "one.log", port=port) as one:
            for seed in (1, 2):
                change(model, seed=seed)
                report = sender.send_weights()
                assert [str(target) for target in sender.targets] == [one.url]
                assert len(report.receivers) == 1
                one.assert_computes(model)
                assert not one.is_paused
        with vllm_server(tmp_path, tmp_path / "none.log", port=port, backend=None) as none:
            with pytest.raises(BackendUnavailableError, match="start it with --weight-transfer-co"):
                ws.connect(model, to=none.url)
            assert not none.is_paused
