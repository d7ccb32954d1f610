"""An engine's process that dies, and a parent that does."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from llmserve.cli.backends import ENGINE_PROCESS
from llmserve.core import GenerateRequest, SamplingParams
from llmserve.engine.adapters.sealed import SealedAdapter
from llmserve.engine.fake import fake_answer
from llmserve.engine.remote.process import ProcessEngine, RestartRule
from llmserve.engine.settings import EngineSettings
from llmserve.errors import InvalidArgument, NotFound, Unavailable
from tests.contracts.engine_process import COMMAND, FAKE
from tests.engine.test_adapters import adapters

FAKE_COMMAND = (*COMMAND, FAKE)
PAUSE_S = 0.01
REQUEST = GenerateRequest("r", (1, 2, 3), SamplingParams(max_tokens=20, temperature=0.0))
LONG = GenerateRequest("r", (1, 2, 3), SamplingParams(max_tokens=250, temperature=0.0))
ANSWER = list(fake_answer(REQUEST.prompt_ids, 20, vocab_size=1000))
WAIT_S = 60


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[ProcessEngine]:
    opened = ProcessEngine(FAKE_COMMAND, tmp_path, tmp_path, EngineSettings(), RestartRule(PAUSE_S))
    yield opened
    opened.close()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """A zombie, whom nobody has asked yet how it ended, is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def answer_of(engine: ProcessEngine, adapter: str = "") -> list[int]:
    async with aclosing(engine.submit(replace(REQUEST, adapter=adapter))) as stream:
        return [token async for event in stream for token in event.token_ids]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
async def test_a_killed_process_ends_its_streams_and_is_started_again(
    engine: ProcessEngine, number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    streams = [engine.submit(LONG) for _ in range(3)]
    for stream in streams:
        await anext(stream)
    os.kill(engine.pid, number)
    for stream in streams:
        with pytest.raises(Unavailable, match="the engine's process ended"):
            async for _ in stream:
                pass
    until(engine.healthy)
    assert await answer_of(engine) == ANSWER
    until(lambda: engine.stats().total_gen_tokens == 20)  # nothing was asked again
    assert engine.stats().num_restarts == 1
    assert f"signal {number.value}, {number.name}" in caplog.text


async def test_a_process_that_is_started_again_has_the_adapters_again(
    engine: ProcessEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = adapters(tmp_path / "adapters", 3)
    copy = SealedAdapter.open(shutil.copytree(first.path, tmp_path / "copy"))
    for adapter in (first, copy, second, third):
        await asyncio.to_thread(engine.add_adapter, adapter)
    engine.remove_adapter(first.digest)  # one of its two names
    engine.remove_adapter(second.digest)
    for damaged in (copy, third):
        (damaged.path / "weights.bin").write_bytes(b"")
    os.kill(engine.pid, signal.SIGKILL)
    until(lambda: engine.stats().num_restarts == 1 and engine.healthy())
    assert await answer_of(engine, first.digest) == fake_answer(REQUEST.prompt_ids, 20, adapter=first.digest)
    for gone in (second, third):
        with pytest.raises(InvalidArgument, match="the engine has no adapter"):
            engine.submit(replace(REQUEST, adapter=gone.digest))
    assert f"requests for the adapter in {third.path} will fail" in caplog.text
    for adapter in (first, third):
        engine.remove_adapter(adapter.digest)
    with pytest.raises(InvalidArgument, match="the engine has no adapter"):
        engine.submit(replace(REQUEST, adapter=first.digest))


async def test_after_its_limit_it_is_left_alone_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = ProcessEngine(FAKE_COMMAND, tmp_path, tmp_path, EngineSettings(), RestartRule(PAUSE_S, most=2))
    for restarts in range(3):
        until(engine.healthy)
        assert engine.stats().num_restarts == restarts
        os.kill(engine.pid, signal.SIGKILL)
        until(lambda: not engine.healthy())
    until(lambda: "it will not be restarted" in caplog.text)
    with pytest.raises(Unavailable, match=r"after 2 restarts in a row.*reload the model"):
        engine.submit(REQUEST)
    assert not engine.healthy()
    engine.close()


def test_pauses_double_and_are_forgotten() -> None:
    rule = RestartRule(pause_s=1, longest_pause_s=5, most=4, forgotten_after_s=100)
    assert [rule.next_pause_s(10) for _ in range(5)] == [0, 1, 2, 4, None]
    assert RestartRule(pause_s=1, longest_pause_s=5, num_in_a_row=4).next_pause_s(10) == 5
    assert rule.next_pause_s(99) is None
    assert [rule.next_pause_s(lived_s) for lived_s in (100, 0, 0, 101)] == [0, 1, 2, 0]


def test_closing_while_it_waits_to_be_started_again(tmp_path: Path) -> None:
    engine = ProcessEngine(FAKE_COMMAND, tmp_path, tmp_path, EngineSettings(), RestartRule(1000.0, num_in_a_row=1))
    os.kill(engine.pid, signal.SIGKILL)
    until(lambda: not engine.healthy())
    with pytest.raises(Unavailable, match=r"process ended"):
        engine.submit(REQUEST)
    engine.close()
    engine.close()


def test_an_error_of_loading_is_the_error(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="nowhere"):
        ProcessEngine(ENGINE_PROCESS, tmp_path / "nowhere", tmp_path, EngineSettings())


def test_a_process_that_dies_while_it_loads_says_how(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dying = (
        sys.executable,
        "-c",
        "import os, sys; print('last words', file=sys.stderr); sys.stderr.flush(); os.abort()",
    )
    with pytest.raises(Unavailable, match="ended while loading the engine: signal 6, SIGABRT"):
        ProcessEngine(dying, tmp_path, tmp_path, EngineSettings())
    assert "last words" in caplog.text


def test_a_socket_whose_path_would_be_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(InvalidArgument, match="set TMPDIR to a folder with a shorter path"):
        ProcessEngine(FAKE_COMMAND, tmp_path, tmp_path, EngineSettings())
    assert [*folder.iterdir()] == []


def test_signals_for_the_parent_do_not_end_it(engine: ProcessEngine) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(engine.pid, number)
    assert asyncio.run(answer_of(engine)) == ANSWER
    assert engine.stats().num_restarts == 0


def test_closing_ends_the_process_and_leaves_nothing(engine: ProcessEngine) -> None:
    pid, socket = engine.pid, engine.socket
    assert socket.exists()
    engine.close()
    assert not is_alive(pid)
    assert not socket.parent.exists()


def test_no_process_outlives_a_killed_parent(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from llmserve.engine.remote.process import ProcessEngine\n"
        "from llmserve.engine.settings import EngineSettings\n"
        "from tests.engine.remote.test_process import FAKE_COMMAND\n"
        "here = Path(sys.argv[1])\n"
        "print(ProcessEngine(FAKE_COMMAND, here, here, EngineSettings()).pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
    until(lambda: not is_alive(pid))


def test_its_log_is_ours(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    code = (
        "import logging, os, signal, sys\n"
        "from tests.contracts import engine_process as process\n"
        "def opened(spec):\n"
        "    logging.getLogger('llmserve.engine').info('loaded by %d', os.getpid())\n"
        "    print('a library prints', flush=True)\n"
        "    return process.open_fake(spec)\n"
        "sys.exit(process.main(opened))\n"
    )
    with caplog.at_level(logging.INFO, "llmserve"):
        engine = ProcessEngine((sys.executable, "-c", code), tmp_path, tmp_path, EngineSettings())
        pid = engine.pid
        engine.close()
    told = {(record.name, record.levelname, record.getMessage()) for record in caplog.records}
    assert ("llmserve.engine", "INFO", f"[engine process {pid}] loaded by {pid}") in told
    assert any(message == f"[engine process {pid}] a library prints" for _, _, message in told)


async def test_an_engine_that_has_failed_gets_a_new_process(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from llmserve.engine.fake import FAKE_RUNNER_INFO, FakeRunner, fake_engine\n"
        "from llmserve.engine.inflight import InflightEngine\n"
        "from tests.contracts import engine_process as process\n"
        "def opened(spec):\n"
        "    mark, info = spec.engine_dir / 'failed', (good := fake_engine()).info\n"
        "    if mark.exists():\n"
        "        return good, process.compile_evens\n"
        "    mark.touch()\n"
        "    return InflightEngine(FakeRunner(fail_at_step=5), info), process.compile_evens\n"
        "sys.exit(process.main(opened))\n"
    )
    command = (sys.executable, "-c", code)
    engine = ProcessEngine(command, tmp_path, tmp_path, EngineSettings(), RestartRule(PAUSE_S))
    with pytest.raises(Exception, match="step 5 was told to fail"):
        await answer_of(engine)
    until(lambda: engine.stats().num_restarts == 1 and engine.healthy())
    assert await answer_of(engine) == ANSWER
    engine.close()
