"""The probe of a worker with the stand-ins of cuda_on_cpu, which importing this module installs."""

from __future__ import annotations

from tests.vllm import cuda_on_cpu
from weightsync.testing.conformance.vllm_probe import Probe

cuda_on_cpu.install()


class ProbeOnCpu(Probe):
    """The same methods."""
