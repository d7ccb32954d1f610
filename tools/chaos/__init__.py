"""Faults under load: `make chaos`."""
