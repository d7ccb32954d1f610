"""The memory limits of a server's requests, from its flags or from the machine's memory."""

from __future__ import annotations

import psutil

from llmserve.engine.machine.memory import memory_limit_bytes
from llmserve.wire.request_memory import RequestMemory

SHARE_OF_MACHINE = 4  # all requests: a quarter of the memory
SHARE_OF_REQUESTS = 4  # one request: a quarter of that


def request_memory(limit_bytes: int | None, each_bytes: int | None) -> RequestMemory:
    """None: a default for this machine. Raises `InvalidArgument`."""
    if limit_bytes is None:
        machine = int(psutil.virtual_memory().total)
        limit_bytes = max(min(memory_limit_bytes() or machine, machine) // SHARE_OF_MACHINE, each_bytes or 0)
    return RequestMemory(limit_bytes, each_bytes if each_bytes is not None else limit_bytes // SHARE_OF_REQUESTS)
