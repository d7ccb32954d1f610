"""The settings of `llmserve worker`; importable without Dynamo."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from llmserve.engine.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The settings of `llmserve worker`."""

    engine: Path
    name: str = ""  # the model's name for clients; default: the engine directory's
    namespace: str = "dynamo"
    component: str = ""  # default: the name
    discovery: str = "file"
    request_plane: str = "tcp"
    event_plane: str = "zmq"
    migrates: bool = True
    drain_s: float = 30.0  # time for running answers at shutdown
    settings: EngineSettings = field(default_factory=EngineSettings)
