"""Services of the process: exit, parent, optimizer steps, tracebacks, provided integrations."""
