"""Which models are served, which failed to load and why: look-up for requests, rows for the repository index."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmserve.errors import InvalidArgument, NotFound
from llmserve.serving.model import ServedModel


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One row of the repository index. States are Triton's: READY, UNAVAILABLE."""

    name: str
    version: str
    state: str
    reason: str = ""


def version_number(text: str) -> int:
    """A version as written by a client; 0 for "", the highest one."""
    if not text:
        return 0
    if text.isascii() and text.isdigit() and len(text) < 19 and int(text) > 0:
        return int(text)
    raise InvalidArgument(
        f"failed to get model version from specified version string '{text}' (details: stol), "
        "version should be an integral value > 0"
    )


class ModelTable:
    def __init__(self) -> None:
        self._models: dict[str, dict[int, ServedModel]] = {}
        self._failures: dict[tuple[str, str], str] = {}  # (model, version or "") -> reason

    def __iter__(self) -> Iterator[ServedModel]:
        for name in sorted(self._models):
            for _, model in sorted(self._models[name].items()):
                yield model

    def add(self, model: ServedModel) -> None:
        self._models.setdefault(model.name, {})[int(model.version)] = model

    def fail(self, name: str, version: str, reason: str) -> None:
        self._failures[name, version] = reason

    def clear(self) -> None:
        self._models.clear()

    def find(self, name: str, version: str = "") -> ServedModel:
        """Raises `NotFound`, or `InvalidArgument` for something that is no version."""
        number = version_number(version)
        versions = self._models.get(name)
        if not versions:
            if any(failed == name for failed, _ in self._failures):
                raise NotFound(f"Request for unknown model: '{name}' has no available versions")
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        model = versions.get(number or max(versions))
        if model is None:
            raise NotFound(f"Request for unknown model: '{name}' version {number} is not found")
        return model

    def versions(self, name: str) -> list[str]:
        return [str(number) for number in sorted(self._models.get(name, ()))]

    def failure(self, name: str) -> str:
        """Why no version of a model can be used; "" when it did not fail."""
        return "; ".join(reason for (failed, _), reason in self._failures.items() if failed == name)

    def all_loaded(self) -> bool:
        return bool(self._models) and not self._failures

    def statuses(self) -> list[ModelStatus]:
        rows = [ModelStatus(name, version, "UNAVAILABLE", text) for (name, version), text in self._failures.items()]
        for model in self:
            if model.healthy():
                rows.append(ModelStatus(model.name, model.version, "READY"))
            else:
                rows.append(ModelStatus(model.name, model.version, "UNAVAILABLE", "an instance has stopped working"))
        return sorted(rows, key=lambda row: (row.name, row.version))
