"""The verbs against a server that speaks TLS: who trusts its certificate, and who asks wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import weightsync as ws
from tests.cli.running import TOKEN, answer_of, tiny_tensors, weightsync, write_checkpoint
from tests.security.https import Certificate, make_certificate, serving_https
from weightsync.serve.model import make_tiny_model


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def https(certificate: Certificate) -> Iterator[str]:
    receiver = ws.WeightReceiver(make_tiny_model().model)
    try:
        with serving_https(receiver, certificate, TOKEN) as url:
            yield url
    finally:
        receiver.close()


@pytest.fixture(autouse=True)
def _trusting_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.usefixtures("segments_closed")
def test_who_is_given_the_certificate_gets_in(
    https: str, certificate: Certificate, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path, tiny_tensors(7))
    trusted = ("--ca-file", certificate.certfile)
    pushed = answer_of(weightsync("push", checkpoint, "--to", https, *trusted, "--json"))
    assert answer_of(weightsync("verify", https, checkpoint, *trusted, "--json"))["equal"] is True
    (server,) = answer_of(weightsync("status", https, *trusted, "--json"))["servers"]
    assert server["version"] == pushed["version"]
    assert server["updates"]["ended"] == {"committed": 1}  # metrics are read by the same trust


def test_who_is_not_given_it_is_told_the_option(https: str, checkpoint: Path) -> None:
    lines = (("status", https), ("verify", https, checkpoint), ("push", checkpoint, "--to", https))
    for line in lines:
        result = weightsync(*line)
        assert result.exit_code == 3, result.output
        assert "--ca-file" in result.output
        assert "CERTIFICATE_VERIFY_FAILED" in result.output


def test_another_certificate_is_not_enough(https: str, tmp_path: Path) -> None:
    other = make_certificate(tmp_path)
    assert weightsync("status", https, "--ca-file", other.certfile).exit_code == 3


def test_plain_http_to_it_is_one_line_that_says_https(https: str, checkpoint: Path) -> None:
    plain = https.replace("https://", "http://")
    result = weightsync("verify", plain, checkpoint)
    assert result.exit_code == 3, result.output
    assert result.stderr.count("\n") == 1
    assert "https://" in result.stderr
    assert weightsync("status", plain).exit_code == 3
