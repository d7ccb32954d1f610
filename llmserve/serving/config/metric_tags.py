"""A config's `metric_tags`: labels of all metrics of its model, with Triton's names."""

from __future__ import annotations

import re

from tritonclient.grpc.model_config_pb2 import ModelConfig

_KEY = re.compile(r"[a-zA-Z0-9]\w*", re.ASCII)  # with "_" before it, a label's name; Prometheus reserves "__"


def metric_labels(config: ModelConfig) -> dict[str, str]:
    return {f"_{key}": value for key, value in config.metric_tags.items() if _KEY.fullmatch(key)}


def has_unusable_tags(config: ModelConfig) -> bool:
    return len(metric_labels(config)) < len(config.metric_tags)
