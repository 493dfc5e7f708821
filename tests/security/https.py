"""A receiver behind HTTPS, with a certificate made on the spot."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvicorn

from tests.server.live import make_app
from weightsync.receiver import WeightReceiver
from weightsync.server.listening import listen, url_of

END_S = 20.0


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
        timeout=60,
    )
    return made


@contextmanager
def serving_https(
    receiver: WeightReceiver, certificate: Certificate, token: str | None
) -> Iterator[str]:
    """Serve the routes of `receiver`; yields the URL."""
    config = uvicorn.Config(
        make_app(receiver, token),
        log_level="error",
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=2,
        ssl_certfile=certificate.certfile,
        ssl_keyfile=certificate.keyfile,
    )
    server = uvicorn.Server(config)
    with listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield url_of(listener, tls=True)
        finally:
            server.should_exit = True
            thread.join(END_S)
            assert not thread.is_alive()
