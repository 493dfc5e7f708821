"""All code that calls CUDA: devices, waits, IPC handles, pinned memory, staging and kernels.

`pytest -m gpu` tests it on a GPU; elsewhere the tests put stand-ins in the place of the driver.
"""
