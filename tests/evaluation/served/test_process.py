"""A server that ends with its owner, however that ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from llmserve.errors import Unavailable
from llmserve.evaluation.served.process import own_server
from llmserve.frontends.shared.restrictions import VARIABLES

OWNER = """
import asyncio, sys
from llmserve.evaluation.served.process import own_server

async def main():
    command = (sys.executable, "-m", "llmserve.cli.owned_server")
    with own_server(command, sys.argv[1], ()) as server:
        print(server.pid, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_server_ends_with_its_owner(number: int, tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner, owner.stdout as told:
        server = psutil.Process(int(told.readline()))
        time.sleep(1.0)
        owner.send_signal(number)
    gone, alive = psutil.wait_procs([server], timeout=30)
    assert (gone, alive) == ([server], [])


async def test_keys_of_the_environment_are_for_other_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("LLMSERVE_ISA", "kept")
    program = "import os; print(*(name for name in os.environ if name.startswith('LLMSERVE_'))); raise SystemExit(3)"
    with (
        pytest.raises(Unavailable, match=r"its output:\nLLMSERVE_ISA$"),
        own_server((sys.executable, "-c", program), tmp_path, ()) as server,
    ):
        await server.ready()


async def test_what_is_no_server_is_told_with_its_last_words(tmp_path: Path) -> None:
    with (
        pytest.raises(Unavailable, match=r"did not start \(exit code 3\); its output:\nnot today"),
        own_server((sys.executable, "-c", "print('not today'); raise SystemExit(3)"), tmp_path, ()) as server,
    ):
        await server.ready()
