"""The process around weightsync: its exit, its parent, its optimizers, its tracebacks."""
