"""A config's `metric_tags`: labels of all its model's metrics, under the names that Triton gives them."""

from __future__ import annotations

import re

from tritonclient.grpc.model_config_pb2 import ModelConfig

_KEY = re.compile(r"[a-zA-Z0-9]\w*", re.ASCII)  # after "_" a label's name; those with "__" Prometheus keeps for itself


def metric_labels(config: ModelConfig) -> dict[str, str]:
    return {f"_{key}": value for key, value in config.metric_tags.items() if _KEY.fullmatch(key)}


def has_unusable_tags(config: ModelConfig) -> bool:
    return len(metric_labels(config)) < len(config.metric_tags)
