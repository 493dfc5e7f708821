"""Updates of a real, unmodified vLLM server over HTTP, with one worker and with two."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import weightsync as ws
from tests.vllm.adapted import adapt
from tests.vllm.served import Served, vllm_server
from tests.vllm.tiny import change, expected, largest_difference, make_model
from weightsync.errors import ConfigError, ManifestMismatchError, ProtocolError, RemoteError
from weightsync.wire.messages import Status, StatusRequest

pytestmark = pytest.mark.timeout(400)
WORKERS = (1, 2)
LONG = 200
TIMEOUT_S = 4.0


class Server:
    """A server, and the model whose weights it has."""

    def __init__(self, served: Served, model: Any, workers: int) -> None:
        self.served = served
        self.model = model
        self.workers = workers

    def states(self) -> list[tuple[str, int]]:
        from weightsync.transports.factory import TransportFactory

        transports = TransportFactory(None).every(self.served.url)
        try:
            answers = [transport.call(StatusRequest(), timeout_s=30) for transport in transports]
            return [(a.state, a.version) for a in answers if isinstance(a, Status)]
        finally:
            for transport in transports:
                transport.close()


@pytest.fixture(scope="module", params=WORKERS, ids=["one-worker", "two-workers"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    model = make_model(folder, tied=request.param == 1)
    log = folder / "server.log"
    with vllm_server(folder, log, workers=request.param) as served:
        yield Server(served, model, request.param)


def test_an_adapter_is_refused_by_a_server_without_lora(server: Server) -> None:
    source = ws.AdapterSource(adapt(copy.deepcopy(server.model)), name="policy")
    with pytest.raises(ConfigError, match=r"without LoRA.*--enable-lora") as refused:
        ws.connect(source, to=server.served.url)
    assert "\n" not in str(refused.value)
    server.served.assert_computes(server.model)
    assert [model["id"] for model in server.served.get("v1/models")["data"]] == ["tiny"]


@pytest.mark.parametrize("scheme", ["", "vllm+"])
@pytest.mark.parametrize("packed", [False, True])
def test_updates_compute_what_transformers_does(
    server: Server, *, scheme: str, packed: bool
) -> None:
    served, model = server.served, server.model
    with ws.connect(model, to=f"{scheme}{served.url}", packed=packed) as sender:
        assert len(sender.targets) == server.workers
        for _ in range(3):
            before = expected(model)[1]
            change(model, seed=sender.version + 20)
            report = sender.send_weights()
            assert report.verified == "arrived"
            assert len(report.receivers) == server.workers
            served.assert_computes(model)
            assert largest_difference(expected(model)[1], before) > 0.01
            assert served.get("weight_info") == {"weight_version": str(report.version)}
            assert not served.is_paused


def test_deltas_compute_what_transformers_does(server: Server) -> None:
    served, model = server.served, server.model
    with ws.connect(model, to=served.url, delta="always") as sender:
        sent = []
        for seed in range(4):
            with torch.no_grad():
                random = torch.Generator().manual_seed(seed)
                for parameter in model.parameters():
                    flat = parameter.view(-1)
                    flat[torch.randint(flat.numel(), (8,), generator=random)] += 0.1
            report = sender.send_weights()
            assert report.delta is not None
            sent.append(report.delta.sent)
            served.assert_computes(model)
        assert sent == [False, True, True, True]


def test_vllms_trainer_api_drives_it_through_its_http_client(server: Server) -> None:
    from vllm.distributed.weight_transfer import (
        HTTPVLLMWeightSyncClient,
        ModuleSource,
        WeightTransferTrainerFactory,
    )

    from weightsync.integrations.vllm.trainer import WeightsyncTrainerInitInfo

    served, model = server.served, server.model
    engine: Any = WeightTransferTrainerFactory.trainer_init(
        WeightsyncTrainerInitInfo(rank=0),
        client=HTTPVLLMWeightSyncClient(served.url),
        source=ModuleSource(model),
    )
    for seed in (70, 71):
        change(model, seed=seed)
        engine.send_weights()
        assert len(engine.report.receivers) == server.workers
        served.assert_computes(model)
        assert served.get("weight_info") == {"weight_version": str(engine.report.version)}
        assert not served.is_paused
    engine.shutdown()


def test_a_steady_update_takes_few_requests(server: Server) -> None:
    with ws.connect(server.model, to=server.served.url) as sender:
        sender.send_weights()
        report = sender.send_weights()
    # update, whose the pause is, pause, finish, version, prefix cache, resume, a note that it runs
    assert report.control_messages == 8


def test_what_vllms_own_verbs_left_open_the_next_send_ends(server: Server) -> None:
    served, model = server.served, server.model
    with ws.connect(model, to=served.url, timeout_s=20) as sender:
        sender.send_weights()
        for seed in (60, 61):
            served.post("start_weight_update").raise_for_status()
            change(model, seed=seed)
            sender.send_weights()
            served.assert_computes(model)
            assert not served.is_paused


def test_a_stopped_worker_is_an_error_in_time(server: Server) -> None:
    served, model = server.served, server.model
    children = psutil.Process(served.process.pid).children(recursive=True)
    # The last is the last worker, or the engine core that has the only one in its own process.
    stopped = max(children, key=lambda child: (child.create_time(), child.pid))
    with ws.connect(model, to=served.url, timeout_s=TIMEOUT_S) as sender:
        sender.send_weights()
        change(model, seed=62)
        stopped.suspend()
        began = time.monotonic()
        try:
            with pytest.raises(ws.WeightSyncError):
                sender.send_weights()
            assert time.monotonic() - began < 3 * TIMEOUT_S
        finally:
            stopped.resume()
        sender.send_weights()
        served.assert_computes(model)
        assert not served.is_paused


def test_requests_in_flight_are_held_and_go_on(server: Server) -> None:
    served, model = server.served, server.model
    with ws.connect(model, to=served.url) as sender, ThreadPoolExecutor(4) as pool:
        sender.send_weights()
        flying = [pool.submit(served.complete, LONG) for _ in range(4)]
        reports = 0
        while not all(future.done() for future in flying):
            change(model, seed=40 + reports)
            sender.send_weights()
            reports += 1
        assert [len(future.result()[0]) for future in flying] == [LONG] * 4
        assert reports
        served.assert_computes(model)


def test_the_prefix_cache_holds_nothing_of_older_weights(server: Server) -> None:
    with ws.connect(server.model, to=server.served.url) as sender:
        server.served.complete()
        change(server.model, 50)
        sender.send_weights()
        server.served.assert_computes(server.model)


def test_a_failure_in_the_middle_leaves_the_old_version_in_use(server: Server) -> None:
    served, model = server.served, server.model
    healthy = True

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for i, (name, parameter) in enumerate(model.named_parameters()):
            if i == 9 and not healthy:
                raise RuntimeError("the trainer has lost its weights")
            yield name, parameter.detach()

    with ws.connect(tensors, to=served.url, bucket_nbytes=1 << 14, timeout_s=30) as sender:
        version = sender.send_weights().version
        healthy = False
        with pytest.raises(RuntimeError, match="lost its weights"):
            sender.send_weights()
        assert server.states() == [("READY", version)] * server.workers
        assert not served.is_paused
        served.assert_computes(model)
        healthy = True
        change(model, 60)
        sender.send_weights()
        served.assert_computes(model)


def test_a_refusal_names_the_tensors_and_leaves_the_server_as_it_was(server: Server) -> None:
    served, model = server.served, server.model
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    wrong = {**state, "model.norm.weight": torch.zeros(3)}
    with pytest.raises(ManifestMismatchError, match=r"model\.norm\.weight"):
        ws.connect(wrong, to=served.url)
    with ws.connect(model, to=served.url) as sender:
        sender.send_weights()
        part = [(n, p) for n, p in state.items() if "layers.0." in n and "v_proj" not in n]
        with (
            pytest.raises(ManifestMismatchError, match="fuses into"),
            sender.update(partial=True) as update,
        ):
            update.send(part)
        assert not served.is_paused
        served.assert_computes(model)
        sender.send_weights()
    served.assert_computes(model)


def test_a_pause_of_somebody_else_is_kept(server: Server) -> None:
    served = server.served
    with ws.connect(server.model, to=served.url) as sender:
        served.post("pause?mode=keep").raise_for_status()
        try:
            sender.send_weights()
            assert served.is_paused
        finally:
            served.post("resume").raise_for_status()
        sender.send_weights()
        assert not served.is_paused


def test_after_an_error_of_vllms_own_the_next_call_gets_through(server: Server) -> None:
    if server.workers > 1:
        pytest.skip("with several workers vLLM is out of step after an error; see the next test")
    served, model = server.served, server.model
    with ws.connect(model, to=served.url) as sender:
        sender.send_weights()
        control = sender._coordinator.fleet.members[0].transport._server.control  # type: ignore[union-attr]
        for _ in range(3):
            with pytest.raises(RemoteError, match=r"collective_rpc answered 500: .*no_such"):
                control.request("collective_rpc", {"method": "no_such"}, 30.0)
            assert control.is_paused(timeout_s=30) is False
        change(model, 70)
        sender.send_weights()
        served.assert_computes(model)


KILLED = """
import sys, time
sys.path[:0] = {path!r}
import torch
import weightsync as ws
from tests.vllm.tiny import change
from transformers import Qwen3ForCausalLM
model = Qwen3ForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
stalls = False
def tensors():
    for i, (name, parameter) in enumerate(model.named_parameters()):
        if stalls and i == 9:
            print("half way", flush=True)
            time.sleep(600)
        yield name, parameter.detach()
sender = ws.connect(tensors, to=sys.argv[2], bucket_nbytes=1 << 14)
sender.send_weights()
stalls = True
sender.send_weights()
"""


def test_a_sender_killed_half_way_is_followed_by_another(server: Server, tmp_path: Path) -> None:
    served, model = server.served, server.model
    model.save_pretrained(tmp_path)
    script = KILLED.format(path=[str(Path.cwd())])
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), served.url], stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"half way\n"
        time.sleep(0.5)
        os.kill(child.pid, signal.SIGKILL)
    finally:
        child.kill()
        child.wait(10)
    served.assert_computes(model)
    with ws.connect(model, to=served.url) as sender:
        change(model, 80)
        sender.send_weights()
    served.assert_computes(model)
    assert not served.is_paused


def test_one_target_at_a_time_is_added(server: Server) -> None:
    receiver = ws.WeightReceiver(torch.nn.Linear(2, 2))
    with ws.connect(torch.nn.Linear(2, 2), to=receiver.handle) as sender:
        wanted: Any = ConfigError if server.workers > 1 else ManifestMismatchError
        with pytest.raises(wanted):
            sender.add(server.served.url)
    receiver.close()


def test_a_round_that_no_worker_can_read_leaves_them_in_step(server: Server) -> None:
    body = {"method": "weightsync", "args": ["this is no round"]}
    answer = server.served.post("collective_rpc", body)
    assert [set(result) for result in answer.json()["results"]] == [{"problem"}] * server.workers
    with ws.connect(server.model, to=server.served.url) as sender:
        change(server.model, 90)
        sender.send_weights()
    server.served.assert_computes(server.model)


def test_answers_of_an_earlier_call_are_found_out(server: Server) -> None:
    """Last of all, since vLLM itself does not recover: a trap that no document of it tells."""
    if server.workers == 1:
        pytest.skip("one worker cannot get out of step")
    for _ in range(2):  # each answer is of the call before: nothing, then the failed one's
        assert server.served.post("collective_rpc", {"method": "no_such"}).status_code == 500
    with pytest.raises((ProtocolError, RemoteError), match="restart the server"):
        ws.connect(server.model, to=server.served.url)
