"""A stand-in for a vLLM server: an engine's loop with real receivers as its workers.

It copies the observed behaviour of the real one, which `make test-vllm` tests.
"""

from __future__ import annotations

import copy
import json
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import torch

import weightsync as ws
from weightsync.integrations.vllm import pauses as vllm_pauses
from weightsync.integrations.vllm import rpc as vllm_rpc
from weightsync.update.lifecycle import ApplyChoice


@dataclass
class Waiting:
    """A request that waits for generation to continue."""

    request_id: str
    client_index: int = 0


class Served:
    """A server of this process with a handler, until `close`."""

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(10)
        self._server.server_close()


class Endpoints(Served):
    """The control endpoints of a server of these workers, over HTTP; `busy` with some calls."""

    def __init__(self, workers: Workers) -> None:
        self.busy = 0
        counting = threading.Lock()

        def count(calls: int) -> None:
            with counting:
                self.busy += calls

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                round_ = json.loads(self.rfile.read(length) or b"{}")
                count(1)
                answer = _answer_http(workers, self.path.strip("/"), round_)
                count(-1)
                body = json.dumps(answer).encode()
                with suppress(OSError):  # the client may be killed
                    self.send_response(404 if answer is None else 200)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(Handler)


def _answer_http(workers: Workers, path: str, round_: dict[str, Any]) -> object:
    verb, _, query = path.partition("?")
    if verb == "version":
        return {"version": "0.32.0"}
    if verb == "get_world_size":
        return {"world_size": 1}  # does not check the configuration
    if verb == "is_paused":
        return {"is_paused": workers.is_paused(timeout_s=5)}
    if verb == "collective_rpc":
        return {"results": workers.rpc(round_["args"][0], timeout_s=5)}
    if verb == "pause":
        workers.pause(query.partition("=")[2], timeout_s=5)
    elif verb == "resume":
        workers.resume(timeout_s=5)
    elif verb == "reset_prefix_cache":
        workers.reset_prefix_cache()
    elif verb == "update_weight_version":
        workers.set_version(round_["new_version"], timeout_s=5)
    else:
        return None
    return {}


class Workers:
    """The verbs of a server of several workers, each a real receiver, and a log of requests.

    `heard` maps a verb to a function that is called once, before the verb. While not `awake` no
    worker answers. It has the parts of an EngineCore that handle pauses, and its loop in a thread.
    """

    target = "server"
    sent_nbytes = 0

    def __init__(self, count: int, *, apply: ApplyChoice = "staged", late: int = 0) -> None:
        self.models = [torch.nn.Linear(40, 40) for _ in range(count)]
        self.receivers = [ws.WeightReceiver(model, apply=apply) for model in self.models]
        self.below: dict[str, list[ws.WeightReceiver]] = {}
        self.paused = False
        self.log: list[str] = []
        self.version = ""
        self.pauses = True
        self.fails: dict[str, Exception] = {}
        self.broken: dict[str, Exception] = {}
        self.heard: dict[str, Callable[[], None]] = {}
        self.seen: list[int] = []
        self.visible = count
        self.awake = threading.Event()
        self.awake.set()
        self.waiting: list[Waiting] = []
        self.refused: list[str] = []
        self.scheduler = self.model_executor = self
        self.vllm_config = SimpleNamespace(
            weight_transfer_config=SimpleNamespace(backend=vllm_rpc.BACKEND)
        )
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self._late = late
        self._results: list[dict[str, Any]] = []
        self._pool = ThreadPoolExecutor(count)
        self._runs = True
        self._loop = threading.Thread(target=self._run, name="engine loop")
        self._loop.start()

    # The methods that a server's client calls.

    @property
    def sent_messages(self) -> int:
        return len(self.log)

    def rpc(self, text: str, *, timeout_s: float) -> object:
        calls = sorted({call.call for call in vllm_rpc.decode_round(text).calls.values()})
        self._note(f"rpc {' '.join(calls)}".rstrip())
        return self._in_loop(lambda: self.collective_rpc(vllm_rpc.METHOD, None, (text,)))

    def is_paused(self, *, timeout_s: float) -> bool:
        return bool(self._in_loop(self.is_scheduler_paused))

    def pause(self, mode: str, *, timeout_s: float) -> None:
        self._note(f"pause {mode}")
        self._in_loop(lambda: setattr(self, "paused", self.pauses))

    def resume(self, *, timeout_s: float) -> None:
        self._note("resume")
        self._in_loop(self.resume_scheduler)

    def wake_up(self, tags: Sequence[str] | None = None, *, timeout_s: float = 5) -> bool:
        """Of an engine as of its client: what sleeps wakes up, and then it is resumed."""
        self._note(f"wake {'+'.join(tags or ['all'])}")
        for receiver in self.receivers:
            receiver.show_awake(tags)
        if not self.is_sleeping:
            self.resume_scheduler()
        return not self.is_sleeping

    def sleep(self, level: int) -> None:
        self.paused = True
        for receiver in self.receivers:
            receiver.show_asleep(level)

    @property
    def is_sleeping(self) -> bool:
        return any(receiver.asleep for receiver in self.receivers)

    def add_request(self, request: object) -> None:
        """Called by nobody here: the plug-in wraps it."""

    def reset_prefix_cache(
        self, *, timeout_s: float = 5, reset_running_requests: bool = True
    ) -> bool:
        self._note("reset")
        return True

    def set_version(self, version: str, *, timeout_s: float) -> None:
        self._note(f"version {version}")
        self.version = version

    def close(self) -> None:
        self._note("close")

    def end(self) -> None:
        self._runs = False
        self.input_queue.put(None)
        self._loop.join(10)
        for receivers in (self.receivers, *self.below.values()):
            for receiver in receivers:
                receiver.close()
        self._pool.shutdown()

    # The used part of an EngineCore, in its loop.

    def collective_rpc(
        self, method: str, timeout: object = None, args: tuple[Any, ...] = (), kwargs: object = None
    ) -> list[dict[str, Any]]:
        round_ = vllm_rpc.decode_round(args[0])
        if not round_.watched:
            self.seen.append(len(round_.calls))
        futures = [self._pool.submit(self._answer, round_, i) for i in range(len(self.models))]
        results = [future.result() for future in futures]
        if self._late:  # answers that a failed call left
            results[-1], self._results = (self._results or results)[-1], results
        return results[: self.visible]

    def is_running(self) -> bool:
        return self._runs

    def is_scheduler_paused(self) -> bool:
        return self.paused

    def resume_scheduler(self) -> None:
        self.paused = False

    def finish_requests(self, request_ids: None, status: str) -> list[Waiting]:
        assert status == "refused"
        ended, self.waiting = self.waiting, []
        return ended

    def _send_error_outputs_to_client(self, req_ids: list[str], client_index: int) -> None:
        self.refused += req_ids

    def _in_loop(self, call: Callable[[], object]) -> Any:
        done: Future[object] = Future()
        self.input_queue.put(("call", (done, call)))
        return done.result(60)

    def _run(self) -> None:
        while True:
            round_ = self.input_queue.get()
            if round_ is None:
                return
            kind, content = round_
            if kind == "utility":
                getattr(self, content[2])(*content[3])
                continue
            done, call = content
            try:
                done.set_result(call())
            except Exception as exc:  # noqa: BLE001  # raised where it was asked for
                done.set_exception(exc)

    def _note(self, what: str) -> None:
        self.log.append(what)
        last = what.rsplit(maxsplit=1)[-1]
        self.heard.pop(last, lambda: None)()
        if last in self.broken:
            raise copy.copy(self.broken[last])
        if last in self.fails:
            raise self.fails.pop(last)

    def _answer(self, round_: vllm_rpc.Round, rank: int) -> dict[str, Any]:
        self.awake.wait(60)
        base = self.receivers[rank]
        parts = {p: vllm_rpc.Part(self.below[p][rank], base) for p in round_.adapters}
        part = parts.pop(round_.below, None)
        return vllm_rpc.answer_round(
            round_,
            base if part is None else part.receiver,
            base.dispatch if part is None else part.handle,
            rank=rank,
            world=len(self.models),
            parts=parts,
        )


vllm_pauses.install(Workers, utility="utility", refused="refused")
