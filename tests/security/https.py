"""A receiver behind HTTPS, with a certificate made on the spot."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.server.live import make_app, serving
from weightsync.receiver import WeightReceiver


@dataclass(frozen=True)
class Certificate:
    """A self-signed certificate for 127.0.0.1, and for no name."""

    certfile: Path
    keyfile: Path


def make_certificate(directory: Path, passphrase: str = "") -> Certificate:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("the openssl command is not installed here")
    made = Certificate(directory / "cert.pem", directory / "key.pem")
    locked = ["-passout", f"pass:{passphrase}"] if passphrase else ["-nodes"]
    subject = ["-subj", "/CN=weightsync test", "-addext", "subjectAltName=IP:127.0.0.1"]
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    subprocess.run(
        [openssl, "req", *kind, *locked, *subject, "-keyout", made.keyfile, "-out", made.certfile],
        check=True,
        capture_output=True,
        timeout=240,
    )
    return made


@contextmanager
def serving_https(
    receiver: WeightReceiver, certificate: Certificate, token: str | None
) -> Iterator[str]:
    """Serve the routes of `receiver`; yields the URL."""
    app = make_app(receiver, token)
    with serving(app, certfile=certificate.certfile, keyfile=certificate.keyfile) as url:
        yield url
