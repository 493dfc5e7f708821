"""The process of receivers that the end-to-end tests have, here too."""

from __future__ import annotations

from tests.e2e.conftest import host, host_process

__all__ = ["host", "host_process"]
