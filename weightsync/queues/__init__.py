"""Queues between processes: a broadcast queue for messages, and a queue for tensors of requests."""
