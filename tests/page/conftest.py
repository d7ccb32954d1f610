"""A real server with the demo network, which is let to talk for longer than it was trained to, and a browser."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.e2e.conftest import CHECKPOINT, ServerProcess, llmserve, start_server
from tests.page.browsers import executable, opened, running_browser
from tests.page.steps import ENGINE

MAX_POSITIONS = 16_384
KV_TOKENS = ("--max-kv-tokens", "32768")


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    executable()  # without a browser nothing need be built
    folder = tmp_path_factory.mktemp("page")
    shutil.copytree(CHECKPOINT, folder / "checkpoint")
    config = json.loads((CHECKPOINT / "config.json").read_text())
    config |= {"max_position_embeddings": MAX_POSITIONS, "model_max_length": MAX_POSITIONS}
    (folder / "checkpoint/config.json").write_text(json.dumps(config))
    made = folder / ENGINE
    done = llmserve("build", str(folder / "checkpoint"), "--dtype", "float16", "--output-dir", str(made))
    assert done.returncode == 0, done.stderr
    return made


@pytest.fixture(scope="session")
def server(engine: Path) -> Iterator[ServerProcess]:
    running = start_server(str(engine), *KV_TOKENS)
    yield running
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(timeout=60) == 0


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of one file: as long as it runs, no other event loop can."""
    with running_browser() as made:
        yield made


@pytest.fixture
def page(browser: Browser, server: ServerProcess) -> Iterator[Page]:
    with opened(browser, server.http) as made:
        yield made
