"""One update as a transaction: its life on a receiver, and its coordination by the sender."""
