"""The known sender against a real server: handles in the message itself, over HTTP."""

from __future__ import annotations

import pytest
import requests

import weightsync as ws
from tests.e2e import models
from tests.e2e.models import digests, fill
from tests.e2e.processes import Host
from weightsync.transports.http import HttpTransport
from weightsync.wire.messages import FinishRequest, StartRequest

TIMEOUT_S = 60.0


@pytest.mark.parametrize("apply", ["staged", "in_place"])
def test_a_bare_post_of_a_whole_model_is_an_update(host: Host, apply: str) -> None:
    receiver = host.receiver("http", apply=apply, model="plain")
    model = models.make("plain", seed=0)
    args = ws.IPCTrainerSendWeightsArgs(send_mode="http", url=receiver.url)
    for version in (1, 2):
        fill(model, seed=version)
        ws.IPCWeightTransferEngine.trainer_send_weights(model.named_parameters(), args)
        assert receiver.digests() == digests(model)
        assert receiver.reading() == version


def test_packed_groups_inside_a_session_of_the_caller(host: Host) -> None:
    receiver = host.receiver("http", model="plain")
    model = models.make("plain", seed=5)
    held = receiver.digests()
    args = {
        "send_mode": "http",
        "url": receiver.url,
        "packed": True,
        "packed_buffer_size_bytes": 4096,
    }
    transport = HttpTransport(receiver.url)
    try:
        transport.call(StartRequest(), timeout_s=TIMEOUT_S)
        ws.IPCWeightTransferEngine.trainer_send_weights(model.named_parameters(), args)
        assert receiver.digests() == held
        transport.call(FinishRequest(weight_version="step-7"), timeout_s=TIMEOUT_S)
    finally:
        transport.close()
    assert receiver.digests() == digests(model)
    assert receiver.status()["label"] == "step-7"


def test_a_session_is_started_as_vllms_clients_do(host: Host) -> None:
    receiver = host.receiver("http", model="plain")
    model = models.make("plain", seed=6)

    def post(call: str, body: dict[str, object]) -> requests.Response:
        return requests.post(f"{receiver.url}/{call}", json=body, timeout=TIMEOUT_S)

    refused = post("start_weight_update", {"is_checkpoint_format": False})
    assert refused.status_code == 400
    assert "send them in the checkpoint's format" in refused.json()["detail"]
    assert receiver.status()["state"] == "READY"
    assert post("init_weight_transfer_engine", {"init_info": {}}).ok
    assert post("start_weight_update", {"is_checkpoint_format": True}).ok
    args = ws.IPCTrainerSendWeightsArgs(send_mode="http", url=receiver.url)
    ws.IPCWeightTransferEngine.trainer_send_weights(model.named_parameters(), args)
    assert post("finish_weight_update", {}).ok
    assert receiver.digests() == digests(model)


def test_a_part_outside_a_session_is_refused(host: Host) -> None:
    receiver = host.receiver("http", model="plain")
    held = receiver.digests()
    name, tensor = next(iter(models.make("plain", seed=5).named_parameters()))
    args = ws.IPCTrainerSendWeightsArgs(send_mode="http", url=receiver.url)
    with pytest.raises(ws.ManifestMismatchError) as refused:
        ws.IPCWeightTransferEngine.trainer_send_weights([(name, tensor)], args)
    assert refused.value.missing
    assert receiver.digests() == held
