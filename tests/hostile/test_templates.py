"""Models whose chat templates take hours or gigabytes."""

from __future__ import annotations

import json
from typing import Any

from tests.hostile.attacks import at_once, post, send, status, works
from tests.hostile.conftest import TEMPLATES, Target


def test_templates_that_take_too_much(target: Target) -> None:
    with target.watched():
        found = at_once(lambda: [ask(target, name) for name in TEMPLATES], 2)
    for answer in [answer for answers in found for answer in answers]:
        assert status(answer) == 400
        assert b"the chat template refuses these messages: it needs more than" in answer
    assert works(target.http_port, target.grpc_port)


def ask(target: Target, name: str) -> bytes:
    messages = json.dumps([{"role": "user", "content": "x"}])
    inputs: list[dict[str, Any]] = [
        {"name": "MESSAGES", "datatype": "BYTES", "shape": [1, 1], "data": [messages]},
        {"name": "REQUEST_OUTPUT_LEN", "datatype": "INT32", "shape": [1, 1], "data": [1]},
    ]
    return send(target.http_port, post(name, json.dumps({"inputs": inputs}).encode()))
