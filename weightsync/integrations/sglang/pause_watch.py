"""A child process that resumes a paused server when the trainer that paused it dies.

For servers that run no code of ours. The process executes this file, which imports nothing of
weightsync: it needs a few megabytes, and no torch.
"""

from __future__ import annotations

import json
import logging
import os
import select
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_RETRY_S = 0.5
_GIVE_UP_S = 120.0
_END_S = 5.0
_PAUSED, _OVER, _LEFT = b"p", b"o", b"l"
_TRY_AGAIN = (408, 429)
_TRUST_VARIABLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")

_left: dict[str, subprocess.Popen[bytes]] = {}
"""By URL: the processes of closed watches that still have a pause to end."""


class PauseWatch:
    """Reports one server's pauses to a watching process, which the first pause starts.

    When this process dies during a pause, the watching process posts `{}` to `url`, with `headers`.
    It has a session of its own, so that signals to the trainer's process group do not reach it.
    `verify_tls` is HttpTransport's. Thread-safe.
    """

    def __init__(self, url: str, headers: dict[str, str], *, verify_tls: bool | str) -> None:
        self._url = url
        self._settings = {"url": url, "headers": headers, "verify_tls": verify_tls}
        self._process: subprocess.Popen[bytes] | None = None
        self._owed = False
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The watching process' id, once it is started."""
        return self._process.pid if self._process is not None else None

    def take_over(self) -> None:
        """End the process that a closed watch of this URL left; the caller now ends that pause.

        Called before each pause, including a user's own: that process would end it.
        """
        process = _left.pop(self._url, None)
        if process is not None:
            process.kill()
            process.wait(_END_S)

    def paused(self) -> None:
        """Note that a pause begins. Called before the server is paused."""
        self.take_over()
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = self._start()
            self._owed = True
            self._write(_PAUSED)

    def over(self) -> None:
        """Note that the pause is over. Called when the server has resumed."""
        with self._lock:
            self._owed = False
            self._write(_OVER)

    def close(self) -> None:
        """End the process. If a pause is still open, the process ends it first, in the background.

        Called after this process has resumed the server, or has failed to.
        """
        with self._lock:
            if self._owed:
                self._write(_LEFT)
            process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        with suppress(OSError):
            process.stdin.close()
        if not self._owed:
            process.kill()
            process.wait(_END_S)
            return
        _left[self._url] = process
        with suppress(RuntimeError):  # at interpreter exit no thread is started
            threading.Thread(target=process.wait, daemon=True).start()

    def _start(self) -> subprocess.Popen[bytes] | None:
        command = [sys.executable, "-I", __file__]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as exc:
            logger.warning("if this trainer dies, %s may not be called: %s", self._url, exc)
            return None
        assert process.stdin is not None
        # Not as arguments, which every user of the host may read: the headers contain a token.
        settings = {**self._settings, "parent": os.getpid()}
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        return process

    def _write(self, word: bytes) -> None:
        if self._process is None or self._process.stdin is None:
            return
        try:
            self._process.stdin.write(word)
            self._process.stdin.flush()
        except OSError as exc:
            logger.warning("the process that watches this trainer's pauses has ended: %s", exc)


def _watch() -> None:
    """Run the watching process: wait for the trainer's end, then end an open pause."""
    received = b""
    settings: dict[str, Any] = {}
    while True:
        # Other children of the trainer may hold the pipe open: its death is checked as well.
        gone = bool(settings) and os.getppid() != settings["parent"]
        ready, _, _ = select.select([0], [], [], 0 if gone else _POLL_S)
        if ready:
            more = os.read(0, 1 << 16)
            received += more
            if not settings and b"\n" in received:
                line, _, received = received.partition(b"\n")
                settings = json.loads(line)
        if (ready and not more) or (gone and not ready) or (settings and received.endswith(_LEFT)):
            break
    if settings and received.endswith(_PAUSED):
        time.sleep(_RETRY_S)  # the dead trainer's call to pause may be on its way
    if settings and received.endswith((_PAUSED, _LEFT)):
        _end_pause(settings)


def _end_pause(settings: dict[str, Any]) -> None:
    deadline = time.monotonic() + _GIVE_UP_S
    request = urllib.request.Request(  # noqa: S310  # the URL of an HttpTransport: http or https
        settings["url"], b"{}", {"Content-Type": "application/json", **settings["headers"]}
    )
    tls = urllib.request.HTTPSHandler(context=_context(settings["verify_tls"]))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), tls, _NoRedirects())
    while time.monotonic() < deadline:
        try:
            with opener.open(request, timeout=deadline - time.monotonic()):
                return
        except urllib.error.HTTPError as exc:
            if exc.code < 500 and exc.code not in _TRY_AGAIN:
                return
        except (OSError, HTTPException):
            pass
        time.sleep(_RETRY_S)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: the token is for this server only."""

    def redirect_request(self, *_: object) -> None:
        return None


def _context(verify_tls: bool | str) -> ssl.SSLContext:
    named = (os.environ.get(name) for name in _TRUST_VARIABLES)
    trusted = verify_tls if isinstance(verify_tls, str) else next(filter(None, named), None)
    if trusted is not None and Path(trusted).is_dir():
        context = ssl.create_default_context(capath=trusted)
    else:
        context = ssl.create_default_context(cafile=trusted)
    if verify_tls is False:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


if __name__ == "__main__":
    _watch()
