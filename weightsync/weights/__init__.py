"""Sources and sinks of weights, the layout of their stream, copy plans and fingerprints."""
