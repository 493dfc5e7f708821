"""The data plane: backends, which move the bytes of weights."""
