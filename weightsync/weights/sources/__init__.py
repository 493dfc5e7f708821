"""Where weights come from on the trainer, and how they are packed."""
