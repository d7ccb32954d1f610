"""Opens the engine of a directory, in this process or as a client of another's."""

from __future__ import annotations

from pathlib import Path

from llmserve.engine.base import Engine
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.registry import runtime_for
from llmserve.engine.remote.replaceable import SocketEngine
from llmserve.engine.settings import EngineSettings


def open_engine(path: Path, settings: EngineSettings | None = None) -> Engine:
    """The engine of the manifest's target, ready for requests.

    Raises NotFound or EngineFileError if the directory is not a usable engine here, Unsupported if this version does
    not support its target, ResourceExhausted if the KV pool does not fit in memory.
    """
    directory = EngineDirectory.open(path)
    return runtime_for(directory.manifest.target).open(directory, settings or EngineSettings())


def open_at_socket(socket: Path, engine_dir: Path, settings: EngineSettings) -> Engine:
    """A client of `engine_dir`'s engine in another process, which has its own settings; see `SocketEngine`."""
    return SocketEngine(socket, EngineDirectory.open(engine_dir).manifest.engine_digest)
