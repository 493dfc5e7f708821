"""A program: sets to an `LLM` as vLLM makes it by default, with its engine in a process of its own.

python -m tests.vllm.default_llm FOLDER UPDATES
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.vllm import offline

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"


def main(folder: Path, updates: int) -> None:
    """Send base and adapter so often; print whether the LLM computes with the last ones."""
    from tests.vllm.adapted import adapt
    from tests.vllm.tiny import expected, make_model
    from tests.vllm.victims import connect_set, train_set
    from weightsync.integrations.vllm.actors import vllm_targets
    from weightsync.integrations.vllm.adapter_names import adapter_request

    base = make_model(folder, tied=False)
    with offline.offline_llm(folder, enable_lora=True, max_loras=2, max_lora_rank=8) as llm:
        model = adapt(base)
        with connect_set(model, vllm_targets(llm)) as sender:
            for seed in range(updates):
                train_set(model, seed)
                sender.send_weights()
        tokens, _ = offline.generated(llm, adapter_request("policy"))
        print("right" if tokens == expected(model)[0] else "wrong", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
