"""What is around weightsync: the process (exit, parent, optimizers, tracebacks), integrations."""
