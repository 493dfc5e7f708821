"""A server with the control endpoints of SGLang, as sglang_contract.json has them.

    python -m tests.integrations.sglang_stand_in MODEL_DIRECTORY

It prints its port. Below `/NAME/VERSION` is a server of that version with a tiny model of its own.
It loads safetensors files as SGLang's loader does: into the weights in use, by name, without
unknown names. `/_state` returns its state, `/_next` sets the next fault. It does not generate;
requests in flight are a number, which the caches need.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import typing
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, create_model
from safetensors import safe_open
from torch import nn

CONTRACT = json.loads(Path(__file__).with_name("sglang_contract.json").read_text())
NAMES = ("a", "b", "c")
INDEX = "model.safetensors.index.json"


class Tiny(nn.Module):
    """An embedding, two projections that SGLang would fuse, and a head that is not tied."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.gate = nn.Linear(8, 8, bias=False)
        self.up = nn.Linear(8, 8, bias=False)
        self.norm = nn.Parameter(torch.ones(8))
        self.lm_head = nn.Linear(8, 16, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight


def request_model(version: str, name: str) -> type[BaseModel]:
    """Return the body of a request as its version declares it; unknown fields are ignored."""
    space = {**vars(typing), "Any": Any}
    declared: dict[str, Any] = {}
    for field, source in (CONTRACT[version]["requests"][name] or {}).items():
        annotation, given, default = source.partition(" = ")
        value = eval(default, space) if given else ...
        declared[field] = (eval(annotation, space), value)
    return create_model(name, **declared)


class StandIn:
    """One server: its model and its state."""

    def __init__(self, version: str, model_path: str) -> None:
        self.version = version
        self.contract = CONTRACT[version]
        self.says = version
        self.first_path = model_path
        self.reset()

    def reset(self) -> None:
        """Reset to the state of a server that has just started."""
        torch.manual_seed(1)
        self.model = Tiny(tied=False).to(torch.bfloat16)
        self.model_path = self.first_path
        self.weight_version = "default"
        self.paused = ""
        self.requests = 0
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.files: list[str] = []
        self.next: dict[str, Any] = {}
        self.info: dict[str, Any] = {}

    def load(self, model_path: str) -> tuple[bool, str]:
        """Read the files of a directory, as SGLang's loader finds them."""
        try:
            files = self._find(Path(model_path))
        except (OSError, RuntimeError, ValueError) as exc:
            return False, f"Failed to get weights iterator: {exc}."
        self.files = [file.name for file in files]
        held = dict(self.model.named_parameters())
        try:
            for file in files:
                with safe_open(file, framework="pt", device="cpu") as opened, torch.no_grad():
                    for name in opened.keys():  # noqa: SIM118  # a handle, no dict
                        if name.endswith(("gate.weight", "up.weight")) or name in held:
                            held[name].copy_(opened.get_tensor(name))
        except Exception as exc:  # noqa: BLE001  # as SGLang's loader does
            return False, f"Failed to update weights: {exc}.\nRolling back to original weights."
        return True, "Succeeded to update model weights."

    def flush(self) -> bool:
        """Empty the caches, unless requests are in flight."""
        taken_back = self.paused == "retract" and self.contract["flush_ignores_requests_taken_back"]
        return not self.requests or taken_back

    def _find(self, directory: Path) -> list[Path]:
        if not directory.is_dir():
            raise ValueError(f"{directory} is no repository's id")
        files = sorted(directory.glob("*.safetensors"))
        if (directory / INDEX).is_file():
            table = json.loads((directory / INDEX).read_text())["weight_map"]
            wanted = {directory / name for name in table.values()}
            if not wanted <= set(files):
                raise RuntimeError("the index names shards that are not there")
            files = [file for file in files if file in wanted]
        if not files:
            raise RuntimeError(f"Cannot find any model weights with `{directory}`")
        return files


def make_app(stand_in: StandIn) -> FastAPI:  # noqa: C901  # one small function for each route
    """Return the endpoints that the contract names, and the two for tests."""
    app = FastAPI()
    contract, version = stand_in.contract, stand_in.version
    update_body = request_model(version, "UpdateWeightFromDiskReqInput")
    pause_body = request_model(version, "PauseGenerationReqInput")
    version_body = request_model(version, "UpdateWeightVersionReqInput")

    async def model_info() -> dict[str, Any]:
        keys = (contract["routes"].get("/model_info") or contract["routes"]["/get_model_info"])[
            "keys"
        ]
        told = {
            **dict.fromkeys(keys),
            "model_path": stand_in.model_path,
            "tokenizer_path": stand_in.first_path,
            "is_generation": True,
        }
        if "weight_version" in keys:
            told["weight_version"] = stand_in.next.pop("say_version", stand_in.weight_version)
        return told

    async def server_info() -> dict[str, Any]:
        return {"version": stand_in.says, "internal_states": [], **stand_in.info}

    async def pause(request: Request) -> JSONResponse:
        if stand_in.next.pop("refuse_pause", False):
            return JSONResponse({"error": {"message": "no pause"}}, 500)
        body = pause_body.model_validate_json(await request.body() or b"{}")
        stand_in.paused = getattr(body, "mode", "abort")
        if stand_in.paused == "abort":
            stand_in.requests = 0
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def proceed() -> JSONResponse:
        if stand_in.next.get("refuse_proceed", False):
            return JSONResponse({"error": {"message": "not now"}}, 500)
        stand_in.paused = ""
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def flush() -> Response:
        return Response(
            "Cache flushed.\n" if stand_in.flush() else "Flush cache failed.\n",
            200 if stand_in.flush() else 400,
        )

    async def update_version(request: Request) -> dict[str, Any]:
        body = version_body.model_validate_json(await request.body())
        stand_in.weight_version = body.new_version  # type: ignore[attr-defined]  # declared above
        return {"success": True, "message": "", "new_version": stand_in.weight_version}

    async def update(request: Request) -> JSONResponse:
        body: Any = update_body.model_validate_json(await request.body())
        stand_in.bodies.append(json.loads(await request.body()))
        if stand_in.next.pop("die", False):
            os._exit(9)
        refusal = stand_in.next.pop("refuse", None)
        if body.load_format is None:  # as the server was started, which may be without weights
            refusal = "Failed to get model loader: DummyModelLoader."
        success, message = (False, refusal) if refusal else stand_in.load(body.model_path)
        if success and getattr(body, "flush_cache", True) and not stand_in.flush():
            if "Cache flush failed after updating weights" in contract["messages"]:
                os._exit(7)  # an assertion in the scheduler: the whole server ends
            success, message = False, "Weights were updated, but the cache was not flushed because"
        if success:
            stand_in.model_path = body.model_path
            deaf = stand_in.next.pop("deaf", False)
            if getattr(body, "weight_version", None) is not None and not deaf:
                stand_in.weight_version = body.weight_version
        told = {"success": success, "message": message, "num_paused_requests": 0}
        return JSONResponse(told, 200 if success else 400)

    handlers: dict[str, Any] = {
        "/model_info": model_info,
        "/get_model_info": model_info,
        "/server_info": server_info,
        "/get_server_info": server_info,
        "/pause_generation": pause,
        "/continue_generation": proceed,
        "/flush_cache": flush,
        "/update_weight_version": update_version,
        "/update_weights_from_disk": update,
    }
    for path, route in contract["routes"].items():
        app.add_api_route(path, handlers[path], methods=route["methods"])

    @app.middleware("http")
    async def note(request: Request, call_next: Any) -> Any:
        call = request.url.path.rpartition("/")[2]
        if not call.startswith("_"):
            stand_in.calls.append(call)
            key = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if stand_in.info.get("admin_api_key", key) != key:
                return JSONResponse({"error": "Unauthorized"}, 401)
        return await call_next(request)

    @app.get("/_state")
    async def state() -> dict[str, Any]:
        weights = {n: p.float().tolist() for n, p in stand_in.model.named_parameters()}
        names = ("calls", "bodies", "files", "paused", "model_path", "weight_version")
        return {"weights": weights, **{name: getattr(stand_in, name) for name in names}}

    @app.post("/_next")
    async def set_next(request: Request) -> dict[str, Any]:
        told = await request.json()
        if told.pop("reset", False):
            stand_in.reset()
            stand_in.says = version
        stand_in.requests = told.pop("requests", stand_in.requests)
        stand_in.says = told.pop("says", stand_in.says)
        stand_in.info.update(told.pop("info", {}))
        stand_in.next.update(told)
        return {}

    return app


def main(model_path: str) -> None:
    """Serve until killed."""
    torch.set_num_threads(1)
    app = FastAPI()
    for name in NAMES:
        for version in CONTRACT:
            app.mount(f"/{name}/{version}", make_app(StandIn(version, model_path)))
    # asyncio turns Nagle's algorithm off for sockets that say that they are TCP's.
    with socket.socket(proto=socket.IPPROTO_TCP) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        sys.stdout.write(f"{listening.getsockname()[1]}\n")
        sys.stdout.flush()
        config = uvicorn.Config(app, log_level=logging.ERROR)
        uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main(sys.argv[1])
