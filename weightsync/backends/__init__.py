"""The data plane: how bytes move."""
