"""Builds that end at a chosen instant: a process of its own for each, told to by a signal between two instructions.

    python -m tests.builder.interruptions FOLDER SIGNAL

prints a line for every instant after which something is wrong, and the number of instants.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

from llmserve import owned_directory
from llmserve.builder import output
from llmserve.cli.termination import terminated_as_exception

FILES = {output.__file__, owned_directory.__file__, shutil.__file__}


def build(directory: Path, content: str) -> None:
    with output.staged_directory(directory) as staging:
        (staging / "rank0.engine").write_text(content)
        (staging / "manifest.json").write_text(content)


def tracer(act: Callable[[int], None]) -> Any:
    """Calls `act` with the number of each line, call and return in `FILES`."""
    num_events = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal num_events
        if frame.f_code.co_filename not in FILES:
            return None
        num_events += 1
        act(num_events)
        return trace

    return trace


def build_until(directory: Path, instant: int, number: int) -> None:
    """In a child: the build gets the signal at that instant, and the process ends as one does."""

    def act(event: int) -> None:
        if event == instant:
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with terminated_as_exception():
            sys.settrace(tracer(act))
            build(directory, "new")
    except (KeyboardInterrupt, SystemExit):
        pass
    finally:
        sys.settrace(None)
        atexit._run_exitfuncs()
        os._exit(0)


def content(directory: Path) -> str:
    """Of an engine that is whole; "" for none."""
    if not directory.exists():
        return ""
    found = {path.name: path.read_text() for path in directory.iterdir()}
    assert set(found) == {"rank0.engine", "manifest.json"}, found
    assert len(set(found.values())) == 1, found
    return found["manifest.json"]


def check(folder: Path, instant: int, number: int) -> str:
    """What is wrong after a build that was ended at that instant, and after the next one."""
    directory = folder / "engine"
    build(directory, "old")
    pid = os.fork()
    if pid == 0:
        build_until(directory, instant, number)
    os.waitpid(pid, 0)
    names = sorted(path.name for path in folder.iterdir())
    if number == signal.SIGKILL:
        try:
            with output.staged_directory(directory):
                if content(directory) not in ("old", "new"):
                    return f"{names}: the older engine did not come back"
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
    elif names != ["engine"]:
        return f"left {names}"
    if content(directory) not in ("old", "new"):
        return f"holds '{content(directory)}'"
    build(directory, "next")
    left = sorted(path.name for path in folder.iterdir())
    return "" if (content(directory), left) == ("next", ["engine"]) else f"the next build left {left}"


def count_instants(folder: Path) -> int:
    last = 0

    def act(event: int) -> None:
        nonlocal last
        last = event

    build(folder / "engine", "old")
    sys.settrace(tracer(act))
    build(folder / "engine", "new")
    sys.settrace(None)
    return last


def main() -> None:
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    num_instants = count_instants(folder)
    with mock.patch("os.fsync"):  # which takes most of the time, and no instant needs the disk
        for instant in range(1, num_instants + 1):
            if problem := check(folder, instant, number):
                print(f"instant {instant}: {problem}")
                shutil.rmtree(folder)
                folder.mkdir()
    print(num_instants)


if __name__ == "__main__":
    main()
