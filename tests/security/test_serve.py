"""`weightsync serve` with TLS and a token file, as a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import requests

import weightsync as ws
from tests.security.https import make_certificate
from tests.serve.servers import forked_server
from weightsync.cli import main
from weightsync.serve.model import make_tiny_model

TOKEN = "sesame-0d41c7"


@pytest.mark.slow
@pytest.mark.usefixtures("shm_clean")
def test_https_with_a_token_from_a_file(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    trusted = str(certificate.certfile)
    token_file = tmp_path / "token"
    token_file.write_text(f"{TOKEN}\n")
    token_file.chmod(0o600)
    options = ["--tls-cert", trusted, "--tls-key", str(certificate.keyfile)]
    options += ["--token-file", str(token_file)]
    log = tmp_path / "log"
    with (
        log.open("w") as stderr,
        forked_server(*options, want_token=False, stderr=stderr) as (url, _),
    ):
        assert url.startswith("https://127.0.0.1:")
        asked = requests.get(f"{url}/weight_info", verify=trusted, timeout=240)
        assert asked.json()["version"] == 0
        model = make_tiny_model(seed=3).model
        with pytest.raises(ws.AuthError):
            ws.connect(model, to=url, token="another", verify_tls=trusted)
        with ws.connect(model, to=url, token=TOKEN, verify_tls=trusted) as sender:
            assert sender.send_weights().version == 1
        pages = [
            requests.get(f"{url}/{page}", verify=trusted, timeout=240).text
            for page in ("", "weight_info", "metrics", "server_info")
        ]
    assert TOKEN not in "".join(pages) + log.read_text()


@pytest.mark.usefixtures("keeps_tracker")
def test_files_that_will_not_do_are_found_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o644)
    for options, wanted in [
        (["--token-file", str(token_file)], "others may read or change it"),
        (["--tls-key", str(token_file)], "without a certificate"),
        (["--tls-cert", str(token_file)], "no TLS with certificate"),
    ]:
        with pytest.raises(SystemExit) as ended:
            main(["serve", "--model", "tiny", "--port", "0", *options])
        said = capsys.readouterr()
        assert ended.value.code == 2, said.err
        assert wanted in " ".join(said.err.split())
        assert TOKEN not in said.err + said.out
