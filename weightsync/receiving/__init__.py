"""One update as its receiver lives it: the gate, the peers, the landings, the steps."""
