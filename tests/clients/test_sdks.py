"""Clients in Python in an environment of their own, which `make test-clients` makes; skipped without it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients import sdks
from tests.frontends.text.talkers import Talker, talking

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-sdks/bin/python"
TIMEOUT_S = 120
CALL = '<tool_call>\n{"name": "%s", "arguments": {"city": "Rome"}}\n</tool_call>'
PARTIAL = "Partialget_weather"  # as Instructor calls the tool whose arguments it reads while they come


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talker]:
    with talking(tmp_path_factory.mktemp("qwen3"), "qwen3") as made:
        thought = f"<think>\n{sdks.THOUGHT}\n</think>\n\n"

        def answer(prompt: str) -> str:
            if "tool_response" in prompt:
                return sdks.ANSWER
            if "json_schema" in prompt:
                return '{"city": "Rome"}'
            return CALL % (PARTIAL if PARTIAL in prompt else "get_weather")

        made.answers(lambda prompt: thought + answer(prompt))
        yield made


@pytest.mark.parametrize("name", sdks.SCENARIOS)
def test_what_its_documentation_shows(talker: Talker, name: str) -> None:
    if not PYTHON.exists():
        pytest.skip("there is no .venv-sdks: make test-clients")
    command = [str(PYTHON), sdks.__file__, talker.server.http_url, name]
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # it would ask the network for prices
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    assert done.stdout.splitlines()[-1:] == [f"ok {name}"], done.stdout[-2000:] + done.stderr[-4000:]
