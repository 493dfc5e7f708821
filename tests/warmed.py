"""What fork servers load last: compiled loops, and a heap that no garbage collector looks through.

A process that sends or receives loads the loops of `weights.lines` from numba's cache, which takes
half a second of computing; a collection in a child would copy all pages that it shares.
"""

from __future__ import annotations

import gc

from weightsync.weights.lines.memory import warm_up

warm_up()
gc.collect()
gc.freeze()
