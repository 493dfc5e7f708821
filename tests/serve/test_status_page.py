"""The status page: rendered by itself, served beside real updates, and read by a real browser."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from fastapi import FastAPI
from markupsafe import escape
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright
from torch import nn

import weightsync as ws
from tests.server.live import TOKEN, serving
from weightsync.errors import TransportTimeout
from weightsync.serve import status_page as figures
from weightsync.serve.messages import EngineOutput, EngineRequest, EngineStats, ModelCard
from weightsync.serve.status_page import (
    FRESH_S,
    NO_ANSWER,
    SHOWN_UPDATES,
    Snapshot,
    WorkerView,
    merge_updates,
    render_fragment,
    render_page,
    round_up,
    status_router,
    take_snapshot,
    worker_names,
)
from weightsync.server.dispatcher import Receiver
from weightsync.server.router import weight_router
from weightsync.wire.messages import (
    FleetRecord,
    FleetServer,
    OpenUpdate,
    Reply,
    Request,
    SharedMemoryUsage,
    Status,
    UpdateRecord,
    WorkerReport,
)
from weightsync.wire.offers import OwnerStatus

WAIT_S = 60
WAIT_MS = WAIT_S * 1000
NOW = 1_800_000_000.0
HOSTILE = '"><script>window.taken=1</script><img src=x onerror="window.taken=2">'
REQUIRED = "WEIGHTSYNC_REQUIRE_CHROMIUM"
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


# Rendering


def status(version: int = 3, state: str = "READY", **more: Any) -> Status:
    fields: dict[str, Any] = {
        "instance": "i",
        "protocol": 1,
        "apply": "staged",
        "verification": "held",
    }
    return Status(
        **(fields | {"state": state, "version": version, "may_generate": state == "READY"} | more)
    )


def record(version: int, **more: Any) -> UpdateRecord:
    fields: dict[str, Any] = {
        "update_id": f"u{version}",
        "version": version,
        "at": NOW - 60 + version,
        "duration_s": 0.25,
        "nbytes": 500_000_000,
        "stall_s": 0.002,
        "apply": "staged",
        "verified": "held",
    }
    return UpdateRecord(**(fields | more))


def report(given: Status | None = None, **more: Any) -> WorkerReport:
    return WorkerReport(status=given or status(), updates_total={"committed": 3}, **more)


def snapshot(*reports: WorkerReport, replicas: list[EngineStats] | None = None) -> Snapshot:
    stats = [EngineStats(versions=[3])] if replicas is None else replicas
    names = worker_names(len(reports), len(stats))
    return take_snapshot("tiny", names, [(one, "") for one in reports], stats, at=NOW)


def section(fragment: str, name: str) -> str:
    """The text of one section, without its tags."""
    found = re.search(rf'<(\w+) id="{name}".*?</\1>', fragment, re.DOTALL)
    if found is None:  # the id need not come first
        found = re.search(rf'<(\w+)(?: [^<>]*)? id="{name}".*?</\1>', fragment, re.DOTALL)
    assert found, f"no section {name}"
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", found[0])).strip()


def test_text_is_escaped_and_isolated_wherever_it_enters() -> None:
    strange = 'a\0b\x1bc\nd<i>"&'
    mark = "\N{REPLACEMENT CHARACTER}"
    escaped = f"a{mark}b{mark}c d&lt;i&gt;&#34;&amp;"
    usage = [SharedMemoryUsage(kind="ring", name=strange, nbytes=5, owner=False, age_s=1.0)]
    one = report(
        status(label=strange, shared_memory=usage, senders={strange: strange}),
        recent=[record(3, label=strange)],
        open_update=OpenUpdate(update_id=strange, version=4, since=NOW, label=strange),
    )
    page = render_page(
        take_snapshot(strange, ["0.0"], [(one, "")], [EngineStats(versions=[3])], at=NOW), strange
    )
    # The model, the path, the sender, the update, and its label, the server's and both tables'.
    assert page.count(f"<bdi>{escaped}</bdi>") == 8
    # The nonce is text of ours, and an attribute is escaped like any other text.
    assert page.count(f'nonce="{escaped}"') == 2
    assert page.count(escaped) == 10
    assert strange not in page


@pytest.mark.parametrize(
    "where", ["label", "update_id", "detail", "sender", "error", "why_not", "fleet", "owner"]
)
def test_no_text_of_others_becomes_markup(where: str) -> None:
    label, detail, sender = (
        HOSTILE if where == name else "x" for name in ("label", "detail", "sender")
    )
    update = HOSTILE if where == "update_id" else "u"
    usage = [SharedMemoryUsage(kind="ring", name=sender, nbytes=5, owner=False, age_s=1.0)]
    server, owner = (HOSTILE if where == name else "x" for name in ("fleet", "owner"))
    one = report(
        status(
            state="TORN",
            label=label,
            detail=detail,
            shared_memory=usage,
        ),
        fleet=FleetRecord(
            sender=owner,
            version=3,
            servers=[
                FleetServer(target=server, path=server, error=server),
                FleetServer(target=f"http://{server}"),
            ],
        ),
        recent=[record(3, label=label, update_id=update)],
        open_update=OpenUpdate(update_id=update, version=4, since=NOW, label=label),
    )
    shown = take_snapshot(
        HOSTILE,
        ["0.0", "0.1"],
        [(one, ""), (None, HOSTILE if where == "error" else "x")],
        [EngineStats(why_not=HOSTILE if where == "why_not" else "x")],
        at=NOW,
    )
    page = render_page(shown, "n")
    assert "<script>window" not in page
    assert "<img" not in page
    assert page.count(str(escape(HOSTILE))) >= 2


def test_the_head_says_state_version_and_label() -> None:
    fragment = render_fragment(snapshot(report(status(12, label="step 12"))))
    assert section(fragment, "now").endswith("READY version 12 step 12")
    assert "None." in section(fragment, "update")
    assert "hidden" in fragment.partition('id="trouble"')[2].partition(">")[0]


def test_workers_of_different_versions_are_said() -> None:
    fragment = render_fragment(snapshot(report(status(12)), report(status(11))))
    assert "versions 11, 12" in section(fragment, "now")
    assert "hold different weights" in section(fragment, "trouble")


def test_a_silent_worker_is_named_and_hides_no_other() -> None:
    answers = [(report(status(5)), ""), (None, "has not answered for 2 s")]
    shown = take_snapshot("tiny", ["0.0", "1.0"], answers, [], "cores are gone", at=NOW)
    fragment = render_fragment(shown)
    assert shown.state == NO_ANSWER
    assert "worker 1.0: has not answered for 2 s" in section(fragment, "trouble")
    assert "engine: cores are gone" in section(fragment, "trouble")
    assert "READY 5" in section(fragment, "workers")


def test_a_page_without_any_answer_is_a_page() -> None:
    fragment = render_fragment(take_snapshot("tiny", ["0.0"], [(None, "gone")], [], "gone", at=NOW))
    assert f"{NO_ANSWER} version unknown" in section(fragment, "now")


@pytest.mark.parametrize(
    ("worker", "said"),
    [
        (WorkerView(name="0.0", state="UPDATING"), "waits for its sender to send more"),
        (WorkerView(name="0.0", state="UPDATING", busy=True), "loads what"),
        (WorkerView(name="0.0", state="PREPARED"), "everything arrived and was checked; waits"),
        (WorkerView(name="0.0", state="PREPARED", busy=True), "waits for the end of the current"),
        (WorkerView(name="0.0", state="PREPARED", orphaned=True), "its sender is dead"),
        (WorkerView(name="0.0", state="ABORTING"), "is aborted"),
    ],
)
def test_what_an_update_waits_for(worker: WorkerView, said: str) -> None:
    assert worker.waits_for.startswith(said)


def test_an_update_in_progress_is_told_once_for_all_its_workers() -> None:
    opened = OpenUpdate(update_id="u4", version=4, since=NOW - 75, label="four")
    first = report(status(state="PREPARED", update_id="u4"), open_update=opened)
    second = report(status(state="UPDATING", update_id="u4", busy=True), open_update=opened)
    said = section(render_fragment(snapshot(first, second)), "update")
    assert said.count("u4") == 1
    assert "version 4 four , for 1 min 15 s" in said
    assert "worker 0.0: everything arrived" in said
    assert "worker 0.1: loads" in said


def test_an_update_is_one_point_however_many_workers_had_it() -> None:
    slow = record(7, duration_s=0.5, stall_s=0.001, at=NOW, sources={0: 5, 1: 2})
    fast = record(7, duration_s=0.1, stall_s=0.003, at=NOW - 1, sources={1: 4})
    (merged, later) = merge_updates([record(8, at=NOW + 1), fast, slow])
    assert (merged.version, merged.workers, later.version) == (7, 2, 8)
    assert (merged.duration_s, merged.stall_s, merged.at) == (0.5, 0.003, NOW)
    assert merged.bytes_per_s == 1e9
    assert (merged.sources, later.sources) == ({0: 5, 1: 6}, {})
    assert len(merge_updates(record(n) for n in range(SHOWN_UPDATES + 9))) == SHOWN_UPDATES


def test_the_fleet_is_what_the_sender_said_with_the_last_update() -> None:
    servers = [
        FleetServer(target="http://a:8000", workers=2, path="shared_memory", load_s=0.25),
        FleetServer(target="actor b", path="tcp", error="does not answer"),
        FleetServer(target="actor c", version=6),
    ]
    told = FleetRecord(sender="trainer on h", version=7, servers=servers)
    former = FleetRecord(sender="x", version=6, servers=[FleetServer(target="former")])
    old = report(status(6), recent=[record(6)], fleet=former)
    # A sender that only connected has sent nothing yet: the fleet is still that of the other.
    held = status(7, owner=OwnerStatus(id="o", name="a new sender"))
    fragment = render_fragment(snapshot(old, report(held, recent=[record(7)], fleet=told)))
    said = section(fragment, "fleet")
    assert said.startswith("Fleet of trainer on h at version 7 ")
    assert "http://a:8000 shared_memory 7 250 ms 2" in said
    assert "actor b tcp failed 1 does not answer" in said
    assert "actor c 6 1" in said
    assert '<a href="http://a:8000" rel="noreferrer">' in fragment
    assert "former" not in fragment
    assert "a new sender" not in fragment


def test_one_server_alone_is_no_fleet_and_none_may_be_known() -> None:
    alone = report(recent=[record(3)], fleet=FleetRecord(sender="t", version=3, servers=[]))
    said = section(render_fragment(snapshot(alone)), "fleet")
    assert said == "Fleet of t at version 3 This server alone."
    assert section(render_fragment(snapshot(report())), "fleet") == "Fleet Not known."


def test_the_chart_draws_every_update_to_scale() -> None:
    recent = [record(n, duration_s=n / 10) for n in (1, 2, 5)]
    (svg, *others) = figures_of(render_fragment(snapshot(report(recent=recent))))
    heights = [float(height) for height in re.findall(r'<rect[^>]* height="([\d.]+)"', svg)]
    assert heights == [20.0, 40.0, 100.0]
    assert "version 2: 200 ms" in svg
    places = [float(x) for x in re.findall(r'<rect[^>]* x="([\d.]+)"', svg)]
    end = 10 * SHOWN_UPDATES  # where the axis says "version 5"
    assert places == [end - 28.5, end - 18.5, end - 8.5]
    assert re.search(r'<p class="ends"[^>]*><span></span><span>version 5</span>', svg)
    assert "Sync time of the last 3 updates: 100 ms to 500 ms, the latest 500 ms" in svg
    assert len(others) == 2
    assert "Stall: no updates yet" in figures_of(render_fragment(snapshot(report())))[2]


def test_a_full_chart_begins_with_its_first_version() -> None:
    recent = [record(n) for n in range(1, SHOWN_UPDATES + 3)]
    (svg, *_) = figures_of(render_fragment(snapshot(report(recent=recent))))
    assert re.search(r"<span>version 3</span><span>version 52</span>", svg)
    assert re.search(r'<rect[^>]* x="1\.5"', svg)


def test_the_weights_have_a_dtype_and_a_device() -> None:
    shown = take_snapshot(
        "tiny", ["0.0"], [(report(), "")], [], at=NOW, dtype="bfloat16", device="cpu"
    )
    fragment = render_fragment(shown)
    assert "<dt>Weights</dt><dd>bfloat16 on cpu</dd>" in fragment


def figures_of(fragment: str) -> list[str]:
    return re.findall(r"<figure>.*?</figure>", fragment, re.DOTALL)


@pytest.mark.parametrize(
    ("value", "top"), [(0, 1), (1, 1), (1.01, 2), (0.03, 0.05), (7, 10), (100, 100), (3e9, 5e9)]
)
def test_scales_end_at_round_numbers(value: float, top: float) -> None:
    assert round_up(value) == pytest.approx(top)


def test_numbers_carry_their_units() -> None:
    assert [figures.seconds(v) for v in (0.000456, 0.0123, 0.9999, 1.5, 250)] == [
        "0.46 ms",
        "12.3 ms",
        "1,000 ms",
        "1.50 s",
        "250 s",
    ]
    assert [figures.nbytes(v) for v in (0, 999, 2.7e8, 1e9)] == [
        "0 B",
        "999 B",
        "270 MB",
        "1.00 GB",
    ]
    assert [figures.rate(v) for v in (3.1e9, 2e7, 4.2e5)] == ["3.10 GB/s", "0.02 GB/s", "0.42 MB/s"]
    assert [figures.span(v) for v in (-1, 59.9, 61, 7300)] == [
        "0 s",
        "59 s",
        "1 min 1 s",
        "2 h 1 min",
    ]


def test_memory_is_summed_by_sender() -> None:
    entries = [
        ("control", "c", 10),
        ("ring", "trainer", 4_000_000),
        ("storage", "trainer", 1_000_000),
    ]
    usage = [
        SharedMemoryUsage(kind=kind, name=name, nbytes=nbytes, owner=False, age_s=1.0)
        for kind, name, nbytes in entries
    ]
    held = status(shared_memory=usage, senders={"trainer": "shared_memory"})
    said = section(render_fragment(snapshot(report(held), report(held))), "memory")
    assert "trainer shared_memory 5.00 MB 10.0 MB 2" in said
    assert "control segments, of all senders any 10 B 20 B 2" in said


def test_replicas_stand_side_by_side() -> None:
    replicas = [
        EngineStats(running=2, waiting=1, tokens_per_s=1234.5, versions=[3, 3]),
        EngineStats(running=1, paused="keep", tokens_per_s=10, versions=[3], why_not="TORN"),
    ]
    fragment = render_fragment(snapshot(report(), report(), replicas=replicas))
    said = section(fragment, "figures")
    assert "Requests running 3 Requests waiting 1 Generation 1,244 tokens/s Pause keep" in said
    assert "0 2 1 1,234/s 0 0 none 3" in section(fragment, "replicas")
    assert "replica 1 does not generate: TORN" in section(fragment, "trouble")
    assert [worker.name for worker in snapshot(report(), report(), replicas=replicas).workers] == [
        "0.0",
        "1.0",
    ]


# Served


@dataclass
class StillEngine:
    """An engine that only has statistics."""

    replicas: list[EngineStats] = field(default_factory=lambda: [EngineStats(tokens_per_s=42.0)])
    error: Exception | None = None

    @property
    def card(self) -> ModelCard:
        return ModelCard(name="tiny", directory="tiny", vocab_size=8, max_length=8, end_ids=[0])

    async def generate(
        self, requests: Sequence[EngineRequest]
    ) -> AsyncGenerator[EngineOutput, None]:
        for delta in list[EngineOutput]():
            yield delta

    def cancel(self, request_id: str, index: int) -> None:
        pass

    async def stats(self) -> list[EngineStats]:
        if self.error is not None:
            raise self.error
        return self.replicas


@dataclass
class Watched(Receiver):
    """A receiver that counts its reports, and can fail or hang."""

    error: Exception | None = None
    hangs: threading.Event | None = None
    reports: int = 0

    def report(self) -> WorkerReport:
        self.reports += 1
        if self.error is not None:
            raise self.error
        if self.hangs is not None:
            self.hangs.wait(WAIT_S)
        return report()

    def dispatch(self, request: Request) -> Reply:
        raise NotImplementedError

    def status(self) -> Status:
        return self.report().status


@contextmanager
def page_of(*receivers: Receiver, engine: StillEngine | None = None) -> Iterator[str]:
    app = FastAPI()
    app.include_router(status_router(engine or StillEngine(), receivers))
    with serving(app) as url:
        yield url


@pytest.fixture
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        session.trust_env = False
        yield session


def read(session: requests.Session, url: str) -> dict[str, Any]:
    answer = session.get(f"{url}/status.json", timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    found: dict[str, Any] = answer.json()
    return found


def test_a_worker_that_fails_is_shown_and_the_page_answers(session: requests.Session) -> None:
    failing = Watched(error=TransportTimeout("worker 1 did not answer"))
    with page_of(Watched(), failing) as url:
        first, second = read(session, url)["workers"]
        page = session.get(url, timeout=WAIT_S)
    assert (first["state"], first["version"]) == ("READY", 3)
    assert (second["state"], second["error"]) == (NO_ANSWER, "worker 1 did not answer")
    assert page.status_code == 200
    assert "worker 1 did not answer" in page.text


def test_a_worker_that_hangs_is_asked_once(
    session: requests.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "REPLY_TIMEOUT_S", 1.0)
    hanging = Watched(hangs=threading.Event())
    assert hanging.hangs is not None
    deadline = time.monotonic() + WAIT_S
    answered = 0
    try:
        with page_of(Watched(), hanging) as url:
            while answered < 2:
                assert time.monotonic() < deadline
                first, second = read(session, url)["workers"]
                answered += first["state"] == "READY"
                assert second["error"].startswith("has not answered for ")
                time.sleep(FRESH_S * 1.2)
            assert hanging.reports == 1
    finally:
        hanging.hangs.set()


def test_an_engine_that_fails_is_shown(session: requests.Session) -> None:
    with page_of(Watched(), engine=StillEngine(error=TransportTimeout("core 0 is mute"))) as url:
        found = read(session, url)
    assert (found["engine_error"], found["replicas"]) == ("core 0 is mute", [])
    assert found["workers"][0]["state"] == "READY"


def test_many_pages_cost_no_more_than_one(session: requests.Session) -> None:
    watched = Watched()
    with page_of(watched) as url, ThreadPoolExecutor(10) as pool:

        def get(_: int) -> int:
            return requests.get(f"{url}/status/fragment", timeout=WAIT_S).status_code

        started = time.monotonic()
        for number in range(30):
            assert get(number) == 200
        assert set(pool.map(get, range(30))) == {200}
        most = 1 + (time.monotonic() - started) / FRESH_S
    assert watched.reports <= most


def test_the_page_may_load_nothing_and_run_only_itself(session: requests.Session) -> None:
    with page_of(Watched()) as url:
        nonces = set()
        for _ in range(2):
            answer = session.get(url, timeout=WAIT_S)
            policy = answer.headers["content-security-policy"]
            found = re.search(r"script-src 'nonce-([\w-]{20,})'", policy)
            assert found, policy
            nonces.add(found[1])
            assert policy.startswith("default-src 'none'; ")
            assert "unsafe" not in policy
            assert answer.text.count(f'nonce="{found[1]}"') == 2
            assert answer.headers["cache-control"] == "no-store"
            assert not re.search(r' style="| on\w+="|src="|https?:', answer.text)
        fragment = session.get(f"{url}/status/fragment", timeout=WAIT_S)
    assert len(nonces) == 2
    assert "default-src 'none'" in fragment.headers["content-security-policy"]


@dataclass
class Live:
    """A served page of a real receiver, with a sender."""

    url: str
    receiver: ws.WeightReceiver
    engine: StillEngine
    model: nn.Module

    def update(self, label: str | None = None) -> None:
        with ws.connect(self.model, to=self.url, token=TOKEN) as sender:
            sender.send_weights(label=label)

    def post(self, call: str, body: dict[str, Any]) -> None:
        answer = requests.post(
            f"{self.url}/{call}",
            json=body,
            headers={"Authorization": f"Bearer {TOKEN}"},
            timeout=WAIT_S,
        )
        assert answer.status_code == 200, answer.text


@pytest.fixture
def live(shm_clean: None) -> Iterator[Live]:
    receiver = ws.WeightReceiver(nn.Linear(64, 64))
    engine = StillEngine()
    app = FastAPI()
    app.include_router(weight_router(receiver, token=TOKEN))
    app.include_router(status_router(engine, [receiver]))
    try:
        with serving(app) as url:
            yield Live(url, receiver, engine, nn.Linear(64, 64))
    finally:
        receiver.close()


def test_a_real_update_leaves_a_record(live: Live, session: requests.Session) -> None:
    assert read(session, live.url)["updates"] == []
    live.update("first")
    time.sleep(FRESH_S * 1.2)
    found = read(session, live.url)
    (update,) = found["updates"]
    assert (found["state"], found["versions"], found["label"]) == ("READY", [1], "first")
    assert (update["version"], update["label"], update["verified"]) == (1, "first", "held")
    assert update["nbytes"] == sum(p.nbytes for p in live.model.parameters())
    assert update["duration_s"] >= update["seconds"]["load"] > 0
    assert update["bytes_per_s"] == pytest.approx(update["nbytes"] / update["duration_s"])
    assert found["workers"][0]["updates_total"] == {"committed": 1}


def test_an_open_update_is_shown_until_it_ends(live: Live, session: requests.Session) -> None:
    live.post("start_weight_update", {"update_id": "slow", "version": 9, "label": "nine"})
    page = session.get(live.url, timeout=WAIT_S).text
    (worker,) = read(session, live.url)["workers"]
    assert worker["state"] == "UPDATING"
    opened = worker["open_update"]
    assert (opened["update_id"], opened["version"], opened["label"]) == ("slow", 9, "nine")
    assert "waits for its sender to send more" in section(page, "update")
    live.post("abort_weight_update", {"update_id": "slow"})
    time.sleep(FRESH_S * 1.2)
    (worker,) = read(session, live.url)["workers"]
    assert (worker["state"], worker["open_update"]) == ("READY", None)


def test_no_page_tells_the_token(live: Live, session: requests.Session) -> None:
    with ws.connect(live.model, to=live.url, token=TOKEN) as sender:
        sender.send_weights()
        for path in ("", "status/fragment", "status.json"):
            assert TOKEN not in session.get(f"{live.url}/{path}", timeout=WAIT_S).text


# In a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        if os.environ.get(REQUIRED):
            pytest.fail(f"{REQUIRED} is set, and no chromium is installed")
        pytest.skip("no chromium is installed (apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=CHROMIUM_FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Seen:
    """A page, what its console said, and whom it asked."""

    page: Page
    errors: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)


@pytest.fixture
def seen(browser: Browser) -> Iterator[Seen]:
    context = browser.new_context(viewport={"width": 1100, "height": 900})
    context.set_default_timeout(WAIT_MS)
    seen = Seen(context.new_page())

    def heard(message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            seen.errors.append(message.text)

    seen.page.on("console", heard)
    seen.page.on("pageerror", lambda error: seen.errors.append(str(error)))
    seen.page.on("request", lambda request: seen.hosts.add(urlsplit(request.url).netloc))
    try:
        yield seen
    finally:
        context.close()


def bars(page: Page) -> int:
    return page.locator("#charts figure").first.locator("rect").count()


def wait_for_text(page: Page, where: str, text: str) -> None:
    expect(page.locator(where)).to_contain_text(text, timeout=WAIT_MS)


def test_the_page_follows_updates_without_a_reload(live: Live, seen: Seen) -> None:
    page = seen.page
    live.update("before")
    page.goto(live.url)
    wait_for_text(page, "#now", "READY")
    wait_for_text(page, "#now", "version 1")
    assert bars(page) == 1
    page.evaluate("window.stays = 1")
    live.update("after")
    wait_for_text(page, "#now", "version 2")
    wait_for_text(page, "#now", "after")
    assert bars(page) == 2
    assert page.title().startswith("READY \N{MIDDLE DOT} version 2")
    assert page.evaluate("window.stays") == 1
    assert "42.0 tokens/s" in page.locator("#figures").inner_text()
    assert seen.errors == []
    assert seen.hosts - {""} == {urlsplit(live.url).netloc}  # "" is the icon, a data: URL


def test_a_hostile_label_is_text(live: Live, seen: Seen) -> None:
    page = seen.page
    live.post("update_weight_version", {"new_version": HOSTILE})
    page.goto(live.url)
    assert page.locator("#now .label").inner_text() == HOSTILE
    live.post("update_weight_version", {"new_version": HOSTILE + "2"})
    wait_for_text(page, "#now .label", HOSTILE + "2")
    assert page.evaluate("window.taken") is None
    assert page.locator("img").count() == 0
    assert seen.errors == []


def test_a_script_that_slipped_in_would_not_run(live: Live, seen: Seen) -> None:
    page = seen.page
    page.goto(live.url)
    page.evaluate(
        "() => { const s = document.createElement('script'); s.textContent = 'window.taken = 1';"
        " document.body.append(s); }"
    )
    assert page.evaluate("window.taken") is None
    assert any("Content Security Policy" in error for error in seen.errors)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1100])
def test_the_page_fits_and_can_be_read(live: Live, seen: Seen, scheme: Any, width: int) -> None:
    page = seen.page
    live.update("w" * 200)
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(live.url)
    wait_for_text(page, "#now", "version 1")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(_LOW_CONTRAST) == []
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper)[:3])) < 128) is (scheme == "dark")
    assert seen.errors == []


# WCAG 2: the relative luminance of a text and of what is behind it, 4.5 : 1 at least.
_LOW_CONTRAST = """() => {
  const light = (color) => {
    const part = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = color.match(/[\\d.]+/g).map(Number);
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const color = getComputedStyle(e).backgroundColor;
      if (!/, 0\\)$/.test(color)) return color;
    }
  };
  const found = [];
  for (const e of document.querySelectorAll("body *:not(script):not(svg *)")) {
    if (![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) continue;
    const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) found.push(e.outerHTML);
  }
  return found;
}"""


def test_charts_tables_and_sections_have_names(live: Live, seen: Seen) -> None:
    page = seen.page
    live.update("named")
    page.goto(live.url)
    chart = page.get_by_role("img", name="Sync time of the last 1 updates")
    expect(chart).to_be_visible()
    expect(page.get_by_role("table", name="Workers, by replica and rank")).to_be_visible()
    expect(page.get_by_role("region", name="Update in progress")).to_be_visible()
    expect(page.get_by_role("columnheader", name="State")).to_be_visible()
    expect(page.get_by_role("alert")).to_be_hidden()


def test_without_scripts_the_page_reloads_itself(live: Live, browser: Browser) -> None:
    context = browser.new_context(java_script_enabled=False)
    try:
        page = context.new_page()
        page.goto(live.url)
        wait_for_text(page, "#now", "version 0")
        live.update()
        wait_for_text(page, "#now", "version 1")
    finally:
        context.close()


def test_a_server_that_is_gone_is_said(seen: Seen) -> None:
    with page_of(Watched()) as url:
        seen.page.goto(url)
        wait_for_text(seen.page, "#now", "READY")
    wait_for_text(seen.page, "#lost", "The server does not answer")
