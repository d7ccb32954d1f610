"""Starts a model's process, and reports how it ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress

from llmserve.backends.python.process.channel import Channel
from llmserve.backends.python.process.environment import Environment

STUB = "llmserve.backends.python.process.stub"
EXIT_TIMEOUT_S = 5.0


class ModelProcess:
    """A running process, with its child processes, and the channel to it."""

    def __init__(self, environment: Environment | None = None) -> None:
        """`environment`: the model's own; without it, the server's."""
        mine, its = socket.socketpair()
        with its:
            if environment is None:
                command = [sys.executable, "-P", "-u", "-m", STUB, str(its.fileno())]
                variables = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            else:
                command = environment.command(STUB, str(its.fileno()))
                variables = environment.variables(os.environ)
            self._process = subprocess.Popen(
                command,
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                env=variables,
                start_new_session=True,  # a process group, so that no child is left behind
            )
        self.channel = Channel(mine, writable=False)
        threading.Thread(target=self._notice_end, name=f"end-of-{self.pid}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> str:
        """How it ended, as text. A process that closed the channel but still runs is killed."""
        self.channel.close()
        try:
            code = self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        return _in_words(code)

    def _notice_end(self) -> None:
        """The channel does not end while a forked process of the model holds it open."""
        self._process.wait()
        self.channel.shut_down()


def _in_words(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
