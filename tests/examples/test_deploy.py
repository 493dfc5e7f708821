"""examples/deploy: files that are read as their programs would, and commands that are run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fastapi.testclient import TestClient

import weightsync as ws
from tests.docs.test_code_blocks import check_weightsync
from tests.server.live import make_app

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "examples" / "deploy"
INSTRUCTIONS = {"FROM", "WORKDIR", "RUN", "COPY", "USER", "ENTRYPOINT", "CMD"}


def load(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def check_command(words: list[str]) -> None:
    """A container's arguments of the image's entry point, `python`."""
    if words[:2] == ["-m", "weightsync"]:
        check_weightsync(words[2:])
    else:
        assert (ROOT / words[0]).exists()


def test_the_image_installs_what_its_commands_need() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    kinds = [line.split()[0] for line in lines]
    assert set(kinds) <= INSTRUCTIONS
    assert kinds[0] == "FROM"
    for line in lines:
        if line.startswith("COPY"):
            assert all((ROOT / source).exists() for source in line.split()[1:-1]), line
        if line.startswith(("CMD", "ENTRYPOINT")):
            assert isinstance(json.loads(line.partition(" ")[2]), list)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(re.findall(r'"\.\[([\w,]+)\]"', text)[0].split(","))
    assert extras <= project["optional-dependencies"].keys()
    assert {"server", "hf", "cli"} <= extras
    check_command(json.loads(lines[-1].partition(" ")[2]))


def test_the_containers_share_memory_and_a_token() -> None:
    services = load("compose.yaml")["services"]
    server, trainer = services["server"], services["trainer"]
    for service in (server, trainer):
        check_command(service["command"])
        assert "WEIGHTSYNC_TOKEN" in service["environment"]
    assert (server["ipc"], trainer["ipc"]) == ("shareable", "service:server")
    assert (DEPLOY / server["build"]["context"]).resolve() == ROOT
    assert (ROOT / server["build"]["dockerfile"]).exists()
    assert trainer["depends_on"]["server"]["condition"] == "service_healthy"


def test_the_pod_mounts_one_memory_in_both_containers() -> None:
    pod = load("pod.yaml")
    assert (pod["apiVersion"], pod["kind"]) == ("v1", "Pod")
    (volume,) = pod["spec"]["volumes"]
    assert volume["emptyDir"]["medium"] == "Memory"
    for container in pod["spec"]["containers"]:
        check_command(container["args"])
        assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/dev/shm"}]
        assert container["env"][0]["name"] == "WEIGHTSYNC_TOKEN"
    assert pod["spec"]["containers"][0]["readinessProbe"]["httpGet"]["path"] == "/health"


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    board = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
    asked = set(re.findall(r"weightsync_\w+", json.dumps(board)))
    receiver = ws.WeightReceiver(torch.nn.Linear(2, 2))
    with ws.connect(torch.nn.Linear(2, 2), to=receiver) as sender:
        sender.send_weights()
        shown = TestClient(make_app(receiver)).get("/metrics").text
    served = re.findall(r"`(weightsync_\w+)\{replica\}", (ROOT / "docs/seeing.md").read_text())
    assert asked - set(served) <= set(re.findall(r"^(weightsync_\w+)", shown, re.MULTILINE))
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    places = [tuple(panel["gridPos"][key] for key in "xywh") for panel in board["panels"]]
    assert all(x + w <= 24 for x, _, w, _ in places)


CONTAINERS = """
mount -t tmpfs -o size=64m,mode=1777 tmpfs /dev/shm || exit 1
ip link set lo up || exit 1
unshare --pid --ipc --fork --mount-proc --kill-child {server} > server.log 2>&1 &
server=$!
unshare --pid --ipc --fork --mount-proc --kill-child timeout 200 {trainer}
status=$?
kill -9 $server
exit $status
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="makes namespaces, which needs root")
@pytest.mark.timeout(400)
def test_the_composed_commands_run_in_two_containers_that_share_64_mb(tmp_path: Path) -> None:
    """Each has its own processes and IPC; network and /dev/shm are those of the pair."""
    services = load("compose.yaml")["services"]
    lines = {
        name: shlex.join([sys.executable, *services[name]["command"]]).replace(
            "examples/", f"{ROOT}/examples/"
        )
        for name in ("server", "trainer")
    }
    script = CONTAINERS.format(**lines).replace("http://server:8000", "http://127.0.0.1:8000")
    environment = {**os.environ, "WEIGHTSYNC_TOKEN": "t" * 32, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "said").open("w") as said:  # no pipe, which a process left behind would hold
        done = subprocess.run(
            ["unshare", "--mount", "--net", "--fork", "--kill-child", "sh", "-c", script],
            cwd=tmp_path,
            env={**environment, "PYTHONPATH": str(ROOT)},
            stdout=said,
            stderr=said,
            timeout=300,
            check=False,
        )
    told = (tmp_path / "said").read_text(encoding="utf-8")
    assert done.returncode == 0, told + (tmp_path / "server.log").read_text(encoding="utf-8")
    reports = [line for line in told.splitlines() if line.startswith("version ")]
    assert len(reports) == 3, told
    assert all(" by shared_memory " in line and "verified: held" in line for line in reports)


def test_the_notebook_runs_as_it_stands() -> None:
    book = json.loads((ROOT / "examples/first_update.ipynb").read_text(encoding="utf-8"))
    assert book["nbformat"] == 4
    code = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    assert all(not cell.get("outputs") for cell in book["cells"])
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"version 1 in [\d.]+ ms: ", done.stdout)
    assert "dtype=torch.float32" in done.stdout
