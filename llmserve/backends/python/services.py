"""Services of the server for models, besides calls: loading models, and custom metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from llmserve.backends.python.metric_store import MetricStore
from llmserve.errors import Unavailable
from llmserve.serving.backend import LoadContext

Result = TypeVar("Result")


class Services:
    """For one instance. Called from any thread except the core's loop; metrics also from there."""

    def __init__(self, context: LoadContext, metrics: MetricStore) -> None:
        self._context = context
        self._metrics = metrics
        self._owner = object()  # tells apart the instances of a model that is being replaced, which have the same names
        self._methods: Mapping[str, Callable[..., Any]] = {
            "load_model": self._load_model,
            "unload_model": self._unload_model,
            "is_model_ready": self._is_model_ready,
            "add_family": self._add_family,
            "add_metric": self._add_metric,
            "change_metric": metrics.change,
            "read_metric": metrics.read,
        }

    def ask(self, method: str, arguments: tuple[Any, ...]) -> Any:
        return self._methods[method](*arguments)

    def close(self) -> None:
        self._metrics.forget(self._owner)

    def _load_model(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        paths = {key.removeprefix("file:"): content for key, content in files.items()}  # the names are as clients' are
        self._wait_for(lambda control: control.load_model(name, config, paths))

    def _unload_model(self, name: str, unload_dependents: bool) -> None:
        self._wait_for(lambda control: control.unload_model(name, unload_dependents=unload_dependents))

    def _is_model_ready(self, name: str, version: str) -> bool:
        async def ask(control: Any) -> bool:
            return bool(control.model_ready(name, version))

        return self._wait_for(ask)

    def _add_family(self, name: str, description: str, kind: str) -> None:
        self._metrics.add_family(name, description, kind, owner=self._owner)

    def _add_metric(self, family: str, labels: Mapping[str, str], buckets: tuple[float, ...]) -> None:
        self._metrics.add(family, labels, buckets, owner=self._owner)

    def _wait_for(self, ask: Callable[[Any], Coroutine[Any, Any, Result]]) -> Result:
        control, loop = self._context.control, self._context.loop
        if control is None or loop is None:
            raise Unavailable("no server is running, so its models cannot be used")
        return asyncio.run_coroutine_threadsafe(ask(control), loop).result()
