"""Parts of `tools/soak_clients.py`."""
