"""Wrong input to every verb: one line that says what to do, a documented code, no traceback."""

from __future__ import annotations

import http.server
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.running import TOKEN
from weightsync.cli import main
from weightsync.cli.app import VERBS
from weightsync.cli.output import FAILED, REFUSED, UNREACHABLE, USAGE
from weightsync.errors import install_hint

pytestmark = pytest.mark.usefixtures("keeps_tracker")


class _Stranger(http.server.BaseHTTPRequestHandler):
    """A web server of another kind."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "4")
        self.end_headers()
        self.wfile.write(b"<ht>")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base's name
        pass


@pytest.fixture(scope="module")
def stranger() -> Iterator[str]:
    """The URL of an HTTP server that is no weightsync server."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Stranger) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join(30)


@pytest.fixture(scope="module")
def open_token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token file that others may read."""
    file = tmp_path_factory.mktemp("token") / "token"
    file.write_text(TOKEN)
    file.chmod(0o644)
    return file


@pytest.fixture
def places(
    url: str, down: str, stranger: str, checkpoint: Path, open_token: Path
) -> dict[str, object]:
    """What stands in braces in a line of the table."""
    return {
        "url": url,
        "down": down,
        "stranger": stranger,
        "tls_to_plain": stranger.replace("http://", "https://"),
        "taken": stranger.rpartition(":")[2],
        "checkpoint": checkpoint,
        "open_token": open_token,
        "empty": "empty",
        "pickled": "pickled",
    }


SERVERS = {"{down}": UNREACHABLE, "http://nosuch.invalid:1": UNREACHABLE, "127.0.0.1:1": USAGE}
SERVERS |= {"ftp://x": USAGE, "http://127.0.0.1:99999": USAGE, "{stranger}": FAILED}
SERVERS |= {"{tls_to_plain}": UNREACHABLE, "http://a\u00a0b:1": USAGE}
SECONDS = ("0", "inf", "nan", "1e300")

CASES = [
    *((f"push {{checkpoint}} --to {url}", code) for url, code in SERVERS.items()),
    *((f"verify {url} {{checkpoint}}", code) for url, code in SERVERS.items()),
    *((f"push {{checkpoint}} --to {{url}} --timeout {given}", USAGE) for given in SECONDS),
    *((f"status {{url}} --timeout {given}", USAGE) for given in SECONDS),
    *((f"status {{url}} --interval {given}", USAGE) for given in SECONDS),
    *((f"verify {{url}} {{checkpoint}} --timeout {given}", USAGE) for given in SECONDS),
    *((f"pull {url} new", code) for url, code in SERVERS.items()),
    ("pull {url} new --timeout 0", USAGE),
    ("pull {url} new --token wrong", REFUSED),
    ("pull {url} new --token-file {open_token}", USAGE),
    ("pull {url} pickled", USAGE),
    ("pull {url} new --backend x", USAGE),
    ("pull {url}", USAGE),
    ("push nowhere --to {url}", USAGE),
    ("push {empty} --to {url}", USAGE),
    ("push {pickled} --to {url}", USAGE),
    ("push {checkpoint}", USAGE),
    ("push {checkpoint} --to {url} --token wrong", REFUSED),
    ("push {checkpoint} --to {url} --token-file {open_token}", USAGE),
    ("push {checkpoint} --to {url} --token x --token-file {open_token}", USAGE),
    ("push {checkpoint} --to {url} --ca-file {open_token}", USAGE),
    ("push {checkpoint} --to https://127.0.0.1:1 --ca-file nowhere", USAGE),
    ("push {checkpoint} --to {url} --insecure", USAGE),
    ("verify {url} nowhere", USAGE),
    ("verify {url} {pickled}", USAGE),
    ("verify {url} {checkpoint} --token wrong", REFUSED),
    ("verify {url}", USAGE),
    ("status", USAGE),
    ("status 127.0.0.1:1", USAGE),
    ("status {url} --token-file nowhere", USAGE),
    ("status {url} --token-file {open_token}", USAGE),
    ("status http://a\u00a0b:1", USAGE),
    ("-- status", USAGE),
    ("-- -- status", USAGE),
    ("doctor --port 0", USAGE),
    ("plot nowhere", USAGE),
    *((f"plot {name}", USAGE) for name in ("infinite", "long", "deep", "list", "far")),
    *((f"bench --nbytes {size}", USAGE) for size in ("some", "512Mi", "-1", "1.M", "")),
    ("bench --backend x", USAGE),
    ("bench --nbytes 900000000G", USAGE),
    (f"bench --nbytes {'9' * 400}", USAGE),
    ("bench --out {empty}", USAGE),
    ("demo", USAGE),
    ("-- demo --model tiny", USAGE),
    ("serve", USAGE),
    ("serve --model tiny --api-servers 0 --port 0", USAGE),
    ("serve --model tiny --port {taken}", USAGE),
    ("serve --model tiny --host nosuch.invalid", USAGE),
    ("serve --model tiny --no-auth --token x", USAGE),
    ("serve --model tiny --data-parallel 300", USAGE),
    ("serve --model nowhere --port 0", USAGE),
    ("serve --model {empty}", USAGE),
    ("serve --model tiny --tensor-parallel 4", USAGE),
    ("serve --model smollm2 --tensor-parallel 2", USAGE),
    ("push {url} {checkpoint}", USAGE),
    ("verify {checkpoint} {url}", USAGE),
    ("serve tiny --model tiny", USAGE),
    ("serve --model tiny --dtype bf17", USAGE),
    ("nosuchverb", USAGE),
]


NUMBERS = {"infinite": "Infinity", "long": "1" * 400, "deep": "[" * 100_000, "far": "1e300"}
REPORT = '{"seconds": {}, "gbps": 1, "stall_s": 1, "version": %s}'


@pytest.mark.parametrize(("line", "code"), CASES, ids=[line for line, _ in CASES])
def test_one_line_and_a_code(
    line: str,
    code: int,
    places: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"no pickle is read")
    for name, number in NUMBERS.items():
        (tmp_path / name).write_text(REPORT % number)
    (tmp_path / "list").write_text("[]")
    words = line.format(**places).split(" ")
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr()
    assert ended.value.code == code, said.err
    assert (said.out, said.err.count("\n")) == ("", 1), said
    assert said.err.startswith("weightsync: ")
    assert TOKEN not in said.err


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("push {url} {checkpoint}", "{url} is a URL: push CHECKPOINT URL, the checkpoint first"),
        (
            "push {checkpoint} {url} --version one",
            "for '--version': 'one' is no integer",
        ),
        (
            "push {checkpoint} {url} --version 0",
            "for '--version': 0 is not at least 1",
        ),
        (
            "push {checkpoint} {url} --timeout soon",
            "for '--timeout': 'soon' is no number",
        ),
        ("certify {down} --to {checkpoint}", "{down} cannot be reached: [Errno 111]"),
        ("certify vllm+{down} --to {checkpoint}", "{down} cannot be reached: [Errno 111]"),
        ("verify {checkpoint} {url}", "is no URL: verify URL CHECKPOINT, the URL first"),
        ("push {checkpoint}", "push needs URLs of servers: push CHECKPOINT URL..."),
        ("serve --dtype bf17", "'bf17' is not one of float32, bfloat16, float16"),
        ("serve", "serve needs one model: smollm2, tiny, or a Hugging Face directory"),
        ("push {checkpoint} --to 127.0.0.1:1", "127.0.0.1:1 is no URL; give http://host:port"),
        ("push {checkpoint} --to {tls_to_plain}", "speaks no TLS; give an http:// URL"),
        ("push pickled --to {url}", "safetensors"),
        ("push {checkpoint} --to {url} --insecure", "--insecure"),
        ("serve --model nowhere --port 0", "model 'nowhere' is neither"),
        ("demo --model tiny", "in weightsync's repository alone: make demo, in a clone"),
        ("bench --nbytes some", "'some' is not a size; write 512MiB"),
        ("status http://a\u00a0b:1", "names no host; give http://host:port"),
        ("status sglang+https://a:1 --ca-file nowhere", "to trust, nowhere, cannot be read"),
        ("plot far", "line 1 is not a report (Expected `float` < 1e+30 - at `$.version`)"),
    ],
)
def test_json_says_it_too(
    line: str,
    told: str,
    places: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin").touch()
    (tmp_path / "far").write_text(REPORT % NUMBERS["far"])
    with pytest.raises(SystemExit) as ended:
        main([*line.format(**places).split(" "), "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["exit_code"] == ended.value.code
    told = told.replace("{url}", str(places["url"])).replace("{down}", str(places["down"]))
    assert told in answer["error"]["message"]


def test_without_arguments_it_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    assert "Commands" in capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_names_no_value_of_flags(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "--help" in said
    assert "bool" not in said.lower()


@pytest.mark.parametrize(
    ("line", "package", "extra"),
    [
        ("bench --nbytes 64K", "uvicorn", "server,cli"),
        ("serve --model tiny --port 0", "uvicorn", "server,hf,cli"),
        ("serve --model tiny --port 0", "zmq", "server,hf,cli"),
    ],
)
def test_a_missing_package_is_named_before_any_process_starts(
    line: str,
    package: str,
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    said = capsys.readouterr()
    assert (ended.value.code, said.out, said.err.count("\n")) == (FAILED, "", 1), said
    assert f"needs {package}; {install_hint(extra)}" in said.err


def test_a_private_token_file_is_taken(
    url: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WEIGHTSYNC_TOKEN", raising=False)
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    pushes = (["push", str(checkpoint), "--to", url], ["push", str(checkpoint), url])
    for words in (*pushes, ["verify", url, str(checkpoint), "--dtype", "fp32"]):
        with pytest.raises(SystemExit) as ended:
            main([*words, "--token-file", str(file)])
        assert ended.value.code == 0
