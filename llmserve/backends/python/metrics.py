"""`pb_utils.MetricFamily`: custom metrics of a model. The server keeps their values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import ClassVar

from llmserve.backends.python.bls import ServerApi, ask
from llmserve.backends.python.errors import TritonModelException

_ACTIONS = {"counter": ("increment",), "gauge": ("increment", "set"), "histogram": ("observe",)}
_FAMILY_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


class Metric:
    """Created by a family."""

    def __init__(self, server: ServerApi, family: str, kind: str, labels: Mapping[str, str]) -> None:
        self._server = server
        self._family = family
        self._kind = kind
        self._labels = dict(labels)

    def increment(self, value: float) -> None:
        if self._kind == "counter" and value < 0:
            raise TritonModelException(f"counter '{self._family}' cannot be incremented by {value}: it can only grow")
        self._change("increment", value)

    def set(self, value: float) -> None:
        self._change("set", value)

    def observe(self, value: float) -> None:
        self._change("observe", value)

    def value(self) -> float:
        if self._kind == "histogram":
            raise TritonModelException(f"histogram '{self._family}' has no single value")
        return float(ask(self._server, "read_metric", self._family, self._labels))

    def _change(self, action: str, value: float) -> None:
        if action not in _ACTIONS[self._kind]:
            raise TritonModelException(f"{self._kind} '{self._family}' has no operation {action}")
        ask(self._server, "change_metric", self._family, self._labels, action, float(value))


class MetricFamily:
    """Models use a subclass that can reach the server."""

    COUNTER: ClassVar[str] = "counter"
    GAUGE: ClassVar[str] = "gauge"
    HISTOGRAM: ClassVar[str] = "histogram"
    server: ClassVar[ServerApi]

    def __init__(self, name: str, description: str, kind: str) -> None:
        if kind not in _ACTIONS:
            raise TritonModelException(f"metric family '{name}': kind must be COUNTER, GAUGE or HISTOGRAM, got {kind}")
        if _FAMILY_NAME.fullmatch(name) is None:
            raise TritonModelException(f"'{name}' is not a valid name for a metric family")
        ask(self.server, "add_family", name, description, kind)
        self._name = name
        self._kind = kind

    def Metric(  # noqa: N802 - the name is Triton's
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        labels = {str(key): str(value) for key, value in (labels or {}).items()}
        if wrong := [name for name in labels if _LABEL_NAME.fullmatch(name) is None]:
            raise TritonModelException(f"metric family '{self._name}': '{wrong[0]}' is not a valid name for a label")
        ask(self.server, "add_metric", self._name, labels, self._bounds(buckets))
        return Metric(self.server, self._name, self._kind, labels)

    def _bounds(self, buckets: Sequence[float] | None) -> tuple[float, ...]:
        if self._kind != "histogram":
            if buckets is not None:
                raise TritonModelException(f"{self._kind} '{self._name}' does not support buckets")
            return ()
        bounds = tuple(float(bound) for bound in buckets or ())
        if not bounds or any(low >= high for low, high in pairwise(bounds)):
            raise TritonModelException(f"histogram '{self._name}' needs buckets in ascending order, got {list(bounds)}")
        return bounds
