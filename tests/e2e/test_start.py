"""What a server has imported when it is ready: nothing that its models do not need, for imports delay the start."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.e2e.conftest import LLMSERVE

NOT_AT_START = {  # beside what typer itself imports, which is rich and pydantic
    "fastapi", "starlette", "llguidance",  # imported with the first request that needs them
    "torch", "transformers", "onnxruntime", "datasets", "pandas",  # of extras
    "cmake", "ninja", "pip", "setuptools",
}  # fmt: skip


def test_a_server_that_is_ready_has_imported_no_library_that_it_does_not_need(
    demo_engine: Path, tmp_path: Path
) -> None:
    ports = ["--host", "127.0.0.1", "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    log = tmp_path / "imports"
    with log.open("w") as errors:
        server = subprocess.Popen(
            [sys.executable, "-X", "importtime", LLMSERVE, "serve", demo_engine, *ports],
            stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        assert server.stdout is not None
        assert any("Started HTTPService" in line for line in server.stdout)
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
    imported = set(re.findall(r"\| +([\w.]+)$", log.read_text(), re.MULTILINE))
    assert {"llmserve.cli.server", "numpy", "uvloop"} <= imported
    assert {name.partition(".")[0] for name in imported} & NOT_AT_START == set()
