"""What changed since a version: the log of it, and the stream that carries it."""
