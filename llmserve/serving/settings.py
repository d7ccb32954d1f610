"""The settings of one server process that concern its models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.serving.instruments.metrics_settings import DEFAULT_METRICS, MetricsSettings


class ControlMode(StrEnum):
    """When models are loaded. Values are those of `--model-control-mode`."""

    NONE = "none"  # all, at start
    EXPLICIT = "explicit"  # when a client asks
    POLL = "poll"  # all, and whenever something in the repositories changes


ALL_MODELS = "*"


@dataclass(frozen=True, slots=True)
class ServerSettings:
    model_repositories: tuple[Path | str, ...]  # directories, or URLs of object stores
    # parameters that this server sets in a config, in addition to the overrides by name
    parameters_for: Callable[[ModelConfig], Mapping[str, str]] = lambda config: {}
    # model -> parameter key -> value: replaces or adds `parameters { key value { string_value } }` at load
    parameter_overrides: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    control_mode: ControlMode = ControlMode.NONE
    load_at_start: tuple[str, ...] = ()  # explicit mode: models to load at start; ALL_MODELS: all
    poll_s: float = 15.0  # between two reads of the repositories; 0: only at start
    auto_complete: bool = True  # backends fill in what configs leave open; False: configs must be complete
    config_name: str = ""  # <model>/configs/<this>.pbtxt is preferred to config.pbtxt
    strict_readiness: bool = True  # ready only when every model is; False: ready whenever the server answers
    load_threads: int = 4  # models that load at the same time
    cache_bytes: int = 0  # of the response cache; 0: there is none
    rate_limit: str = "off"  # or "execution_count"
    rate_limit_resources: tuple[str, ...] = ()  # NAME:COUNT or NAME:COUNT:DEVICE
    metrics: MetricsSettings = DEFAULT_METRICS
    inline_execution: bool = True  # pure and brief executions may run on the event loop; False: none does
    server_name: str = "llmserve"
