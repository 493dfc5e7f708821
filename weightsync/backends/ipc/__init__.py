"""The backend `ipc`: memory of one host that the receiver opens."""
