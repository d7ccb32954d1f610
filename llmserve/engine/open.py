"""An engine directory -> a running `Engine`: in this process, or a client of another's."""

from __future__ import annotations

from pathlib import Path

from llmserve.engine.base import Engine
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.registry import runtime_for
from llmserve.engine.remote.replaceable import SocketEngine
from llmserve.engine.settings import EngineSettings


def open_engine(path: Path, settings: EngineSettings | None = None) -> Engine:
    """The engine that the manifest's target names, ready for requests.

    Raises NotFound or EngineFileError for a directory that is no usable engine here, Unsupported for a target that this
    version does not execute, ResourceExhausted when the KV pool does not fit this machine.
    """
    directory = EngineDirectory.open(path)
    return runtime_for(directory.manifest.target).open(directory, settings or EngineSettings())


def open_at_socket(socket: Path, engine_dir: Path, settings: EngineSettings) -> Engine:
    """A client of `engine_dir`'s engine in another process, which has settings of its own; see `SocketEngine`."""
    return SocketEngine(socket, EngineDirectory.open(engine_dir).manifest.engine_digest)
