"""What one server process is told about its models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ServerSettings:
    model_repositories: tuple[Path, ...]
    # model -> parameter key -> value: replaces or adds `parameters { key value { string_value } }` at load
    parameter_overrides: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    strict_readiness: bool = True  # ready only when every model is; False: ready whenever the server answers
    load_threads: int = 4  # models that load at the same time
    cache_bytes: int = 0  # of the response cache; 0: there is none
    server_name: str = "llmserve"
