"""Deltas: the change log of a sender, and the stream that carries the changed lines."""
