"""Weights as tensors and bytes; tests/test_layers.py says which folder may import which."""
