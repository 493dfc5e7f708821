"""What joins weightsync to the systems that people run."""
