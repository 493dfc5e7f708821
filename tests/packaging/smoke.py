"""What an installed weightsync has to do, without its source: an update inside one process.

Run by dist_check.py in the environment of a built wheel. Prints one JSON object.
"""

from __future__ import annotations

import importlib.metadata
import json
from importlib.resources import files

import torch

import weightsync as ws


def main() -> None:
    trained, served = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    receiver = ws.WeightReceiver(served)
    with ws.connect(trained, to=receiver.handle) as sender:
        for _ in range(2):
            torch.nn.init.normal_(trained.weight)
            report = sender.send_weights()
    with receiver.reading() as version:
        same = torch.equal(trained.weight, served.weight)
    receiver.close()
    assert same
    assert files("weightsync").joinpath("py.typed").is_file()
    print(
        json.dumps(
            {
                "file": ws.__file__,
                "version": ws.__version__,
                "metadata": importlib.metadata.version("weightsync"),
                "torch": str(torch.__version__),
                "held": version,
                "verified": report.verified,
            }
        )
    )


if __name__ == "__main__":
    main()
