"""Shared parts of both protocols: protocol extensions, raw tensors, and the interface of the server core."""
