"""Compiles what DeepSpeed would compile for a CPU in the first test, for minutes.

A process that is ended meanwhile leaves a lock, for which every later one waits without an end. So
`make test-openrlhf` runs this when it builds its environment, and tests find it done.
"""

from __future__ import annotations

import os
import shutil

from tests.openrlhf.conftest import EXTENSIONS

if __name__ == "__main__":
    os.environ.update(DS_ACCELERATOR="cpu", TORCH_EXTENSIONS_DIR=EXTENSIONS)
    shutil.rmtree(EXTENSIONS, ignore_errors=True)

    from deepspeed.accelerator import get_accelerator

    for name in ("FusedAdamBuilder", "ShareMemCommBuilder"):
        get_accelerator().create_op_builder(name).load()
