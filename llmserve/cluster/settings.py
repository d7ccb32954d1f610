"""What `llmserve worker` was told; importable without Dynamo."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from llmserve.engine.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What `llmserve worker` was told."""

    engine: Path
    name: str = ""  # under which clients ask; the engine directory's by default
    namespace: str = "dynamo"
    component: str = ""  # one for each name
    discovery: str = "file"
    request_plane: str = "tcp"
    event_plane: str = "zmq"
    migrates: bool = True
    drain_s: float = 30.0  # for answers under way, at the end
    settings: EngineSettings = field(default_factory=EngineSettings)
