"""Loads that are rejected leave nothing."""

from __future__ import annotations

import base64
import json

import psutil

from tests.hostile.attacks import MIB, at_once, send, status
from tests.hostile.conftest import IS_STRICT, Target

NUM_LOADS = 600 if IS_STRICT else 16
CODE = b"raise ValueError('never')\n" + b"#" * 40_000


def load(target: Target, name: str) -> int:
    config = json.dumps({"name": name, "backend": "python"})
    parameters = {"config": config, "file:1/model.py": base64.b64encode(CODE).decode()}
    body = json.dumps({"parameters": parameters}).encode()
    head = (
        f"POST /v2/repository/models/{name}/load HTTP/1.1\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return status(send(target.http_port, [head.encode() + body]))


def test_rejected_loads(target: Target) -> None:
    process = psutil.Process(target.server.process.pid)
    load(target, "first")
    files, memory = list(target.temporary.rglob("*")), process.memory_info().rss
    names = iter([f"new{number % 50}" for number in range(NUM_LOADS)])
    with target.watched():
        found = at_once(lambda: [load(target, name) for name in [next(names) for _ in range(NUM_LOADS // 4)]], 4)
    assert {each for statuses in found for each in statuses} == {400}
    assert list(target.temporary.rglob("*")) == files
    assert process.memory_info().rss - memory < 100 * MIB
    assert status(send(target.http_port, [b"GET /v2/health/ready HTTP/1.1\r\nConnection: close\r\n\r\n"])) == 200
    index = send(
        target.http_port, [b"POST /v2/repository/index HTTP/1.1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"]
    )
    assert b"new" not in index
