"""Asks a server for its health, again and again, and watches its memory: a process of its own, which nothing disturbs.

    python -m tests.hostile.prober PORT PID

Prints what it has seen, as JSON, when its input ends.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from dataclasses import asdict, dataclass

import psutil

PAUSE_S = 0.01
TIMEOUT_S = 60.0
REQUEST = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@dataclass
class Seen:
    num_probes: int = 0
    num_failures: int = 0
    slowest_s: float = 0.0
    late_s: float = 0.0  # most that this process was late itself: what the machine is worth at the moment
    peak_bytes: int = 0  # of the server's resident memory


def probe(port: int) -> bool:
    """A connection of its own, as a load balancer's is."""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
        connection.sendall(REQUEST)
        answer = b""
        while chunk := connection.recv(4096):
            answer += chunk
    return answer.startswith(b"HTTP/1.1 200")


def watch(port: int, pid: int) -> Seen:
    seen, server = Seen(), psutil.Process(pid)
    print("watching", flush=True)
    while True:
        started = time.monotonic()
        if select.select([sys.stdin], [], [], PAUSE_S)[0]:
            return seen
        begun = time.monotonic()
        seen.late_s = max(seen.late_s, begun - started - PAUSE_S)
        try:
            is_alive = probe(port)
        except OSError:
            is_alive = False
        seen.slowest_s = max(seen.slowest_s, time.monotonic() - begun)
        seen.num_probes += 1
        seen.num_failures += not is_alive
        seen.peak_bytes = max(seen.peak_bytes, server.memory_info().rss)


if __name__ == "__main__":
    print(json.dumps(asdict(watch(int(sys.argv[1]), int(sys.argv[2])))))
