"""Shared memory of one host: segments, the counter ring, waiting, and who can open what."""
