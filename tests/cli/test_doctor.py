"""`weightsync doctor`: every path tried for real, and what each check says of what it sees."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import socket
import sys
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from tests.cli.running import answer_of, weightsync
from tests.shm.processes import OWNER, kill, line_of, private_directory, python, running
from weightsync.backends.base import Backend, Trial
from weightsync.backends.ipc.backend import IpcBackend
from weightsync.backends.nixl.backend import NixlBackend
from weightsync.backends.registry import get_backend
from weightsync.backends.ring import ProbeMemory
from weightsync.backends.tcp import trial as tcp_trial
from weightsync.backends.tcp.backend import TcpBackend
from weightsync.cli import doctor
from weightsync.cli.child import Child
from weightsync.cli.doctor import Check, Finding, Level, examine, ok
from weightsync.cli.doctor_helper import Gpu
from weightsync.errors import (
    BackendUnavailableError,
    ConnectError,
    HandleError,
    RemoteError,
    TransferError,
    install_hint,
)
from weightsync.integrations.sglang.files import WeightDirectory, list_homes
from weightsync.shm.segment import Segment

CHECKS = {
    "cpu",
    "versions",
    "host",
    "gpu",
    "allocator",
    "shm",
    "leftovers",
    "namespaces",
    "files",
    "memlock",
    "ray",
    "port",
    "ptrace",
    "auto",
    "cuda_ipc",
    "shared_memory",
    "nixl",
    "tcp",
}
HERE = platform.machine() in ("x86_64", "aarch64")


@pytest.fixture(scope="module")
def examined() -> dict[str, Any]:
    """What the doctor says of this machine, while one of two ports is taken."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        result = weightsync("doctor", "--port", port, "--json")
    answer = answer_of(result, 1)
    assert result.stderr == ""
    return answer | {"port": port}


def findings_of(answer: dict[str, Any], check: str) -> list[dict[str, Any]]:
    return [finding for finding in answer["findings"] if finding["check"] == check]


def test_every_check_says_something(examined: dict[str, Any]) -> None:
    assert {finding["check"] for finding in examined["findings"]} >= CHECKS
    for finding in examined["findings"]:
        assert finding["seen"]
        assert finding["level"] in {"ok", "warning", "problem"}
        assert bool(finding["remedy"]) == (finding["level"] != "ok"), finding
    assert not any("this check" in finding["seen"] for finding in examined["findings"])


@pytest.mark.skipif(not HERE, reason="rings of shared memory need x86-64 or aarch64")
def test_the_paths_of_this_machine_work(examined: dict[str, Any]) -> None:
    assert (examined["paths"]["shared_memory"], examined["paths"]["tcp"]) == (True, True)
    for path in ("shared_memory", "tcp"):
        (finding,) = findings_of(examined, path)
        assert (finding["level"], finding["works"]) == ("ok", True)


def test_a_taken_port_is_a_problem(examined: dict[str, Any]) -> None:
    (finding,) = findings_of(examined, "port")
    assert (examined["level"], finding["level"]) == ("problem", "problem")
    assert f"127.0.0.1 port {examined['port']}: Address already in use" in finding["seen"]


def test_nixl_reads_by_what_ucx_takes(examined: dict[str, Any]) -> None:
    pytest.importorskip("nixl", reason="the package nixl, which `make venv` installs")
    assert examined["paths"]["nixl"] is True
    chosen, *others = findings_of(examined, "nixl")
    assert (chosen["level"], chosen["works"]) == ("ok", True)
    (over_tcp,) = [other for other in others if "UCX_TLS=tcp,self" in other["seen"]]
    assert (over_tcp["level"], over_tcp["works"]) == ("ok", None)
    read = r"32 MiB read at [\d.]+ GB/s \([\w -]+, (.*)\)$"
    assert re.search(read, chosen["seen"])
    taken = re.search(read, over_tcp["seen"])
    assert taken
    assert "tcp/" in taken[1]


def test_the_paths_to_another_host_are_in_the_order_of_auto(examined: dict[str, Any]) -> None:
    (finding,) = findings_of(examined, "auto")
    assert "tcp (cost 5)" in finding["seen"]
    if importlib.util.find_spec("nixl") is not None and not Path("/sys/class/infiniband").exists():
        why = "without RDMA, UCX is slower than plain TCP"
        assert finding["seen"].endswith(f"tcp (cost 5), then nixl (cost 10: {why})")


@pytest.mark.gpu
def test_cuda_ipc_works_between_processes(examined: dict[str, Any]) -> None:
    assert examined["paths"]["cuda_ipc"] is True
    assert any("GPU-" in finding["seen"] for finding in findings_of(examined, "gpu"))


def only(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> None:
    checks = [
        Check(finding.check, partial(list, [finding]), 10, is_path=finding.works is not None)
        for finding in findings
    ]
    monkeypatch.setattr(doctor, "make_checks", lambda **_: checks)


def test_people_read_lines_and_a_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = Finding("shared_memory", Level.OK, "it works", works=True)
    small = Finding("shm", Level.WARNING, "small", "enlarge it")
    only(monkeypatch, tried, small, small)
    result = weightsync("doctor")
    assert result.exit_code == 0, result.output
    assert [line.split() for line in result.stdout.splitlines()] == [
        ["ok", "shared_memory", "it", "works"],
        *2 * [["warning", "shm", "small"], ["->", "enlarge", "it"]],
        ["paths", "that", "work", "here:", "shared_memory", "(1", "ok,", "2", "warnings)"],
    ]


def test_the_worst_finding_makes_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, Finding("shm", Level.WARNING, "small", "enlarge it"), ok("cpu", "fine"))
    assert answer_of(weightsync("doctor", "--json"))["level"] == "warning"
    only(monkeypatch, Finding("shm", Level.PROBLEM, "none", "mount it"), ok("cpu", "fine"))
    answer_of(weightsync("doctor", "--json"), 1)
    assert weightsync("doctor", "--port", "0").exit_code == 2


def test_a_path_works_if_a_trial_of_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    fails = Finding("other", Level.WARNING, "none", "mend it", works=False)
    only(monkeypatch, ok("mine", "read", works=True), fails, ok("cpu", "fine"))
    assert answer_of(weightsync("doctor", "--json"))["paths"] == {"mine": True, "other": False}
    assert "paths that work here: mine (2 ok, 1 warning)" in weightsync("doctor").stdout


def test_a_check_that_crashes_or_hangs_is_a_finding() -> None:
    release = threading.Event()

    def crash() -> list[Finding]:
        raise OSError("broken\ndriver")

    def hang() -> list[Finding]:
        release.wait(60)
        return []

    checks = [Check("a", hang, 0.1), Check("b", crash, 10), Check("c", lambda: [ok("c", "x")], 10)]
    try:
        first, second, third = examine(checks)
    finally:
        release.set()
    assert (first.check, first.level) == ("a", Level.PROBLEM)
    assert first.seen == "this check did not end within 0.1 s"
    assert second.seen == "this check failed: OSError: broken driver"
    assert third == ok("c", "x")


@pytest.mark.parametrize(
    ("free", "level"), [(1 << 20, Level.PROBLEM), (64 << 20, Level.WARNING), (2 << 30, Level.OK)]
)
def test_shared_memory_is_judged_by_what_is_free(free: int, level: Level) -> None:
    assert doctor.judge_shm(free, "/dev/shm").level is level


def test_no_shared_memory_is_a_problem(tmp_path: Path) -> None:
    (finding,) = doctor.check_shm(tmp_path / "nowhere")
    assert finding.level is Level.PROBLEM
    assert "does not exist" in finding.seen
    assert doctor.check_leftovers(clean=True, directory=tmp_path / "nowhere") == []


def test_only_what_dead_owners_left_is_removed() -> None:
    with (
        private_directory() as directory,
        running(python(OWNER, directory)) as owner,
        ExitStack() as stack,
    ):
        dead = line_of(owner)
        mine = Segment.create(4096, directory=directory)
        beside = stack.enter_context(socket.socket(socket.AF_UNIX))
        beside.bind(str(directory / f"{dead}.sock"))
        (finding,) = doctor.check_leftovers(clean=True, directory=directory)
        assert (finding.level, finding.seen) == (Level.OK, "none; 2 segments in use")
        kill(owner)
        (finding,) = doctor.check_leftovers(clean=False, directory=directory)
        assert finding.level is Level.WARNING
        assert finding.seen == "1 segments of dead owners, 0.0 MiB; 1 segments in use"
        assert "--clean" in finding.remedy
        assert (directory / dead).exists()
        (finding,) = doctor.check_leftovers(clean=True, directory=directory)
        removed = "removed 1 segments of dead owners, 0.0 MiB, 1 sockets of dead owners"
        assert finding.seen.startswith(removed)
        assert [path.name for path in directory.iterdir()] == [mine.name]
        mine.close()


SHELF = """
import signal, sys
from pathlib import Path
from weightsync.integrations.sglang.files import WeightDirectory
shelf = WeightDirectory(Path(sys.argv[1]))
home = shelf.join("some", 1).weights.parent
(home / "weights").mkdir()
(home / "weights" / "model.safetensors").write_bytes(bytes(2 << 20))
print(home.name, flush=True)
signal.pause()
"""


def test_weights_that_a_dead_trainer_left_for_sglang_are_removed() -> None:
    with private_directory() as directory:
        with running([sys.executable, "-c", SHELF, str(directory)]) as trainer:
            name = line_of(trainer)
            (finding,) = doctor.check_leftovers(clean=True, directory=directory)
            assert (finding.level, finding.seen) == (Level.OK, "none; 0 segments in use")
            (home,) = list_homes(directory)
            assert (home.path.name, home.owner_alive) == (name, True)
            kill(trainer)
        said = "1 directories of weights for SGLang of dead owners, 2.0 MiB; 0 segments in use"
        (finding,) = doctor.check_leftovers(clean=False, directory=directory)
        assert (finding.level, finding.seen) == (Level.WARNING, said)
        assert (directory / name).is_dir()
        (finding,) = doctor.check_leftovers(clean=True, directory=directory)
        assert (finding.level, finding.seen) == (Level.OK, f"removed {said}")
        assert list(directory.iterdir()) == []


def test_weights_that_lie_for_sglang_are_of_this_host() -> None:
    shelf = WeightDirectory()
    shelf.share()
    batch = shelf.join("some", 1)
    name = batch.weights.parent.name
    try:
        found = answer_of(weightsync("status", "--host", "--json"))["host"]
        (home,) = [one for one in found if one["name"] == name]
        assert home["owner_alive"] is True
        assert name in weightsync("status", "--host").stdout
    finally:
        shelf.leave(batch, 1)
        shelf.close()


GPU = Gpu(ordinal=0, key="GPU-1", name="NVIDIA H200", total_nbytes=141 * 10**9)


@pytest.mark.parametrize(
    ("gpu", "level"),
    [
        (GPU, Level.OK),
        (msgspec.structs.replace(GPU, key="MIG-1"), Level.WARNING),
        (msgspec.structs.replace(GPU, name="NVIDIA H200 MIG 1g.18gb"), Level.WARNING),
    ],
)
def test_a_mig_slice_is_a_warning(gpu: Gpu, level: Level) -> None:
    finding = doctor.judge_gpu(gpu)
    assert finding.level is level
    assert finding.seen.startswith(f"0: {gpu.name}, 141 GB, {gpu.key}")
    assert ("nvidia-smi -mig 0" in finding.remedy) == (level is Level.WARNING)


@pytest.mark.parametrize(
    ("inode", "gpu", "level", "said"),
    [
        (1, True, Level.WARNING, "PID and IPC namespace of its own (a container): CUDA IPC"),
        (1, False, Level.OK, "PID and IPC namespace of its own (a container); other containers"),
        (None, True, Level.OK, "PID and IPC namespaces are the host's"),
    ],
)
def test_a_container_matters_where_there_is_a_gpu(
    inode: int | None, gpu: bool, level: Level, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {
        kind: Path(f"/proc/self/ns/{kind}").stat().st_ino + (inode or 0) for kind in ("pid", "ipc")
    }
    monkeypatch.setattr(doctor, "_FIRST_NAMESPACES", own)
    (finding,) = doctor.check_namespaces(gpu=gpu)
    assert (finding.level, finding.seen[: len(said)]) == (level, said)
    assert bool(finding.remedy) == (level is Level.WARNING)


@pytest.mark.parametrize(
    ("works", "gpu", "level"),
    [(False, True, Level.WARNING), (False, False, Level.OK), (True, True, Level.OK)],
)
def test_descriptors_that_are_refused_matter_where_there_is_a_gpu(
    works: bool, gpu: bool, level: Level
) -> None:
    reason = "" if works else "Operation not permitted"
    finding = doctor.judge_ptrace(reason, "1", gpu=gpu)
    assert finding.level is level
    assert ("is refused (Operation not permitted; ptrace_scope 1)" in finding.seen) is not works
    assert ("--cap-add=SYS_PTRACE" in finding.remedy) is (level is Level.WARNING)


def test_a_descriptor_of_nobody_cannot_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "weightsync.cli.doctor_helper"
    arguments = (module, "take", str(os.getpid()), "1000000")
    monkeypatch.setattr(doctor, "run_helper", lambda *_: Child("other process", *arguments))
    (finding,) = doctor.try_ptrace(gpu=True)
    assert finding.level is Level.WARNING
    assert "pidfd_getfd is refused (Bad file descriptor; " in finding.seen


def test_an_old_ray_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.39.0")
    (finding,) = doctor.check_ray()
    assert (finding.level, finding.seen) == (Level.WARNING, "ray 2.39.0 is too old")
    assert finding.remedy == "install ray 2.40 or later"


def test_a_backend_that_cannot_be_imported_is_a_warning_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert doctor.check_backends() == []

    def load(name: str) -> Backend:
        if name == "fast":
            raise BackendUnavailableError("backend 'fast' cannot be loaded: libfabric.so.1:\ngone")
        if name == "odd":
            raise OSError
        return get_backend(name)

    monkeypatch.setattr(doctor, "backend_names", lambda: ["fast", "ipc", "odd"])
    monkeypatch.setattr(doctor, "get_backend", load)
    first, second = doctor.check_backends()
    assert (first.check, first.level) == ("backend", Level.WARNING)
    assert first.seen == "fast: backend 'fast' cannot be loaded: libfabric.so.1: gone"
    assert first.remedy.endswith("or use another backend than 'fast'")
    assert second.seen == "odd: OSError"


@pytest.mark.parametrize(
    ("limit", "level"),
    [
        (64, Level.PROBLEM),
        (512, Level.WARNING),
        (1024, Level.OK),
        (resource.RLIM_INFINITY, Level.OK),
    ],
)
def test_open_files_are_judged(limit: int, level: Level) -> None:
    assert doctor.judge_files(limit).level is level


def test_locked_memory_matters_where_there_is_a_gpu() -> None:
    assert doctor.judge_memlock(65536, gpu=True).level is Level.WARNING
    assert doctor.judge_memlock(65536, gpu=False).level is Level.OK
    assert doctor.judge_memlock(resource.RLIM_INFINITY, gpu=True).level is Level.OK


@pytest.mark.parametrize(
    ("driver", "level"), [(None, Level.WARNING), ((12, 8), Level.PROBLEM), ((13, 1), Level.OK)]
)
def test_a_driver_older_than_torch_is_a_problem(
    driver: tuple[int, int] | None, level: Level
) -> None:
    assert doctor.judge_driver(driver, "13.0").level is level


def test_expandable_segments_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    finding = doctor.check_allocator()
    assert finding.level is Level.WARNING
    assert "PYTORCH_CUDA_ALLOC_CONF" in finding.remedy
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    assert doctor.check_allocator().level is Level.OK


def test_an_address_of_nobody_is_a_problem() -> None:
    finding = doctor.check_port("192.0.2.1", 8000)
    assert finding.level is Level.PROBLEM
    assert "cannot listen on 192.0.2.1 port 8000" in finding.seen


def test_memory_with_other_bytes_does_not_count_as_shared() -> None:
    probe = ProbeMemory()
    try:
        wrong = msgspec.structs.replace(probe.info(), digest="0" * 32)
        with pytest.raises(HandleError, match="other bytes"):
            IpcBackend().read_trial("shared_memory", [msgspec.to_builtins(wrong)])
    finally:
        probe.close()


def test_a_process_that_dies_says_its_last_words() -> None:
    with (
        doctor.run_helper("no-such-trial") as helper,
        pytest.raises(RemoteError, match=r"ended with status 1: KeyError: 'no-such-trial'"),
    ):
        doctor.receive(helper, str)
    assert helper.has_ended


def test_a_loopback_that_does_not_work_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_trial, "LOOPBACK", "192.0.2.1")  # an address of nobody
    with (
        pytest.raises(ConnectError, match=r"192\.0\.2\.1"),
        TcpBackend().offer_trial("tcp"),
    ):
        pass


def test_other_bytes_than_were_sent_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with TcpBackend().offer_trial("tcp") as offer:
        assert "GB/s" in TcpBackend().read_trial("tcp", offer)
    monkeypatch.setattr(tcp_trial, "mix64", lambda chunk: chunk.data_ptr())
    with (
        TcpBackend().offer_trial("tcp") as offer,
        pytest.raises(TransferError, match="the bytes that arrived differ"),
    ):
        TcpBackend().read_trial("tcp", offer)


def test_transports_that_ucx_lacks_are_a_warning_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("nixl", reason="the package nixl, which `make venv` installs")
    monkeypatch.setenv("UCX_TLS", "nonsense")
    before = psutil.Process().children()
    (finding,) = doctor.run_trial("nixl", NixlBackend().trials()[0])
    assert (finding.level, finding.works) == (Level.WARNING, False)
    assert finding.seen.startswith("as it is set (UCX_TLS=nonsense): NIXL failed: ")
    assert "transport 'nonsense' is not available, please use one or more of: " in finding.seen
    assert "unset UCX_TLS" in finding.remedy
    assert psutil.Process().children() == before


def test_without_nixl_its_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    (finding,) = doctor.try_path("nixl", NixlBackend().trials())
    assert (finding.level, finding.works) == (Level.OK, False)
    why = f"the package nixl is not installed: {install_hint('nixl')}"
    assert finding.seen == f"not tried: {why}"


@pytest.mark.parametrize(("is_essential", "level"), [(True, Level.PROBLEM), (False, Level.WARNING)])
def test_a_trial_that_takes_too_long_ends_with_its_processes(
    is_essential: bool, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "TRIAL_S", 0.01)
    before = psutil.Process().children()
    trial = Trial(path="tcp", remedy="wait", is_essential=is_essential)
    (finding,) = doctor.run_trial("tcp", trial)
    assert finding == Finding(
        "tcp", level, "the other process wrote nothing for 0 s", "wait", False
    )
    assert psutil.Process().children() == before
