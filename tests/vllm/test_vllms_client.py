"""vLLM's own HTTP control client drives weightsync's server: empty bodies, versions as text."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import fastapi
import pytest
import requests
import torch
import uvicorn
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

import weightsync as ws
from tests.vllm.versions import since
from weightsync.integrations.vllm.ipc_engine import IPCWeightTransferEngine
from weightsync.server.router import weight_router


@pytest.fixture
def served() -> Iterator[tuple[str, ws.WeightReceiver, torch.nn.Linear]]:
    model = torch.nn.Linear(8, 4)
    receiver = ws.WeightReceiver(model)
    app = fastapi.FastAPI()
    app.include_router(weight_router(receiver, token=None))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + 20
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", receiver, model
    finally:
        server.should_exit = True
        thread.join(20)
        receiver.close()


def test_vllms_client_opens_and_ends_an_update(
    served: tuple[str, ws.WeightReceiver, torch.nn.Linear],
) -> None:
    url, receiver, model = served
    client = HTTPVLLMWeightSyncClient(url, timeout=20)
    sent = torch.nn.Linear(8, 4)
    for version in ("step-1", "step-2"):
        with torch.no_grad():
            sent.weight.add_(1)
        client.init_weight_transfer_engine({})
        client.start_weight_update()
        client.update_weights({})
        IPCWeightTransferEngine.trainer_send_weights(
            iter(sent.state_dict().items()), {"send_mode": "http", "url": url, "token": ""}
        )
        client.finish_weight_update(version)
        assert receiver.label == version
        assert torch.equal(model.weight, sent.weight)
    assert receiver.version == 2
    client.start_weight_update()
    IPCWeightTransferEngine.trainer_send_weights(
        iter(sent.state_dict().items()), {"send_mode": "http", "url": url, "token": ""}
    )
    client.finish_weight_update()
    assert receiver.version == 3


@since("0.32", "its client has no shutdown_weight_transfer_engine()")
def test_vllms_client_ends_the_connection(
    served: tuple[str, ws.WeightReceiver, torch.nn.Linear],
) -> None:
    url, receiver, _ = served
    client = HTTPVLLMWeightSyncClient(url, timeout=20)
    client.init_weight_transfer_engine({})
    client.shutdown_weight_transfer_engine()
    client.init_weight_transfer_engine({})
    client.start_weight_update()
    with pytest.raises(requests.HTTPError, match="409"):  # in the middle of an update
        client.shutdown_weight_transfer_engine()
    assert receiver.status().update_id is not None


def test_handles_that_vllms_client_pickles_are_refused(
    served: tuple[str, ws.WeightReceiver, torch.nn.Linear],
) -> None:
    url, receiver, model = served
    before = model.weight.clone()
    client = HTTPVLLMWeightSyncClient(url, timeout=20)
    client.start_weight_update()
    update = {"names": ["weight"], "dtype_names": ["float32"], "shapes": [[4, 8]]}
    with pytest.raises(requests.HTTPError) as caught:
        client.update_weights({**update, "ipc_handles": [{"GPU-0": (1, 2)}]})
    assert caught.value.response.status_code == 400
    assert "pickle" in caught.value.response.text
    assert torch.equal(model.weight, before)
    assert receiver.may_generate
