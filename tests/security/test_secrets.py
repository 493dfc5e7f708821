"""The token appears where it is sent, and nowhere else: no log, report, error or page has it."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import traceback
from collections.abc import Iterator

import pytest
import requests
from torch import nn

import weightsync as ws
from tests.server.live import make_app, serving
from weightsync.errors import AuthError, ConfigError, WeightSyncError
from weightsync.serve.options import ServeOptions
from weightsync.server.auth import TokenAuth, resolve_token
from weightsync.transports.http import HttpTransport
from weightsync.wire.messages import CALLS

TOKEN = "sesame-5f1c2d"
WRONG = "wrong-9b7e4a"


@pytest.fixture
def heard() -> Iterator[io.StringIO]:
    """Everything that any logger says, at the lowest level, tracebacks included."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter("%(name)s %(message)s %(args)s"))
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield text
    finally:
        root.setLevel(before)
        root.removeHandler(handler)


def told(error: BaseException) -> str:
    """All that an error shows to people: its traceback, its arguments, its notes."""
    whole = "".join(traceback.format_exception(error))
    return f"{whole}{error!r}{error.args}{vars(error)}"


@pytest.mark.usefixtures("shm_clean")
def test_an_update_leaves_it_in_nothing_that_anybody_reads(heard: io.StringIO) -> None:
    receiver = ws.WeightReceiver(nn.Linear(16, 16))
    said: list[object] = []
    with serving(make_app(receiver, TOKEN)) as url:
        with ws.connect(nn.Linear(16, 16), to=url, token=TOKEN, packed=True) as sender:
            report = sender.send_weights(label="first")
            said += [report, str(report), json.dumps(report.to_dict()), sender, vars(sender)]
            said += [
                sender.targets,
                sender.shared_memory_usage(),
                receiver.status(),
                receiver.shared_memory_usage(),
            ]
        for page in ("weight_info", "metrics", "openapi.json", "health"):
            said.append(requests.get(f"{url}/{page}", timeout=20).text)
        for token in (TOKEN, WRONG, None):
            for call in CALLS:
                headers = {"Authorization": f"Bearer {token}"} if token else {}
                answer = requests.post(
                    f"{url}/{call}", data=b'{"no":"such"}', headers=headers, timeout=20
                )
                said += [answer.text, dict(answer.headers)]
        for bad in (WRONG, ""):
            with pytest.raises(AuthError) as refused:
                ws.connect(nn.Linear(16, 16), to=url, token=bad)
            said.append(told(refused.value))
    with pytest.raises(WeightSyncError) as gone:
        ws.connect(nn.Linear(16, 16), to=url, token=TOKEN, timeout_s=5)
    said.append(told(gone.value))
    receiver.close()
    everything = heard.getvalue() + "".join(map(str, said)) + "".join(map(repr, said))
    assert "weightsync" in everything
    assert TOKEN not in everything
    assert WRONG not in everything


def test_what_holds_it_does_not_show_it() -> None:
    transport = HttpTransport("http://127.0.0.1:1", TOKEN)
    holders: list[object] = [transport, resolve_token(TOKEN), ServeOptions(model="m", token=TOKEN)]
    holders.append(TokenAuth(make_app(ws.WeightReceiver(nn.Linear(1, 1))), TOKEN))
    transport.close()
    for holder in holders:
        assert TOKEN not in f"{holder!r}{holder}"


@pytest.mark.parametrize(
    "url",
    [
        f"http://user:{TOKEN}@127.0.0.1:8000",
        f"http://{TOKEN}@127.0.0.1:8000",
        f"http://user:{TOKEN}@127.0.0.1:99999",
        f"http://user:{TOKEN}@[::1",
        f"http://127.0.0.1:8000/?token={TOKEN}",
        f"http://127.0.0.1:8000/#{TOKEN}",
        f"http://127.0.0.1:{TOKEN}",
        f"ftp://user:{TOKEN}@127.0.0.1",
        f"user:{TOKEN}@127.0.0.1:8000",
        f"vllm+ftp://user:{TOKEN}@127.0.0.1",
        f"vllm+http://user:{TOKEN}@127.0.0.1:8000",
    ],
)
def test_a_url_that_holds_it_is_refused_and_not_repeated(url: str, heard: io.StringIO) -> None:
    with pytest.raises(ConfigError) as refused:
        ws.connect(nn.Linear(2, 2), to=url, token="")
    assert TOKEN not in told(refused.value)
    assert TOKEN not in heard.getvalue()


@pytest.mark.parametrize("token", [f"{TOKEN} ", f"{TOKEN}\n", f"{TOKEN}é", f"{TOKEN}" * 1000])
def test_a_token_that_cannot_be_sent_is_not_repeated(token: str, heard: io.StringIO) -> None:
    for use in (
        lambda: resolve_token(token),
        lambda: HttpTransport("http://127.0.0.1:1", token),
        lambda: make_app(ws.WeightReceiver(nn.Linear(1, 1)), token),
    ):
        with pytest.raises(ConfigError) as refused:
            use()
        # A traceback shows lines of code, and in this file the token stands in none of them.
        assert TOKEN not in told(refused.value)
    with contextlib.suppress(ConfigError):
        ws.connect(nn.Linear(2, 2), to="http://127.0.0.1:1", token=token)
    assert TOKEN not in heard.getvalue()
