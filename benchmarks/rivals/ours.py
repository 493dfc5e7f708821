"""The rival weightsync: over HTTP, as servers use it; each update verified or not.

A path that did other work than its name says would be measured under the wrong name. So a trainer
of the unpacked path asserts that its parameters were adopted into shared memory, a reader that
stages updates into a module that they were swapped in, and a trainer that always sends deltas that
each update was one.
"""

from __future__ import annotations

import operator
import secrets
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import weightsync as ws
from benchmarks.receiving import http_server
from benchmarks.rivals.contract import Job, Reader, Rival, RivalError
from benchmarks.rivals.crew import Crew
from benchmarks.rivals.parameters import addresses, load
from weightsync.server.listening import listen, url_of

END_S = 10.0


class Trainer(Rival):
    """`option` is path, sink, apply and `delta` of `connect`, with commas between."""

    def setup(self, job: Job, module: nn.Module) -> None:
        path, sink, apply, self._delta = self.option.split(",")
        token = secrets.token_urlsafe(16)
        self._module = module if path == "unpacked" else nn.Module()
        self._before = addresses(self._module)
        self._crew = Crew(job, self.reader(), [(sink, apply, token)] * job.readers)
        to = self._crew.ready()
        began = time.perf_counter()
        self._sender = ws.connect(
            module,
            to=to,
            token=token,
            backend="tcp" if path == "tcp" else "auto",
            packed={"packed": True, "unpacked": False}.get(path),
            delta=self._delta,  # type: ignore[arg-type] # one of three words
        )
        self.connect_s = time.perf_counter() - began
        if self._delta != "off":
            self._sender.send_weights()  # what the deltas build on

    def reader(self) -> type[Reader]:
        """Return the class that runs in the reader processes."""
        return Receiver

    def update(self, way: str) -> None:
        self._sender.verify = way == "verified"
        report = self._sender.send_weights()
        delta = report.delta or ws.DeltaReport()
        if self._delta == "always" and not delta.sent:
            raise RivalError(f"the whole model was sent: {delta.reason}")
        self.sent_nbytes = delta.nbytes if delta.sent else report.nbytes
        self.stall_s = report.stall_s

    def held(self) -> list[Mapping[str, str]]:
        refuse_unmoved(self._module, self._before, "were not adopted into shared memory")
        return self._crew.held()

    def close(self) -> None:
        if hasattr(self, "_sender"):
            self._sender.close()
        if hasattr(self, "_crew"):
            self._crew.close()


class Receiver(Reader):
    """A WeightReceiver behind the HTTP routes."""

    def __init__(self, module: nn.Module, extra: Any) -> None:
        super().__init__(module, extra)
        sink, apply, token = extra
        hook = self.load_weights if sink == "hook" else module
        self._swapped = module if (sink, apply) == ("module", "staged") else nn.Module()
        self._before = addresses(self._swapped)
        self._receiver = ws.WeightReceiver(hook, apply=apply)
        self._server = http_server(self._receiver, token)
        self._listener = listen("127.0.0.1", 0)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def load_weights(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load weights as the hook of an inference engine does."""
        return load(self.parameters, pairs)

    def hello(self) -> str:
        return url_of(self._listener)

    def held(self) -> Mapping[str, str]:
        refuse_unmoved(self._swapped, self._before, "were copied over and not swapped in")
        return super().held()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(END_S)
        self._receiver.close()

    def _serve(self) -> None:
        self._server.run(sockets=[self._listener])


def refuse_unmoved(module: nn.Module, before: Sequence[int], what: str) -> None:
    """Raise RivalError for parameters that still have their former address."""
    after = addresses(module)
    stayed = sum(map(operator.eq, before, after))
    if stayed:
        raise RivalError(f"{stayed} of {len(after)} parameters {what}")
