"""Queues between processes: messages from one writer to many readers, and tensors of requests."""
