"""Main of a model's process: `python -m llmserve.backends.python.process.stub DESCRIPTOR`.

The model runs on the main thread; messages arrive on another. The process ends with the channel.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path

from llmserve.backends.python.errors import describe_failure
from llmserve.backends.python.host import ModelHost, ModelSpec
from llmserve.backends.python.process.channel import Channel
from llmserve.backends.python.process.guest import ForwardingHandler, Guest
from llmserve.backends.python.process.messages import Complete, Completed, Dead, Open, Opened
from llmserve.errors import InternalError, LlmserveError

WORST_OOM_SCORE = "1000"


def main() -> None:
    _leave_signals_to_the_server()
    _be_killed_before_the_server()
    channel = Channel(socket.socket(fileno=int(sys.argv.pop())), writable=True)  # the model has no arguments
    guest = Guest(channel)
    logger = logging.getLogger("llmserve")
    logger.addHandler(ForwardingHandler(guest))
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        order = channel.receive()
    except EOFError:
        sys.exit(1)  # the server has gone
    match order:
        case Open(spec):
            _host(spec, guest)
        case Complete(file, config):
            guest.send(_completed(file, config))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # do not wait for threads that the model left behind


def _host(spec: ModelSpec, guest: Guest) -> None:
    name = spec.file.stem if spec.file.stem not in sys.modules else ""  # `model`: unittest.main("model") finds it
    host = ModelHost(spec, guest, on_death=lambda: guest.send(Dead()), module_name=name)

    def report(opened: Future[None]) -> None:
        error = opened.exception()
        assert error is None or isinstance(error, Exception)
        guest.send(Opened(_sendable(error), host.is_async))

    threading.Thread(target=guest.serve, args=(host,), name="channel", daemon=True).start()
    host.run(report)


def _completed(file: Path, config: bytes) -> Completed:
    from llmserve.backends.python.complete import run_auto_complete  # only this needs protobuf

    try:
        return Completed(run_auto_complete(file, config), None)
    except Exception as error:  # border: the answer describes the error
        return Completed(config, _sendable(error))


def _sendable(error: Exception | None) -> Exception | None:
    """The server does not have the model's own exception classes."""
    if error is None or type(error) in _known_errors():
        return error
    return InternalError(describe_failure(error))


def _known_errors() -> set[type[Exception]]:
    known: set[type[Exception]] = {LlmserveError}
    waiting = [LlmserveError]
    while waiting:
        found = waiting.pop().__subclasses__()
        known.update(found)
        waiting += found
    return known


def _leave_signals_to_the_server() -> None:
    """A service manager sends SIGTERM to every process, but the server drains first."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    usual = [signal.signal(number, lambda *_: None) for number in numbers]  # child processes would inherit SIG_IGN

    def take_signals() -> None:
        """In a process that the model forks: multiprocessing ends its own with SIGTERM, possibly at once."""
        for number, handler in zip(numbers, usual, strict=True):
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    os.register_at_fork(
        before=partial(signal.pthread_sigmask, signal.SIG_BLOCK, numbers),
        after_in_parent=partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, numbers),
        after_in_child=take_signals,
    )


def _be_killed_before_the_server() -> None:
    """If memory runs out, the kernel kills this process before the server."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(WORST_OOM_SCORE)


if __name__ == "__main__":
    main()
