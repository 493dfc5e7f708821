"""What two processes of one host can share: memory, handles to it, and queues in it."""
