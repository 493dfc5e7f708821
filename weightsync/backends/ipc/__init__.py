"""The backend `ipc`: memory of one host, which trainer and receiver share."""
