"""The engine's gauges in the metrics of a Triton server: the same families as with TensorRT-LLM's backend."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from llmserve.serving.backend import GaugeSample

TEXTS = {
    "nv_trt_llm_request_metrics": "TRT LLM request metrics",
    "nv_trt_llm_kv_cache_block_metrics": "TRT LLM KV cache block metrics",
    "nv_trt_llm_inflight_batcher_metrics": "TRT LLM inflight_batcher-specific metrics",
    "nv_trt_llm_runtime_memory_metrics": "TRT LLM runtime memory metrics",
    "nv_trt_llm_general_metrics": "General TRT LLM metrics",
}

logger = logging.getLogger(__name__)


class TritonGauges:
    """Each gauge is created when it is first set, and updated when its value changes."""

    def __init__(self, utils: Any, labels: Mapping[str, str]) -> None:
        self._utils = utils
        self._labels = labels
        self._families: dict[str, Any] = {}
        self._gauges: dict[tuple[str, ...], Any] = {}
        self._values: dict[tuple[str, ...], float] = {}
        self._is_on = hasattr(utils, "MetricFamily")

    def export(self, samples: Sequence[GaugeSample]) -> None:
        if not self._is_on:
            return
        try:
            for family, labels, value in samples:
                self._set(family, labels, value)
        except Exception as error:  # border: the server refuses if its metrics are disabled
            logger.warning("the server does not accept metrics from this model: %s", error)
            self._is_on = False

    def _set(self, family: str, labels: Mapping[str, str], value: float) -> None:
        key = (family, *labels.values())
        if self._values.get(key) == value:
            return
        if key not in self._gauges:
            self._gauges[key] = self._family(family).Metric(labels={**self._labels, **labels})
        self._gauges[key].set(value)
        self._values[key] = value

    def _family(self, name: str) -> Any:
        if name not in self._families:
            kind = self._utils.MetricFamily.GAUGE
            self._families[name] = self._utils.MetricFamily(name=name, description=TEXTS.get(name, name), kind=kind)
        return self._families[name]
