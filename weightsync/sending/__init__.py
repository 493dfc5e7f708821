"""One update as its sender lives it: the fleet, the road, the transaction."""
