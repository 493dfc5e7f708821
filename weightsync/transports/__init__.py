"""Transports: carry control messages to receivers. The bytes of weights take other paths."""
