"""Code that calls a CUDA driver: IPC handles, pinned memory, events, staging.

None of it has run on a GPU; `pytest -m gpu tests/gpu` tests it there.
"""
