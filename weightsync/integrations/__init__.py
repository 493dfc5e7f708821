"""Integrations with inference servers and trainers."""
