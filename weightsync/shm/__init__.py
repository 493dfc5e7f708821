"""Shared memory on one host: segments, the counter ring, waiting, device and host keys."""
