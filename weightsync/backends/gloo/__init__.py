"""The backend `gloo`: a chain of hosts over a private Gloo group."""
