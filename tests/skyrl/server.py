"""SkyRL's own inference server on a CPU, with the arguments that SkyRL makes of its configuration.

Its actor of Ray does the same, and asks for a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import os

from skyrl.backends.skyrl_train.inference_servers.utils import build_vllm_cli_args
from skyrl.backends.skyrl_train.inference_servers.vllm_server_actor import (
    _build_and_serve_vllm_server,
)

from tests.skyrl.configs import configuration


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--port", type=int)
    given, _ = parser.parse_known_args()
    args = build_vllm_cli_args(configuration(given.model))
    assert args.weight_transfer_config.backend == "weightsync"
    args.host, args.port = "127.0.0.1", given.port
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
    asyncio.run(_build_and_serve_vllm_server(args))


if __name__ == "__main__":
    main()
