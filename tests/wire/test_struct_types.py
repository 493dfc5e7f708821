"""The first messages of a process come to several threads at once."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, sys, threading
from weightsync.errors import ProtocolError
from weightsync.wire import codec

REPLY = b'{"status": {"owner": {"id": "a", "name": "b"}, "shared_memory": [{}]}}'
START = b'{"init_info": {"manifest": {"names": ["a"]}, "ring": {"data": {"HOST": {}}}}}'
CALL = "init_weight_transfer_engine"

def decode(barrier):
    barrier.wait()
    for decode, body in ((codec.decode_reply, REPLY), (codec.decode_request, START)):
        try:
            decode(CALL, body)
        except ProtocolError:
            pass

codes = set()
for _ in range(60):
    child = os.fork()
    if not child:
        sys.setswitchinterval(1e-6)
        barrier = threading.Barrier(4)
        threads = [threading.Thread(target=decode, args=(barrier,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os._exit(0)
    codes.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(*codes)
"""


def test_no_thread_meets_a_type_that_another_one_is_preparing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr
