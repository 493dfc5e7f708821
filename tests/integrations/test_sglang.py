"""SGLang servers as receivers, against the stand-in that keeps to sglang_contract.json."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import weightsync as ws
from tests.children import CONTEXT
from tests.e2e.processes import wait_until
from tests.integrations.sglang_process import Served, StandInProcess, stand_in
from tests.integrations.sglang_stand_in import CONTRACT, Tiny
from weightsync.errors import (
    AuthError,
    BackendUnavailableError,
    ConfigError,
    ConnectError,
    ManifestMismatchError,
    ProtocolError,
    TransferError,
    UpdateConflictError,
)
from weightsync.integrations.sglang import files
from weightsync.integrations.sglang.pause_watch import PauseWatch
from weightsync.integrations.sglang.server import SglangControl
from weightsync.shm.segment import remove_leftovers
from weightsync.wire.messages import PauseRequest, ResumeRequest

pytestmark = pytest.mark.usefixtures("shm_clean", "no_files_left")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with which the servers were started."""
    directory = tmp_path_factory.mktemp("checkpoint")
    held = {name: p.detach().to(torch.bfloat16) for name, p in Tiny().named_parameters()}
    save_file(held, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def process(checkpoint: Path) -> Iterator[StandInProcess]:
    with stand_in(checkpoint) as running:
        yield running


@pytest.fixture
def server(process: StandInProcess) -> Served:
    return process.server()


@pytest.fixture
def no_files_left() -> Iterator[None]:
    """Nothing of this process's is left in shared memory."""
    before = homes(files.MEMORY)
    yield
    assert homes(files.MEMORY) <= before


def homes(base: Path) -> set[Path]:
    return set(base.glob("weightsync-sglang-*"))


def weights_in(base: Path) -> list[Path]:
    """The files with weights that lie somewhere below."""
    return [file for home in homes(base) for file in home.rglob("*.safetensors")]


def model(*, tied: bool = False) -> Tiny:
    torch.manual_seed(7)
    return Tiny(tied=tied)


def train(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter))


def connect(module: object, server: Served, **settings: Any) -> ws.WeightSender:
    return ws.connect(module, to=f"sglang+{server.url}", dtype=torch.bfloat16, **settings)


def holds(server: Served, module: nn.Module) -> bool:
    held = server.weights()
    state = {name: p.detach() for name, p in module.state_dict().items()}
    return held.keys() == state.keys() and all(
        torch.equal(held[name], tensor.to(torch.bfloat16).float()) for name, tensor in state.items()
    )


def test_two_updates_arrive_and_nothing_is_left(server: Served) -> None:
    module = model()
    with connect(module, server) as sender:
        for version in (1, 2):
            train(module)
            assert not holds(server, module)
            report = sender.send_weights()
            assert (report.version, report.path) == (version, "safetensors_file")
            assert report.receivers[0].verified == "arrived"
            assert sender.path == "safetensors_file"
            assert holds(server, module)
            state = server.state()
            assert (state["weight_version"], state["paused"]) == (str(version), "")
            assert weights_in(files.MEMORY) == []
        assert state["calls"][-5:] == [
            "model_info",
            "pause_generation",
            "update_weights_from_disk",
            "model_info",
            "continue_generation",
        ]
        paths = {body["model_path"] for body in state["bodies"]}
        assert len(paths) == 1, "the server's name follows the path, so it stays the same"
        assert (
            state["bodies"][-1].keys()
            <= CONTRACT["0.5.23"]["requests"]["UpdateWeightFromDiskReqInput"].keys()
        )


def test_a_bare_url_is_found_out_and_the_next_sender_follows(server: Served) -> None:
    module = model()
    with ws.connect(module, to=server.url) as sender:
        assert sender.send_weights().version == 1
    with ws.connect(module, to=server.url, packed=True) as sender:
        assert sender.send_weights(label="step 9").version == 2
    assert server.state()["weight_version"] == "step 9"
    assert holds(server, module)


def test_one_fleet_writes_once_in_several_shards(
    process: StandInProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "SHARD_NBYTES", 300)
    made: list[str] = []
    add = files.Snapshot.add

    def counted(batch: files.Snapshot, layout: Any) -> Any:
        made.append("")
        return add(batch, layout)

    monkeypatch.setattr(files.Snapshot, "add", counted)
    servers = [process.server(name=name) for name in "abc"]
    urls = [f"sglang+{server.url}?directory={tmp_path}" for server in servers]
    module = model()
    with ws.connect(module, to=urls, dtype=torch.bfloat16) as sender:
        for _ in range(2):
            train(module)
            sender.send_weights()
            assert all(holds(server, module) for server in servers)
            assert weights_in(tmp_path) == []
        assert len(made) == 2
        state = servers[2].state()
        assert len(state["files"]) > 1
        assert state["bodies"][0]["model_path"].startswith(str(tmp_path))
    assert homes(tmp_path) == set()


@pytest.mark.parametrize("version", ["0.4.6", "0.4.9", "0.5.3", "0.5.9", "0.5.16"])
def test_older_servers_are_not_paused_but_wait(process: StandInProcess, version: str) -> None:
    """A pause that takes requests back would end them: their cache cannot be emptied then."""
    server = process.server(version)
    module = model()
    with connect(module, server) as sender:
        report = sender.send_weights()
    assert report.version == 1
    assert holds(server, module)
    state = server.state()
    assert "pause_generation" not in state["calls"]
    fields = CONTRACT[version]["requests"]["UpdateWeightFromDiskReqInput"]
    assert state["bodies"][0].keys() <= fields.keys()
    assert ("weight_version" in state["bodies"][0]) == ("weight_version" in fields)


def test_an_unknown_version_is_treated_with_care(server: Served) -> None:
    server.next(says="unreleased")
    with connect(model(), server) as sender:
        sender.send_weights()
    assert "pause_generation" not in server.state()["calls"]


def test_requests_in_flight_are_kept_where_that_is_safe(server: Served) -> None:
    server.next(requests=3)
    with connect(model(), server) as sender:
        sender.send_weights()
    assert server.state()["paused"] == ""


def test_pausing_by_abort(process: StandInProcess) -> None:
    server = process.server("0.5.16")
    server.next(requests=3)
    url = f"sglang+{server.url}?pause=abort"
    with ws.connect(model(), to=url, dtype=torch.bfloat16) as sender:
        sender.send_weights()
    assert server.state()["calls"].count("pause_generation") == 1
    with pytest.raises(
        BackendUnavailableError, match=r"SGLang 0\.5\.16; pause=keep needs 0\.5\.21"
    ):
        ws.connect(model(), to=f"sglang+{server.url}?pause=keep")


def test_a_refusal_is_told_and_a_full_update_heals(server: Served) -> None:
    module = model()
    with connect(module, server) as sender:
        sender.send_weights()
        server.next(refuse="Failed to update weights: no.\nRolling back to original weights.")
        train(module)
        with pytest.raises(TransferError, match=r"no\.\nRolling back.*TORN.*full update") as caught:
            sender.send_weights()
        assert server.url in str(caught.value)
        assert server.state()["paused"] == ""
        assert weights_in(files.MEMORY) == []
        with (
            pytest.raises(UpdateConflictError, match="TORN"),
            sender.update(partial=True) as update,
        ):
            update.send([("norm", module.norm.detach())])
        sender.send_weights()
    assert holds(server, module)


def test_one_of_two_that_refuses_is_sent_it_again(process: StandInProcess) -> None:
    one, other = process.server(name="a"), process.server(name="b")
    other.next(refuse="Failed to update weights: once.")
    module = model()
    urls = [f"sglang+{server.url}" for server in (one, other)]
    with ws.connect(module, to=urls, dtype=torch.bfloat16) as sender:
        report = sender.send_weights()
    assert report.rule == "roll-forward"
    assert holds(one, module)
    assert holds(other, module)


def test_a_cache_that_is_not_emptied_is_told(server: Served) -> None:
    server.next(refuse="Weights were updated, but the cache was not flushed because …")
    with (
        connect(model(), server) as sender,
        pytest.raises(TransferError, match="new weights, and caches of the old"),
    ):
        sender.send_weights()


def test_another_version_than_was_sent_is_told(server: Served) -> None:
    with connect(model(), server) as sender:
        sender.send_weights()
        server.next(say_version="somebody's")
        sender.send_weights()  # what it says before a full update does not matter
        server.next(say_version="somebody's")
        with (
            pytest.raises(ProtocolError, match=r"somebody's.*send a full update"),
            sender.update(partial=True) as update,
        ):
            update.send([("norm", torch.ones(8, dtype=torch.bfloat16))])


def test_a_version_that_the_server_did_not_take_is_told(server: Served) -> None:
    with connect(model(), server) as sender:
        server.next(deaf=True)
        with pytest.raises(ProtocolError, match="loaded weights '1', and now reports 'defau"):
            sender.send_weights()
        assert server.state()["paused"] == ""


def test_names_that_the_server_does_not_have_are_refused_before_anything(server: Served) -> None:
    def renamed(name: str) -> str:
        return f"policy.{name}"

    with pytest.raises(ManifestMismatchError) as caught:
        connect(model(), server, rename=renamed)
    assert "policy.norm" in caught.value.unexpected
    assert "norm" in caught.value.missing
    assert "update_weights_from_disk" not in server.state()["calls"]
    with pytest.raises(ManifestMismatchError, match=r"norm: offered bfloat16\[9\]"):
        connect({**model().state_dict(), "norm": torch.ones(9)}, server)


def test_a_prefix_is_taken_off(server: Served) -> None:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy = model()

    policy = Policy()
    with connect(policy, server, rename=lambda name: name.removeprefix("policy.")) as sender:
        sender.send_weights()
    assert holds(server, policy.policy)


def test_names_that_nobody_checks_are_the_servers_to_refuse(server: Served) -> None:
    url = f"sglang+{server.url}?names=any"
    with ws.connect(model(), to=url, rename=lambda name: f"x.{name}") as sender:
        with pytest.raises(TransferError, match=r"(?s)Failed to update weights: 'x\..*TORN"):
            sender.send_weights()
        assert server.state()["paused"] == ""


def test_a_checkpoint_that_cannot_be_read_is_told(
    process: StandInProcess, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(model(), process.server()) as sender:
        sender.send_weights()
    moved = Served(process.origin, "a", "0.5.23")  # its path is that of the files, which are gone
    with caplog.at_level(logging.WARNING), connect(model(), moved) as sender:
        assert sender.send_weights().version == 2
    assert "names cannot be checked" in caplog.text


def test_tied_weights_go_under_the_names_of_the_servers_checkpoint(
    process: StandInProcess, server: Served
) -> None:
    tied = model(tied=True)
    with connect(tied, server) as sender:
        sender.send_weights()
    held = server.weights()
    assert torch.equal(held["lm_head.weight"], held["embed.weight"])
    assert holds(server, tied)


def test_a_part_of_the_model_changes_that_part_alone(server: Served) -> None:
    module = model()
    with connect(module, server) as sender:
        sender.send_weights()
        before = server.weights()
        with sender.update(partial=True) as update:
            update.send([("norm", torch.full((8,), 3.0, dtype=torch.bfloat16))])
            update.send([("up.weight", torch.full((8, 8), 2.0, dtype=torch.bfloat16))])
        state = server.state()
        assert (state["weight_version"], len(state["bodies"])) == ("2", 2)
        after = server.weights()
    assert after["norm"].eq(3).all()
    assert after["up.weight"].eq(2).all()
    assert all(torch.equal(after[n], before[n]) for n in ("gate.weight", "embed.weight"))


def test_a_server_that_is_down(server: Served) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(ConnectError, match="is the server running"):
            ws.connect(model(), to=f"sglang+{url}")


def test_a_server_that_dies_while_it_loads(checkpoint: Path) -> None:
    with stand_in(checkpoint) as process:
        server = process.server()
        module = model()
        with connect(module, server, timeout_s=20) as sender:
            sender.send_weights()
            server.next(die=True)
            with pytest.raises(
                TransferError, match=r"did not report how its update ended.*TORN"
            ) as got:
                sender.send_weights()
            assert "its generation could not be resumed" in "".join(got.value.__notes__)
            assert process.process.wait(20) == 9
            assert weights_in(files.MEMORY) == []
            with pytest.raises(ConnectError, match="is the server running"):
                sender.send_weights()
            assert weights_in(files.MEMORY) == []


def test_a_pause_that_is_refused_is_taken_back(server: Served) -> None:
    module = model()
    with connect(module, server) as sender:
        server.next(refuse_pause=True)
        with pytest.raises(ws.errors.RemoteError, match="pause_generation answered 500: no pause"):
            sender.send_weights()
        assert server.state()["calls"][-1] == "continue_generation"
        assert sender.send_weights().version
    assert holds(server, module)


def die_paused(url: str, pipe: Connection) -> None:
    """A trainer's process: killed while the server is paused; a child of its own lives on."""

    def die(*_: object, **__: object) -> None:
        child = os.fork()  # has the trainer's ends of all its pipes
        if not child:
            time.sleep(300)
            os._exit(0)
        pipe.send(child)
        os.kill(os.getpid(), signal.SIGKILL)

    SglangControl.load = die  # type: ignore[method-assign]  # it is our own process
    ws.connect(model(), to=f"sglang+{url}", timeout_s=20).send_weights()


def test_a_killed_trainer_s_pause_ends_without_it(server: Served) -> None:
    ours, theirs = CONTEXT.Pipe()
    trainer = CONTEXT.Process(target=die_paused, args=(server.url, theirs))
    trainer.start()
    try:
        assert ours.poll(120)
        child = ours.recv()
        try:
            trainer.join(20)
            assert trainer.exitcode == -signal.SIGKILL
            wait_until(lambda: "continue_generation" in server.state()["calls"], "it goes on")
            assert server.state()["paused"] == ""
        finally:
            os.kill(child, signal.SIGKILL)
    finally:
        trainer.kill()
        trainer.join(20)
        ours.close()
        theirs.close()
    trained = model()
    with connect(trained, server) as sender:
        sender.send_weights()
    assert holds(server, trained)
    remove_leftovers()


def test_a_trainer_that_leaves_ends_what_watched_it(server: Served) -> None:
    with connect(model(), server) as sender:
        sender.send_weights()
        watch = sender._coordinator.fleet.members[0].transport._pause_watch  # type: ignore[union-attr]
        assert psutil.pid_exists(watch.pid)
        pid = watch.pid
    assert not psutil.pid_exists(pid)
    assert server.state()["calls"].count("continue_generation") == 1


def leave_with_a_pause_owed(server: Served) -> int:
    """Close a sender whose server refuses to go on; return the pid of what watches the pause."""
    with connect(model(), server) as sender:
        server.next(refuse_proceed=True)
        with pytest.raises(ws.errors.RemoteError, match="continue_generation answered 500"):
            sender.send_weights()
        watch = sender._coordinator.fleet.members[0].transport._pause_watch  # type: ignore[union-attr]
        pid: int = watch.pid
    return pid


def test_a_pause_that_is_still_owed_at_close_ends_all_the_same(server: Served) -> None:
    pid = leave_with_a_pause_owed(server)
    assert server.state()["paused"] != ""
    server.next(refuse_proceed=False)
    wait_until(lambda: server.state()["paused"] == "", "it goes on")
    wait_until(lambda: not psutil.pid_exists(pid), "the process beside the trainer to end")


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_pause_that_is_still_owed_does_not_end_one_of_the_next_sender(
    server: Served, by_hand: bool
) -> None:
    pid = leave_with_a_pause_owed(server)
    assert psutil.pid_exists(pid)
    with connect(model(), server) as sender:
        if by_hand:
            transport = sender._coordinator.fleet.members[0].transport  # type: ignore[union-attr]
            transport.call(PauseRequest(mode="keep"), timeout_s=20)
            assert server.state()["paused"] != ""
        else:
            with pytest.raises(ws.errors.RemoteError, match="continue_generation answered 500"):
                sender.send_weights()
        assert not psutil.pid_exists(pid)
        server.next(refuse_proceed=False)
        if by_hand:
            transport.call(ResumeRequest(), timeout_s=20)
        else:
            sender.send_weights()
        assert server.state()["paused"] == ""


def test_a_pause_is_ended_whatever_the_server_answers_first() -> None:
    answers = [b"", b"?\r\n\r\n", b"HTTP/1.1 "]
    answers += [b"HTTP/1.1 %d -\r\n\r\n" % status for status in (408, 429, 503, 200)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/continue_generation"
        watch = PauseWatch(url, {}, verify_tls=True)
        watch.paused()
        pid = watch.pid
        assert pid is not None
        watch.close()
        for answer in answers:
            client, _ = listener.accept()
            with client, client.makefile("rb") as asked:
                assert asked.readline().startswith(b"POST /continue_generation ")
                while asked.readline().strip():
                    pass
                assert asked.read(2) == b"{}"
                client.sendall(answer)
    wait_until(lambda: not psutil.pid_exists(pid), "the process beside the trainer to end")


def test_a_full_directory(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    module = model()
    with connect(module, server) as sender:
        sender.send_weights()
        with monkeypatch.context() as patch:
            usage = type("Usage", (), {"free": 100})
            patch.setattr("shutil.disk_usage", lambda _: usage)
            with pytest.raises(TransferError, match=r"has 100 bytes left.*name another directory"):
                sender.send_weights()
        assert server.state()["calls"].count("update_weights_from_disk") == 1
        assert weights_in(files.MEMORY) == []
        sender.send_weights()
    assert holds(server, module)


def test_other_hosts_need_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"another host.*directory=/shared/path"):
        ws.connect(model(), to="sglang+http://192.0.2.7:30000")


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("sglang+ftp://host", "no HTTP URL"),
        ("sglang+http://127.0.0.1:9?mode=x", "mode is no option"),
        ("sglang+http://127.0.0.1:9?names=no", "names=no is no option"),
        ("sglang+http://127.0.0.1:9?pause=later", "pause must be one of"),
        ("sglang+http://127.0.0.1:9?directory=/nowhere", "no absolute path of a directory"),
    ],
)
def test_targets_that_say_nothing(target: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        ws.connect(model(), to=target)


def test_a_key_that_is_wrong(server: Served) -> None:
    server.next(info={"admin_api_key": "secret"})
    with pytest.raises(AuthError, match="--admin-api-key"):
        connect(model(), server)
    with connect(model(), server, token="secret") as sender:
        sender.send_weights()


def test_a_server_that_lends_its_weights_is_refused(server: Served) -> None:
    server.next(info={"weight_cache_mode": "attach"})
    with pytest.raises(BackendUnavailableError, match="--weight-cache-mode off"):
        connect(model(), server)


def test_another_backend_is_refused(server: Served) -> None:
    with pytest.raises(ConfigError, match="reached by files; leave backend"):
        connect(model(), server, backend="tcp")


def test_a_server_that_is_no_sglang(process: StandInProcess) -> None:
    with pytest.raises(ProtocolError, match="no SGLang server"):
        ws.connect(model(), to=f"sglang+{process.origin}")


def test_a_dtype_that_the_files_cannot_hold(server: Served) -> None:
    url = f"sglang+{server.url}?names=any"
    weights = {"norm": torch.ones(8).to(torch.float8_e4m3fnuz)}
    with pytest.raises(ConfigError, match="norm: of a dtype"):
        ws.connect(weights, to=url)


def test_a_receiver_may_come_and_go(process: StandInProcess) -> None:
    one, other = process.server(name="a"), process.server(name="b")
    module = model()
    with connect(module, one) as sender:
        sender.send_weights()
        sender.add(f"sglang+{other.url}")
        assert holds(other, module)
        train(module)
        sender.send_weights()
        assert holds(other, module)
        sender.remove(other.url)
        train(module)
        sender.send_weights()
        assert holds(one, module)
        assert not holds(other, module)
