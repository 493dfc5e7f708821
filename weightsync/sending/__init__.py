"""One update as its sender lives it: the fleet, the path, the transaction."""
