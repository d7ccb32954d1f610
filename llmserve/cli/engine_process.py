"""An engine's process, started by `engine/remote/process.py`: `python -m llmserve.cli.engine_process`.

It ends when its standard input ends. It ignores signals that stop its parent, which may finish answers first. If the
engine fails, the process ends, too, and the parent restarts it.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import uvloop

from llmserve.engine.base import Engine
from llmserve.engine.open import open_engine
from llmserve.engine.remote.child import LOG_FORMAT, ChildSpec, ready_line
from llmserve.engine.remote.server import CompileGuide, EngineServer
from llmserve.errors import InternalError, LlmserveError, Unavailable
from llmserve.stages.guides import GuidesOfDirectory

HEALTH_PERIOD_S = 0.5
END_TIMEOUT_S = 30.0  # a step cannot be interrupted
STDIN, STDOUT, STDERR = 0, 1, 2

logger = logging.getLogger(__name__)


def open_guided(spec: ChildSpec) -> tuple[Engine, CompileGuide]:
    engine = open_engine(spec.engine_dir, spec.settings)
    return engine, GuidesOfDirectory(spec.tokenizer_dir, engine.info.vocab_size).compiled


def main(opened: Callable[[ChildSpec], tuple[Engine, CompileGuide]] = open_guided) -> int:
    """Return the exit code: 0 at the end of standard input, 1 if the engine did not load or has failed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    told = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)  # output of libraries belongs to the log
    spec = ChildSpec.read(sys.stdin.buffer.readline())
    logging.basicConfig(level=logging.WARNING, format=LOG_FORMAT)
    logging.getLogger("llmserve").setLevel(spec.log_level)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(spec, opened, told))


async def _run(spec: ChildSpec, opened: Callable[[ChildSpec], tuple[Engine, CompileGuide]], told: int) -> int:
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()
    threading.Thread(target=_await_owner, args=(loop, gone), name="llmserve-owner", daemon=True).start()
    try:
        engine, compile_guide = await asyncio.to_thread(opened, spec)
    except LlmserveError as error:
        os.write(told, ready_line(error))
        return 1
    except Exception as error:  # outermost handler: the parent reports it
        logger.exception("the engine cannot be opened")
        os.write(told, ready_line(InternalError(f"the engine cannot be opened: {error!r}")))
        return 1
    server = EngineServer(engine, compile_guide=compile_guide)
    try:
        await server.serve(spec.socket)
        os.write(told, ready_line())
        os.close(told)
        return await until_gone(engine, gone)
    finally:
        await server.close(Unavailable("the engine's process ends"))
        await asyncio.to_thread(engine.close)


async def until_gone(engine: Engine, gone: asyncio.Event) -> int:
    while engine.healthy():
        try:
            async with asyncio.timeout(HEALTH_PERIOD_S):
                await gone.wait()
        except TimeoutError:
            continue
        return 0
    logger.error("the engine has failed, and its process ends")
    return 1


def _await_owner(loop: asyncio.AbstractEventLoop, gone: asyncio.Event) -> None:
    while os.read(STDIN, 1):
        pass
    try:
        loop.call_soon_threadsafe(gone.set)
    except RuntimeError:  # the loop has ended already
        return
    time.sleep(END_TIMEOUT_S)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
