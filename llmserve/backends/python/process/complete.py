"""Runs `auto_complete_config` in a separate process."""

from __future__ import annotations

from pathlib import Path

from llmserve.backends.python.process.environment import Environment
from llmserve.backends.python.process.launch import ModelProcess
from llmserve.backends.python.process.messages import Complete, Completed, LogLine
from llmserve.errors import ModelConfigError


def complete_in_process(file: Path, config: bytes, environment: Environment | None = None) -> bytes:
    """See `complete.run_auto_complete`. `environment`: the model's own."""
    process = ModelProcess(environment)
    answer: object = None
    try:
        process.channel.send(Complete(file, config))
        while not isinstance(answer := process.channel.receive(), Completed):
            assert isinstance(answer, LogLine)
    except (EOFError, OSError):
        raise ModelConfigError(f"{file}: auto_complete_config: its process {process.wait()}") from None
    process.wait()
    if answer.error is not None:
        raise answer.error
    return answer.config
