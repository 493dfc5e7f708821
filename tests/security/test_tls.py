"""TLS between a sender and a receiver: who is trusted, and how one finds out who is not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.security.https import Certificate, make_certificate, serving_https
from weightsync.cli.status import fetch_last_updates
from weightsync.errors import ConfigError, ConnectError
from weightsync.server.listening import check_tls_files
from weightsync.transports.http import HttpTransport
from weightsync.wire.messages import Status, StatusRequest

TOKEN = "a-token-for-tls"
VARIABLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def served(certificate: Certificate) -> Iterator[tuple[str, nn.Module]]:
    held = nn.Linear(4, 3)
    receiver = ws.WeightReceiver(held)
    try:
        with serving_https(receiver, certificate, TOKEN) as url:
            yield url, held
    finally:
        receiver.close()


@pytest.fixture(autouse=True)
def _trusting_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def ask(url: str, verify_tls: bool | str = True) -> Status:
    transport = HttpTransport(url, "", verify_tls=verify_tls)
    try:
        reply = transport.call(StatusRequest(), timeout_s=20)
    finally:
        transport.close()
    assert isinstance(reply, Status)
    return reply


@pytest.mark.usefixtures("shm_clean")
def test_weights_go_to_a_server_whose_certificate_is_trusted(
    served: tuple[str, nn.Module], certificate: Certificate
) -> None:
    url, held = served
    model = nn.Linear(4, 3)
    sent = [parameter.detach().clone() for parameter in model.parameters()]
    trusted = str(certificate.certfile)
    with ws.connect(model, to=url, token=TOKEN, verify_tls=trusted) as sender:
        report = sender.send_weights()
    assert report.verified == "held"
    for parameter, wanted in zip(held.parameters(), sent, strict=True):
        assert torch.equal(parameter, wanted)


@pytest.mark.usefixtures("shm_clean")
def test_a_single_call_trusts_the_same_certificate(
    served: tuple[str, nn.Module], certificate: Certificate
) -> None:
    url, held = served
    model = nn.Linear(4, 3)
    try:
        ws.send_weights(model, url, token=TOKEN, verify_tls=str(certificate.certfile))
    finally:
        ws.close()
    assert torch.equal(held.get_parameter("weight"), model.weight)


@pytest.mark.parametrize("variable", VARIABLES)
def test_the_variables_of_requests_say_whom_to_trust(
    served: tuple[str, nn.Module],
    certificate: Certificate,
    variable: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, _ = served
    monkeypatch.setenv(variable, str(certificate.certfile))
    assert ask(url).may_generate
    with ws.connect(nn.Linear(4, 3), to=url, token=TOKEN) as sender:
        sender.send_weights()
    with closing(HttpTransport(url, "")) as transport:
        assert fetch_last_updates(transport, 20).ended["committed"] >= 1


def test_a_certificate_that_nobody_vouches_for_is_refused_with_what_to_do(
    served: tuple[str, nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    url, _ = served
    with pytest.raises(ConnectError, match=r"CERTIFICATE_VERIFY_FAILED.* verify_tls="):
        ask(url)
    with pytest.raises(ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        ws.connect(nn.Linear(4, 3), to=url, token=TOKEN)
    assert not caplog.messages
    assert ask(url, verify_tls=False).may_generate
    assert caplog.messages == [f"verify_tls=False: the identity of {url} is not verified"]


def test_a_certificate_of_another_host_is_refused(
    served: tuple[str, nn.Module], certificate: Certificate
) -> None:
    elsewhere = served[0].replace("127.0.0.1", "localhost")
    with pytest.raises(ConnectError, match="no TLS with"):
        ask(elsewhere, verify_tls=str(certificate.certfile))


def test_a_server_without_tls_is_never_taken_for_one_with_it(
    served: tuple[str, nn.Module],
) -> None:
    with pytest.raises(ConnectError):
        ask(served[0].replace("https:", "http:"))


def test_trusted_certificates_that_are_not_there_are_found_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.pem, cannot be read"):
        HttpTransport("https://127.0.0.1:1", "", verify_tls=str(tmp_path / "absent.pem"))


class TestServersFiles:
    def test_a_certificate_with_its_key_will_do(self, certificate: Certificate) -> None:
        check_tls_files(None, None)
        check_tls_files(str(certificate.certfile), str(certificate.keyfile))

    def test_whatever_is_missing_is_said_before_anything_starts(
        self, certificate: Certificate, tmp_path: Path
    ) -> None:
        locked = make_certificate(tmp_path, passphrase="unknown-here")
        for certfile, keyfile in [
            (None, certificate.keyfile),
            (certificate.certfile, None),
            (certificate.certfile, tmp_path / "absent.pem"),
            (certificate.certfile, locked.keyfile),
            (locked.certfile, certificate.keyfile),
        ]:
            with pytest.raises(ConfigError, match="TLS"):
                check_tls_files(str(certfile) if certfile else None, str(keyfile or "") or None)
