"""Requests that a machine makes from the schema: none of them is answered with a fault of the server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from tests.frontends.server import RunningServer

NUM_EXAMPLES = 8  # for each route, beside those that the schema names


def with_our_model(schema: Any) -> Any:
    """A made-up name would be refused before anything else is looked at."""
    if isinstance(schema, list):
        return [with_our_model(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: with_our_model(one) for name, one in schema.items()}
    if isinstance(found.get("properties"), dict) and "model" in found["properties"]:
        found["properties"]["model"] = {"type": "string", "enum": ["ensemble"]}
    return found


def test_no_request_of_the_schema_is_a_fault(served: RunningServer, http: httpx.Client, tmp_path: Path) -> None:
    schema = tmp_path / "openapi.json"
    schema.write_text(json.dumps(with_our_model(http.get("/openapi.json").json())))
    command = [
        str(Path(sys.executable).with_name("schemathesis")), "run", str(schema), "--url", served.http_url,
        "--checks", "not_a_server_error", "--phases", "coverage,fuzzing", "--generation-deterministic",
        "--max-examples", str(NUM_EXAMPLES), "--request-timeout", "60",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:]
    assert http.get("/v2/health/ready").status_code == 200
